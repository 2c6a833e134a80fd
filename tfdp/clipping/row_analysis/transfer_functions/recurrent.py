"""Calls of recurrent layers' functions."""

import tensorflow as tf

from tfdp.clipping.loss_graph.recurrent import RecurrentCall
from tfdp.clipping.row_analysis.analysis import Transfer, unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State, Unproven
from tfdp.clipping.row_analysis.transfer_functions.common import constant_along


def recurrent_transfer(call: RecurrentCall) -> Transfer:
    """Returns the transfer function of a call of a recurrent layer's function."""
    weights = (call.kernel, call.recurrent_kernel, call.bias)
    sequence = Rows(1 if call.time_major else 0)

    def transfer(op: tf.Operation, inputs: list[State]) -> State | list[State]:
        length = op.inputs[call.x].shape[sequence.axis]
        for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
            expected = sequence if index in (call.x, call.mask) else Rows()
            if isinstance(state, Public) and index in weights:
                continue
            if isinstance(state, Public) and constant_along(tensor, expected.axis, length):
                continue
            if index in weights or state != expected:
                return unproven(op, f"{tensor.name} does not hold the examples as expected")
        other = Unproven(f"'{op.name}' ({op.type}): one of its other outputs")
        known: list[State] = [Rows(), sequence, *[Rows() for _ in call.states]]
        return [*known, *[other] * (len(op.outputs) - len(known))]

    return transfer
