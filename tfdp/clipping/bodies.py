"""Calls of functions and loops over time, differentiated example by example.

TensorFlow's gradient of a loop, or of a call, adds up the gradients of the weights over the
examples. The one here differentiates a copy of a step, as it is, and keeps for each operation that
combines weights with examples (a site) its data and the gradient of its output. Those of all steps
are what the rules of `tfdp.clipping.rules` need, as if there were one operation on sequences.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping import devices, graph_copy, loss_graph, step_graph
from tfdp.clipping.recurrent import is_zero
from tfdp.clipping.rows import RowAnalysis
from tfdp.clipping.states import RowList, Rows
from tfdp.clipping.uses import CannotUse, Site, by_example, rows_of, unchanged

# Operations with a state that return the same when a step is taken again.
_REPEATABLE = step_graph.READS | {"PartitionedCall", "StatefulPartitionedCall", "While", "If"}


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a rule needs of a site.

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
        self.rows = [rows_of(site, analysis) for site in sites]
        for kind, name in loss_graph.stateful_operations(self.graph):
            if kind not in _REPEATABLE and not kind.startswith("Placeholder"):
                raise CannotUse(f"'{op.name}' calls '{name}' ({kind}), which differs when repeated")

    def backward(
        self, gradients: Sequence[tf.Tensor | None], count: tf.Tensor
    ) -> tuple[list[tf.Tensor | None], list[Taken]]:
        """The gradient of the call, and what the gradients of the weights follow from.

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
                arriving,
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
          known: Values for the function's arguments, by name.
        """
        target = tf.compat.v1.get_default_graph()
        stop = {t.ref() for t in self.graph.inputs}
        made = [t for t in wanted if t.ref() not in stop]
        operations, boundary = graph_copy.cone(made, stop)
        values = {t.name: graph_copy.bring(known[t.name], target) for t in boundary}
        copies = iter(graph_copy.copy(operations, made, values)[0])
        return [known[t.name] if t.ref() in stop else next(copies) for t in wanted]

    def differentiate(
        self,
        known: dict[str, tf.Tensor],
        ys: Sequence[tf.Tensor],
        arriving: Sequence[tf.Tensor],
        xs: Sequence[tf.Tensor],
        count: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Evaluates the function again, and differentiates it.

        Args:
          known: Values for the function's arguments, by name.
          ys: Tensors of the function.
          arriving: Their gradients.
          xs: Other tensors of the function.
          count: Number of rows of the batch, a scalar.

        Returns:
          The gradients of `xs`; and for each site its data and gradient, in a flat list.
        """
        unique = {t.ref() for t in xs}
        values = {
            t.name: tf.identity(known[t.name]) if t.ref() in unique else known[t.name]
            for t in self.graph.inputs
            if t.name in known
        }
        data = [[t for t, r in self._inputs(i) if r is not None] for i in range(len(self.sites))]
        outputs = [site.op.outputs[0] for site in self.sites]
        wanted = [*ys, *xs, *outputs, *[t for tensors in data for t in tensors]]
        copies = self.copy(wanted, values)
        copied = {t.ref(): copy for t, copy in zip(wanted, copies, strict=True)}
        targets = [copied[t.ref()] for t in [*xs, *outputs]]
        found = tf.gradients([copied[t.ref()] for t in ys], targets, list(arriving))
        found = [
            tf.zeros_like(target) if g is None else tf.convert_to_tensor(g)
            for target, g in zip(targets, found, strict=True)
        ]
        for gradient, target in zip(found, targets, strict=True):
            gradient.set_shape(target.shape)
        taps = []
        for i, gradient in enumerate(found[len(xs) :]):
            pairs = [(copied[t.ref()], r) for t, r in self._inputs(i) if r is not None]
            pairs.append((gradient, self.rows[i][-1]))
            taps += [by_example(tensor, rows, count) for tensor, rows in pairs]
        return found[: len(xs)], taps

    def _inputs(self, site: int) -> list[tuple[tf.Tensor, Rows | None]]:
        return list(zip(self.sites[site].op.inputs, self.rows[site][:-1], strict=True))

    def _taken(self, taps: Sequence[tf.Tensor]) -> list[Taken]:
        """Returns what is known of the sites, from the flat list that `differentiate` returns."""
        left = iter(taps)
        return [
            Taken([None if r is None else next(left) for r in rows[:-1]], next(left))
            for rows in self.rows
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
        if not self._counts(0) or _integer(op.inputs[0]) != 0:
            raise CannotUse(f"'{op.name}' does not count its steps")
        self.steps = self._number_of_steps()

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
        """Returns the lists, by index, of which an entry with a gradient is read, and where."""
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

    def _counts(self, index: int) -> bool:
        """Returns whether a variable of the loop is one more after each step."""
        add = unchanged(self.graph.outputs[index]).op
        return (
            add.type == "AddV2"
            and add.inputs[0] is self.graph.inputs[index]
            and _integer(add.inputs[1]) == 1
        )

    def _number_of_steps(self) -> int | None:
        """Returns how many steps the loop takes, or None if that is not known statically."""
        condition = step_graph.function_graph(self.op.graph, self.op.get_attr("cond").name)
        place = {t.ref(): i for i, t in enumerate(condition.inputs)}
        pending, limits = [condition.outputs[0]], []
        while pending:
            op = unchanged(pending.pop()).op
            if op.type == "LogicalAnd":
                pending += op.inputs
                continue
            index = place.get(op.inputs[0].ref()) if op.type == "Less" else None
            if index is None or not self._counts(index):
                return None
            first, other = _integer(self.op.inputs[index]), place.get(op.inputs[1].ref())
            if other is not None and not self._kept[other]:
                return None
            limit = _integer(op.inputs[1] if other is None else self.op.inputs[other])
            if first is None or limit is None:
                return None
            limits.append(max(0, limit - first))
        return min(limits)

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
        taps = [
            tf.TensorArray(t.dtype, size, element_shape=t.shape)
            for t in self._specs_of_taps(carried, count)
        ]

        def body(position, states, arriving, lists, taps):
            known = self._known({i: array.read(position) for i, array in stored.items()})
            found, arriving, new = self._step_back(
                known, carried, states, dict(zip(written, arriving, strict=True)), count
            )
            places, items, values = found
            lists = self._add_to_lists(lists, places, items)
            taps = [array.write(position, t) for array, t in zip(taps, new, strict=True)]
            for before, after in zip(states, values, strict=True):
                after.set_shape(before.shape)
            return position - 1, values, arriving, lists, taps

        start = [steps - 1, states, [gradients[i] for i in written], lists, taps]
        _, states, _, lists, taps = tf.while_loop(
            lambda position, *_: position >= 0, body, start, parallel_iterations=4
        )
        found = {**dict(zip(carried, states, strict=True)), **lists}
        taken = self._taken([self._along_steps(array.stack()) for array in taps])
        return [found.get(i) for i in range(len(op.inputs))], taken

    def _known(self, states: dict[int, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns values for the body's arguments but the lists that it writes, by name."""
        return {
            tensor.name: self.op.inputs[i] if kept else states[i]
            for i, (tensor, kept) in enumerate(zip(self.graph.inputs, self._kept, strict=True))
            if kept or i in states
        }

    def _replay(self, steps: tf.Tensor, size: tf.Tensor) -> dict[int, tf.TensorArray]:
        """Takes the steps again; returns the loop's variables in front of each, by index."""
        first = [self.op.inputs[i] for i in self._states]
        shapes = [self.graph.inputs[i].shape for i in self._states]
        arrays = [
            tf.TensorArray(t.dtype, size, element_shape=shape)
            for t, shape in zip(first, shapes, strict=True)
        ]

        def body(position, values, arrays):
            arrays = [array.write(position, t) for array, t in zip(arrays, values, strict=True)]
            known = self._known(dict(zip(self._states, values, strict=True)))
            after = self.copy([self.graph.outputs[i] for i in self._states], known)
            for tensor, shape in zip(after, shapes, strict=True):
                tensor.set_shape(shape)
            return position + 1, after, arrays

        first = [tf.ensure_shape(t, s) for t, s in zip(first, shapes, strict=True)]
        _, _, arrays = tf.while_loop(
            lambda position, *_: position < steps, body, [0, first, arrays], parallel_iterations=4
        )
        return dict(zip(self._states, arrays, strict=True))

    def _step_back(self, known, carried, states, arriving, count):
        """Differentiates one step.

        Returns:
          The gradients of what it reads from lists, with the places, and of the variables; the
          gradients of the lists that it writes before it; and what is taken of its sites.
        """
        writes = [self._written[i] for i in arriving]
        places = self.copy([op.inputs[1] for op in [*writes, *[r for _, r in self._reads]]], known)
        items = self.copy([op.inputs[2] for op in writes], known)
        of_items, before = [], []
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
        ys = [self.graph.outputs[i] for i in carried] + [op.inputs[2] for op in writes]
        xs = [self.graph.inputs[i] for i in carried] + [op.outputs[0] for _, op in self._reads]
        found, taps = self.differentiate(known, ys, [*states, *of_items], xs, count)
        values, items = found[: len(carried)], found[len(carried) :]
        return (places[len(writes) :], items, values), before, taps

    def _add_to_lists(self, lists, places, items):
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

    def _specs_of_taps(self, carried: list[int], count: tf.Tensor) -> list[tf.TensorSpec]:
        """Returns the types and static shapes of what is taken of the sites in one step."""
        specs = []
        for site, rows in zip(self.sites, self.rows, strict=True):
            tensors = [t for t, r in zip(site.op.inputs, rows[:-1], strict=True) if r is not None]
            kinds = [r for r in rows if r is not None]
            for tensor, kind in zip([*tensors, site.op.outputs[0]], kinds, strict=True):
                rest = [d for a, d in enumerate(tensor.shape) if a != kind.axis]
                specs.append(tf.TensorSpec([None, kind.each, *rest], tensor.dtype))
        return specs

    def _along_steps(self, stacked: tf.Tensor) -> tf.Tensor:
        """From `[steps, rows, each, ...]` to `[rows, steps * each, ...]`."""
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
    return (Loop if op.type in ("While", "StatelessWhile") else Body)(op, analysis, sites)


def _integer(tensor: tf.Tensor) -> int | None:
    """Returns the value of a scalar, if it follows from constants and static shapes."""
    tensor = unchanged(tensor)
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "Max":
        value = tf.get_static_value(tensor.op.inputs[0])
        value = None if value is None else value.max()
    if value is None and tensor.op.type == "StridedSlice":
        value = _size(tensor.op)
    return None if value is None else int(value)


def _size(op: tf.Operation) -> int | None:
    """Returns one static size of a shape of which an operation takes a slice."""
    first, shrinks = tf.get_static_value(op.inputs[1]), op.get_attr("shrink_axis_mask")
    if op.inputs[0].op.type != "Shape" or first is None or len(first) != 1 or shrinks != 1:
        return None
    shape = op.inputs[0].op.inputs[0].shape
    return shape[int(first[0])] if shape.rank else None
