"""Differentially private stochastic gradient descent."""

from typing import Any

import tensorflow as tf
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (
    VectorizedDPKerasSGDOptimizer,
)

from tfdp.optimizers.base import PrivateOptimizerMixin


@tf.keras.utils.register_keras_serializable(package="tfdp")
class DPSGD(PrivateOptimizerMixin, VectorizedDPKerasSGDOptimizer):
    """Differentially private stochastic gradient descent, with momentum.

    Each example's gradient is clipped to norm C, the clipped gradients are summed, noise is added:

        g = (sum_i clip_C(grad L_i) + N(0, (noise_multiplier * C)^2)) / expected_batch_size
        w = w - learning_rate * g

    It is a subclass of TF-Privacy's `VectorizedDPKerasSGDOptimizer`, and a drop-in optimizer for
    `model.compile`. The loss must keep one value per example (`reduction="none"`).

    Formal guarantee: on batches of `tfdp.data.poisson_batches`, T steps are T adaptively composed
    Poisson-sampled Gaussian mechanisms with sampling probability `expected_batch_size /
    dataset_size` and noise multiplier `noise_multiplier`, under add-or-remove-one; `ledger`
    counts them.

    Args:
      l2_norm_clip: Largest l2 norm C of an example's gradient, over all variables together, in
        gradient units. Longer gradients are scaled down to it.
      noise_multiplier: Standard deviation of the noise, in units of the sensitivity of the clipped
        sum (C; 2C with `num_microbatches`). 0 trains without privacy.
      expected_batch_size: Expected number of examples in a logical batch; the noisy sum is divided
        by this public constant, never by the number of examples that were drawn.
      num_microbatches: Number of groups whose mean gradients are clipped instead of those of
        examples, or None. Saves no time with this engine; doubles the sensitivity.
      gradient_accumulation_steps: Batches that make one logical batch. Noise is added, and the
        variables are updated, once per logical batch.
      dataset_size: Number of training examples N, treated as public; together with
        `expected_batch_size` the sampling probability of the ledger. Without it the optimizer
        trains, and its `ledger` raises an error.
      noise_seed: For tests only: makes the noise reproducible, and who knows the seed can
        subtract it. By default noise comes from the operating system's entropy.
      learning_rate: A float, a `LearningRateSchedule` (of logical steps), or a callable.
      momentum: Factor in [0, 1] by which the velocity of the last step is kept.
      nesterov: Whether to apply Nesterov momentum.
      name: Name of the optimizer.
      **kwargs: As in `tf.keras.optimizers.legacy.SGD`.

    Raises:
      ValueError: An argument is out of its range; while training, the loss is not one value per
        example, or the model mixes examples (BatchNormalization).

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> model.compile(
      ...     optimizer=tfdp.DPSGD(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=1.1,
      ...         learning_rate=0.5,
      ...         **batches.sampling.optimizer_arguments(),
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(
      ...         from_logits=True, reduction="none"
      ...     ),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True

    References:
      - Abadi et al., 2016, Deep Learning with Differential Privacy, Algorithm 1
        (https://arxiv.org/abs/1607.00133).
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float,
        expected_batch_size: int,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        dataset_size: int | None = None,
        noise_seed: int | None = None,
        learning_rate: Any = 0.01,
        momentum: Any = 0.0,
        nesterov: bool = False,
        name: str = "DPSGD",
        **kwargs: Any,
    ):
        super().__init__(
            l2_norm_clip,
            noise_multiplier,
            expected_batch_size,
            num_microbatches,
            gradient_accumulation_steps,
            dataset_size,
            noise_seed,
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            name=name,
            **kwargs,
        )
