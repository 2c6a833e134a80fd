"""The private optimizers with selective update and release (DPSUR)."""

from typing import Any

import tensorflow as tf

from tfdp.optimizers.arguments import PRIVATE_ARGUMENTS
from tfdp.optimizers.dp_adam import DPAdam
from tfdp.optimizers.dp_sgd import DPSGD
from tfdp.optimizers.dp_sign_adam import DPSignAdam
from tfdp.optimizers.dp_sign_sgd import DPSignSGD
from tfdp.optimizers.selective import SELECTIVE_ARGUMENTS, SelectiveUpdateMixin

_DOC = """`{base}` with selective update and release (DPSUR).

    Each attempt is a step of `{base}`, from the last accepted state w to w'. It is tested on a
    fresh Poisson batch of the training set, by the mean loss J of that batch,

        clip(J(w') - J(w), -C_v, C_v) + N(0, (2 C_v sigma_v)^2) < beta C_v

    with C_v = `validation_clip`, sigma_v = `validation_noise_multiplier` and beta = `threshold`,
    and kept, or rolled back without a trace: variables, slots, iterations and layer states. The
    optimizer works in a `tfdp.SelectiveModel`, which makes the attempts. The loss is any of
    Keras, also a mean.

    Formal guarantee: T accepted updates are T adaptively composed
    `tfdp.accounting.SelectiveReleaseDpEvent`s, under add-or-remove-one; `ledger` counts them. What
    is not released with `selective_release="conditional"`: rejected attempts, how many they were,
    and the time they took. (The epsilon of the paper's Theorem 5.6 is smaller, and is not an
    upper bound: see docs/selective_release.md.)

    Args:
      {private_arguments}
        Here `gradient_accumulation_steps` must be 1.
      {selective_arguments}
      **kwargs: As for `{base}`.

    Raises:
      ValueError: An argument is out of its range.
      RuntimeError: While training: the model is not a `SelectiveModel`.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tfdp.SelectiveModel(tf.keras.Sequential([tf.keras.layers.Dense(2)]))
      >>> model.compile(
      ...     optimizer=tfdp.{name}(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=2.0,
      ...         validation_batch_size=50,
      ...         validation_noise_multiplier=1.3,
      ...         learning_rate={rate},
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, steps_per_epoch=5, verbose=0)  # five accepted updates
      >>> model.optimizer.ledger.steps
      5

    References:
      - Fu et al., DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using
        Selective Update and Release, Algorithm 2. (It divides by the realised batch size, which
        is private.)
    """


def _document(rate: float) -> Any:
    def add_docstring(cls: type) -> type:
        cls.__doc__ = _DOC.format(
            name=cls.__name__,
            base=cls.__mro__[2].__name__,
            rate=rate,
            private_arguments=PRIVATE_ARGUMENTS,
            selective_arguments=SELECTIVE_ARGUMENTS,
        )
        return cls

    return add_docstring


@tf.keras.utils.register_keras_serializable(package="tfdp")
@_document(rate=0.5)
class DPSURSGD(SelectiveUpdateMixin, DPSGD):  # noqa: D101
    pass


@tf.keras.utils.register_keras_serializable(package="tfdp")
@_document(rate=0.01)
class DPSURAdam(SelectiveUpdateMixin, DPAdam):  # noqa: D101
    pass


@tf.keras.utils.register_keras_serializable(package="tfdp")
@_document(rate=0.01)
class DPSURSignSGD(SelectiveUpdateMixin, DPSignSGD):  # noqa: D101
    pass


@tf.keras.utils.register_keras_serializable(package="tfdp")
@_document(rate=0.01)
class DPSURSignAdam(SelectiveUpdateMixin, DPSignAdam):  # noqa: D101
    pass
