"""Lookup tables and counts of categories: what vocabulary and encoding layers are made of."""

import numpy as np
import tensorflow as tf

from tfdp.clipping.loss_graph import lookup_tables
from tfdp.clipping.row_analysis.analysis import mixes, ragged_transfers, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Ragged, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import of_rows


@transfers("LookupTableFindV2")
@ragged_transfers("LookupTableFindV2")
def look_up(op: tf.Operation, inputs: list[State]) -> State:
    """Handles values of a table that nothing can be written into.

    Of other tables, nothing shows what examples may have stored in them, nor how many of the last
    axes of the keys are one key.
    """
    table, keys, default = inputs
    if not isinstance(table, Public) or not lookup_tables.is_static(op.inputs[0]):
        return unproven(op, "its table may be written into: use `tf.lookup.StaticHashTable`")
    if not isinstance(default, Public) or op.inputs[2].shape.rank != 0:
        return unproven(op, "its default value may differ from row to row")
    if isinstance(keys, Rows) or (isinstance(keys, Ragged) and keys.part == "values"):
        return keys
    return unproven(op, "its keys do not hold the examples")


@of_rows("DenseBincount")
def count(op: tf.Operation, rows: Rows, inputs: list[State]) -> State:
    """Returns numbers of entries of each value in each row of a matrix; without weights."""
    if op.inputs[0].shape.rank != 2 or rows.axis != 0:
        raise mixes(op, "it counts over the batch")
    if op.inputs[2].shape.num_elements() != 0:
        return unproven(op, "its weights may differ from row to row")
    return rows


@ragged_transfers("RaggedBincount")
def count_ragged(op: tf.Operation, inputs: list[State]) -> State:
    """Handles counts of each value in each row of a ragged matrix, without weights."""
    splits, values, size, weights = inputs
    if not isinstance(splits, Ragged) or splits.part != "splits":
        return unproven(op, "where its rows begin is not proven")
    if values != Ragged("values", splits.source) or not isinstance(size, Public):
        return unproven(op, "its values, or their number, are not proven")
    if not isinstance(weights, Public) or op.inputs[3].shape.num_elements() != 0:
        return unproven(op, "its weights may differ from row to row")
    return Rows()


@transfers("SparseCross")
def cross(op: tf.Operation, inputs: list[State]) -> State | list[State]:
    """Handles hashes of combinations of columns that have one entry in each row."""
    columns = list(op.inputs)
    if op.get_attr("N") or any(state != Rows() for state in inputs):  # N columns are sparse.
        return unproven(op, "its columns are not proven to hold the examples")
    if any(tensor.shape.rank != 2 or tensor.shape[1] != 1 for tensor in columns):
        return unproven(op, "its columns do not hold one entry for each example")
    return [Ragged(part, op.name) for part in ("indices", "values", "shape")]


@ragged_transfers("SparseToDense")
def to_dense(op: tf.Operation, inputs: list[State]) -> State:
    """Handles entries of `cross`, one of each example, as a column."""
    indices, shape, values, default = inputs
    if not isinstance(default, Public) or not isinstance(indices, Ragged):
        return unproven(op, "what it fills rows up with depends on the batch")
    parts = [Ragged(part, indices.source) for part in ("indices", "shape", "values")]
    made_by = op.graph.get_operation_by_name(indices.source)
    if [indices, shape, values] != parts or made_by.type != "SparseCross":
        return unproven(op, "its rows are as long as the longest of the batch")
    op.outputs[0].set_shape([None, 1])  # Which TensorFlow does not infer.
    return Rows()


@ragged_transfers("Reshape")
def to_vector(op: tf.Operation, inputs: list[State]) -> State:
    """Handles ids, or entries, as a vector."""
    entries, shape = inputs[0], tf.get_static_value(op.inputs[1])
    if isinstance(entries, Ragged) and shape is not None:
        sizes = list(np.ravel(shape))
        if entries.part in ("ids", "values") and sizes == [-1] and op.inputs[0].shape.rank == 1:
            return entries
    return unproven(op, "where its result holds the examples is not known")
