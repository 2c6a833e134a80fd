"""Keras's LSTM and GRU as one operation whose weight gradients come apart into examples.

In a traced graph such a layer is a single call of a function with a loop inside. TensorFlow's
gradient of that call adds up the examples before anyone sees them. The one here keeps, for every
weight, two sequences whose outer products add up to each example's gradient.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

Use = tuple[tf.Tensor | None, tf.Tensor]
_Tensors = list[tf.Tensor]

_CALL_TYPES = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# A pre-activation that closes a gate, or opens it, in any float type.
_SHUT, _OPEN = -1e4, 1e4
# How far two computations of the same values lie apart, by type.
_TOLERANCE = {tf.float64: 1e-7, tf.float32: 1e-4, tf.float16: 1e-2, tf.bfloat16: 6e-2}
# Which of five steps count: all, right-padded, left-padded, holes (twice), none.
_MASKS = ("11111", "11000", "00111", "10110", "01001", "00000")
_recognised: dict[tuple[str, str], "RecurrentCall | None"] = {}


@dataclasses.dataclass(frozen=True)
class RecurrentCall:
    """What a call of Keras's LSTM or GRU computes, and its gradient.

    Formal guarantee: row `i` of every gradient and of every pair of `backward` is a function of
    row `i` of the inputs and of the output gradients, and of the weights, alone.

    Attributes:
      kind: "lstm", or "gru" (with `reset_after=True`, the only one that Keras makes a call of).
      go_backwards: Whether steps are taken from the last to the first; `outputs` are in the order
        in which they are taken.
      time_major: Whether `x`, the mask and `outputs` are `[time, batch, ...]`.
      return_sequences: Whether `outputs` holds all steps, or only the last one taken.
      zero_output_for_mask: Whether the output of a masked step is zero, or that of the step
        before. The state is carried over either way.
      mask: Index of the call's input that says which steps count, or None.
      lengths: Index of the call's input that holds the rows' lengths, or None.
    """

    kind: str
    go_backwards: bool = False
    time_major: bool = False
    return_sequences: bool = False
    zero_output_for_mask: bool = False
    mask: int | None = None
    lengths: int | None = None

    @property
    def states(self) -> tuple[int, ...]:
        """Indices of the initial states among the call's inputs (`x` is the first)."""
        return (1, 2) if self.kind == "lstm" else (1,)

    @property
    def kernel(self) -> int:
        """Index of the kernel among the call's inputs."""
        return len(self.states) + 1

    @property
    def recurrent_kernel(self) -> int:
        """Index of the recurrent kernel among the call's inputs."""
        return self.kernel + 1

    @property
    def bias(self) -> int:
        """Index of the bias among the call's inputs."""
        return self.kernel + 2

    @property
    def num_outputs(self) -> int:
        """How many outputs are the layer's: the last output, outputs, states and the runtime.

        Others, if any, are what TensorFlow's own gradient reads.
        """
        return len(self.states) + 3

    def backward(
        self, inputs: Sequence[tf.Tensor], output_gradients: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor | None], dict[int, Use]]:
        """The gradient of the call, weights example by example.

        Args:
          inputs: The call's inputs.
          output_gradients: For each output of the call its gradient, or None for zero.

        Returns:
          For each input its gradient: None for weights, mask and lengths. And for the index of
          each weight a pair `(a, g)`, `[batch, time, p]` and `[batch, time, d]`, float32 or wider:
          an example's gradient of the weight is the sum over time of the outer products of
          `a` and `g`, in the shape of the weight. For the bias `a` is None, and the sum is of `g`
          alone: of `[batch, 1, 6 * units]` for a GRU, whose two biases have gradients of their own.

        Raises:
          ValueError: A gradient arrives at an output that is not the layer's.
        """
        for gradient in output_gradients[self.num_outputs :]:
            if not _is_zero(gradient):
                raise ValueError(
                    f"Argument `output_gradients` may be nonzero for the {self.num_outputs} "
                    f"outputs of the layer only. Received the gradient {gradient} of another."
                )
        replay = self._replay(inputs)
        sequence, final = self._state_gradients(replay, output_gradients)
        states, taken = _walk(
            lambda reads, states: replay.cell.step_back(reads[1:], reads[0], states),
            [sequence, *replay.saved, replay.idle],
            final,
            replay.cell.gradient_widths,
            tf.shape(replay.x)[0],
            backwards=not self.go_backwards,
        )
        into_kernel, into_recurrent, into_bias = replay.cell.pre_activations(
            [_swap(_stack(gradient, replay.x)) for gradient in taken]
        )
        x_gradient = _project(into_kernel, tf.transpose(replay.kernel))
        gradients: list[tf.Tensor | None] = [None] * len(inputs)
        gradients[0] = _swap(x_gradient) if self.time_major else x_gradient
        for index, gradient in zip(self.states, states, strict=True):
            gradients[index] = gradient
        return [
            None if g is None else tf.ensure_shape(tf.cast(g, t.dtype), t.shape)
            for g, t in zip(gradients, inputs, strict=True)
        ], {
            self.kernel: (_swap(replay.x), into_kernel),
            self.recurrent_kernel: (_swap(replay.hidden), into_recurrent),
            self.bias: (None, into_bias),
        }

    def forward(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The layer's outputs but the runtime, computed as `backward` takes them to be."""
        replay = self._replay(inputs)
        last = replay.final[0][tf.newaxis]
        if self.go_backwards:
            hidden = tf.concat([last, replay.hidden[:-1]], axis=0)[::-1]
        else:
            hidden = tf.concat([replay.hidden[1:], last], axis=0)
        if replay.keep is not None:
            shown = self._shown(replay.keep)
            shown = shown[::-1] if self.go_backwards else shown
            hidden *= tf.cast(shown, hidden.dtype)[..., tf.newaxis]
        outputs = hidden if self.return_sequences else hidden[-1:]
        outputs = [hidden[-1], outputs if self.time_major else _swap(outputs), *replay.final]
        return [tf.cast(output, inputs[0].dtype) for output in outputs]

    def _replay(self, inputs: Sequence[tf.Tensor]) -> "_Replay":
        """Takes the steps again, keeping what the way back needs."""
        dtype = inputs[0].dtype
        dtype = tf.float32 if dtype.size < 4 else dtype
        x, *states = [tf.cast(inputs[i], dtype) for i in (0, *self.states)]
        kernel, recurrent_kernel, bias = [
            tf.cast(inputs[i], dtype) for i in (self.kernel, self.recurrent_kernel, self.bias)
        ]
        x = x if self.time_major else _swap(x)
        keep = self._keep(inputs, x)
        cell = (_Lstm if self.kind == "lstm" else _Gru)(recurrent_kernel, bias)
        projected = _project(x, kernel) + cell.input_bias
        wide = idle = None
        if keep is not None:
            projected = tf.where(keep[..., tf.newaxis], projected, cell.standstill)
            wide = tf.tile(keep[..., tf.newaxis], [1, 1, cell.units])
            idle = 1 - tf.cast(wide, dtype)
        final, (hidden, *saved) = _walk(
            lambda reads, states: cell.step(reads[0], reads[1], states),
            [projected, wide],
            states,
            (cell.units, *cell.saved_widths),
            tf.shape(x)[0],
            backwards=self.go_backwards,
        )
        return _Replay(cell, x, kernel, keep, idle, _stack(hidden, x), saved, final)

    def _keep(self, inputs: Sequence[tf.Tensor], x: tf.Tensor) -> tf.Tensor | None:
        """Which steps count: bool `[time, batch]`, or None for all."""
        if self.mask is not None:
            keep = tf.cast(inputs[self.mask], tf.bool)
            return keep if self.time_major else tf.transpose(keep)
        if self.lengths is not None:
            # Going backwards, Keras counts from the longest row: as long as `x`, where it pads.
            lengths = tf.cast(inputs[self.lengths], tf.int32)
            return tf.transpose(tf.sequence_mask(lengths, tf.shape(x)[0]))
        return None

    def _shown(self, keep: tf.Tensor) -> tf.Tensor:
        """Whether the output of a step is the state, 1, or nothing yet, 0: `[time, batch]`."""
        shown = tf.cast(keep, tf.int32)
        if not self.zero_output_for_mask:
            shown = tf.minimum(tf.cumsum(shown, reverse=self.go_backwards), 1)
        return tf.cast(shown, tf.float32)

    def _state_gradients(
        self, replay: "_Replay", output_gradients: Sequence[tf.Tensor | None]
    ) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """Gradients that reach the hidden state of each step, and the final states, directly."""
        dtype = replay.x.dtype
        last, outputs, *states = [
            None if _is_zero(gradient) else tf.cast(gradient, dtype)
            for gradient in output_gradients[: self.num_outputs - 1]
        ]
        if outputs is not None:
            outputs = outputs if self.time_major else _swap(outputs)
            if not self.return_sequences:
                last, outputs = _add(last, outputs[0]), None
            elif self.go_backwards:
                outputs = outputs[::-1]
        if replay.keep is not None:
            shown = tf.cast(self._shown(replay.keep), dtype)[..., tf.newaxis]
            outputs = None if outputs is None else outputs * shown
            last = None if last is None else last * shown[0 if self.go_backwards else -1]
        states[0] = _add(states[0], last)
        final = [
            tf.zeros_like(state) if gradient is None else gradient
            for gradient, state in zip(states, replay.final, strict=True)
        ]
        return outputs, final


def recognise(op: tf.Operation) -> RecurrentCall | None:
    """Finds out whether an operation is a call of Keras's LSTM or GRU, and with which options.

    Keras marks the functions it makes for them; this only says which calls are worth a closer
    look. Options are those with which `RecurrentCall.forward` returns what the call returns, on
    random inputs and masks of every kind.

    Args:
      op: An operation of a graph.

    Returns:
      What it computes, or None: it is something else, or its inputs are of other ranks or types.
    """
    if op.type not in _CALL_TYPES:
        return None
    name = op.get_attr("f").name
    with tf.init_scope():
        function = op.graph._get_function(name) if tf.executing_eagerly() else None
    if function is None:
        return None
    mark = function.definition.attr["api_implements"].s.decode()
    candidates = _candidates(op) if mark.startswith(("lstm_", "gru_")) else []
    if not candidates:
        return None
    key = (mark, name)
    if key not in _recognised:
        with tf.init_scope(), tf.device("CPU:0"):
            _recognised[key] = next((c for c in candidates if _agrees(c, op, function)), None)
    return _recognised[key]


def _candidates(op: tf.Operation) -> list[RecurrentCall]:
    """The calls that an operation may be, judging by the types and shapes of its inputs."""
    ranks = [t.shape.rank for t in op.inputs]
    kinds = {(3, 2, 2, 2, 2, 1): ("lstm", 4), (3, 2, 2, 2, 2): ("gru", 3)}
    for extra in ((), (2,), (1,)):
        for weights, (kind, gates) in kinds.items():
            if tuple(ranks) != (*weights, *extra):
                continue
            index = len(weights)
            call = RecurrentCall(
                kind,
                mask=index if extra == (2,) else None,
                lengths=index if extra == (1,) else None,
            )
            if _fits(call, gates, op):
                return _options(call)
    return []


def _fits(call: RecurrentCall, gates: int, op: tf.Operation) -> bool:
    floats = op.inputs[: call.bias + 1]
    units = op.inputs[call.recurrent_kernel].shape[0]
    return (
        units is not None
        and floats[0].dtype in _TOLERANCE
        and all(t.dtype == floats[0].dtype for t in floats)
        and floats[call.kernel].shape.is_fully_defined()
        and op.inputs[call.recurrent_kernel].shape == [units, gates * units]
        and floats[call.kernel].shape[1] == gates * units
        and len(op.outputs) >= call.num_outputs
    )


def _options(call: RecurrentCall) -> list[RecurrentCall]:
    masked = call.mask is not None or call.lengths is not None
    return [
        dataclasses.replace(
            call,
            go_backwards=backwards,
            time_major=time_major,
            return_sequences=sequences,
            zero_output_for_mask=zero,
        )
        for time_major, backwards, sequences, zero in itertools.product(
            (False, True), (False, True), (False, True), (False, True) if masked else (False,)
        )
    ]


def _agrees(call: RecurrentCall, op: tf.Operation, function: Callable) -> bool:
    """Whether `call` computes what `function`, the one that `op` calls, computes."""
    tolerance = _TOLERANCE[op.inputs[0].dtype]
    shown = call.num_outputs - 1  # All but the runtime.
    for inputs in _samples(call, op):
        try:
            actual = function.call_flat(*inputs)[:shown]
        except (tf.errors.InvalidArgumentError, ValueError):
            return False  # The loop takes no inputs of these shapes.
        for ours, theirs in zip(call.forward(inputs), actual, strict=True):
            if ours.shape != theirs.shape or not np.allclose(
                tf.cast(ours, tf.float64), tf.cast(theirs, tf.float64), tolerance, tolerance
            ):
                return False
    return True


def _samples(call: RecurrentCall, op: tf.Operation) -> Iterator[list[tf.Tensor]]:
    """Random inputs: small and large values, masks of every kind in every row."""
    random = np.random.default_rng(0)
    axis = 1 if call.time_major else 0
    x = op.inputs[0].shape
    batch = op.inputs[1].shape[0] or x[axis] or len(_MASKS)
    time = x[1 - axis] or len(_MASKS[0])
    shapes = [[*((time, batch) if axis else (batch, time)), op.inputs[call.kernel].shape[0]]]
    shapes += [[batch, op.inputs[call.recurrent_kernel].shape[0]] for _ in call.states]
    shapes += [op.inputs[i].shape.as_list() for i in range(call.kernel, call.bias + 1)]
    for trial in range(max(2, math.ceil(len(_MASKS) / batch))):
        # Recurrent kernels stay small: rounding errors must not grow with time.
        scales = [(3.0 if trial % 2 else 1.0)] * len(shapes)
        scales[call.kernel] /= math.sqrt(shapes[call.kernel][0])
        scales[call.recurrent_kernel] = 1 / math.sqrt(shapes[call.recurrent_kernel][0])
        inputs = [
            tf.cast(scale * random.normal(size=shape), op.inputs[0].dtype)
            for scale, shape in zip(scales, shapes, strict=True)
        ]
        rows = [_MASKS[(row + trial * batch) % len(_MASKS)] for row in range(batch)]
        mask = np.array([[row[step % len(row)] == "1" for step in range(time)] for row in rows])
        if call.mask is not None:
            inputs.append(tf.cast(mask.T if axis else mask, op.inputs[call.mask].dtype))
        if call.lengths is not None:
            # As Keras pads: the longest row fills the steps.
            lengths = np.maximum.reduce([mask.sum(1), np.arange(batch) == trial % batch]) 
            inputs.append(tf.cast(lengths, op.inputs[call.lengths].dtype))
        yield inputs


class _Lstm:
    """The LSTM's step, and the way back through it.

    With `i, f, g, o` the gates: `c = f c' + i g`, `h = o tanh(c)`. Gradients are linear in those of
    `h` and `c`; their factors are made on the way there, where all they need is at hand.

    Args:
      recurrent_kernel: `[units, 4 * units]`.
      bias: `[4 * units]`.
    """

    def __init__(self, recurrent_kernel: tf.Tensor, bias: tf.Tensor):
        units = recurrent_kernel.shape[0]
        self.units = units
        self.input_bias = bias
        # With these in place of the projected input, a step keeps the carry, and outputs zero.
        self.standstill = tf.constant(
            [_SHUT] * units + [_OPEN] * units + [0.0] * units + [_SHUT] * units, bias.dtype
        )
        self.saved_widths = (4 * units, units, units)
        self.gradient_widths = (4 * units,)
        self._recurrent_kernel = recurrent_kernel

    def step(self, reads: _Tensors, states: list[tf.Tensor]) -> tuple[_Tensors, _Tensors]:
        """New states; and the old hidden state with the factors of the way back."""
        projected, keep = reads
        hidden, carry = states
        z = tf.split(projected + tf.matmul(hidden, self._recurrent_kernel), 4, axis=1)
        i, f, g, o = tf.sigmoid(z[0]), tf.sigmoid(z[1]), tf.tanh(z[2]), tf.sigmoid(z[3])
        kept, added = f * carry, i * g
        new_carry = kept + added
        squashed = tf.tanh(new_carry)
        output = o * squashed
        slopes = [added - added * i, kept - kept * f, i - added * g, output - output * o]
        new_hidden = output if keep is None else tf.where(keep, output, hidden)
        saved = [hidden, tf.concat(slopes, axis=1), o - output * squashed, f]
        return [new_hidden, new_carry], saved

    def step_back(self, reads: _Tensors, states: list[tf.Tensor]) -> tuple[_Tensors, _Tensors]:
        """Gradients of the old states from those of the new; and of the pre-activations."""
        direct, slopes, output_slope, f, idle = reads
        hidden, carry = states
        hidden = _add(hidden, direct)
        carry += hidden * output_slope
        z = tf.concat([carry, carry, carry, hidden], axis=1) * slopes
        old_hidden = tf.matmul(z, self._recurrent_kernel, transpose_b=True)
        if idle is not None:
            old_hidden += hidden * idle
        return [old_hidden, carry * f], [z]

    def pre_activations(self, taken: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What to combine with the kernel's and the recurrent kernel's inputs, and the bias's."""
        return taken[0], taken[0], taken[0]


class _Gru:
    """The GRU's step, and the way back through it; see `_Lstm`.

    With `z, r` the gates and `u` the recurrent pre-activation of the candidate:
    `k = tanh(x + r u)`, `h = z h' + (1 - z) k`.

    Args:
      recurrent_kernel: `[units, 3 * units]`.
      bias: `[2, 3 * units]`.
    """

    def __init__(self, recurrent_kernel: tf.Tensor, bias: tf.Tensor):
        units = recurrent_kernel.shape[0]
        self.units = units
        self.input_bias = bias[0]
        # With these in place of the projected input, a step keeps the state.
        self.standstill = tf.constant([_OPEN] * units + [0.0] * (2 * units), bias.dtype)
        self.saved_widths = (3 * units, units, units)
        self.gradient_widths = (3 * units, units)
        self._recurrent_kernel = recurrent_kernel
        self._recurrent_bias = bias[1]

    def step(self, reads: _Tensors, states: list[tf.Tensor]) -> tuple[_Tensors, _Tensors]:
        """New states; and the old hidden state with the factors of the way back."""
        (hidden,) = states
        sizes = [2 * self.units, self.units]
        inner = tf.nn.bias_add(tf.matmul(hidden, self._recurrent_kernel), self._recurrent_bias)
        inner_gates, inner_candidate = tf.split(inner, sizes, axis=1)
        gates, candidate = tf.split(reads[0], sizes, axis=1)
        z, r = tf.split(tf.sigmoid(gates + inner_gates), 2, axis=1)
        reset = r * inner_candidate
        candidate = tf.tanh(candidate + reset)
        share = 1 - z
        slope = share - share * candidate * candidate
        slopes = [(hidden - candidate) * (z * share), slope * (reset - reset * r), slope * r]
        saved = [hidden, tf.concat(slopes, axis=1), slope, z]
        return [z * hidden + share * candidate], saved

    def step_back(self, reads: _Tensors, states: list[tf.Tensor]) -> tuple[_Tensors, _Tensors]:
        """Gradients of the old states from those of the new; and of the pre-activations."""
        direct, slopes, slope, z, _ = reads
        hidden = _add(states[0], direct)
        inner = tf.concat([hidden, hidden, hidden], axis=1) * slopes
        old = tf.matmul(inner, self._recurrent_kernel, transpose_b=True) + hidden * z
        return [old], [inner, hidden * slope]

    def pre_activations(self, taken: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What to combine with the kernel's and the recurrent kernel's inputs, and the biases'."""
        inner, candidate = taken
        outer = tf.concat([inner[..., : 2 * self.units], candidate], axis=2)
        sums = [tf.reduce_sum(gradient, axis=1, keepdims=True) for gradient in (outer, inner)]
        return outer, inner, tf.concat(sums, axis=2)


@dataclasses.dataclass(frozen=True)
class _Replay:
    """The steps of a call, taken again; sequences are `[time, batch, ...]`.

    Attributes:
      cell: What a step computes.
      x: The inputs, in the order of `outputs` if steps were taken forwards.
      kernel: The kernel.
      keep: Which steps count, bool `[time, batch]`; None: all.
      idle: One where a step does not count, `[time, batch, units]`; None if all count.
      hidden: The hidden state before each step.
      saved: What the way back reads at each step.
      final: The states after all steps.
    """

    cell: _Lstm | _Gru
    x: tf.Tensor
    kernel: tf.Tensor
    keep: tf.Tensor | None
    idle: tf.Tensor | None
    hidden: tf.Tensor
    saved: list[tf.TensorArray]
    final: list[tf.Tensor]


def _walk(
    step: Callable[[_Tensors, list[tf.Tensor]], tuple[_Tensors, _Tensors]],
    sequences: Sequence[tf.Tensor | tf.TensorArray | None],
    states: list[tf.Tensor],
    widths: Sequence[int],
    length: tf.Tensor,
    backwards: bool,
) -> tuple[list[tf.Tensor], list[tf.TensorArray]]:
    """Takes steps along sequences; what a step returns is stored at the step's own position."""
    reads = [
        tf.TensorArray(s.dtype, length, element_shape=s.shape[1:]).unstack(s)
        if tf.is_tensor(s)
        else s
        for s in sequences
    ]
    batch = states[0].shape[0]
    stored = [
        tf.TensorArray(states[0].dtype, length, element_shape=[batch, width]) for width in widths
    ]

    def body(position, states, stored):
        new, values = step([None if r is None else r.read(position) for r in reads], states)
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


def _stack(array: tf.TensorArray, like: tf.Tensor) -> tf.Tensor:
    stacked = array.stack()
    stacked.set_shape([*like.shape[:2], None])
    return stacked


def _project(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The product of sequences `[n, m, p]` and weights `[p, d]`, as that of two matrices."""
    flat = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), weights)
    shape = tf.shape(x)
    product = tf.reshape(flat, [shape[0], shape[1], weights.shape[1]])
    product.set_shape([*x.shape[:2], weights.shape[1]])
    return product


def _swap(x: tf.Tensor) -> tf.Tensor:
    """Exchanges batch and time."""
    return tf.transpose(x, [1, 0, 2])


def _add(a: tf.Tensor | None, b: tf.Tensor | None) -> tf.Tensor | None:
    return b if a is None else a if b is None else a + b


def _is_zero(gradient: tf.Tensor | None) -> bool:
    """Whether a gradient is zero for certain; TensorFlow passes such for outputs not in use."""
    if gradient is None:
        return True
    if not tf.is_symbolic_tensor(gradient):
        return False
    if gradient.op.type in ("Identity", "Fill"):
        return _is_zero(gradient.op.inputs[-1])
    if gradient.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(gradient)
    return value is not None and not np.any(value)
