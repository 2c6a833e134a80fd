"""Convolutions: the gradient of a kernel is a product of patches and output gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdp.clipping.one_pass.op_gradients import depthwise
from tfdp.clipping.one_pass.op_gradients.products import positions_of
from tfdp.clipping.one_pass.op_gradients.registry import register_op_gradients
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct, OuterProducts
from tfdp.clipping.one_pass.weight_uses import Use
from tfdp.clipping.shared_tensors import constant, product, reshaped, sizes_of

# Pixels of fewer contiguous bytes are not gathered one by one.
_RUN_BYTES = 32

# The size of an axis: a scalar tensor where it is not static.
Size: TypeAlias = int | tf.Tensor


def _attributes(op: tf.Operation) -> dict:
    names = ("strides", "padding", "explicit_paddings", "dilations")
    known = {attr.name for attr in op.op_def.attr}
    return {name: op.get_attr(name) for name in names if name in known}


def _merge(tensor: tf.Tensor) -> tf.Tensor:
    """Reshapes `[n, each, ...]` to `[n * each, ...]`."""
    n, each, *rest = sizes_of(tensor)
    static = tensor.shape[2:].is_fully_defined()
    return reshaped(tensor, [-1 if static else n * each, *rest])


def _is_supported(use: Use, x: tf.Tensor) -> bool:
    """Returns whether a convolution has channels last; its images may be of any size."""
    data_format = use.op.get_attr("data_format")
    known = x.shape.rank is not None and use.gradient.shape.rank is not None
    return known and data_format in (b"NHWC", b"NDHWC") and use.gradient.shape[-1] is not None


@register_op_gradients("Conv2D")
def conv2d(use: Use) -> Contribution | None:
    """Handles Conv2D and, through it, Conv1D; any stride, padding, dilation and groups."""
    x = use.data[0]
    if x is None or not _is_supported(use, x):
        return None
    channels = x.shape[-1]
    if channels is not None and use.shape[2] == 1 and channels > 1:  # A group for each channel.
        return _depthwise(use, x, [*use.shape[:2], channels, use.shape[3] // channels])
    if channels != use.shape[2]:  # If it is not known, there is perhaps one group.
        output = sizes_of(use.gradient)[2:4]
        patches, order = _patches_2d(x, output, use.shape[:2], _attributes(use.op), use.shape[2])
        return _grouped(use, x, patches, order[:2])
    return _products_2d(x, use.gradient, use, "convolution")


def _products_2d(image: tf.Tensor, outputs: tf.Tensor, use: Use, name: str) -> OuterProducts:
    """Returns products of patches of `image` and `outputs`, which has one entry per patch."""
    attributes = _attributes(use.op)

    def ordinary(inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=_merge(inputs),
            filter_sizes=constant(use.shape),
            out_backprop=_merge(outputs),
            **attributes,
        )

    output = sizes_of(outputs)[2:4]
    patches, order = _patches_2d(image, output, use.shape[:2], attributes, use.shape[2])
    return OuterProducts(
        image,
        outputs,
        use.shape,
        positions_of(outputs),
        math.prod(use.shape[:3]),
        use.shape[3],
        name,
        expand=patches,
        order=order,
        ordinary=ordinary if max(attributes["dilations"]) == 1 else None,
    )


def _patches_2d(
    tensor: tf.Tensor,
    output: Sequence[Size],
    kernel: list[int],
    attributes: dict,
    fewest_channels: int,
) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[int]]:
    """Finds patches by gathering contiguous runs of memory, which is faster than a convolution.

    Where a pixel has few channels, runs would be short: then whole rows are gathered first, and
    transposed so that a patch's column is contiguous.

    Args:
      tensor: Tensor of which patches are taken, `[n, each, h, w, c]`.
      output: Number of patches along the height and the width.
      kernel: Height and width of a patch.
      attributes: Attributes of the convolution.
      fewest_channels: The channels that a pixel has at least.

    Returns:
      A function from `[n, each, h, w, c]` to the patches, `[n * each, positions, kernel]`; and the
      order of the kernel's axes in a patch.
    """
    height, width, channels = sizes_of(tensor)[2:]
    strides, dilations = attributes["strides"][1:3], attributes["dilations"][1:3]
    (top, bottom), (left, right) = _paddings([height, width], kernel, output, attributes)
    # Neighboring pixels that every patch has together are moved together.
    run = strides[1] if dilations[1] == 1 and kernel[1] % strides[1] == 0 else 1
    right += -(left + width + right) % run
    height, width = height + top + bottom, width + left + right
    rows = _range(output[0])[:, np.newaxis] * strides[0] + _range(kernel[0]) * dilations[0]
    steps = _range(kernel[1] // run) * dilations[1]
    columns = _range(output[1])[:, np.newaxis] * (strides[1] // run) + steps
    known = tensor.shape[-1] or fewest_channels
    by_column = tensor.dtype.size * known < _RUN_BYTES
    padded = _any([top, bottom, left, right])
    if [1, 1] == kernel == list(strides) and not padded:
        return _merge, [0, 1, 2, 3]
    if by_column:  # [output row, run of the image's columns] by [run of the patch's columns]
        places = _range(output[0])[:, np.newaxis, np.newaxis] * (width // run) + columns
    else:  # [output row, output column] by [row of the patch, run of its columns]
        places = rows[:, np.newaxis, :, np.newaxis] * (width // run) + columns[:, np.newaxis, :]

    def gather(x: tf.Tensor) -> tf.Tensor:
        x = _merge(x)
        if padded:
            x = tf.pad(x, [[0, 0], [top, bottom], [left, right], [0, 0]])
        n = -1 if tensor.shape[2:].is_fully_defined() else tf.shape(x)[0]
        entries = channels
        if by_column:
            x = _gather(reshaped(x, [n, height, width * channels]), rows)
            x = reshaped(x, [n, output[0], kernel[0], width, channels])
            x = tf.transpose(x, constant([0, 1, 3, 2, 4]))
            entries = kernel[0] * channels
        x = reshaped(x, [n, (output[0] if by_column else height) * width // run, run * entries])
        return _gather(x, places)

    return gather, [1, 0, 2, 3] if by_column else [0, 1, 2, 3]


def _range(size: Size) -> Any:
    """Returns the integers below a size: an array if it is a number, or else a tensor."""
    return tf.range(size) if tf.is_tensor(size) else np.arange(size, dtype=np.int32)


def _any(sizes: Sequence[Size]) -> bool:
    """Returns whether a size may be above zero."""
    return any(tf.is_tensor(size) or size > 0 for size in sizes)


def _gather(tensor: tf.Tensor, places: Any) -> tf.Tensor:
    indices = reshaped(places, [-1]) if tf.is_tensor(places) else constant(places.ravel())
    return tf.gather(tensor, indices, axis=constant(1))


def _paddings(
    image: Sequence[Size], kernel: Sequence[int], output: Sequence[Size], attributes: dict
) -> list[tuple[Size, Size]]:
    """Returns the zeros before and after each of the two axes; SAME puts the odd one after."""
    strides, dilations = attributes["strides"][1:3], attributes["dilations"][1:3]
    if attributes["padding"] == b"EXPLICIT":
        explicit = attributes["explicit_paddings"]
        return [(explicit[2], explicit[3]), (explicit[4], explicit[5])]
    if attributes["padding"] == b"VALID":
        return [(0, 0), (0, 0)]
    pairs = []
    for size, k, s, d, out in zip(image, kernel, strides, dilations, output, strict=True):
        total = (out - 1) * s + (k - 1) * d + 1 - size
        total = tf.maximum(total, 0) if tf.is_tensor(total) else max(total, 0)
        pairs.append((total // 2, total - total // 2))
    return pairs


def _patches_by_identity(
    operation: Callable[..., tf.Tensor], kernel: list[int], attributes: dict
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that extracts patches by a convolution that copies each entry.

    Its argument is `[n, each, ..., c]`.
    """
    patch = math.prod(kernel)
    identity = np.eye(patch, dtype=np.float32).reshape([*kernel, patch])

    def convolve(x: tf.Tensor) -> tf.Tensor:
        return operation(input=_merge(x), filter=tf.constant(identity, x.dtype), **attributes)

    return convolve


def _grouped(
    use: Use, x: tf.Tensor, patches: Callable[[tf.Tensor], tf.Tensor], order: list[int]
) -> Contribution:
    """Returns products of patches and outputs in each group of channels.

    Args:
      use: The convolution.
      x: Tensor of which patches are taken, `[n, each, ..., channels]`.
      patches: Function from it to patches of all channels, `[n * each, positions, kernel *
        channels]`.
      order: The order of the kernel's axes, but those of the channels, in a patch.
    """
    *kernel, fan_in, filters = use.shape
    groups, size = sizes_of(x)[-1] // fan_in, math.prod(kernel)
    positions = math.prod(sizes_of(use.gradient)[1:-1])
    in_patch = [kernel[axis] for axis in order]
    axes = [order.index(axis) + 1 for axis in range(len(order))]

    def function(x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        n = tf.shape(x)[0]
        columns = tf.reshape(patches(x), [n, positions, size, groups, fan_in])
        g = tf.reshape(g, [n, positions, groups, filters // groups])
        products = tf.einsum("ntkgi,ntgo->nkigo", columns, g)
        products = tf.reshape(products, [-1, *in_patch, fan_in, filters])
        last = len(in_patch) + 1
        return tf.transpose(products, [0, *axes, last, last + 1])

    patches_floats = product([positions, size, sizes_of(x)[-1]])
    floats = patches_floats + product([positions, filters]) + math.prod(use.shape)
    name = "convolution" if x.shape[-1] is None else "grouped convolution"
    name = f"{name}, instantiated"
    return Direct([x, use.gradient], use.shape, name, function, floats)


@register_op_gradients("Conv3D")
def conv3d(use: Use) -> Contribution | None:
    """Handles Conv3D; any stride, padding, dilation and groups."""
    op, x = use.op, use.data[0]
    if x is None or not _is_supported(use, x):
        return None
    if x.shape[-1] is None:
        return None
    if x.shape[-1] != use.shape[3]:
        whole = [*use.shape[:3], x.shape[-1]]
        patches = _patches_by_identity(tf.raw_ops.Conv3D, whole, _attributes(op))
        return _grouped(use, x, patches, [0, 1, 2])
    return OuterProducts(
        x,
        use.gradient,
        use.shape,
        positions_of(use.gradient),
        math.prod(use.shape[:4]),
        use.shape[4],
        "convolution",
        expand=_patches_by_identity(tf.raw_ops.Conv3D, use.shape[:4], _attributes(op)),
    )


@register_op_gradients("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def transposed_convolution(use: Use) -> Contribution | None:
    """Handles transposed convolutions: input and output gradient trade places."""
    op, x = use.op, use.data[2]
    if x is None or not _is_supported(use, x) or use.gradient.shape[-1] != use.shape[-2]:
        return None
    if len(use.shape) == 4:
        return _products_2d(use.gradient, x, use, "transposed convolution")
    return OuterProducts(
        use.gradient,
        x,
        use.shape,
        positions_of(x),
        math.prod(use.shape[:-1]),
        use.shape[-1],
        "transposed convolution",
        expand=_patches_by_identity(tf.raw_ops.Conv3D, use.shape[:-1], _attributes(op)),
    )


@register_op_gradients("DepthwiseConv2dNative")
def depthwise_conv2d(use: Use) -> Contribution | None:
    """Handles depthwise convolutions, in DepthwiseConv2D and SeparableConv."""
    x = use.data[0]
    if x is None or not _is_supported(use, x):
        return None
    return _depthwise(use, x, use.shape)


def _depthwise(use: Use, x: tf.Tensor, kernel: list[int]) -> Contribution:
    """Handles a correlation for each channel of `x`.

    `kernel` is `[height, width, channels, multiplier]`.

    (With groups, they are the same numbers as `[height, width, 1, channels * multiplier]`.)
    """
    attributes = _attributes(use.op)
    output = sizes_of(use.gradient)[2:4]
    window = depthwise.Window(
        kernel=kernel,
        strides=attributes["strides"][1:3],
        dilations=attributes["dilations"][1:3],
        pads=_paddings(sizes_of(x)[2:4], kernel[:2], output, attributes),
    )
    floats = math.prod(use.shape) + sum(product(sizes_of(t)[1:]) for t in (x, use.gradient))
    name = "depthwise convolution, instantiated"
    return Direct([x, use.gradient], use.shape, name, window.gradients, floats)
