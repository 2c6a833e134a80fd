"""Differentially private sign descent."""

from typing import Any

import tensorflow as tf

from tfdp.base.validation import is_number
from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.keras_2 import VectorizedDPKerasSGDOptimizer, registered
from tfdp.step.arguments import PRIVATE_ARGUMENTS


@registered
class DPSignSGD(PrivateOptimizerMixin, VectorizedDPKerasSGDOptimizer):
    """Differentially private sign descent: steps of one size, in the noisy gradient's directions.

    Each example's gradient is clipped to norm C, the clipped gradients are summed, noise is added,
    and only the sign of each coordinate is kept:

        g = (sum_i clip_C(grad L_i) + N(0, (noise_multiplier * C)^2)) / expected_batch_size
        v = momentum * v + g
        w = w - learning_rate * sign(v)

    Without momentum no more than these signs leaves a step, which costs less privacy than the noisy
    sum, as in `DPSGD` (see docs/sign_accounting.md). A velocity is made of noisy sums, and costs
    what they cost. Every coordinate moves by `learning_rate`, also with momentum. The best learning
    rate is far smaller than that of `DPSGD`, and does not depend on epsilon. Gradients of weight
    regularizers are added to g. Without momentum this is the paper's DP-SignSGD; with
    `noise_multiplier=0` and `l2_norm_clip=math.inf` it is SignSGD (Algorithm 1).

    With momentum it is Signum: the sign is taken of the velocity, in which noise has been averaged
    already. The other order, an average of signs, is `DPSignAdam`. If noise is much larger than the
    gradient, taking signs of gradients multiplies the variance of a weight's trajectory by 1.57
    (pi/2). Taking signs of the velocity at momentum 0.9 multiplies it by only 1.10 (by the arcsine
    law).

    It is a subclass of TF-Privacy's `VectorizedDPKerasSGDOptimizer`, and a drop-in optimizer for
    `model.compile`. The loss may be any Keras loss, including a mean.

    Formal guarantee: on batches of `tfdp.data.poisson_batches`, T steps are T adaptively composed
    Poisson-sampled Gaussian mechanisms with sampling probability `expected_batch_size /
    dataset_size` and noise multiplier `noise_multiplier`, under zero-out; `ledger`
    counts them, as signs if `releases_signs` (not with momentum, `compression`,
    `noise_correlation` or an adaptive clip).

    Args:
      {{private_arguments}}
      learning_rate: A float, a `LearningRateSchedule` (of logical steps), or a callable.
      momentum: Factor in [0, 1] that multiplies the velocity of the last step.
      nesterov: Whether to take the sign of `momentum * v + g`.
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
      ...     optimizer=tfdp.DPSignSGD(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=1.1,
      ...         learning_rate=0.01,
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True

    References:
      - Ghosh and Das, Bottlenecked Backpropagation to Train Differentially Private Deep Neural
        Networks, Algorithm 3. (It prints noise on the mean of the batch; noise belongs on the
        sum, whose sensitivity is C, and the sign does not depend on scale.)
      - Bernstein et al., signSGD: Compressed Optimization for Non-Convex Problems, Algorithm 2
        (Signum).
    """

    def _moves_by_signs(self) -> bool:
        momentum = self._base_arguments.get("momentum", 0.0)  # A velocity is of noisy numbers.
        return is_number(momentum) and momentum == 0

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: Any = None
    ) -> tf.Operation:
        key = (var.device, var.dtype.base_dtype)
        coefficients = (apply_state or {}).get(key) or self._fallback_apply_state(*key)
        direction = grad
        if self._momentum:
            momentum, slot = coefficients["momentum"], self.get_slot(var, "momentum")
            velocity = slot.assign(momentum * slot + grad, use_locking=self._use_locking)
            direction = momentum * velocity + grad if self.nesterov else velocity
        update = coefficients["lr_t"] * tf.sign(direction)
        return var.assign_sub(update, use_locking=self._use_locking, read_value=False)


DPSignSGD.__doc__ = str(DPSignSGD.__doc__).replace("{{private_arguments}}", PRIVATE_ARGUMENTS)
