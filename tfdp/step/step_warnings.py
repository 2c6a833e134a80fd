"""Warnings of private optimizers, each issued once."""

import tensorflow as tf

from tfdp.accounting.sampling import NONE
from tfdp.base import devices, private_logs
from tfdp.base.user_warnings import warn_user
from tfdp.step.parameters import PrivacyParameters
from tfdp.step.record import draw_use


class StepWarnings(PrivacyParameters):
    """Base class of private optimizers, which warns of what steps do not do well."""

    def _warn_without_sampling(self) -> None:
        """Warns once, at the first step, where training ends without an epsilon."""
        if self._sampled is None and self._has_noise:
            self._warn_once(draw_use.NO_EPSILON.format(self._public_name()))

    def _warn_of_gpu(self) -> None:
        """Warns once, at the first step, of what a GPU does worse than a CPU."""
        if not devices.has_gpu():
            return
        if self._secure_noise:
            self._warn_once(
                "`secure_noise` does not do on a GPU what it does on a CPU: the last bits of an "
                "example's gradient can differ there from run to run, and with the other examples. "
                "Hide the GPU: `tf.config.set_visible_devices([], 'GPU')`."
            )
        elif self._sampled is not None and self._sampled.padding == NONE:
            self._warn_once(
                "Steps are slow on a GPU for batches whose number of rows varies: TensorFlow "
                "chooses kernels anew for each number, which may take a second. Draw batches of "
                'three sizes: `tfdp.data.poisson_batches(..., padding="buckets")`. Their rows have '
                "weights, so that metrics belong in `weighted_metrics`."
            )

    def note_callbacks(self, callbacks: list) -> None:
        """Warns of callbacks that act on private logs, and notes them in the ledger."""
        if private_logs.warn_of(callbacks, self._warn_once):
            with tf.init_scope():
                self._released.note_shown()

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            warn_user(message)
