"""Gradients of examples that consist of several rows of the batch: the sums of their rows'."""

from collections.abc import Callable

import tensorflow as tf

from tfdp.clipping.one_pass.combined_gradients import combine
from tfdp.clipping.one_pass.per_example_gradients import (
    Contribution,
    Direct,
    Lookups,
    OuterProducts,
)
from tfdp.clipping.one_pass.tied_tables import TiedTable
from tfdp.clipping.shared_tensors import reshaped


def of_examples(rows: Contribution, each: int) -> Contribution:
    """Returns the gradients of examples, from those of rows.

    The rows of an example become positions of it, as the time steps of a sequence are.

    Args:
      rows: The gradient of every row of the batch.
      each: Consecutive rows that make up one example.
    """
    if each == 1:
        return rows
    if isinstance(rows, TiedTable):
        return combine([of_examples(c, each) for c in (rows.lookups, rows.products)], rows.shape)
    found: Contribution
    if isinstance(rows, OuterProducts):
        found = _outer_products(rows, each)
    elif isinstance(rows, Lookups):
        indices, gradients = (_with_positions(t, each) for t in rows.tensors)
        found = Lookups(indices, gradients, rows.shape)
    else:
        found = _summed(rows, each)
    found.slow = rows.slow
    return found.through(rows.view)


def _outer_products(rows: OuterProducts, each: int) -> OuterProducts:
    inputs, outputs = (_by_example(t, each) for t in rows.tensors)
    expand, ordinary = rows.expand, rows.ordinary
    return OuterProducts(
        inputs,
        outputs,
        rows.shape,
        None if rows.positions is None else rows.positions * each,
        rows.fan_in,
        rows.fan_out,
        rows.name.split(",")[0],
        expand=None if expand is None else _of_rows(expand),
        order=rows.order,
        ordinary=None if ordinary is None else _of_rows(ordinary),
    )


def _summed(rows: Contribution, each: int) -> Direct:
    def function(*tensors: tf.Tensor) -> tf.Tensor:
        flat = rows.flat([_merged(t) for t in tensors])
        return tf.reduce_sum(reshaped(flat, [-1, each, rows.size]), axis=1)

    tensors = [_by_example(t, each) for t in rows.tensors]
    floats = rows.floats_per_row * each
    return Direct(tensors, rows.shape, rows.name, function, floats, as_they_are=True)


def _of_rows(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a function of rows as one of examples."""
    return lambda *tensors: function(*[_merged(t) for t in tensors])


def _by_example(tensor: tf.Tensor, each: int) -> tf.Tensor:
    """Arranges `[rows, ...]` as `[examples, each, ...]`."""
    rest = tensor.shape[1:]
    if rest.is_fully_defined():
        return reshaped(tensor, [-1, each, *rest])
    arranged = tf.reshape(tensor, tf.concat([[-1, each], tf.shape(tensor)[1:]], 0))
    arranged.set_shape([None, each, *rest])
    return arranged


def _merged(tensor: tf.Tensor) -> tf.Tensor:
    """Arranges `[examples, each, ...]` as `[rows, ...]`."""
    rest = tensor.shape[2:]
    if rest.is_fully_defined():
        return reshaped(tensor, [-1, *rest])
    merged = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
    merged.set_shape([None, *rest])
    return merged


def _with_positions(tensor: tf.Tensor, each: int) -> tf.Tensor:
    """Arranges `[rows, positions, ...]` as `[examples, each * positions, ...]`."""
    positions, rest = tensor.shape[1], tensor.shape[2:]
    count = tf.shape(tensor)[1] if positions is None else positions
    arranged = tf.reshape(tensor, [-1, each * count, *rest])
    arranged.set_shape([None, None if positions is None else each * positions, *rest])
    return arranged
