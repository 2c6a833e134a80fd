"""Calls of recurrent layers' functions."""

import tensorflow as tf

from tfdp.clipping.recurrent import RecurrentCall
from tfdp.clipping.rows import Transfer, unproven
from tfdp.clipping.states import Filled, Rows, State, Unproven
from tfdp.clipping.transfers.common import constant_along


def recurrent_transfer(call: RecurrentCall) -> Transfer:
    """The transfer function of a call of a recurrent layer's function."""
    weights = (call.kernel, call.recurrent_kernel, call.bias)
    sequence = Rows(1 if call.time_major else 0)

    def transfer(op: tf.Operation, inputs: list[State]) -> State | list[State]:
        for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
            if state == (sequence if index in (0, call.mask) else Rows()):
                continue
            constant = isinstance(state, Filled) or constant_along(tensor, 0)
            if isinstance(state, Rows) or not (index in weights or constant):
                return unproven(op, f"{tensor.name} does not hold the examples as expected")
        other = Unproven(f"'{op.name}' ({op.type}): one of its other outputs")
        known: list[State] = [Rows(), sequence, *[Rows() for _ in call.states]]
        return [*known, *[other] * (len(op.outputs) - len(known))]

    return transfer
