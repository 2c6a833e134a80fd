"""Differentially private stochastic gradient descent."""

from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.keras_2 import VectorizedDPKerasSGDOptimizer, registered
from tfdp.step.arguments import PRIVATE_ARGUMENTS


@registered
class DPSGD(PrivateOptimizerMixin, VectorizedDPKerasSGDOptimizer):
    """Differentially private stochastic gradient descent, with momentum.

    Each example's gradient is clipped to norm C, the clipped gradients are summed, noise is added:

        g = (sum_i clip_C(grad L_i) + N(0, (noise_multiplier * C)^2)) / expected_batch_size
        w = w - learning_rate * g

    It is a subclass of TF-Privacy's `VectorizedDPKerasSGDOptimizer`, and a drop-in optimizer for
    `model.compile`. The loss may be any Keras loss, including a mean.

    Formal guarantee: on batches of `tfdp.data.poisson_batches`, T steps are T adaptively composed
    Poisson-sampled Gaussian mechanisms with sampling probability `expected_batch_size /
    dataset_size` and noise multiplier `noise_multiplier`, under zero-out; `ledger`
    counts them.

    Args:
      {{private_arguments}}
      learning_rate: A float, a `LearningRateSchedule` (of logical steps), or a callable.
      momentum: Factor in [0, 1] that multiplies the velocity of the last step.
      nesterov: Whether to apply Nesterov momentum.
      weight_decay: Share, times the learning rate, that each step first takes off the weights, as
        in `tf.keras.optimizers.AdamW`; `exclude_from_weight_decay` leaves out some. It costs no
        privacy. None: nothing.
      **kwargs: `name` and others, as in `tf.keras.optimizers.legacy.SGD`.

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
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True

    References:
      - Abadi et al., 2016, Deep Learning with Differential Privacy, Algorithm 1
        (https://arxiv.org/abs/1607.00133).
    """


DPSGD.__doc__ = str(DPSGD.__doc__).replace("{{private_arguments}}", PRIVATE_ARGUMENTS)
