"""Calls of functions and loops over time, differentiated example by example.

TensorFlow's gradient of a loop, or of a call, adds up the gradients of the weights over the
examples. The one here differentiates a copy of a step, as it is, and keeps for each operation that
combines weights with examples (a site) its data and the gradient of its output. Those of all steps
are what the rules in `op_gradients` need, as if there were one operation on sequences.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import copying, loss_reader
from tfdp.clipping.one_pass import loop_recordings
from tfdp.clipping.one_pass.marked_calls import is_zero
from tfdp.clipping.one_pass.weight_uses import CannotUse, Site, by_example, rows_of, unchanged
from tfdp.clipping.row_analysis.analysis import RowAnalysis
from tfdp.clipping.row_analysis.states import RowList, Rows


@dataclasses.dataclass(frozen=True)
class Taken:
    """The tensors of a site that its rule needs.

    Attributes:
      data: Its inputs that hold examples, `[rows, each, ...]`, others None.
      gradient: The gradient of its output, `[rows, each, ...]`. In a loop `each` is over all steps.
    """

    data: list[tf.Tensor | None]
    gradient: tf.Tensor


class Body:
    """A function that is called, and its gradient by examples.

    Formal guarantee: row `i` of every gradient and of everything that `backward` takes is a
    function of row `i` of the inputs and of the output gradients, and of public values, alone.

    Args:
      op: The call.
      analysis: The proof of where the tensors of the function hold the examples.
      sites: The operations in it that combine weights with examples.

    Raises:
      CannotUse: The function would not return the same again, such as one with random numbers.
    """

    def __init__(self, op: tf.Operation, analysis: RowAnalysis, sites: Sequence[Site]):
        self.op, self.analysis, self.sites = op, analysis, list(sites)
        self.graph = analysis.graph
        # For each site: whether each input holds examples.
        self._present: list[list[bool]] = []
        # For each site: the inputs that hold examples, then the output, and the axes of examples.
        self._tapped: list[list[tuple[tf.Tensor, Rows]]] = []
        for site in sites:
            inputs, output = rows_of(site, analysis)
            pairs = zip(site.op.inputs, inputs, strict=True)
            self._present.append([rows is not None for rows in inputs])
            self._tapped.append([(t, rows) for t, rows in pairs if rows is not None])
            self._tapped[-1].append((site.op.outputs[0], output))
        self.draws = self.recorded_draws()
        drawn = {t.op.name for t in self.draws}
        for kind, name in loss_reader.stateful_operations(self.graph):
            if kind not in loop_recordings.REPEATABLE and name not in drawn:
                raise CannotUse(f"'{op.name}' calls '{name}' ({kind}), which differs when repeated")

    def recorded_draws(self) -> list[tf.Tensor]:
        """Returns the random numbers of the function that are known when it is evaluated again."""
        return []

    def backward(
        self, gradients: Sequence[tf.Tensor | None], count: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], list[Taken]]:
        """Returns the gradient of the call, and what the gradients of the weights follow from.

        Args:
          gradients: For each output of the call its gradient, or None for zero.
          count: Number of rows of the batch, a scalar.

        Returns:
          For each input its gradient, None if it holds no examples; and for each site what is
          needed of it.
        """
        ys = [  # TensorFlow gives functions that it differentiates more outputs, at the end.
            i
            for i, (t, g) in enumerate(zip(self.graph.outputs, gradients, strict=False))
            if not is_zero(g) and self.is_differentiable(t)
        ]
        xs = [i for i, t in enumerate(self.graph.inputs) if self.is_differentiable(t)]

        def run(inputs: list[tf.Tensor], arriving: list[tf.Tensor], count: tf.Tensor) -> list:
            known = {t.name: value for t, value in zip(self.graph.inputs, inputs, strict=True)}
            found, taps = self.differentiate(
                known,
                [self.graph.outputs[i] for i in ys],
                lambda values: arriving,
                [self.graph.inputs[i] for i in xs],
                count,
            )
            return [*found, *taps]

        if self._compiled():
            run = tf.function(run, jit_compile=True, autograph=False)
        results = run(list(self.op.inputs), [gradients[i] for i in ys], count)
        found = dict(zip(xs, results, strict=False))
        taken = self._taken(results[len(xs) :])
        return [found.get(i) for i in range(len(self.op.inputs))], taken

    def _compiled(self) -> bool:
        """Returns whether the function must be compiled: some operations have no other kernel."""
        try:
            return bool(self.op.get_attr("_XlaMustCompile")) and not devices.compiled_by_xla()
        except ValueError:
            return False

    def is_differentiable(self, tensor: tf.Tensor) -> bool:
        """Returns whether gradients flow through a tensor of the function to examples' data."""
        return tensor.dtype.is_floating and isinstance(self.analysis.state(tensor), Rows)

    def copy(self, wanted: Sequence[tf.Tensor], known: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        """Computes tensors of the function in the default graph.

        Args:
          wanted: The tensors.
          known: Values for the function's arguments, and for what it drew, by name.
        """
        return copying.evaluate(wanted, [*self.graph.inputs, *self.draws], known)

    def differentiate(
        self,
        known: dict[str, tf.Tensor],
        ys: Sequence[tf.Tensor],
        arriving: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
        xs: Sequence[tf.Tensor],
        count: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Evaluates the function again, and differentiates it.

        Args:
          known: Values for the function's arguments, by name.
          ys: Tensors of the function.
          arriving: Function from their values to their gradients.
          xs: Other tensors of the function.
          count: Number of rows of the batch, a scalar.

        Returns:
          The gradients of `xs`; and for each site its data and gradient, in a flat list.
        """
        unique = {t.ref() for t in xs}
        values = {
            t.name: tf.identity(known[t.name]) if t.ref() in unique else known[t.name]
            for t in [*self.graph.inputs, *self.draws]
            if t.name in known
        }
        outputs = [site.op.outputs[0] for site in self.sites]
        wanted = [*ys, *xs, *[t for tapped in self._tapped for t, _ in tapped]]
        copies = self.copy(wanted, values)
        copied = {t.ref(): copy for t, copy in zip(wanted, copies, strict=True)}
        targets = [copied[t.ref()] for t in [*xs, *outputs]]
        values_of_ys = [copied[t.ref()] for t in ys]
        found = tf.gradients(values_of_ys, targets, list(arriving(values_of_ys)))
        found = [
            tf.zeros_like(target) if g is None else tf.convert_to_tensor(g)
            for target, g in zip(targets, found, strict=True)
        ]
        for gradient, target in zip(found, targets, strict=True):
            gradient.set_shape(target.shape)
        taps = []
        for tapped, gradient in zip(self._tapped, found[len(xs) :], strict=True):
            taps += [by_example(copied[t.ref()], rows, count) for t, rows in tapped[:-1]]
            taps.append(by_example(gradient, tapped[-1][1], count))
        return found[: len(xs)], taps

    def _taken(self, taps: Sequence[tf.Tensor]) -> list[Taken]:
        """Returns what is known of the sites, from the flat list that `differentiate` returns."""
        left = iter(taps)
        return [
            Taken([next(left) if there else None for there in present], next(left))
            for present in self._present
        ]


class Loop(Body):
    """A loop, such as a recurrent layer's over time; see `Body`.

    A first loop takes the steps again and keeps the states in front of them; a second one takes
    the steps back, last one first.

    Raises:
      CannotUse: Its variables are neither kept, nor numbers, nor lists that are only read or only
        written.
    """

    def __init__(self, op: tf.Operation, analysis: RowAnalysis, sites: Sequence[Site]):
        super().__init__(op, analysis, sites)
        inputs, outputs = self.graph.inputs, self.graph.outputs
        pairs = list(zip(inputs, outputs, strict=True))
        self._kept = [unchanged(after) is before for before, after in pairs]
        self._written = {
            i: self._write(before, after)
            for i, (before, after) in enumerate(pairs)
            if before.dtype == tf.variant and not self._kept[i]
        }
        self._states = [
            i for i in range(len(pairs)) if not self._kept[i] and i not in self._written
        ]
        if any(inputs[i].dtype == tf.resource for i in self._states):
            raise CannotUse(f"'{op.name}' changes which variable it uses")
        self._reads = self._find_reads()
        found = loop_recordings.number_of_steps(op, self.graph)
        self.steps = found if isinstance(found, int) else None
        counted = (
            loop_recordings.counts(self.graph, 0) and loop_recordings.integer(op.inputs[0]) == 0
        )
        if self.steps is None and not counted:
            raise CannotUse(f"'{op.name}' does not count its steps")

    def _write(self, before: tf.Tensor, after: tf.Tensor) -> tf.Operation:
        """Returns the operation that writes an entry of a list in every step."""
        op = unchanged(after).op
        users = [c for c in before.consumers() if c.name in self.analysis.operations]
        if op.type != "TensorListSetItem" or op.inputs[0] is not before or users != [op]:
            raise CannotUse(f"'{self.op.name}' uses the list '{before.name}' in an unknown way")
        if any(c.type != "Identity" for c in op.outputs[0].consumers()):
            raise CannotUse(f"'{self.op.name}' reads the list '{before.name}' that it writes")
        return op

    def _find_reads(self) -> list[tuple[int, tf.Operation]]:
        """Returns the lists, by index, that an entry with a gradient is read from, and where."""
        reads = []
        for index, tensor in enumerate(self.graph.inputs):
            state = self.analysis.state(tensor)
            if not (isinstance(state, RowList) and self._kept[index]):
                continue
            for op in tensor.consumers():
                if op.name not in self.analysis.operations:
                    continue
                if op.type == "TensorListGetItem":
                    if self.is_differentiable(op.outputs[0]):
                        reads.append((index, op))
                elif op.type not in ("TensorListLength", "Identity"):
                    raise CannotUse(f"'{self.op.name}' uses a list in '{op.name}' ({op.type})")
        return reads

    def recorded_draws(self) -> list[tf.Tensor]:
        """See `Body`: those that the loop writes into lists, one entry a step."""
        self._recorders = {}
        for draw in loop_recordings.draws_of(self.graph):
            index = loop_recordings.recorder(self.graph, draw)
            if index is not None:
                self._recorders[index] = draw
        return list(self._recorders.values())

    def backward(
        self, gradients: Sequence[tf.Tensor | None], count: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], list[Taken]]:
        """See `Body`."""
        op = self.op
        steps = op.outputs[0] if self.steps is None else tf.constant(self.steps)
        size = steps
        if self.steps is None and devices.compiled_by_xla():
            size = op.inputs[1]  # The most steps there may be, which a compiler knows.
        stored = self._replay(steps, size)
        carried = [i for i, t in enumerate(self.graph.inputs) if self.is_differentiable(t)]
        states = [
            tf.zeros_like(op.inputs[i]) if is_zero(gradients[i]) else gradients[i] for i in carried
        ]
        written = [
            i
            for i, write in self._written.items()
            if not is_zero(gradients[i]) and self.is_differentiable(write.inputs[2])
        ]
        lists = {i: tf.zeros_like(op.inputs[i]) for i, _ in self._reads}
        taps = [tf.TensorArray(t.dtype, size, element_shape=t.shape) for t in self._specs_of_taps()]

        def body(
            position: tf.Tensor, states: list, arriving: list, lists: dict, taps: list
        ) -> tuple:
            values = {i: array.read(position) for i, array in stored.items()}
            known = self._known(values, position)
            found, arriving, new = self._step_back(
                known, carried, states, dict(zip(written, arriving, strict=True)), count
            )
            places, items, earlier = found
            lists = self._add_to_lists(lists, places, items)
            taps = [array.write(position, t) for array, t in zip(taps, new, strict=True)]
            for before, after in zip(states, earlier, strict=True):
                after.set_shape(before.shape)
            return position - 1, earlier, arriving, lists, taps

        start = [steps - 1, states, [gradients[i] for i in written], lists, taps]
        _, states, _, lists, taps = tf.while_loop(
            lambda position, *_: position >= 0, body, start, parallel_iterations=4
        )
        found = {**dict(zip(carried, states, strict=True)), **lists}
        taken = self._taken([self._along_steps(array.stack()) for array in taps])
        return [found.get(i) for i in range(len(op.inputs))], taken

    def _known(self, states: dict[int, tf.Tensor], position: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns what a step begins with, but the lists that it writes, and what it drew."""
        known = {
            tensor.name: self.op.inputs[i] if kept else states[i]
            for i, (tensor, kept) in enumerate(zip(self.graph.inputs, self._kept, strict=True))
            if kept or i in states
        }
        for index, draw in self._recorders.items():
            known[draw.name] = tf.raw_ops.TensorListGetItem(
                input_handle=self.op.outputs[index],
                index=position,
                element_shape=tf.constant(-1),
                element_dtype=draw.dtype,
            )
            known[draw.name].set_shape(draw.shape)
        return known

    def _replay(self, steps: tf.Tensor, size: tf.Tensor) -> dict[int, tf.TensorArray]:
        """Takes the steps again; returns the loop's variables in front of each, by index."""
        first = [self.op.inputs[i] for i in self._states]
        shapes = [self.graph.inputs[i].shape for i in self._states]
        arrays = [
            tf.TensorArray(t.dtype, size, element_shape=shape)
            for t, shape in zip(first, shapes, strict=True)
        ]

        def body(position: tf.Tensor, values: list, arrays: list) -> tuple:
            arrays = [array.write(position, t) for array, t in zip(arrays, values, strict=True)]
            known = self._known(dict(zip(self._states, values, strict=True)), position)
            after = self.copy([self.graph.outputs[i] for i in self._states], known)
            for tensor, shape in zip(after, shapes, strict=True):
                tensor.set_shape(shape)
            return position + 1, after, arrays

        first = [tf.ensure_shape(t, s) for t, s in zip(first, shapes, strict=True)]
        _, _, arrays = tf.while_loop(
            lambda position, *_: position < steps, body, [0, first, arrays], parallel_iterations=4
        )
        return dict(zip(self._states, arrays, strict=True))

    def _step_back(
        self,
        known: dict[str, tf.Tensor],
        carried: Sequence[int],
        states: Sequence[tf.Tensor],
        arriving: dict[int, tf.Tensor],
        count: tf.Tensor,
    ) -> tuple[tuple[list, list, list], list[tf.Tensor], list[tf.Tensor]]:
        """Differentiates one step.

        Returns:
          The gradients of what it reads from lists, with the places, and of the variables; the
          gradients of the lists that it writes before it; and what is taken of its sites.
        """
        writes = [self._written[i] for i in arriving]
        places = self.copy([op.inputs[1] for op in [*writes, *[r for _, r in self._reads]]], known)
        before = []

        def of_values(values: list[tf.Tensor]) -> list[tf.Tensor]:
            of_items = []
            items = values[len(carried) :]
            for gradient, place, item in zip(arriving.values(), places, items, strict=False):
                shape, kind = tf.shape(item), item.dtype
                of_items.append(
                    tf.raw_ops.TensorListGetItem(
                        input_handle=gradient, index=place, element_shape=shape, element_dtype=kind
                    )
                )
                before.append(
                    tf.raw_ops.TensorListSetItem(
                        input_handle=gradient, index=place, item=tf.zeros_like(item)
                    )
                )
            return [*states, *of_items]

        ys = [self.graph.outputs[i] for i in carried] + [op.inputs[2] for op in writes]
        xs = [self.graph.inputs[i] for i in carried] + [op.outputs[0] for _, op in self._reads]
        found, taps = self.differentiate(known, ys, of_values, xs, count)
        values, items = found[: len(carried)], found[len(carried) :]
        return (places[len(writes) :], items, values), before, taps

    def _add_to_lists(
        self, lists: dict[int, tf.Tensor], places: Sequence[tf.Tensor], items: Sequence[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """Adds the gradients of what a step read to those of the lists."""
        lists = dict(lists)
        for (index, _), place, item in zip(self._reads, places, items, strict=True):
            before = tf.raw_ops.TensorListGetItem(
                input_handle=lists[index],
                index=place,
                element_shape=tf.shape(item),
                element_dtype=item.dtype,
            )
            lists[index] = tf.raw_ops.TensorListSetItem(
                input_handle=lists[index], index=place, item=before + item
            )
        return lists

    def _specs_of_taps(self) -> list[tf.TensorSpec]:
        """Returns the types and static shapes of what is taken of the sites in one step."""
        specs = []
        for tensor, rows in [pair for tapped in self._tapped for pair in tapped]:
            rest = [d for axis, d in enumerate(tensor.shape) if axis != rows.axis]
            specs.append(tf.TensorSpec([None, rows.each, *rest], tensor.dtype))
        return specs

    def _along_steps(self, stacked: tf.Tensor) -> tf.Tensor:
        """Reshapes `[steps, rows, each, ...]` to `[rows, steps * each, ...]`."""
        each, rest = stacked.shape[2], stacked.shape[3:]
        order = [1, 0, *range(2, stacked.shape.rank)]
        tensor = tf.transpose(stacked, order)
        shape = tf.shape(tensor)
        tensor = tf.reshape(tensor, tf.concat([shape[:1], [shape[1] * shape[2]], shape[3:]], 0))
        length = None if self.steps is None or each is None else self.steps * each
        tensor.set_shape([None, length, *rest])
        return tensor


def body_of(op: tf.Operation, analysis: RowAnalysis, sites: Sequence[Site]) -> Body:
    """Returns what differentiates an operation that calls a function.

    Raises:
      CannotUse: It cannot be.
    """
    return (Loop if op.type in op_types.LOOPS else Body)(op, analysis, sites)
