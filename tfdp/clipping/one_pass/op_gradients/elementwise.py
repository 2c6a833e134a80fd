"""Biases, scales and shifts: gradients that are sums over all but the weights' axes."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.shared_tensors import constant


@register_op_gradients("BiasAdd")
def bias_add(use: Use) -> Contribution:
    """Handles `x + b` for each channel."""
    rank = use.gradient.shape.rank
    channel = 2 if use.op.get_attr("data_format") == b"NCHW" else rank - 1
    axes = [axis for axis in range(1, rank) if axis != channel]
    return reduced(use, [use.gradient], lambda g: g, axes, "bias")


def _broadcast_axes(use: Use) -> list[int] | None:
    """Returns the axes of a gradient `[n, each, ...]` along which the weights are the same.

    Axes whose length is not static may be among them, too: see `_to_open_shape`.
    """
    output = use.op.outputs[0].shape
    if output.rank is None or use.rows[-1] is None:
        return None
    own = [1] * (output.rank - len(use.shape)) + use.shape
    example = use.rows[-1].axis
    if not _is_one(own[example]):
        return None
    rest = [own[axis] for axis in range(output.rank) if axis != example]
    return [1, *[2 + i for i, size in enumerate(rest) if _is_one(size)]]


def _is_one(size: int | tf.Tensor | None) -> bool:
    """Returns whether a size is static, and 1."""
    return isinstance(size, int) and size == 1


@register_op_gradients("Add", "AddV2", weight=0, open_shapes=True)
@register_op_gradients("Add", "AddV2", weight=1, open_shapes=True)
def add(use: Use) -> Contribution | None:
    """Handles `x + b`, the weights of any shape that broadcasts."""
    axes = _broadcast_axes(use)
    return None if axes is None else reduced(use, [use.gradient], lambda g: g, axes, "shift")


@register_op_gradients("Sub", weight=0, open_shapes=True)
@register_op_gradients("Sub", weight=1, open_shapes=True)
def subtract(use: Use) -> Contribution | None:
    """Handles `x - b` or `b - x`."""
    axes, sign = _broadcast_axes(use), -1.0 if use.weight else 1.0
    return None if axes is None else reduced(use, [use.gradient], lambda g: sign * g, axes, "shift")


@register_op_gradients("BroadcastTo", "Tile", weight=0, open_shapes=True)
def repeated(use: Use) -> Contribution | None:
    """Handles weights that are repeated for each example, such as a class token."""
    axes, output = _broadcast_axes(use), use.op.outputs[0].shape
    pairs = zip(use.shape[::-1], output[::-1], strict=False)
    if axes is None or (use.op.type == "Tile" and any(not _is_kept(*pair) for pair in pairs)):
        return None
    return reduced(use, [use.gradient], lambda g: g, axes, "repeated weights")


def _is_kept(size: int | tf.Tensor, length: int | None) -> bool:
    """Returns whether an axis of the weights is an axis of the result, or repeated as a whole."""
    return isinstance(size, int) and size in (1, length)


@register_op_gradients("Mul", weight=0, open_shapes=True)
@register_op_gradients("Mul", weight=1, open_shapes=True)
def multiply(use: Use) -> Contribution | None:
    """Handles `x * w`: the scale of a normalization."""
    axes, x = _broadcast_axes(use), use.data[1 - use.weight]
    if axes is None or x is None or x.shape.rank != use.gradient.shape.rank:
        return None
    return reduced(use, [use.gradient, x], lambda g, x: g * x, axes, "scale")


def reduced(
    use: Use,
    tensors: list[tf.Tensor],
    function: Callable[..., tf.Tensor],
    axes: list[int],
    name: str,
) -> Contribution:
    """Returns gradients that sum a function of `tensors`, `[n, each, ...]`, over `axes`."""

    def summed(*args: tf.Tensor) -> tf.Tensor:
        found = tf.reduce_sum(function(*args), axis=constant(axes))
        return _to_open_shape(found, use.shape) if use.is_open else found

    return direct(use, tensors, summed, axes, name)


def _to_open_shape(gradients: tf.Tensor, shape: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Sums gradients of weights along the axes whose length turns out to be 1.

    Args:
      gradients: `[n, ...]`, one axis for each axis of the weights that is not 1 statically.
      shape: Shape of the weights.
    """
    kept = [size for size in shape if not _is_one(size)]
    own = tf.stack([tf.shape(gradients)[0], *kept])
    axes = tf.raw_ops.BroadcastGradientArgs(s0=own, s1=tf.shape(gradients))[0]
    return tf.reduce_sum(gradients, axes, keepdims=True)


def direct(
    use: Use,
    tensors: list[tf.Tensor],
    function: Callable[..., tf.Tensor],
    axes: list[int],
    name: str,
) -> Contribution:
    """Returns gradients that a function of `tensors`, `[n, each, ...]`, sums over `axes`."""
    small = use.each == 1 and all(use.gradient.shape[axis] == 1 for axis in axes)
    floats = None if small else use.gradient.shape[1:].num_elements()
    contribution = Direct(tensors, use.shape, name, function, floats)
    contribution.whole = small
    return contribution
