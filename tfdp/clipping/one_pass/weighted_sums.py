"""Norms of per-example gradients, their clip factors, and the clipped sums.

A graph pays for each of its operations when it is traced and optimized. Of a model with many
variables, small gradients are therefore put side by side, `[rows, size]`, so that most operations
are needed once for all of them and not once for each.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping import norms
from tfdp.clipping.engine import Factors
from tfdp.clipping.one_pass.per_example_gradients import Contribution, OuterProducts, weighted_sum
from tfdp.clipping.shared_tensors import constant

# Gradients of at most so many weights are put side by side: copying larger ones would cost more.
_SMALL = 2**12
# Parts of fewer rows do not pay: then all rows are worked on at once, in at most so many times the
# memory of a part.
_FEWEST_ROWS, _MOST_PARTS = 8, 64

# Computes the factors from squared norms, the block of each variable, the rows that count and the
# random numbers of a random rule.
FactorsOf = Callable[[Sequence[tf.Tensor], Sequence[int], tf.Tensor, tf.Tensor], Factors]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Gradients that are instantiated side by side.

    Attributes:
      indices: Indices of the contributions.
      block: The block of variables that they are clipped in.
      sizes: Numbers of weights.
    """

    indices: list[int]
    block: int
    sizes: list[int]


class WeightedSums:
    """The clipped sums of the gradients of several variables.

    Args:
      contributions: The gradients.
      block_of: For each, the block of variables that it is clipped in.
      wide: Whether to compute the sums in float64.
    """

    def __init__(
        self, contributions: Sequence[Contribution], block_of: Sequence[int], wide: bool = False
    ):
        self._contributions, self._block_of, self._wide = list(contributions), block_of, wide
        self._factored = [i for i, c in enumerate(contributions) if c.factored]
        self._pieces = self._side_by_side()

    def _side_by_side(self) -> list[Piece]:
        pieces: list[Piece] = []
        small: dict[tuple, list[int]] = {}
        for i, c in enumerate(self._contributions):
            if c.factored:
                continue
            key = (self._block_of[i], c.dtype) if c.size <= _SMALL else (i,)
            small.setdefault(key, []).append(i)
        for indices in small.values():
            sizes = [self._contributions[i].size for i in indices]
            pieces.append(Piece(indices, self._block_of[indices[0]], sizes))
        return pieces

    def compute(
        self,
        mask: tf.Tensor,
        rows: tf.Tensor,
        uniforms: tf.Tensor,
        factors_of: FactorsOf,
        expected_rows: int | None = None,
    ) -> tuple[list[tf.Tensor], Factors]:
        """Computes norms, factors and sums.

        Args:
          mask: Mask of the rows that are examples.
          rows: Number of rows.
          uniforms: For each row the random number of a random rule.
          factors_of: Gives the factors.
          expected_rows: About how many rows there will be, if that is known.

        Returns:
          The clipped sum of each contribution, in the shape of its weights; and the factors.
        """
        contributions = self._contributions
        early = {i: contributions[i].squares(contributions[i].tensors) for i in self._early()}
        if self._fits(expected_rows):
            tensors = {i: c.tensors for i, c in enumerate(contributions)}
            flats, factors = self._norms(tensors, early, mask, uniforms, factors_of)
            found = self._sums_of_pieces(flats, factors)
        else:
            found, factors = self._in_parts(early, mask, rows, uniforms, factors_of)
        factors = dataclasses.replace(factors, block_of=list(self._block_of))
        sums: dict[int, tf.Tensor] = {}
        for piece, total in zip(self._pieces, found, strict=True):
            parts = tf.split(total, piece.sizes) if len(piece.sizes) > 1 else [total]
            for i, part in zip(piece.indices, parts, strict=True):
                sums[i] = contributions[i].unflatten(part)
        rest = {i: contributions[i] for i in self._factored}
        sums.update(_wide_totals(rest, factors, rows) if self._wide else _totals(rest, factors))
        return [sums[i] for i in range(len(contributions))], factors

    def _early(self) -> list[int]:
        """Returns those whose norms follow from little memory, before any loop."""
        return [i for i in self._factored if self._contributions[i].whole]

    def _floats_per_row(self) -> int | tf.Tensor:
        return sum(c.floats_per_row for c in self._contributions if not c.whole)

    def _rows_of_part(self) -> int | tf.Tensor:
        floats, size = self._floats_per_row(), devices.working_set_bytes() // 4
        if tf.is_tensor(floats):
            rows = tf.maximum(size // floats, tf.minimum(_most_floats() // floats, _FEWEST_ROWS))
            return tf.cast(tf.maximum(rows, 1), tf.int32)
        return max(1, size // max(1, floats))

    def _fits(self, expected_rows: int | None) -> bool:
        """Returns whether all rows are worked on at once."""
        floats = self._floats_per_row()
        if tf.is_tensor(floats):  # Each step finds out how many rows make up a part.
            return False
        if not floats:
            return True
        if expected_rows is None:
            return False
        limit = self._rows_of_part()
        return expected_rows <= (_most_floats() // floats if limit < _FEWEST_ROWS else limit)

    def _norms(
        self,
        tensors: dict[int, list[tf.Tensor]],
        early: dict[int, tf.Tensor],
        keep: tf.Tensor,
        uniforms: tf.Tensor,
        factors_of: FactorsOf,
    ) -> tuple[list[tf.Tensor], Factors]:
        """Returns the gradients of the pieces, `[n, size]`, and the factors of n rows.

        Args:
          tensors: Tensors of each contribution: n rows.
          early: Squared norms that are known already.
          keep: Mask of the rows that count.
          uniforms: For each row the random number of a random rule.
          factors_of: Gives the factors.
        """
        squares, blocks = list(early.values()), [self._block_of[i] for i in early]
        flats = []
        for piece in self._pieces:
            own = [self._contributions[i].flat(tensors[i]) for i in piece.indices]
            flats.append(tf.concat(own, axis=1) if len(own) > 1 else own[0])
            squares.append(norms.of_rows(flats[-1], sum(piece.sizes)))
            blocks.append(piece.block)
        grams: dict[tf.DType, list] = {}
        for i in self._factored:
            c = self._contributions[i]
            if i in early:
                continue
            if isinstance(c, OuterProducts):
                sums = c.gram_sums(tensors[i])
                grams.setdefault(sums.products.dtype, []).append((i, sums))
            else:
                squares.append(c.squares(tensors[i]))
                blocks.append(self._block_of[i])
        for found in grams.values():
            squares += norms.of_gram_sums([sums for _, sums in found])
            blocks += [self._block_of[i] for i, _ in found]
        return flats, factors_of(squares, blocks, keep, uniforms)

    def _sums_of_pieces(self, flats: list[tf.Tensor], factors: Factors) -> list[tf.Tensor]:
        """Returns the weighted sums of the gradients of the pieces, `[size]` each."""
        return [
            weighted_sum(flat, factors.of_block(piece.block), self._wide)
            for flat, piece in zip(cleaned(flats, factors.bad), self._pieces, strict=True)
        ]

    def _in_parts(
        self,
        early: dict[int, tf.Tensor],
        mask: tf.Tensor,
        rows: tf.Tensor,
        uniforms: tf.Tensor,
        factors_of: FactorsOf,
    ) -> tuple[list[tf.Tensor], Factors]:
        """Computes norms and factors in parts, each small enough for a processor's cache.

        The last part begins early, so that all have the same size; its first rows, which have been
        counted, are left out.
        """
        limit = self._rows_of_part()
        count = (rows + limit - 1) // limit
        size = (rows + count - 1) // tf.maximum(count, 1)
        blocks = max(self._block_of) + 1
        late = [i for i in range(len(self._contributions)) if i not in early]

        def body(
            index: tf.Tensor, sums: list, by_block: tf.Tensor, bad: tf.Tensor, within: tf.Tensor
        ) -> tuple:
            start = tf.minimum(index * size, rows - size)
            part = Part(start, size)
            tensors = {i: [part.cut(t) for t in self._contributions[i].tensors] for i in late}
            known = {i: part.cut(square) for i, square in early.items()}
            places = start + tf.range(size)
            keep = tf.logical_and(part.cut(mask), places >= index * size)
            flats, own = self._norms(tensors, known, keep, part.cut(uniforms), factors_of)
            new = self._sums_of_pieces(flats, own)
            sums = [s + n for s, n in zip(sums, new, strict=True)]
            by_block = tf.tensor_scatter_nd_add(by_block, places[:, tf.newaxis], own.by_block)
            bad = tf.tensor_scatter_nd_max(bad, places[:, tf.newaxis], tf.cast(own.bad, tf.int32))
            return index + 1, sums, by_block, bad, within + own.within_clip

        zeros = []
        for piece in self._pieces:
            dtype = tf.float64 if self._wide else self._contributions[piece.indices[0]].dtype
            zeros.append(tf.zeros([sum(piece.sizes)], dtype))
        _, sums, by_block, bad, within = tf.while_loop(
            lambda index, *_: index < count,
            body,
            [0, zeros, tf.zeros([rows, blocks]), tf.zeros([rows], tf.int32), 0.0],
            parallel_iterations=2,
        )
        return sums, Factors(by_block, tf.cast(bad, tf.bool), within, list(self._block_of))


def _most_floats() -> int:
    """Returns how many floats may be in memory where parts would have too few rows."""
    return min(_MOST_PARTS * devices.working_set_bytes(), devices.memory_budget()) // 4


class Part:
    """Some rows of a batch.

    Args:
      start: The first.
      size: Their number.
    """

    def __init__(self, start: tf.Tensor, size: tf.Tensor):
        self._start, self._size = start, size
        self._known: dict = {}
        self._limits: dict = {}

    def cut(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns these rows of a tensor; the same tensor if it is asked for again."""
        if tensor.ref() not in self._known:
            rest = tensor.shape[1:]
            begin, size = self._limits_of(tensor)
            piece = tf.slice(tensor, begin, size)
            piece.set_shape([None, *rest])
            self._known[tensor.ref()] = piece
        return self._known[tensor.ref()]

    def _limits_of(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the limits of a part, which all tensors of a shape share."""
        rest = tensor.shape[1:]
        if not rest.is_fully_defined():
            begin = tf.pad([self._start], [[0, rest.rank]])
            return begin, tf.concat([[self._size], tf.shape(tensor)[1:]], 0)
        key = tuple(rest)
        if key not in self._limits:
            begin = tf.stack([self._start, *[0] * rest.rank])
            self._limits[key] = (begin, tf.stack([self._size, *rest]))
        return self._limits[key]


def cut(tensor: tf.Tensor, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Cuts some rows out of a tensor, as many for every part."""
    return Part(start, size).cut(tensor)


def cleaned(tensors: Sequence[tf.Tensor], bad: tf.Tensor) -> list[tf.Tensor]:
    """Sets the rows of tensors `[n, ...]` that are bad to zero: zero times NaN is not zero.

    Where no row is bad, nothing is copied.
    """
    if not tensors:
        return []
    found = tf.cond(
        tf.reduce_any(bad),
        lambda: [_zeroed(tensor, bad) for tensor in tensors],
        lambda: list(tensors),
    )
    return tf.nest.flatten(found)


def _zeroed(tensor: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
    bad = tf.reshape(bad, constant([-1] + [1] * (tensor.shape.rank - 1)))
    return tf.where(bad, constant(0, tensor.dtype), tensor)


def _wide_totals(
    contributions: dict[int, Contribution], factors: Factors, rows: tf.Tensor
) -> dict[int, tf.Tensor]:
    """Returns the weighted sums of contributions in float64, part by part to save memory."""
    if not contributions:
        return {}
    floats = max(c.sum_floats_per_row for c in contributions.values())
    limit = max(1, devices.working_set_bytes() // (8 * max(1, floats)))
    count = (rows + limit - 1) // limit
    size = (rows + count - 1) // tf.maximum(count, 1)

    def body(index: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        start = tf.minimum(index * size, rows - size)
        counts = start + tf.range(size) >= index * size
        part = Part(start, size)
        by_block = part.cut(factors.by_block)
        own = dataclasses.replace(
            factors,
            by_block=tf.where(counts[:, tf.newaxis], by_block, tf.zeros_like(by_block)),
            bad=part.cut(factors.bad),
        )
        parts = {i: [part.cut(t) for t in c.tensors] for i, c in contributions.items()}
        new = _totals(contributions, own, parts, wide=True)
        return index + 1, [s + new[i] for i, s in zip(contributions, sums, strict=True)]

    zeros = [tf.zeros(c.shape, tf.float64) for c in contributions.values()]
    _, sums = tf.while_loop(lambda index, _: index < count, body, [0, zeros], parallel_iterations=1)
    return dict(zip(contributions, sums, strict=True))


def _totals(
    contributions: dict[int, Contribution],
    factors: Factors,
    tensors: dict[int, list[tf.Tensor]] | None = None,
    wide: bool = False,
) -> dict[int, tf.Tensor]:
    """Returns the weighted sums of contributions, for all rows or for those of `tensors`."""
    tensors = tensors or {i: c.tensors for i, c in contributions.items()}
    used = {t.ref(): t for i in contributions for t in tensors[i]}
    clean = dict(zip(used, cleaned(list(used.values()), factors.bad), strict=True))
    return {
        i: c.total([clean[t.ref()] for t in tensors[i]], factors.of_variable(i), wide)
        for i, c in contributions.items()
    }
