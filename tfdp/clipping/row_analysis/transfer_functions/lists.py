"""Lists of tensors, in which loops read and write their steps (`tf.TensorArray`)."""

import tensorflow as tf

from tfdp.clipping.row_analysis.analysis import list_transfers, transfers, unproven
from tfdp.clipping.row_analysis.states import BatchSize, Public, RowList, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import moved


@list_transfers("TensorListReserve")
def reserve(op: tf.Operation, inputs: list[State]) -> State:
    """Handles a list of entries that are zero until they are written."""
    if not isinstance(inputs[0], Public | BatchSize) or not isinstance(inputs[1], Public):
        return unproven(op, "its length may depend on the batch")
    return RowList()


@transfers("TensorListFromTensor")
def from_tensor(op: tf.Operation, inputs: list[State]) -> State:
    """Handles slices along the first axis, which must not be that of the examples."""
    rows = inputs[0]
    if not isinstance(rows, Rows) or rows.axis == 0:
        return unproven(op, "it takes the batch apart")
    return RowList(moved(rows, -1))


@list_transfers("TensorListGetItem")
def get_item(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the entry at a public place."""
    state = inputs[0]
    if not isinstance(state, RowList) or not isinstance(inputs[1], Public):
        return unproven(op, "which entry it reads may depend on the batch")
    return unproven(op, "the entry may not be written") if state.element is None else state.element


@list_transfers("TensorListSetItem")
def set_item(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the list with another entry at a public place."""
    state, place, item = inputs
    if not isinstance(state, RowList) or not isinstance(place, Public):
        return unproven(op, "which entry it writes may depend on the batch")
    if not isinstance(item, Rows | Public):
        return unproven(op, "what it writes is not proven to hold the examples")
    item = Public() if isinstance(item, Public) else item
    if state.element not in (None, item):
        return unproven(op, "its entries hold the examples differently")
    return RowList(item)


@list_transfers("TensorListStack")
def stack(op: tf.Operation, inputs: list[State]) -> State:
    """Handles all entries along a new first axis."""
    state = inputs[0]
    if not isinstance(state, RowList) or state.element is None:
        return unproven(op, "its entries are not proven to hold the examples")
    return moved(state.element, 1) if isinstance(state.element, Rows) else Public()


@list_transfers("TensorListLength")
def length(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the number of entries."""
    return Public()


@list_transfers("Identity", "ZerosLike")
def identity(op: tf.Operation, inputs: list[State]) -> State:
    """Handles the same list."""
    return inputs[0]
