"""The gradients of a variable for every example, in the form that is cheapest to clip.

A contribution knows, from tensors with one row per example, each example's gradient of one tensor
of weights. It can give the squared norms and the weighted sum, either of instantiated gradients or,
where that is cheaper, without ever having them in memory.
"""

import abc
import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping import norms
from tfdp.clipping.one_pass.weight_uses import View
from tfdp.clipping.shared_tensors import constant, product, reshaped, sizes_of
from tfdp.clipping.vectorized.mapping import noting_loops

# Instantiating a gradient writes and reads its entries: about as long as this many multiplications.
_MULTIPLICATIONS_PER_ENTRY = 16


def _gram_is_cheaper(positions: int, fan_in: int, fan_out: int) -> bool:
    """Returns whether two `[T, T]` products cost less than passing over gradients in memory."""
    products = positions**2 * (fan_in + fan_out)
    return products < _MULTIPLICATIONS_PER_ENTRY * fan_in * fan_out


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """Casts to float32 at least, in which norms are computed."""
    narrow = tensor.dtype.is_floating and tensor.dtype.size < 4
    return tf.cast(tensor, tf.float32) if narrow else tensor


C = TypeVar("C", bound="Contribution")


class Contribution(abc.ABC):
    """Gradients of one tensor of weights, one per example.

    Attributes:
      tensors: Tensors that they are computed from: `[rows, ...]` each.
      shape: Shape of the weights; a scalar tensor stands for a size that is not static.
      name: Name of the computation, for reports.
      view: Steps from the variable to the weights.
    """

    factored = False  # Whether norms and sums come without instantiating the gradients.
    whole = False  # Whether all rows can be worked on at once in little memory.
    slow: str | None = None  # Why this takes long, if it does.

    def __init__(self, tensors: Sequence[tf.Tensor], shape: Sequence[int], name: str):
        self.tensors = list(tensors)
        self.shape = list(shape)
        self.name = name
        self.view = View()

    def through(self: C, view: View) -> C:
        """Returns these gradients, of weights that follow from the variable as `view` says."""
        seen = copy.copy(self)
        seen.view = view
        return seen

    @property
    def size(self) -> int:
        """Number of weights; a scalar tensor where it is not static, see `computed_weights`."""
        return product(self.shape)

    @property
    def dtype(self) -> tf.DType:
        """Type of the gradients: float32, or float64 where the data is."""
        wide = any(tensor.dtype == tf.float64 for tensor in self.tensors)
        return tf.float64 if wide else tf.float32

    @property
    def floats_per_row(self) -> int | tf.Tensor:
        """About how many floats are in memory for one example while norms are computed.

        A scalar tensor where it depends on the size of images, and that is not static.
        """
        return self.size

    @property
    def work_per_row(self) -> int:
        """About how many multiplications the gradient of one example takes."""
        return self.size

    @property
    def sum_floats_per_row(self) -> int | tf.Tensor:
        """About how many floats of one example are in memory while `total` is computed."""
        return self.floats_per_row

    @abc.abstractmethod
    def flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the gradients, `[n, size]`, in an order of their own.

        Args:
          tensors: As `self.tensors`, of any n examples.
        """

    def unflatten(self, flat: tf.Tensor) -> tf.Tensor:
        """Restores the shape of the weights: `[..., size]` to `[..., *shape]`."""
        return _with_trailing(flat, self.shape, 1)

    def squares(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the squared norms, `[n]`: upper bounds, see `tfdp.clipping.norms`."""
        return norms.of_rows(self.flat(tensors), self.size)

    def total(
        self, tensors: Sequence[tf.Tensor], factors: tf.Tensor, wide: bool = False
    ) -> tf.Tensor:
        """Sums the gradients times `factors`, `[n]`, in the shape of the weights.

        Args:
          tensors: As `self.tensors`, of any n examples.
          factors: Factors of the gradients.
          wide: Whether to compute the sum, of the same gradients, in float64.
        """
        return self.unflatten(weighted_sum(self.flat(tensors), factors, wide))

    def sum_terms(self) -> tuple[int | tf.Tensor, float]:
        """Returns for `engine.sum_error` the terms per example, and their share of the clip."""
        return 1, 1.0


def weighted_sum(flat: tf.Tensor, factors: tf.Tensor, wide: bool = False) -> tf.Tensor:
    """Returns the sum of the rows of `[n, size]` times `factors`; in float64 if it is `wide`."""
    flat = tf.cast(flat, tf.float64) if wide else flat
    row = tf.expand_dims(tf.cast(factors, flat.dtype), constant(0))
    return reshaped(tf.matmul(row, flat), [-1])


def _with_trailing(tensor: tf.Tensor, trailing: Sequence[int], old: int) -> tf.Tensor:
    """Reshapes the last `old` axes of a tensor to `trailing`."""
    lead = tensor.shape[: tensor.shape.rank - old]
    if lead.num_elements() is not None:
        return reshaped(tensor, [*lead, *trailing])
    if lead.rank == 1:
        return reshaped(tensor, [tf.shape(tensor)[0], *trailing])
    return tf.reshape(tensor, tf.concat([tf.shape(tensor)[:-old], trailing], 0))


class OuterProducts(Contribution):
    """Sums over positions (time, pixels) of outer products: `sum_t a[t] outer g[t]`.

    Args:
      inputs: Inputs of the layer, `[rows, ...]`.
      outputs: Gradients of what it made of it, `[rows, ...]`.
      shape: Shape of the weights.
      positions: Number T of positions, None if it is not static.
      fan_in: Length p of each a[t].
      fan_out: Length d of each g[t].
      name: Name of the computation.
      expand: Function from inputs to `[n, T, p]`, such as the patches of a convolution.
      order: The axes of the weights in the order in which they make up first p, then d.
      ordinary: Function from inputs and outputs, `[n, ...]`, to the gradient of their sum, where
        TensorFlow has an operation for it.
    """

    def __init__(
        self,
        inputs: tf.Tensor,
        outputs: tf.Tensor,
        shape: Sequence[int],
        positions: int | None,
        fan_in: int,
        fan_out: int,
        name: str,
        expand: Callable[[tf.Tensor], tf.Tensor] | None = None,
        order: Sequence[int] | None = None,
        ordinary: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
    ):
        super().__init__([inputs, outputs], shape, name)
        self.positions, self.fan_in, self.fan_out = positions, fan_in, fan_out
        self.expand, self.ordinary = expand, ordinary
        self.order = list(range(len(self.shape))) if order is None else list(order)
        self.whole = positions == 1
        gram = positions is not None and _gram_is_cheaper(positions, fan_in, fan_out)
        self.factored = self.whole or gram
        self.name = f"{name}, {'norms by Gram matrices' if self.factored else 'instantiated'}"
        if self.whole:
            self.name = f"{name}, norms as products of norms"

    @property
    def floats_per_row(self) -> int | tf.Tensor:
        """See `Contribution`."""
        positions = self.positions or 64
        if self.positions is None and self.expand is not None:  # There may be many more.
            positions = product([self.number_of_positions()])
        sizes = 2 * positions**2 if self.factored else self.size
        pairs = positions * (self.fan_in + self.fan_out)
        return sizes + (pairs // 2 if self._narrow and not self.factored else pairs)

    @property
    def work_per_row(self) -> int:
        """See `Contribution`."""
        return (self.positions or 64) * self.fan_in * self.fan_out

    @property
    def sum_floats_per_row(self) -> int:
        """See `Contribution`; the positions of what has norms by Gram matrices are known."""
        return (self.positions or 64) * (self.fan_in + self.fan_out)

    def number_of_positions(self, outputs: tf.Tensor | None = None) -> int | tf.Tensor:
        """Returns T, of outputs `[n, ...]` that may be of any size; of its own by default."""
        outputs = self.tensors[1] if outputs is None else outputs
        if self.positions is not None or not self.fan_out:
            return self.positions or 0
        return math.prod(sizes_of(outputs)[1:]) // self.fan_out

    def pairs(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the vectors a, `[n, T, p]`, and g, `[n, T, d]`."""
        return self._pairs(*(widen(t) for t in tensors))

    def _pairs(self, inputs: tf.Tensor, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `pairs` in the types of its arguments."""
        n: int | tf.Tensor = -1
        if self.positions is None or 0 in (self.positions, self.fan_in, self.fan_out):
            n = tf.shape(inputs)[0]
        positions = self.number_of_positions(outputs)
        a = inputs if self.expand is None else self.expand(inputs)
        return (
            reshaped(a, [n, positions, self.fan_in]),
            reshaped(outputs, [n, positions, self.fan_out]),
        )

    @property
    def _narrow(self) -> bool:
        """Returns whether instantiated gradients are products of bfloat16.

        They are rounded to it, then: norms and sums are of what was rounded.
        """
        return devices.multiplies_bfloat16() and all(t.dtype == tf.bfloat16 for t in self.tensors)

    @property
    def _narrow_first(self) -> bool:
        """Returns whether gradients are instantiated as `[p, d]`, which is then faster."""
        return self.fan_in < self.fan_out

    def flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`; as `[p, d]` or `[d, p]`, whichever is the faster product."""
        a, g = self._pairs(*tensors) if self._narrow else self.pairs(tensors)
        first, second = (a, g) if self._narrow_first else (g, a)
        return widen(reshaped(tf.matmul(first, second, transpose_a=True), [-1, self.size]))

    def unflatten(self, flat: tf.Tensor) -> tf.Tensor:
        """See `Contribution`."""
        if self._narrow_first:
            return self._arrange(flat, 1)
        flat = _with_trailing(flat, [self.fan_out, self.fan_in], 1)
        return self._arrange(tf.linalg.matrix_transpose(flat), 2)

    def _arrange(self, products: tf.Tensor, trailing: int = 2) -> tf.Tensor:
        """Arranges `[..., p, d]`, or flattened `[..., p d]`, in the shape of the weights."""
        products = _with_trailing(products, [self.shape[axis] for axis in self.order], trailing)
        if self.order == sorted(self.order):
            return products
        leading = products.shape.rank - len(self.order)
        back = [self.order.index(axis) + leading for axis in range(len(self.order))]
        return tf.transpose(products, constant([*range(leading), *back]))

    def squares(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`."""
        if not self.factored:
            return super().squares(tensors)
        if self.whole:
            a, g = self._vectors(tensors)
            return norms.of_outer_products(a, g, self.fan_in, self.fan_out)
        return norms.of_gram_sums([self.gram_sums(tensors)])[0]

    def gram_sums(self, tensors: Sequence[tf.Tensor]) -> norms.GramSums:
        """Returns sums over Gram matrices, from which `norms.of_gram_sums` makes squared norms."""
        a, g = self.pairs(tensors)
        positions = self.positions or 1  # Known, as `factored` says.
        return norms.gram_sums(a, g, self.fan_in, self.fan_out, positions)

    def sum_terms(self) -> tuple[int | tf.Tensor, float]:
        """See `Contribution`."""
        summed = self.factored and not self.whole
        return (self.positions or 1, norms.MOST_CANCELLED) if summed else (1, 1.0)

    def total(
        self, tensors: Sequence[tf.Tensor], factors: tf.Tensor, wide: bool = False
    ) -> tf.Tensor:
        """See `Contribution`."""
        if wide:
            a, g = (tf.cast(t, tf.float64) for t in self.pairs(tensors))
            g *= tf.cast(factors, tf.float64)[:, tf.newaxis, tf.newaxis]
            return self._products(a, g)
        inputs, outputs = (widen(t) for t in tensors)
        weights = reshaped(factors, [-1] + [1] * (outputs.shape.rank - 1))
        outputs = outputs * tf.cast(weights, outputs.dtype)
        if self.ordinary is not None:
            return self.ordinary(inputs, outputs)
        return self._products(*self._vectors([inputs, outputs]))

    def _vectors(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `pairs` with the positions of all examples one after the other: `[n T, ...]`."""
        if self.expand is not None:
            a, g = self.pairs(tensors)
        else:
            a, g = (widen(t) for t in tensors)
        return reshaped(a, [-1, self.fan_in]), reshaped(g, [-1, self.fan_out])

    def _products(self, a: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        """Sums outer products over examples and positions, in the shape of the weights."""
        a, g = reshaped(a, [-1, self.fan_in]), reshaped(g, [-1, self.fan_out])
        return self._arrange(tf.matmul(a, g, transpose_a=True))


class Direct(Contribution):
    """Gradients that a function computes at once, such as those of a bias.

    Args:
      tensors: Tensors that they are computed from.
      shape: Shape of the weights.
      name: Name of the computation.
      function: Function from those tensors of n examples to `[n, size]`.
      floats_per_row: See `Contribution`; the size by default.
      as_they_are: Whether the function gets tensors of any type, and not of float32 at least.
    """

    def __init__(
        self,
        tensors: Sequence[tf.Tensor],
        shape: Sequence[int],
        name: str,
        function: Callable[..., tf.Tensor],
        floats_per_row: int | tf.Tensor | None = None,
        as_they_are: bool = False,
    ):
        super().__init__(tensors, shape, name)
        self._function = function
        self._as_they_are = as_they_are
        self._floats_per_row = floats_per_row

    @property
    def floats_per_row(self) -> int | tf.Tensor:
        """See `Contribution`."""
        return self.size if self._floats_per_row is None else self._floats_per_row

    def flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`."""
        given = tensors if self._as_they_are else [widen(t) for t in tensors]
        with noting_loops() as loops:
            found = widen(self._function(*given))
        if loops and self.slow is None:
            self.slow = "in a loop over the examples, as TensorFlow cannot vectorize it"
        return found if found.shape.rank == 2 else reshaped(found, [-1, self.size])


class Lookups(Contribution):
    """Gradients of a table of vectors from which each example looked up some (an embedding).

    Nothing of the size of the table is made per example: `<e_i outer g_t, e_j outer g_s>` is zero
    unless the tokens i and j are the same. An example with an index outside the table is bad: its
    norm is NaN, and it contributes nothing.

    Args:
      indices: Rows of the table, integers `[rows, T]`.
      gradients: Gradients of what was looked up, `[rows, T, d]`.
      shape: Shape of the table, `[vocabulary, d]`, flattened after the first dimension.
    """

    factored = True

    def __init__(self, indices: tf.Tensor, gradients: tf.Tensor, shape: Sequence[int]):
        name = "gather, norms by comparing tokens"
        super().__init__([indices, gradients], shape, name)
        self.width = tf.TensorShape(shape[1:]).num_elements()

    @property
    def floats_per_row(self) -> int:
        """See `Contribution`."""
        positions = self.tensors[0].shape[1] or 64
        return 3 * positions**2 + positions * self.width

    @property
    def work_per_row(self) -> int:
        """See `Contribution`."""
        return (self.tensors[0].shape[1] or 64) * self.width

    def squares(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`."""
        indices, g = tensors[0], widen(tensors[1])
        same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], g.dtype)
        squares = norms.of_lookups(same, g, self.width)
        return tf.where(self.in_table(indices), squares, _nan(g.dtype))

    def flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """See `Contribution`; large: only for tables that are also used in other ways."""
        indices, g = tf.cast(tensors[0], tf.int64), widen(tensors[1])
        n = tf.shape(indices, tf.int64)[0]
        known = self.in_table(indices)[:, tf.newaxis]
        rows = tf.where(known, indices, 0) + self.shape[0] * tf.range(n)[:, tf.newaxis]
        flat = tf.reshape(self._scatter(rows, g, n * self.shape[0]), [n, self.size])
        return tf.where(known, flat, _nan(g.dtype))

    def sum_terms(self) -> tuple[int | tf.Tensor, float]:
        """See `Contribution`."""
        return tf.shape(self.tensors[0])[1], norms.MOST_CANCELLED

    def total(
        self, tensors: Sequence[tf.Tensor], factors: tf.Tensor, wide: bool = False
    ) -> tf.Tensor:
        """See `Contribution`."""
        indices, g = tf.cast(tensors[0], tf.int64), widen(tensors[1])
        g = tf.cast(g, tf.float64) if wide else g
        g = g * tf.cast(factors, g.dtype)[:, tf.newaxis, tf.newaxis]
        return tf.reshape(self._scatter(indices, g, self.shape[0]), self.shape)

    def in_table(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns whether all that an example looks up is in the table, bool `[n]`.

        Compilers and devices differ in what they do otherwise: the example is bad.
        """
        indices = tf.cast(indices, tf.int64)
        return tf.reduce_all((indices >= 0) & (indices < self.shape[0]), axis=1)

    def _scatter(self, indices: tf.Tensor, values: tf.Tensor, length: tf.Tensor | int) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(
            tf.reshape(values, [-1, self.width]), tf.reshape(indices, [-1]), length
        )


def _nan(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(float("nan"), dtype)
