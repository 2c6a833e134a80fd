"""Depthwise convolutions: the gradient of a kernel is one correlation for each channel."""

import itertools
import math

import tensorflow as tf

from tfdp.clipping import devices
from tfdp.clipping.constants import constant, reshaped
from tfdp.clipping.contributions import Contribution, Direct
from tfdp.clipping.rules.convolutions import attributes_of, is_supported, paddings
from tfdp.clipping.rules.registry import register_rule
from tfdp.clipping.uses import Use

# Kernels of more pixels are correlated pixel by pixel: TensorFlow's operation is slow where the
# gradients of all examples together leave the processor's caches.
_LARGEST_FOLDED = 9


@register_rule("DepthwiseConv2dNative")
def depthwise_conv2d(use: Use) -> Contribution | None:
    """Depthwise convolution, in DepthwiseConv2D and SeparableConv."""
    x = use.data[0]
    if x is None or not is_supported(use, x):
        return None
    attributes = attributes_of(use.op)
    folds = math.prod(use.shape[:2]) <= _LARGEST_FOLDED and max(attributes["dilations"]) == 1
    gradients = _by_pixel if devices.compiled_by_xla() or not folds else _folded

    def function(x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        return gradients(x, g, use.shape, attributes)

    floats = math.prod(use.shape) + sum(math.prod(t.shape[1:]) for t in (x, use.gradient))
    name = "depthwise convolution, instantiated"
    return Direct([x, use.gradient], use.shape, name, function, floats)


def _folded(x: tf.Tensor, g: tf.Tensor, kernel: list[int], attributes: dict) -> tf.Tensor:
    """TensorFlow's gradient of one batch whose channels are those of all examples.

    Args:
      x: Inputs, `[n, each, h, w, channels]`.
      g: Output gradients, `[n, each, h', w', channels * multiplier]`.
      kernel: Shape of the kernel, `[kernel h, kernel w, channels, multiplier]`.
      attributes: Of the convolution.

    Returns:
      The gradients of the kernel, `[n, size]`.
    """
    height, width, channels, multiplier = kernel
    folded = [
        reshaped(tf.transpose(t, constant([1, 2, 3, 0, 4])), [*t.shape[1:4], -1]) for t in (x, g)
    ]
    sizes = tf.stack([height, width, tf.shape(folded[0])[3], multiplier])
    gradients = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=folded[0], filter_sizes=sizes, out_backprop=folded[1], **attributes
    )
    gradients = reshaped(gradients, [height * width, -1, channels * multiplier])
    return reshaped(tf.transpose(gradients, constant([1, 0, 2])), [-1, math.prod(kernel)])


def _by_pixel(x: tf.Tensor, g: tf.Tensor, kernel: list[int], attributes: dict) -> tf.Tensor:
    """The same, pixel by pixel of the kernel: sums of products of shifted inputs and gradients."""
    height, width, channels, multiplier = kernel
    strides, dilations = attributes["strides"][1:3], attributes["dilations"][1:3]
    output = g.shape[2:4].as_list()
    pads = paddings(x.shape[2:4].as_list(), kernel[:2], output, attributes)
    if any(map(max, pads)):
        x = tf.pad(x, [(0, 0), (0, 0), *pads, (0, 0)])
    if multiplier > 1:
        x = tf.repeat(x, multiplier, axis=4)
    phases = {
        phase: x if max(strides) == 1 else x[:, :, phase[0] :: strides[0], phase[1] :: strides[1]]
        for phase in itertools.product(range(strides[0]), range(strides[1]))
    }
    size = constant([-1, -1, *output, -1])
    found = []
    for row, column in itertools.product(range(height), range(width)):
        place = [row * dilations[0], column * dilations[1]]
        (i, di), (j, dj) = (divmod(p, s) for p, s in zip(place, strides, strict=True))
        shifted = tf.slice(phases[di, dj], constant([0, 0, i, j, 0]), size)
        found.append(tf.reduce_sum(shifted * g, axis=constant([1, 2, 3])))
    return reshaped(tf.stack(found, axis=1), [-1, math.prod(kernel)])

