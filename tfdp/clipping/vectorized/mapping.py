"""Vectorized functions of one example, so that no example gets into another's results.

`tf.vectorized_map` has converters that do not keep examples apart. They are replaced here, for the
time of a call, inside nested functions and for gradients, too:
  * Matrix products. Those with examples on one side only become products of broadcast batches,
    which TensorFlow with oneDNN computes wrongly (`tfdp.clipping.vectorized.faulty_products`).
  * Segments (also the gradients of lookups). An example's ids are moved by an offset, so that an
    id outside its range is one of the next example's; where ids are not int64, offsets overflow.
  * `tf.roll`, whose negative axes are counted wrongly: it rolls over the examples.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import lookup_tables
from tfdp.clipping.vectorized import faulty_products

_LOCK = threading.RLock()
_NOTES = threading.local()
# Their converters flatten examples with an offset as well: rare, and worked on row by row instead.
_ROW_BY_ROW = tuple(
    f"SparseSegment{kind}{suffix}"
    for kind in ("Sum", "Mean", "SqrtN")
    for suffix in ("", "WithNumSegments", "Grad", "GradV2")
)


def vectorized_map(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to the rows of tensors, vectorized; as `tf.vectorized_map`.

    Formal guarantee: row `i` of the result is a function of row `i` of `rows` and of what does not
    depend on them. A row with a segment id that is too large, where TensorFlow's devices and
    compilers differ in what they do, is NaN where results are floating-point numbers; otherwise
    such ids are left out.

    Args:
      function: Gets tensors like `rows`, without their first dimension.
      rows: Nested tensors, `[n, ...]`.

    Returns:
      Nested tensors, `[n, ...]`.

    Raises:
      ValueError: The result needs a product that TensorFlow may compute wrongly.
    """
    graph = tf.compat.v1.get_default_graph()
    with _LOCK, _safe_converters():
        before = len(graph.get_operations())
        result = tf.vectorized_map(function, rows, warn=False)
    made = graph.get_operations()[before:]
    faulty_products.check(made)
    for note in getattr(_NOTES, "stack", []):
        note += [op for op in made if op.type in op_types.LOOPS]
    return result


@contextlib.contextmanager
def noting_loops() -> Iterator[list[tf.Operation]]:
    """Yields a list that gets the loops over rows that `vectorized_map` makes meanwhile."""
    stack = _NOTES.__dict__.setdefault("stack", [])
    stack.append([])
    try:
        yield stack[-1]
    finally:
        stack.pop()


@contextlib.contextmanager
def _safe_converters() -> Iterator[None]:
    registry = pfor._pfor_converter_registry
    saved = dict(registry)
    registry.update(_CONVERTERS)
    for name in _ROW_BY_ROW:
        registry.pop(name, None)
    try:
        yield
    finally:
        registry.clear()
        registry.update(saved)


def _convert_product(pfor_input: Any) -> Any:
    """Converts batched matrix products without broadcasting, or as an einsum."""
    (x, x_stacked, _), (y, y_stacked, _) = pfor_input.input(0), pfor_input.input(1)
    op = pfor_input.op
    adj_x, adj_y = op.get_attr("adj_x"), op.get_attr("adj_y")
    leads = [tensor.shape[:-2] for tensor in op.inputs]
    known = all(lead.is_fully_defined() for lead in leads)
    if x_stacked and y_stacked and known and leads[0] == leads[1]:
        rest = [tf.shape(tensor)[-2:] for tensor in (x, y)]
        flat = [
            tf.reshape(tensor, tf.concat([[-1], own], 0))
            for tensor, own in zip((x, y), rest, strict=True)
        ]
        product = tf.matmul(*flat, adjoint_a=adj_x, adjoint_b=adj_y)
        shape = tf.concat([tf.shape(x)[:-2], tf.shape(product)[1:]], 0)
        return pfor.wrap(tf.cast(tf.reshape(product, shape), op.outputs[0].dtype), True)
    if x.dtype.is_complex:
        x, y = (tf.math.conj(t) if adj else t for t, adj in ((x, adj_x), (y, adj_y)))
    left = ("z" if x_stacked else "") + "..." + ("ba" if adj_x else "ab")
    right = ("z" if y_stacked else "") + "..." + ("cb" if adj_y else "bc")
    product = tf.einsum(f"{left},{right}->z...ac", x, y)
    return pfor.wrap(tf.cast(product, op.outputs[0].dtype), True)


def _segment_converter(function: Callable[..., tf.Tensor]) -> Callable[[Any], Any]:
    """Returns a converter of `tf.math.unsorted_segment_*`.

    The ids of each example get a range of their own.
    """

    def convert(pfor_input: Any) -> Any:
        pfor_input.stack_inputs([0, 1])
        data, ids = pfor_input.stacked_input(0), pfor_input.stacked_input(1)
        ids = tf.cast(ids, tf.int64)
        count = tf.cast(pfor_input.unstacked_input(2), tf.int64)
        n = tf.shape(ids, tf.int64)[0]
        ones = [1] * (ids.shape.rank - 1)
        first = tf.reshape(count * tf.range(n), [-1, *ones])
        own = tf.where((ids < 0) | (ids >= count), tf.constant(-1, tf.int64), ids + first)
        output = function(data, own, n * count)
        rest = tf.shape(output, tf.int64)[1:]
        output = tf.reshape(output, tf.concat([tf.stack([n, count]), rest], 0))
        if output.dtype.is_floating:
            bad = tf.reduce_any(ids >= count, axis=list(range(1, ids.shape.rank)))
            bad = tf.reshape(bad, tf.concat([[-1], tf.ones_like(tf.shape(output)[1:])], 0))
            output = tf.where(bad, tf.constant(float("nan"), output.dtype), output)
        return pfor.wrap(output, True)

    return convert


def _convert_count(pfor_input: Any) -> Any:
    """Counts the rows of all examples' matrices as those of one."""
    x, stacked, _ = pfor_input.input(0)
    others_stacked = any(pfor_input.input(i)[1] for i in (1, 2))
    if not stacked or others_stacked or x.shape.rank != 3:
        return pfor._fallback_converter(pfor_input)
    size, weights = pfor_input.unstacked_input(1), pfor_input.unstacked_input(2)
    counts = tf.raw_ops.DenseBincount(
        input=tf.reshape(x, [-1, tf.shape(x)[2]]),
        size=size,
        weights=weights,
        binary_output=pfor_input.get_attr("binary_output"),
    )
    shape = tf.concat([tf.shape(x)[:2], tf.reshape(tf.cast(size, tf.int32), [1])], 0)
    return pfor.wrap(tf.reshape(counts, shape), True)


def _convert_look_up(pfor_input: Any) -> Any:
    """Looks up the keys of all examples in one table."""
    keys, stacked, _ = pfor_input.input(1)
    if not stacked or pfor_input.input(0)[1] or pfor_input.input(2)[1]:
        return pfor._fallback_converter(pfor_input)
    values = tf.raw_ops.LookupTableFindV2(
        table_handle=pfor_input.unstacked_input(0),
        keys=keys,
        default_value=pfor_input.unstacked_input(2),
    )
    if lookup_tables.is_static(pfor_input.op.inputs[0]):  # Which TensorFlow does not infer.
        values.set_shape(keys.shape)
    return pfor.wrap(values, True)


def _convert_roll(pfor_input: Any) -> Any:
    """Rolls along the axes of an example, from whichever end they are counted."""
    x, stacked, _ = pfor_input.input(0)
    if not stacked or pfor_input.input(1)[1]:  # Each example has a shift of its own.
        return pfor._fallback_converter(pfor_input)
    axis = pfor_input.unstacked_input(2)
    axis = tf.where(axis < 0, axis + tf.rank(x), axis + 1)
    return pfor.wrap(tf.roll(x, pfor_input.unstacked_input(1), axis), True)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "BatchMatMul": _convert_product,
    "BatchMatMulV2": _convert_product,
    "BatchMatMulV3": _convert_product,
    "UnsortedSegmentSum": _segment_converter(tf.math.unsorted_segment_sum),
    "UnsortedSegmentMax": _segment_converter(tf.math.unsorted_segment_max),
    "UnsortedSegmentMin": _segment_converter(tf.math.unsorted_segment_min),
    "UnsortedSegmentProd": _segment_converter(tf.math.unsorted_segment_prod),
    "DenseBincount": _convert_count,
    "LookupTableFindV2": _convert_look_up,
    "Roll": _convert_roll,
}
