"""Per-example gradients of a variable that is used several times."""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdp.clipping.one_pass import tied_tables
from tfdp.clipping.one_pass.per_example_gradients import (
    Contribution,
    Direct,
    Lookups,
    OuterProducts,
)
from tfdp.clipping.one_pass.weight_uses import View

# The axes of a variable that are the rows of a matrix, and those that are its columns.
_Matrix: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def combine(contributions: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """Combines the gradients of a variable that is used several times.

    The norms are those of the summed gradients, not sums of the norms of each use.

    Args:
      contributions: Those of every use.
      shape: Shape of the variable.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return first
    products = [c for c in contributions if _same_products(c, first)]
    if len(products) == len(contributions):
        return _joined_products([c for c in products if isinstance(c, OuterProducts)])
    return _of_matrix(contributions, shape) or _sum_of(contributions, shape)


def _of_matrix(contributions: Sequence[Contribution], shape: Sequence[int]) -> Contribution | None:
    """Combines lookups of rows of a matrix and products with it, or with its transpose.

    Returns:
      None if a use is another one, or if instantiated gradients are cheaper.
    """
    if len({c.view.key for c in contributions}) == 1:  # What they arrange is a matrix as well.
        matrices = [_matrix(c, View(), c.shape) for c in contributions]
    else:
        matrices = [_matrix(c, c.view, shape) for c in contributions]
    uses = list(zip(contributions, matrices, strict=True))
    lookups = [(c, m) for c, m in uses if isinstance(c, Lookups)]
    matrix = lookups[0][1] if lookups else matrices[0]
    if matrix is None or not {m for _, m in lookups} <= {matrix}:
        return None
    if not set(matrices) <= {matrix, matrix[::-1]}:
        return None
    products = [(c, m == matrix) for c, m in uses if isinstance(c, OuterProducts)]
    rows_first = [first for _, first in products]
    looked_up = _joined_lookups([c for c, _ in lookups]) if lookups else None
    multiplied = _joined_products([c for c, _ in products], rows_first) if products else None
    if looked_up is None or multiplied is None:
        return looked_up or multiplied
    if not tied_tables.is_cheaper(looked_up, multiplied):
        return None
    instantiated = _sum_of([looked_up, multiplied], shape)
    return tied_tables.TiedTable(looked_up, multiplied, rows_first[0], instantiated)


def _same_products(c: Contribution, first: Contribution) -> bool:
    return (
        isinstance(c, OuterProducts)
        and c.expand is None
        and isinstance(first, OuterProducts)
        and c.view.key == first.view.key
        and (c.order, c.fan_in, c.fan_out) == (first.order, first.fan_in, first.fan_out)
    )


def _matrix(c: Contribution, view: View, shape: Sequence[int]) -> _Matrix | None:
    """Returns the matrix that sums of outer products are gradients of, or None.

    Args:
      c: Gradients of weights.
      view: Steps from a tensor to the weights.
      shape: Shape of the tensor.
    """
    if not isinstance(c, OuterProducts | Lookups) or 0 in c.shape:
        return None
    order, columns_from = list(range(len(c.shape))), 1
    if isinstance(c, OuterProducts) and c.expand is None:
        order = c.order
        sizes = [math.prod(c.shape[axis] for axis in order[:i]) for i in range(len(order) + 1)]
        if c.fan_in not in sizes:
            return None
        columns_from = sizes.index(c.fan_in)
    elif isinstance(c, OuterProducts):
        return None
    rows = view.axes_of(order[:columns_from], shape)
    columns = view.axes_of(order[columns_from:], shape)
    return None if rows is None or columns is None else (rows, columns)


def _joined_lookups(contributions: Sequence[Lookups]) -> Lookups:
    """Returns lookups of all the uses' positions, one after the other."""
    first = contributions[0]
    if len(contributions) == 1:
        return first
    indices = [tf.cast(c.tensors[0], tf.int64) for c in contributions]
    values = _in_one_type([_signed(c.tensors[1], c, first) for c in contributions])
    joined = Lookups(tf.concat(indices, 1), tf.concat(values, 1), first.shape)
    return joined.through(first.view)


def _joined_products(
    contributions: Sequence[OuterProducts], rows_first: Sequence[bool] = ()
) -> OuterProducts:
    """Returns products of all the uses' positions, one after the other.

    Args:
      contributions: Sums of outer products.
      rows_first: For each, whether its first vectors have an entry for each row of the matrix, and
        not the second ones; empty if that is equal for all.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return first
    pairs = []
    for i, c in enumerate(contributions):
        a, g = c.pairs(c.tensors)
        if rows_first and rows_first[i] != rows_first[0]:
            a, g = g, a
        pairs.append((a, _signed(g, c, first)))
    counts = [c.positions for c in contributions]
    joined = OuterProducts(
        tf.concat(_in_one_type([a for a, _ in pairs]), 1),
        tf.concat(_in_one_type([g for _, g in pairs]), 1),
        first.shape,
        sum(c for c in counts if c is not None) if None not in counts else None,
        first.fan_in,
        first.fan_out,
        f"{len(contributions)} uses of {first.name.split(',')[0]}",
        order=first.order,
    )
    return joined.through(first.view)


def _signed(gradients: tf.Tensor, c: Contribution, first: Contribution) -> tf.Tensor:
    """Returns gradients of one use as those of another, whose weights may have the other sign."""
    return -gradients if c.view.negates != first.view.negates else gradients


def _in_one_type(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Casts to float64 if one of the tensors is of that type, to float32 otherwise."""
    wide = any(t.dtype == tf.float64 for t in tensors)
    return [tf.cast(t, tf.float64 if wide else tf.float32) for t in tensors]


def _sum_of(contributions: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """Adds up instantiated gradients."""
    ends = list(itertools.accumulate(len(c.tensors) for c in contributions))

    def function(*tensors: tf.Tensor) -> tf.Tensor:
        parts = []
        for c, end in zip(contributions, ends, strict=True):
            gradient = c.unflatten(c.flat(tensors[end - len(c.tensors) : end]))
            parts.append(c.view.pull_back(gradient))
        return tf.add_n(parts)

    tensors = [t for c in contributions for t in c.tensors]
    name = " + ".join(c.name.split(",")[0] for c in contributions) + ", instantiated"
    floats = sum(c.floats_per_row for c in contributions)
    found = Direct(tensors, shape, name, function, floats)
    found.slow = next((c.slow for c in contributions if c.slow is not None), None)
    return found
