"""Batched matrix products that TensorFlow's CPU kernels may compute wrongly.

With oneDNN, as TensorFlow 2.21 uses it by default on x86, `x @ y` is wrong, or writes past its
memory, where `x` is `[n, 1, i, k]` and `y` is `[k, j]` or has batch dimensions of 1: then one
example's numbers may be anyone's. (Measured for all pairs of up to three batch dimensions of one
or more: no other was.) Einsums and products of equal batch dimensions are right.
"""

import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp.base import devices

_TYPES = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})


def check(operations: Sequence[tf.Operation]) -> None:
    """Refuses operations that may compute a wrong product, also in functions that they call.

    Args:
      operations: Operations of a graph.

    Raises:
      ValueError: There is such an operation.
    """
    if devices.compiled_by_xla() or os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return
    for op in _with_called(operations, set()):
        if _may_be_wrong(op):
            x, y = (tensor.shape for tensor in op.inputs)
            raise ValueError(
                "The model multiplies batches of matrices in a way that TensorFlow with oneDNN "
                "computes wrongly on CPUs, so that one example's numbers get into another's. "
                f"Received '{op.name}', a product of the shapes {x} and {y}, where the batch "
                "dimensions of the first end in one that is or may be 1, and those of the second "
                "are. Write it with `einsum` or a Dense layer, remove that dimension "
                "with `tf.squeeze` first, give both sides the same batch dimensions, or set the "
                "environment variable TF_ENABLE_ONEDNN_OPTS=0."
            )


def _may_be_wrong(op: tf.Operation) -> bool:
    if op.type not in _TYPES:
        return False
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return True
    x, y = (tensor.shape[:-2].as_list() for tensor in op.inputs)
    if len(x) < 2 or x[-1] not in (1, None) or x == y:
        return False
    return any(size != 1 for size in x) and all(size in (1, None) for size in y)


def _with_called(operations: Sequence[tf.Operation], seen: set[str]) -> Iterator[tf.Operation]:
    """Yields operations, and those of the functions that they call."""
    for op in operations:
        yield op
        for attr in op.op_def.attr:
            if attr.type not in ("func", "list(func)"):
                continue
            value = op.get_attr(attr.name)
            for function in value if isinstance(value, list) else [value]:
                if function.name in seen or not op.graph._is_function(function.name):
                    continue
                seen.add(function.name)
                graph = getattr(op.graph._get_function(function.name), "graph", None)
                if graph is not None:
                    yield from _with_called(graph.get_operations(), seen)
