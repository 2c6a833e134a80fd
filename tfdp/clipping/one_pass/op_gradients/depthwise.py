"""The gradients of the kernels of depthwise convolutions: one correlation for each channel."""

import dataclasses
import itertools
import math

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping.shared_tensors import constant, reshaped, sizes_of

# Kernels of more pixels are correlated pixel by pixel: TensorFlow's operation is slow where the
# gradients of all examples together leave the processor's caches.
_LARGEST_FOLDED = 9


@dataclasses.dataclass(frozen=True)
class Window:
    """The places at which a kernel meets an image.

    Attributes:
      kernel: Its shape, `[height, width, channels, multiplier]`.
      strides: Along height and width.
      dilations: Likewise.
      pads: Zeros before and after the image along height and width; scalar tensors where the
        image's size is not static.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int | tf.Tensor, int | tf.Tensor]]

    def gradients(self, x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        """Computes the gradients of the kernel for every example.

        Args:
          x: Inputs, `[n, each, h, w, channels]`.
          g: Output gradients, `[n, each, h', w', channels * multiplier]`.

        Returns:
          `[n, size]`.
        """
        small = math.prod(self.kernel[:2]) <= _LARGEST_FOLDED
        folds = small and max(self.dilations) == 1 and self.strides[0] == self.strides[1]
        if folds and not devices.compiled_by_xla():
            return self._folded(x, g)
        return self._by_pixel(x, g)

    @property
    def _has_static_pads(self) -> bool:
        return not any(tf.is_tensor(pad) for pad in itertools.chain(*self.pads))

    def _padded(self, x: tf.Tensor) -> tf.Tensor:
        """Puts zeros around the images of `[n, each, h, w, channels]`."""
        if self._has_static_pads and not any(map(max, self.pads)):
            return x
        return tf.pad(x, [(0, 0), (0, 0), *self.pads, (0, 0)])

    def _folded(self, x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        """Computes gradients as TensorFlow's of one image with the channels of all examples."""
        height, width, channels, multiplier = self.kernel
        explicit = [0, 0, *itertools.chain(*self.pads), 0, 0]
        if not self._has_static_pads:
            x, explicit = self._padded(x), [0] * 8
        folded = []
        for t in (x, g):
            images = sizes_of(t)[1:4]
            folded.append(reshaped(tf.transpose(t, constant([1, 2, 3, 0, 4])), [*images, -1]))
        gradients = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=folded[0],
            filter_sizes=tf.stack([height, width, tf.shape(folded[0])[3], multiplier]),
            out_backprop=folded[1],
            strides=[1, *self.strides, 1],
            padding="EXPLICIT",
            explicit_paddings=explicit,
        )
        gradients = reshaped(gradients, [height * width, -1, channels * multiplier])
        return reshaped(tf.transpose(gradients, constant([1, 0, 2])), [-1, math.prod(self.kernel)])

    def _by_pixel(self, x: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        """Sums products of shifted inputs and gradients, for one pixel of the kernel at a time."""
        height, width, _, multiplier = self.kernel
        down, right = self.strides
        x = self._padded(x)
        if multiplier > 1:
            x = tf.repeat(x, multiplier, axis=4)
        phases = {(0, 0): x}
        if max(self.strides) > 1:
            every = itertools.product(range(down), range(right))
            phases = {(i, j): x[:, :, i::down, j::right] for i, j in every}
        image = sizes_of(g)[2:4]
        is_static = g.shape[2:4].is_fully_defined()
        size = constant([-1, -1, *image, -1]) if is_static else tf.stack([-1, -1, *image, -1])
        found = []
        for i, j in itertools.product(range(height), range(width)):
            row, i = divmod(i * self.dilations[0], down)
            column, j = divmod(j * self.dilations[1], right)
            shifted = tf.slice(phases[i, j], constant([0, 0, row, column, 0]), size)
            found.append(tf.reduce_sum(shifted * g, axis=constant([1, 2, 3])))
        return reshaped(tf.stack(found, axis=1), [-1, math.prod(self.kernel)])
