"""Differentially private Adam whose second moment is corrected for the noise (DP-AdamBC)."""

from typing import Any

import tensorflow as tf

from tfdp.base.validation import positive
from tfdp.keras2.dp_adam import DPAdam
from tfdp.keras2.keras_2 import registered
from tfdp.step.arguments import PRIVATE_ARGUMENTS
from tfdp.step.corrected_second_moment import LEAST_SECOND_MOMENT, KnownNoise


@registered
class DPAdamBC(KnownNoise, DPAdam):
    """Differentially private Adam whose second moment is corrected for the noise.

    The noise is in Adam's mean of squared gradients, too, and where it is larger than the gradient
    all coordinates are divided by nearly the same number. Its variance is known, and is subtracted:

        s = (noise_multiplier * C / expected_batch_size)^2
        update = learning_rate * m / (sqrt(max(v - s, least_second_moment * s)) + epsilon)

    with Adam's moments m and v of the noisy mean gradient, both divided by 1 - beta^t as in Adam.
    This is post-processing: the privacy is that of `DPAdam`. Without noise it is Adam.

    It is a subclass of TF-Privacy's `VectorizedDPKerasAdamOptimizer`, and a drop-in optimizer for
    `model.compile`.

    Formal guarantee: that of `DPAdam`, which `ledger` counts.

    Args:
      {{private_arguments}}
      least_second_moment: Least corrected second moment, as a fraction of the variance of the
        noise; positive. Where v - s is smaller, it is mostly an error of v, which averages
        1 / (1 - beta_2) steps. (The paper has a constant in the place of the product.)
      learning_rate: A float, a `LearningRateSchedule` (of logical steps), or a callable.
      beta_1: Decay of the mean of gradients, in [0, 1).
      beta_2: Decay of the mean of squared gradients, in [0, 1).
      epsilon: Small constant for numerical stability, as in Keras.
      weight_decay: Share, times the learning rate, that each step first takes off the weights, as
        in `tf.keras.optimizers.AdamW`; `exclude_from_weight_decay` leaves out some. It costs no
        privacy. None: nothing.
      **kwargs: `name` and others, as in `tf.keras.optimizers.legacy.Adam`.

    Raises:
      ValueError: An argument is out of its range; the noise changes from step to step (a schedule,
        an adaptive clip, correlated noise) or some coordinates have none (`compression`); while
        training, the loss is a `TwoTermLoss`, or what `DPAdam` refuses.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> model.compile(
      ...     optimizer=tfdp.DPAdamBC(
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
      - Tang, Shpilevskiy, Lecuyer, 2024, DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You
        Apply Bias Correction) (https://arxiv.org/abs/2312.14334), Algorithm 1.
    """

    def __init__(self, *args: Any, least_second_moment: float = LEAST_SECOND_MOMENT, **kwargs: Any):
        if kwargs.pop("amsgrad", False):
            raise ValueError("Argument `amsgrad` must be False. Received: amsgrad=True.")
        self._least = positive("least_second_moment", least_second_moment)
        super().__init__(*args, **kwargs)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: Any = None
    ) -> tf.Operation:
        # In narrower numbers, beta_2 is 1.
        dtype = tf.float32 if var.dtype.size < 4 else var.dtype.base_dtype
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        grad, m_old, v_old = (tf.cast(t, dtype) for t in (grad, m, v))
        beta_1, beta_2 = (self._get_hyper(name, dtype) for name in ("beta_1", "beta_2"))
        step = tf.cast(self.iterations + 1, dtype)
        m_new = m_old + (grad - m_old) * (1 - beta_1)
        v_new = v_old + (grad**2 - v_old) * (1 - beta_2)
        variance = tf.constant(self.noise_variance, dtype)
        second = v_new / (1 - beta_2**step) - variance
        root = tf.sqrt(tf.maximum(second, self._least * variance)) + self.epsilon
        update = self._decayed_lr(dtype) / (1 - beta_1**step) * m_new / root
        return tf.group(
            m.assign(tf.cast(m_new, m.dtype), use_locking=self._use_locking),
            v.assign(tf.cast(v_new, v.dtype), use_locking=self._use_locking),
            var.assign_sub(tf.cast(update, var.dtype), use_locking=self._use_locking),
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again, without the secret noise key."""
        config = {**super().get_config(), "least_second_moment": self._least}
        del config["amsgrad"]
        return config


DPAdamBC.__doc__ = str(DPAdamBC.__doc__).replace("{{private_arguments}}", PRIVATE_ARGUMENTS)
