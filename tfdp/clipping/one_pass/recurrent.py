"""Keras's LSTM and GRU as one operation whose weight gradients come apart into examples.

In a traced graph such a layer is a single call of a function with a loop inside. TensorFlow's
gradient of that call adds up the examples before anyone sees them. The one here keeps, for every
weight, two sequences whose outer products add up to each example's gradient.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.clipping.one_pass import marked_calls
from tfdp.clipping.one_pass.marked_calls import is_zero
from tfdp.clipping.row_analysis.analysis import unproven
from tfdp.clipping.row_analysis.states import Public, Rows, State, Unproven
from tfdp.clipping.row_analysis.transfer_functions.common import constant_along

_Use = tuple[tf.Tensor | None, tf.Tensor]
_Tensors = list[Any]  # Tensors, or None.
# Pre-activations that exactly close a gate, and that exactly open it.
_SHUT, _OPEN = -1e4, 1e4
# Largest difference between two computations of the same values, by type.
_TOLERANCE = {tf.float64: 1e-7, tf.float32: 1e-4, tf.float16: 1e-2, tf.bfloat16: 6e-2}
# Masks of five steps: all count, right-padded, left-padded, holes, none.
_MASKS = np.array([[*row] for row in ("11111", "11000", "00111", "10110", "01001", "00000")]) == "1"
# Recognized calls, by function. Names would not do: other functions may have them later.
_recognised: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class RecurrentCall:
    """Call of Keras's LSTM or GRU, and its gradient.

    Formal guarantee: row `i` of every gradient and of every pair of `backward` is a function of
    row `i` of the inputs and of the output gradients, and of the weights, alone.

    Attributes:
      kind: "lstm", or "gru" (with `reset_after=True`, the only one that Keras makes a call of).
      states: Indices of the initial states among the call's inputs.
      kernel, recurrent_kernel, bias: Indices of the weights.
      mask: Index of the mask that says which steps count; None: all do.
      time_major: Whether `x`, the mask and `outputs` are `[time, batch, ...]`.
      go_backwards: Whether steps are taken from the last to the first; `outputs` are in the order
        in which they are taken.
      return_sequences: Whether `outputs` holds all steps, or only the last one taken.
      zero_output_for_mask: Whether the output of a masked step is zero, or that of the step
        before. The state is carried over either way.
      x: Index of the sequences that the layer reads.
    """

    kind: str
    states: tuple[int, ...]
    kernel: int
    recurrent_kernel: int
    bias: int
    mask: int | None = None
    time_major: bool = False
    go_backwards: bool = False
    return_sequences: bool = False
    zero_output_for_mask: bool = False
    x: int = 0

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the layer; TensorFlow adds others for its own gradient."""
        return len(self.states) + 3

    def transfer(self, op: tf.Operation, inputs: list[State]) -> State | list[State]:
        """Returns where the outputs of the call hold the examples: its transfer function."""
        weights = (self.kernel, self.recurrent_kernel, self.bias)
        sequence = Rows(1 if self.time_major else 0)
        length = op.inputs[self.x].shape[sequence.axis]
        for index, (tensor, state) in enumerate(zip(op.inputs, inputs, strict=True)):
            expected = sequence if index in (self.x, self.mask) else Rows()
            if isinstance(state, Public) and index in weights:
                continue
            if isinstance(state, Public) and constant_along(tensor, expected.axis, length):
                continue
            if index in weights or state != expected:
                return unproven(op, f"{tensor.name} does not hold the examples as expected")
        other = Unproven(f"'{op.name}' ({op.type}): one of its other outputs")
        known: list[State] = [Rows(), sequence, *[Rows() for _ in self.states]]
        return [*known, *[other] * (len(op.outputs) - len(known))]

    def backward(
        self, inputs: Sequence[tf.Tensor], output_gradients: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor | None], dict[int, _Use]]:
        """Returns the gradient of the call, that of the weights example by example.

        Args:
          inputs: The call's inputs.
          output_gradients: For each output of the call its gradient, or None for zero.

        Returns:
          For each input its gradient, None for weights and mask. And for the index of each weight
          a pair `(a, g)`, `[batch, time, p]` and `[batch, time, d]`, float32 or wider: an example's
          gradient of the weight is the sum over time of the outer products of `a` and `g`. For the
          bias `a` is None, and the gradient is the sum of `g`: of `[batch, 1, 6 * units]` for a
          GRU, the values of its two biases `[2, 3 * units]` in a row.

        Raises:
          ValueError: A gradient arrives at an output that is not the layer's.
        """
        unknown = [g for g in output_gradients[self.num_outputs :] if not is_zero(g)]
        if unknown:
            raise ValueError(
                f"Argument `output_gradients` may be nonzero for the {self.num_outputs} outputs "
                f"of the layer only. Received gradients of others: {unknown}."
            )
        replay = self._replay(inputs)
        sequence, final = self._state_gradients(replay, output_gradients)
        cell, x, reads = replay.cell, replay.x, [sequence, *replay.saved, replay.idle]
        states, taken = _walk(cell.step_back, reads, final, cell.taken, x, not self.go_backwards)
        outer, inner, bias = cell.pre_activations([_swap(t.stack()) for t in taken])
        x_gradient = tf.tensordot(outer, tf.cast(tf.transpose(inputs[self.kernel]), outer.dtype), 1)
        uses: dict[int, _Use] = {
            self.kernel: (_swap(x), outer),
            self.recurrent_kernel: (_swap(replay.hidden), inner),
            self.bias: (None, bias),
        }
        gradients: _Tensors = [_swap(x_gradient) if self.time_major else x_gradient, *states]
        for i, t in enumerate(inputs[: self.kernel]):
            gradients[i] = tf.ensure_shape(tf.cast(gradients[i], t.dtype), t.shape)
        return gradients + [None] * (len(inputs) - self.kernel), uses

    def forward(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the layer's outputs but the runtime, as `backward` takes them to be."""
        replay = self._replay(inputs)
        last, before = replay.final[0][tf.newaxis], replay.hidden
        hidden = tf.concat([last, before[:-1]] if self.go_backwards else [before[1:], last], axis=0)
        if replay.keep is not None:
            hidden *= self._shown(replay.keep, hidden.dtype)
        hidden = hidden[::-1] if self.go_backwards else hidden
        outputs = hidden if self.return_sequences else hidden[-1:]
        outputs = [hidden[-1], outputs if self.time_major else _swap(outputs), *replay.final]
        return [tf.cast(output, inputs[0].dtype) for output in outputs]

    def _replay(self, inputs: Sequence[tf.Tensor]) -> "_Replay":
        """Takes the steps again, keeping what the way back needs."""
        dtype = inputs[0].dtype if inputs[0].dtype.size >= 4 else tf.float32
        x, *states, kernel, recurrent, bias = [tf.cast(t, dtype) for t in inputs[: self.bias + 1]]
        x = x if self.time_major else _swap(x)
        cell = (_Lstm if self.kind == "lstm" else _Gru)(recurrent, bias)
        projected = tf.tensordot(x, kernel, 1) + cell.input_bias
        keep = idle = None
        if self.mask is not None:
            keep = tf.cast(inputs[self.mask], tf.bool)
            keep = keep if self.time_major else tf.transpose(keep)
            units = recurrent.shape[0]
            still = tf.constant(np.repeat(cell.standstill, units), dtype)
            projected = tf.where(keep[..., tf.newaxis], projected, still)
            idle = tf.tile(1 - tf.cast(keep, dtype)[..., tf.newaxis], [1, 1, units])
        reads = [projected, idle]
        final, stored = _walk(cell.step, reads, states, cell.saved, x, self.go_backwards)
        return _Replay(cell, x, keep, idle, stored[0].stack(), stored[1:], final)

    def _shown(self, keep: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns whether a step's output is its state, 1, or zero still, 0: `[time, batch, 1]`."""
        shown = tf.cast(keep, tf.int32)
        if not self.zero_output_for_mask:
            shown = tf.minimum(tf.cumsum(shown, reverse=self.go_backwards), 1)
        return tf.cast(shown, dtype)[..., tf.newaxis]

    def _state_gradients(
        self, replay: "_Replay", output_gradients: Sequence[tf.Tensor | None]
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """Returns what the outputs pass to each hidden state's gradient, and to the last's."""
        dtype = replay.x.dtype
        last, outputs, *states = [
            None if is_zero(gradient) else tf.cast(gradient, dtype)
            for gradient in output_gradients[: self.num_outputs - 1]
        ]
        final = [
            tf.zeros_like(state) if gradient is None else tf.ensure_shape(gradient, state.shape)
            for gradient, state in zip(states, replay.final, strict=True)
        ]
        if outputs is not None:
            outputs = outputs if self.time_major else _swap(outputs)
            outputs = outputs[::-1] if self.go_backwards else outputs
            if not self.return_sequences:
                last, outputs = outputs[0] if last is None else last + outputs[0], None
        if replay.keep is not None:
            shown = self._shown(replay.keep, dtype)
            outputs = outputs if outputs is None else outputs * shown
            last = last if last is None else last * shown[0 if self.go_backwards else -1]
        final[0] += 0 if last is None else last
        return outputs, final


def recognize(op: tf.Operation) -> RecurrentCall | None:
    """Finds out whether an operation is a call of Keras's LSTM or GRU, and with which options.

    Keras marks the functions it makes for them; that only says which calls are worth a closer
    look. The options are those with which `RecurrentCall.forward` returns what the call returns,
    on random inputs with masks of every kind.

    Args:
      op: An operation of a graph.

    Returns:
      What it computes, or None if that is anything else.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        function = marked_calls.function_of(op)
        if function is None:
            return None
        marks = function.definition.attr
        if function not in _recognised:
            likely = (marks["time_major"].b, marks["go_backwards"].b)
            calls = sorted(_candidates(op), key=lambda c: (c.time_major, c.go_backwards) != likely)
            _recognised[function] = next((c for c in calls if _agrees(c, op, function)), None)
        return _recognised.get(function)


def _candidates(op: tf.Operation) -> Iterator[RecurrentCall]:
    """Returns the calls that an operation may be, by the types and shapes of its inputs."""
    ranks = tuple(t.shape.rank for t in op.inputs if op.inputs[0].dtype in _TOLERANCE)
    for kind, gates, weights in (("lstm", 4, (3, 2, 2, 2, 2, 1)), ("gru", 3, (3, 2, 2, 2, 2))):
        count = len(weights)
        if ranks not in (weights, (*weights, 2)) or len(op.outputs) < count - 1:
            continue
        _, hidden, *_, kernel, recurrent_kernel, _ = (t.shape for t in op.inputs[:count])
        units = hidden[1]
        if units and kernel[0] and kernel[1] == gates * units and recurrent_kernel[0] == units:
            mask = count if ranks != weights else None
            for flags in itertools.product((False, True), repeat=3 if mask is None else 4):
                yield RecurrentCall(
                    kind, tuple(range(1, count - 3)), count - 3, count - 2, count - 1, mask, *flags
                )


def _agrees(call: RecurrentCall, op: tf.Operation, function: Any) -> bool:
    """Returns whether `call` computes what `function`, the one that `op` calls, computes."""
    tolerance = _TOLERANCE[op.inputs[0].dtype]
    length = max(size or 0 for size in op.inputs[0].shape[:2])
    forward = tf.function(call.forward, autograph=False) if length > 99 else call.forward
    for inputs in _samples(call, op):
        try:
            actual = function.call_flat(*inputs)[: call.num_outputs - 1]
        except tf.errors.InvalidArgumentError:
            return False  # It takes no inputs of these shapes.
        for ours, theirs in zip(forward(inputs), actual, strict=True):
            ours, theirs = np.float64(ours), np.float64(theirs)
            if ours.shape != theirs.shape or not np.allclose(ours, theirs, tolerance, tolerance):
                return False
    return True


def _samples(call: RecurrentCall, op: tf.Operation) -> Iterator[list[tf.Tensor]]:
    """Returns random inputs, of small and large values, with every mask in some row."""
    random = np.random.default_rng(0)
    x, hidden, dtype = op.inputs[0].shape, op.inputs[1].shape, op.inputs[0].dtype
    kinds, steps = _MASKS.shape
    batch = hidden[0] or x[1 if call.time_major else 0] or kinds
    time = x[0 if call.time_major else 1] or steps
    weights = [op.inputs[i].shape.as_list() for i in range(call.kernel, call.bias + 1)]
    lead = [time, batch] if call.time_major else [batch, time]
    shapes = [[*lead, weights[0][0]], *[[batch, weights[1][0]] for _ in call.states], *weights]
    for trial in range(max(2, -(-kinds // batch))):
        # Recurrent weights are always small: rounding errors must not grow with time.
        scales = [3.0 if trial % 2 else 1.0] * len(shapes)
        scales[call.kernel] /= np.sqrt(weights[0][0])
        scales[call.recurrent_kernel] = 1 / np.sqrt(weights[1][0])
        inputs = [
            tf.cast(scale * random.normal(size=shape), dtype)
            for scale, shape in zip(scales, shapes, strict=True)
        ]
        if call.mask is not None:
            rows = np.arange(trial * batch, (trial + 1) * batch) % kinds
            mask = _MASKS[np.ix_(rows, np.arange(time) % steps)]
            inputs.append(tf.cast(mask.T if call.time_major else mask, op.inputs[call.mask].dtype))
        yield inputs


class _Lstm:
    """The LSTM's step, and the way back through it.

    With gates `i, f, g, o`: `c = f c' + i g`, `h = o tanh(c)`. Pre-activations' gradients are those
    of `c` and `h` times factors, which are made on the way there, where all they need is at hand.
    """

    # In place of the projected input: lets a step keep `c`, put out zero, and have no gradient.
    standstill = (_SHUT, _OPEN, 0.0, _SHUT)
    # Widths, in units, of what the steps there and back leave behind.
    saved, taken = (1, 4, 1, 1), (4,)

    def __init__(self, recurrent_kernel: tf.Tensor, bias: tf.Tensor):
        self.input_bias = bias
        self._recurrent_kernel = recurrent_kernel

    def step(self, reads: _Tensors, states: _Tensors) -> tuple[_Tensors, _Tensors]:
        projected, idle = reads
        hidden, carry = states
        z = tf.split(projected + tf.matmul(hidden, self._recurrent_kernel), 4, axis=1)
        i, f, g, o = tf.sigmoid(z[0]), tf.sigmoid(z[1]), tf.tanh(z[2]), tf.sigmoid(z[3])
        kept, added = f * carry, i * g
        new_carry = kept + added
        squashed = tf.tanh(new_carry)
        output = o * squashed
        slopes = [added - added * i, kept - kept * f, i - added * g, output - output * o]
        new_hidden = output if idle is None else output + hidden * idle
        saved = [hidden, tf.concat(slopes, axis=1), o - output * squashed, f]
        return [new_hidden, new_carry], saved

    def step_back(self, reads: _Tensors, states: _Tensors) -> tuple[_Tensors, _Tensors]:
        direct, slopes, output_slope, f, idle = reads
        hidden = states[0] if direct is None else states[0] + direct
        carry = states[1] + hidden * output_slope
        z = tf.concat([carry, carry, carry, hidden], axis=1) * slopes
        old_hidden = tf.matmul(z, self._recurrent_kernel, transpose_b=True)
        if idle is not None:
            old_hidden += hidden * idle
        return [old_hidden, carry * f], [z]

    def pre_activations(self, taken: _Tensors) -> _Tensors:
        """Returns the gradients by pre-activation: of kernel, recurrent kernel and bias."""
        return taken * 3


class _Gru:
    """The GRU's step, and the way back through it; see `_Lstm`.

    With gates `z, r`, and the candidate `k` of pre-activation `x + r u`: `h = z h' + (1 - z) k`.
    """

    standstill = (_OPEN, 0.0, 0.0)
    saved, taken = (1, 3, 1, 1), (3, 1)

    def __init__(self, recurrent_kernel: tf.Tensor, bias: tf.Tensor):
        self.input_bias, self._recurrent_bias = bias[0], bias[1]
        self._recurrent_kernel = recurrent_kernel
        self._sizes = [2 * recurrent_kernel.shape[0], recurrent_kernel.shape[0]]

    def step(self, reads: _Tensors, states: _Tensors) -> tuple[_Tensors, _Tensors]:
        (hidden,) = states
        inner = tf.nn.bias_add(tf.matmul(hidden, self._recurrent_kernel), self._recurrent_bias)
        inner_gates, inner_candidate = tf.split(inner, self._sizes, axis=1)
        gates, candidate = tf.split(reads[0], self._sizes, axis=1)
        z, r = tf.split(tf.sigmoid(gates + inner_gates), 2, axis=1)
        reset = r * inner_candidate
        candidate = tf.tanh(candidate + reset)
        share = 1 - z
        slope = share - share * candidate * candidate
        slopes = [(hidden - candidate) * (z * share), slope * (reset - reset * r), slope * r]
        saved = [hidden, tf.concat(slopes, axis=1), slope, z]
        return [z * hidden + share * candidate], saved

    def step_back(self, reads: _Tensors, states: _Tensors) -> tuple[_Tensors, _Tensors]:
        direct, slopes, slope, z, _ = reads
        hidden = states[0] if direct is None else states[0] + direct
        inner = tf.concat([hidden, hidden, hidden], axis=1) * slopes
        old_hidden = tf.matmul(inner, self._recurrent_kernel, transpose_b=True) + hidden * z
        return [old_hidden], [inner, hidden * slope]

    def pre_activations(self, taken: _Tensors) -> _Tensors:
        inner, candidate = taken
        outer = tf.concat([inner[..., : self._sizes[0]], candidate], axis=2)
        sums = [tf.reduce_sum(gradient, axis=1, keepdims=True) for gradient in (outer, inner)]
        return [outer, inner, tf.concat(sums, axis=2)]


@dataclasses.dataclass(frozen=True)
class _Replay:
    """A call's steps, as sequences `[time, batch, ...]` in the order of `x`.

    `keep` says which count, and `idle` which do not; `hidden` is the state before the step, `saved`
    what the way back reads; `final` holds the states after the last step.
    """

    cell: _Lstm | _Gru
    x: tf.Tensor
    keep: tf.Tensor | None
    idle: tf.Tensor | None
    hidden: tf.Tensor
    saved: list[tf.TensorArray]
    final: list[tf.Tensor]


def _walk(
    step: Callable[..., tuple[list[tf.Tensor], list[tf.Tensor]]],
    sequences: Sequence[Any],
    states: list[tf.Tensor],
    widths: Sequence[int],
    x: tf.Tensor,
    backwards: bool,
) -> tuple[list[tf.Tensor], list[tf.TensorArray]]:
    """Takes steps along sequences; returns the last states, and arrays of what steps leave."""
    length = x.shape[0] or tf.shape(x)[0]

    def array(s: tf.Tensor) -> tf.TensorArray:
        return tf.TensorArray(s.dtype, length, element_shape=s.shape[1:]).unstack(s)

    arrays = [array(s) if tf.is_tensor(s) else s for s in sequences]
    batch, units = states[0].shape
    shapes = [[batch, width * units] for width in widths]
    stored = [tf.TensorArray(x.dtype, length, element_shape=shape) for shape in shapes]

    def body(position: tf.Tensor, states: list, stored: list) -> tuple:
        new, values = step([a and a.read(position) for a in arrays], states)
        for old, tensor in zip(states, new, strict=True):
            tensor.set_shape(old.shape)
        stored = [array.write(position, v) for array, v in zip(stored, values, strict=True)]
        return position + (-1 if backwards else 1), new, stored

    _, states, stored = tf.while_loop(
        lambda position, *_: position >= 0 if backwards else position < length,
        body,
        [length - 1 if backwards else 0, states, stored],
        parallel_iterations=4,
    )
    return states, stored


def _swap(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, 2])
