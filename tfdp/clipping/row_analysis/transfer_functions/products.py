"""Matrix products and einsums."""

import tensorflow as tf

from tfdp.clipping.row_analysis.analysis import mixes, transfers, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State
from tfdp.clipping.row_analysis.transfer_functions.common import aligned


def transposes(op: tf.Operation) -> tuple[bool, bool]:
    """Returns whether a matrix product transposes its sides."""
    plain = op.type in ("MatMul", "SparseMatMul")
    names = ("transpose_a", "transpose_b") if plain else ("adj_x", "adj_y")
    return op.get_attr(names[0]), op.get_attr(names[1])


@transfers("MatMul", "SparseMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(op: tf.Operation, inputs: list[State]) -> State:
    """Handles matrix products.

    The examples may be rows of the left side, columns of the right, or on a batch axis.
    """
    transposed = transposes(op)
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return unproven(op, "the rank of an input is unknown")
    rank = max(tensor.shape.rank for tensor in op.inputs)
    found: list[Rows] = []
    for side, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
        if isinstance(state, Rows):
            axis = state.axis + rank - tensor.shape.rank
            if axis >= rank - 2:  # An axis of the matrices themselves.
                axis = (rank - 2) + (axis - (rank - 2) ^ transposed[side])
                if axis != (rank - 2, rank - 1)[side]:
                    raise mixes(op, "it sums over the batch")
            found.append(Rows(axis, state.each, state.interleaved))
        elif not isinstance(state, Public):
            return unproven(op, f"{tensor.name} depends on the size of the batch")
    rows = found[0]
    if len(found) == 2 and all(r.axis >= rank - 2 for r in found):
        raise mixes(op, "it compares all examples with all")
    if any(other != rows for other in found):
        return unproven(op, "its inputs hold the examples differently")
    for tensor, state in zip(op.inputs, inputs, strict=True):
        own = rows.axis - (rank - tensor.shape.rank)
        per_row = rows.axis < rank - 2 and own >= 0 and tensor.shape[own] != 1
        if isinstance(state, Public) and per_row:
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return rows


@transfers("MatrixSolve")
def solve(op: tf.Operation, inputs: list[State]) -> State:
    """Handles systems of linear equations, one for each example or several."""
    rank = op.inputs[1].shape.rank
    if rank is None or op.inputs[0].shape.rank != rank:
        return unproven(op, "the rank of an input is unknown")
    state = aligned(op, inputs, rank)
    if isinstance(state, Rows) and state.axis >= rank - 2:
        raise mixes(op, "the examples are the equations of one system")
    return state


@transfers("SparseTensorDenseMatMul")
def sparse_matmul(op: tf.Operation, inputs: list[State]) -> State:
    """Handles a public sparse matrix times one that holds the examples as columns."""
    rows = inputs[3]
    if not isinstance(rows, Rows) or not all(isinstance(state, Public) for state in inputs[:3]):
        return unproven(op, "its matrices are not proven to be public, and to hold examples")
    if rows.axis == int(op.get_attr("adjoint_b")):
        raise mixes(op, "it sums over the batch")
    return Rows(1, rows.each, rows.interleaved)


@transfers("Einsum")
def einsum(op: tf.Operation, inputs: list[State]) -> State:
    """Handles products in which the examples have a label of their own."""
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return unproven(op, "the rank of an input is unknown")
    equation = einsum_labels(op)
    if equation is None:
        return unproven(op, "its equation repeats a label")
    terms, result = equation
    found: list[tuple[str, Rows]] = []
    for labels, tensor, state in zip(terms, op.inputs, inputs, strict=True):
        if isinstance(state, Rows):
            found.append((labels[state.axis], state))
        elif not isinstance(state, Public):
            return unproven(op, f"{tensor.name} depends on the size of the batch")
    label, rows = found[0]
    for other, state in found:
        if other != label:
            raise mixes(op, "it combines all examples with all")
        if (state.each, state.interleaved) != (rows.each, rows.interleaved):
            return unproven(op, "its inputs hold the examples differently")
    if label not in result:
        raise mixes(op, "it sums over the batch")
    for labels, tensor, state in zip(terms, op.inputs, inputs, strict=True):
        if label in labels and isinstance(state, Public):
            return unproven(op, f"the public {tensor.name} may differ from row to row")
    return Rows(result.index(label), rows.each, rows.interleaved)


def einsum_labels(op: tf.Operation) -> tuple[list[str], str] | None:
    """Returns the labels of inputs and result, ellipses spelled out; None if one repeats."""
    left, result = op.get_attr("equation").decode().replace(" ", "").split("->")
    terms = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in left + result]
    counts = [
        tensor.shape.rank - len(term.replace("...", "")) if "..." in term else 0
        for term, tensor in zip(terms, op.inputs, strict=True)
    ]
    most = max(counts)
    terms = [
        term.replace("...", "".join(free[most - count : most]))
        for term, count in zip(terms, counts, strict=True)
    ]
    result = result.replace("...", "".join(free[:most]))
    repeated = any(len(set(labels)) < len(labels) for labels in [*terms, result])
    return None if repeated else (terms, result)
