"""Differentially private Adam on signs."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.keras_2 import VectorizedDPKerasAdamOptimizer, registered
from tfdp.step.arguments import PRIVATE_ARGUMENTS


@registered
class DPSignAdam(PrivateOptimizerMixin, VectorizedDPKerasAdamOptimizer):
    """Differentially private Adam, fed with the signs of the noisy gradient.

    Each example's gradient is clipped to norm C, the clipped gradients are summed, noise is added,
    and Adam is fed with the sign of each coordinate:

        g = sign(sum_i clip_C(grad L_i) + N(0, (noise_multiplier * C)^2))

    No more than these signs leaves a step, which costs less privacy than the noisy sum, as in
    `DPAdam` (see docs/sign_accounting.md). The signs are +-1, so Adam's second moment is a
    constant. The update is sign descent with bias-corrected momentum `beta_1`, an average of signs;
    one slot per variable is enough. (`DPSignSGD` with momentum takes the sign of an average
    instead.) With `noise_multiplier=0` and `l2_norm_clip=math.inf` this is SignAdam (Algorithm 2).

    It is a subclass of TF-Privacy's `VectorizedDPKerasAdamOptimizer`, and a drop-in optimizer for
    `model.compile`. The loss may be any Keras loss, including a mean.

    Formal guarantee: on batches of `tfdp.data.poisson_batches`, T steps are T adaptively composed
    Poisson-sampled Gaussian mechanisms with sampling probability `expected_batch_size /
    dataset_size` and noise multiplier `noise_multiplier`, under zero-out; `ledger`
    counts them, as signs if `releases_signs` (not with `compression`, `noise_correlation` or an
    adaptive clip).

    Args:
      {{private_arguments}}
      learning_rate: A float, a `LearningRateSchedule` (of logical steps), or a callable.
      beta_1: Decay of the mean of gradients, in [0, 1).
      beta_2: Decay of the mean of squared gradients, in [0, 1).
      epsilon: Small constant for numerical stability, as in Keras.
      weight_decay: Share, times the learning rate, that each step first takes off the weights, as
        in `tf.keras.optimizers.AdamW`; `exclude_from_weight_decay` leaves out some. It costs no
        privacy. None: nothing.
      **kwargs: `name` and others, as in `tf.keras.optimizers.legacy.Adam`.

    Raises:
      ValueError: An argument is out of its range; while training, the loss is not one value per
        example, or the model mixes examples (BatchNormalization).

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> model.compile(
      ...     optimizer=tfdp.DPSignAdam(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=1.1,
      ...         learning_rate=0.001,
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True

    References:
      - Ghosh and Das, Bottlenecked Backpropagation to Train Differentially Private Deep Neural
        Networks, Algorithm 4. (It prints noise on the mean of the batch; noise belongs on the
        sum, whose sensitivity is C, and the sign does not depend on scale.)
    """

    def _moves_by_signs(self) -> bool:
        return True

    def _transform_private_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        return tf.sign(gradient)

    # With noise every sign is +-1, so the second moment after t steps is 1 - beta_2^t whatever the
    # data: no slot is spent on it. Without noise a coordinate can be exactly zero (a dead unit, an
    # absent word), its second moment is smaller, and Adam's own update is used.

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        if self.noise_multiplier == 0:
            super()._create_slots(var_list)
            return
        for var in var_list:
            self.add_slot(var, "m")

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: Any = None
    ) -> tf.Operation:
        if self.noise_multiplier == 0:
            return super()._resource_apply_dense(grad, var, apply_state)
        key = (var.device, var.dtype.base_dtype)
        coefficients = (apply_state or {}).get(key) or self._fallback_apply_state(*key)
        m = self.get_slot(var, "m")
        m_new = m.assign(
            coefficients["beta_1_t"] * m + coefficients["one_minus_beta_1_t"] * grad,
            use_locking=self._use_locking,
        )
        root_v = tf.sqrt(1 - coefficients["beta_2_power"])
        # Adam as Keras computes it: `lr` holds both bias corrections.
        update = coefficients["lr"] * m_new / (root_v + coefficients["epsilon"])
        return var.assign_sub(update, use_locking=self._use_locking, read_value=False)


DPSignAdam.__doc__ = str(DPSignAdam.__doc__).replace("{{private_arguments}}", PRIVATE_ARGUMENTS)
