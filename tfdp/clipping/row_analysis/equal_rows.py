"""Public tensors that have the same row for each example of a batch of one size.

`tape.gradient(scores, x)` starts from a tensor of ones, one for each score. Where the size of the
batch is open, it is filled for each row. Where the size is known, it is a constant, of which
nothing says that its rows go with the examples.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfdp.clipping.row_analysis.states import Rows


def find(operations: Iterable[tf.Operation], batch: Sequence[tf.Tensor]) -> dict:
    """Returns tensors that may be taken for rows of the examples, by reference, with that state.

    Whether they may is to be decided for all uses: a proof that begins with them as rows, and goes
    through, holds, since a row of them is the same whatever the example, and wherever it is.

    Args:
      operations: The operations that compute a loss.
      batch: The tensors of the batch.
    """
    sizes = {tensor.shape[0] for tensor in batch}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or size < 2:
        return {}
    return {
        op.outputs[0].ref(): Rows()
        for op in operations
        if len(op.outputs) == 1 and _has_equal_rows(op, size)
    }


def _has_equal_rows(op: tf.Operation, size: int) -> bool:
    output = op.outputs[0]
    if not (output.dtype.is_floating and output.shape.rank and output.shape[0] == size):
        return False
    if op.type in ("BroadcastTo", "Tile"):
        return op.inputs[0].op.type in ("Const", "Reshape") and _is_one(op.inputs[0])
    value = tf.get_static_value(output) if op.type in ("Const", "Fill") else None
    return value is not None and bool(np.all(value == 1))


def _is_one(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has a single entry, a constant."""
    if tensor.op.type == "Reshape":
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Const" and tensor.shape.num_elements() == 1
