"""Steps that train a part of the coordinates: random masks, and the largest noisy coordinates."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tfdp.base.validation import error, is_integer, one_of
from tfdp.clipping.clipping_rules import PerLayerClipping
from tfdp.step.compression import NAMED, Compression, check_fraction

_UNITS = ("layer", "coordinate")


@dataclasses.dataclass(frozen=True)
class RandomMask(Compression):
    """Trains a random part of the model in each step, as an optimizer's `compression`.

    Each example's gradient is masked, and clipped after that: all of the clip C goes to the chosen
    coordinates. The update is zero elsewhere, noise and weight regularizers included. (Momentum and
    the weight decay of an optimizer move other coordinates, too.)

    Formal guarantee: the masks are a function of `seed` and the number of the step, so they do not
    depend on the data. Given the masks, an example adds a vector of norm at most C to the sum, and
    the step is the Gaussian mechanism of the optimizer without masks: the same sensitivity, the
    same cost in the ledger. Masks need not be secret. (A choice by the magnitude of private
    gradients would be one more release, with a budget of its own; there is none here.)

    Where gradients are longer than the clip, a step has about 1 / sqrt(fraction) times the signal
    in a coordinate that it trains, but a coordinate is trained in `fraction` of the steps. So the
    ratio of signal to noise over all steps is about the same: masks are for what they save, not for
    accuracy.

    Args:
      fraction: Share of the layers or coordinates that a step trains, in (0, 1].
      by: "layer": whole layers, the nearest number of them to the fraction, but at least one; they
        cost no time. Variables belong to the same layer if their names have the same part before
        the last slash. "coordinate": each coordinate with probability `fraction`; gradients of
        examples are then formed one by one, as with `engine="vectorized"`.
      redraw: Whether each step draws its own mask. False: one mask for all steps, so that the rest
        is frozen.
      seed: Integer from which masks are drawn, in [0, 2^31). It may be public.

    Raises:
      ValueError: An argument is out of its range; a `TwoTermLoss` is trained with it, or the
        optimizer has a `noise_correlation`.

    Example:
      >>> import tfdp
      >>> optimizer = tfdp.DPSGD(
      ...     l2_norm_clip=1.0,
      ...     noise_multiplier=1.1,
      ...     expected_batch_size=100,
      ...     compression=tfdp.contrib.RandomMask(0.5),
      ... )
      >>> optimizer.compression.by
      'layer'

    References:
      - Adamczewski and Park, 2023, Differential Privacy Meets Neural Network Pruning
        (https://arxiv.org/abs/2303.04612): masks of coordinates, fixed or redrawn.
    """

    has_masks: ClassVar[bool] = True

    fraction: float
    by: str = "layer"
    redraw: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        one_of("by", self.by, _UNITS)
        if not isinstance(self.redraw, bool):
            raise error("redraw", "True or False", self.redraw)
        if not (is_integer(self.seed) and 0 <= self.seed < 2**31):
            raise error("seed", "an integer in [0, 2^31)", self.seed)

    def masks(self, variables: Sequence[tf.Variable], step: tf.Tensor) -> list[tf.Tensor]:
        """See `Compression.masks`."""
        step = tf.cast(step, tf.int64) if self.redraw else tf.zeros([], tf.int64)
        seed = tf.stack([tf.constant(self.seed, tf.int64), step])
        if self.by == "layer":
            layers = PerLayerClipping().blocks([v.name for v in variables])
            count = max(layers) + 1
            order = tf.argsort(_uniforms(count, seed))
            ranks = tf.math.invert_permutation(order)
            chosen = ranks < max(1, round(self.fraction * count))
            return [chosen[layer] for layer in layers]
        sizes = [v.shape.num_elements() for v in variables]
        drawn = tf.split(_uniforms(sum(sizes), seed) < self.fraction, sizes)
        return [tf.reshape(d, v.shape) for d, v in zip(drawn, variables, strict=True)]


def _uniforms(count: int, seed: tf.Tensor) -> tf.Tensor:
    # By name: the same numbers on every device, with XLA and without.
    return tf.random.stateless_uniform([count], seed, alg="philox")


@dataclasses.dataclass(frozen=True)
class TopK(Compression):
    """Keeps the largest coordinates of the noisy gradient, as an optimizer's `compression`.

    The mean gradient is compressed after noise was added to it (with the gradients of weight
    regularizers): the `fraction` of the coordinates, of all variables together, with the largest
    absolute values is kept, and the rest is zero. With `error_memory`, what is left out is added to
    the next step's mean gradient, until it is large enough.

    Formal guarantee: the coordinates are chosen from noisy gradients, and the memory holds nothing
    else, so both are post-processing. Sensitivity, noise and cost are those of the optimizer
    without it. (The choice by gradients without noise would need a budget of its own.)

    Updates become small to send. They do not become more accurate: noise has the same size in all
    coordinates, and where it is larger than the gradient, the largest coordinates are the noisiest.

    Args:
      fraction: Share of the coordinates to keep, in (0, 1]; at least one coordinate is kept.
      error_memory: Whether what is left out is remembered. The memory is as large as the model, and
        is saved with the optimizer.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import tfdp
      >>> optimizer = tfdp.DPSGD(
      ...     l2_norm_clip=1.0,
      ...     noise_multiplier=1.1,
      ...     expected_batch_size=100,
      ...     compression=tfdp.contrib.TopK(0.1),
      ... )
      >>> optimizer.compression
      TopK(fraction=0.1, error_memory=True)

    References:
      - Phong and Phuong, 2023, Differentially private stochastic gradient descent via compression
        and memorization.
      - Stich et al., 2018, Sparsified SGD with Memory (https://arxiv.org/abs/1809.07599).
    """

    fraction: float
    error_memory: bool = True

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if not isinstance(self.error_memory, bool):
            raise error("error_memory", "True or False", self.error_memory)

    @property
    def has_memory(self) -> bool:
        """See `Compression`."""
        return self.error_memory

    def keep(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """See `Compression.keep`."""
        sizes = [g.shape.num_elements() for g in gradients]
        dtype = max((g.dtype for g in gradients), key=lambda dtype: dtype.size)
        flat = tf.concat([tf.reshape(tf.cast(g, dtype), [-1]) for g in gradients], axis=0)
        count = max(1, round(self.fraction * sum(sizes)))
        _, places = tf.math.top_k(tf.abs(flat), count, sorted=False)
        kept = tf.scatter_nd(places[:, tf.newaxis], tf.ones([count], tf.int32), [sum(sizes)]) > 0
        parts = tf.split(kept, sizes)
        return [tf.reshape(part, g.shape) for part, g in zip(parts, gradients, strict=True)]


NAMED["random_mask"] = RandomMask
NAMED["top_k"] = TopK
