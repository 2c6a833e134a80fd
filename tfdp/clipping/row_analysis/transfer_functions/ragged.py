"""Ragged tensors whose rows are the examples: what texts are split into.

Each row stays a function of its example because operations on the entries work on each of them
alone, or on the entries of one row, and because a row's length never reaches another: rows become
a dense tensor only by being cut and filled up to a public length.
"""

import tensorflow as tf

from tfdp.clipping.row_analysis import shape_values
from tfdp.clipping.row_analysis.analysis import ragged_transfers, unproven
from tfdp.clipping.row_analysis.states import BatchSize, Public, Ragged, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import ELEMENTWISE, of_rows

# The condition of a Select may choose whole rows.
_ENTRYWISE = sorted(ELEMENTWISE - {"Select"})


@of_rows("StringSplitV2")
def split_text(op: tf.Operation, rows: Rows, inputs: list[State]) -> State | list[State]:
    """Handles the words of each text."""
    if rows != Rows() or op.inputs[0].shape.rank != 1:
        return unproven(op, "it splits several texts of an example")
    return [Ragged(part, op.name) for part in ("indices", "values", "shape")]


@of_rows("UnicodeDecode")
def decode(op: tf.Operation, rows: Rows, inputs: list[State]) -> State | list[State]:
    """Characters of each text."""
    if rows != Rows() or op.inputs[0].shape.rank != 1:
        return unproven(op, "it splits several texts of an example")
    return [Ragged(part, op.name) for part in ("splits", "values")]


@ragged_transfers("StringNGrams")
def n_grams(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Handles neighboring words of each text, joined."""
    values, splits = inputs
    if not isinstance(values, Ragged) or values.part != "values":
        return unproven(op, "its words are not proven to hold the examples")
    if splits != Ragged("splits", values.source):
        return unproven(op, "where its texts begin is not proven")
    return [Ragged(part, op.name) for part in ("values", "splits")]


@ragged_transfers(*_ENTRYWISE)
def entrywise(op: tf.Operation, inputs: list[State]) -> State:
    """Functions of each entry and of public scalars; of parts, copies in another type."""
    found = {state for state in inputs if isinstance(state, Ragged)}
    part = found.pop()
    if found:
        return unproven(op, "its inputs are rows of different lengths")
    if part.part != "values":
        kept = op.type == "Identity" or (op.type == "Cast" and op.outputs[0].dtype.is_integer)
        return part if kept else unproven(op, "it computes with the lengths of rows")
    for tensor, state in zip(op.inputs, inputs, strict=True):
        if state != part and not (isinstance(state, Public) and tensor.shape.rank == 0):
            return unproven(op, f"{tensor.name} may differ from entry to entry")
    if any(tensor.shape.rank != 1 for tensor in op.outputs):
        return unproven(op, "its result has other entries")
    return part


@ragged_transfers("StridedSlice")
def column_or_size(op: tf.Operation, inputs: list[State]) -> State:
    """Handles slices that give the example of each entry, or the number of examples."""
    state = inputs[0]
    limits = [tf.get_static_value(tensor) for tensor in list(op.inputs)[1:]]
    if not isinstance(state, Ragged) or any(limit is None for limit in limits):
        return unproven(op, "what it slices is not static")
    begin, _, strides = (list(limit) for limit in limits)
    whole_first = bool(op.get_attr("begin_mask") & op.get_attr("end_mask") & 1)
    plain = not op.get_attr("new_axis_mask") and not op.get_attr("ellipsis_mask")
    shrinks = op.get_attr("shrink_axis_mask")
    first_column = whole_first and len(begin) == 2 and begin[1] == 0 and strides[0] == 1
    if plain and state.part == "indices" and first_column and shrinks == 2:
        return Ragged("ids", state.source)
    if plain and state.part == "shape" and begin == [0] and shrinks == 1:
        return BatchSize((Rows(0, 1),))
    return unproven(op, "it takes some entries of rows of different lengths")


@ragged_transfers("DenseBincount")
def lengths(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the number of entries of each example, counted by their ids."""
    ids, size, weights = inputs
    if not isinstance(ids, Ragged) or ids.part != "ids" or op.get_attr("binary_output"):
        return unproven(op, "it counts over the batch")
    if not _is_number_of_examples(op.inputs[1], size):
        return unproven(op, "it may not count all examples")
    if not isinstance(weights, Public) or op.inputs[2].shape.num_elements() != 0:
        return unproven(op, "its weights may differ from row to row")
    return Ragged("lengths", ids.source)


@ragged_transfers("Cumsum")
def ends(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the ends of each example's entries."""
    state, axis = inputs[0], tf.get_static_value(op.inputs[1])
    plain = not op.get_attr("exclusive") and not op.get_attr("reverse")
    if isinstance(state, Ragged) and state.part == "lengths" and plain and axis == 0:
        return Ragged("ends", state.source)
    return unproven(op, "it adds up over the batch")


@ragged_transfers("ConcatV2")
def splits(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the beginnings of each example's entries, and the last one's end."""
    if len(inputs) == 3 and isinstance(inputs[1], Ragged) and inputs[1].part == "ends":
        first, axis = tf.get_static_value(op.inputs[0]), tf.get_static_value(op.inputs[2])
        if first is not None and list(first) == [0] and axis == 0:
            return Ragged("splits", inputs[1].source)
    return unproven(op, "it concatenates along the batch")


@ragged_transfers("RaggedTensorToTensor")
def to_tensor(op: tf.Operation, inputs: list[State]) -> State:
    """Handles rows that are cut and filled up to a public length."""
    shape, values, default, *partition = inputs
    lengths = tf.get_static_value(op.inputs[0])
    if not isinstance(shape, Public) or lengths is None:
        return unproven(op, "the length of its rows is not static")
    if lengths.ndim == 0 or lengths[-1] < 0:
        return unproven(
            op,
            "its rows are as long as the longest of the batch: state a length "
            "(`output_sequence_length` of TextVectorization, `shape` of `to_tensor`)",
        )
    if len(lengths) != 2 or lengths[0] != -1:
        return unproven(op, "it may cut, or fill up, the batch")
    if not isinstance(values, Ragged) or values.part != "values":
        return unproven(op, "its values are not proven to hold the examples")
    if not isinstance(default, Public) or op.inputs[2].shape.rank != 0:
        return unproven(op, "what it fills rows up with may differ from row to row")
    kinds = [kind.decode() for kind in op.get_attr("row_partition_types")]
    if kinds == ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]:
        known = _is_number_of_examples(op.inputs[3], partition[0])
        known = known and partition[1] == Ragged("ids", values.source)
    else:
        known = kinds == ["ROW_SPLITS"] and partition[0] == Ragged("splits", values.source)
    return Rows() if known else unproven(op, "where its rows begin is not proven")


def _is_number_of_examples(tensor: tf.Tensor, state: State) -> bool:
    return tensor.shape.rank == 0 and shape_values.known(tensor, state) == (Rows(0, 1),)
