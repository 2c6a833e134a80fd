"""Plan of the one-pass engine: which rule handles each variable, or why none does."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import loss_reader
from tfdp.clipping.one_pass import (
    computed_weights,
    loop_recordings,
    low_rank_weights,
    memory,
    op_gradients,
)
from tfdp.clipping.one_pass.combined_gradients import combine
from tfdp.clipping.one_pass.example_rows import of_examples
from tfdp.clipping.one_pass.loops import Body, Taken, body_of
from tfdp.clipping.one_pass.marked_calls import recognize
from tfdp.clipping.one_pass.per_example_gradients import Contribution, Direct, OuterProducts
from tfdp.clipping.one_pass.weight_uses import (
    CannotUse,
    Site,
    View,
    find_sites,
    make_use,
    recorded_use,
)
from tfdp.clipping.report import Entry, Report
from tfdp.clipping.row_analysis import equal_rows
from tfdp.clipping.row_analysis.analysis import RowAnalysis, Transfer
from tfdp.clipping.row_analysis.states import Rows

_LOOP_TYPES = op_types.LOOPS | {"Scan"}


class NeedsWholeModel(Exception):
    """Reason to leave all variables to the vectorized engine: some lack a rule; it has loops."""


class Plan:
    """Plan of how to compute the clipped sum of a loss.

    Args:
      graph: The loss.
      handles: The variables' handles in its graph.
      variables: The variables.
      whole: The plan for the whole batch, if this plan is for a part of it.

    Attributes:
      fallback: Why nothing is proven of the model, or None.

    Raises:
      ValueError: The model mixes examples.
    """

    def __init__(
        self,
        graph: loss_reader.LossGraph,
        handles: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        whole: "Plan | None" = None,
    ):
        self._graph, self._handles, self._variables = graph, handles, variables
        operations = graph.operations()
        if loop_recordings.record_draws(operations, [*graph.vectors, *graph.terms]):
            operations = graph.operations()
        self._in_cone = {op.name: op for op in operations}
        calls = [op for op in operations if op.type in op_types.CALLS]
        found = {op.name: recognize(graph.sources.get(op.name, op)) for op in calls}
        self._calls: dict[str, Any] = {k: v for k, v in found.items() if v is not None}
        special = {name: call.transfer for name, call in self._calls.items()}
        given = {} if whole is None else whole.states_of_drawn(graph)
        self._analysis, self.fallback = self._analysed(operations, special, given)

    def _analysed(
        self, operations: list[tf.Operation], special: dict[str, Transfer], given: dict
    ) -> tuple[RowAnalysis, str | None]:
        """Returns the analysis, and why it proves nothing, or None."""
        if repeated := equal_rows.find(operations, self._graph.batch):
            with contextlib.suppress(ValueError):
                analysis = RowAnalysis(operations, self._graph.batch, special, given | repeated)
                if self._unproven(analysis) is None:
                    return analysis, None
        analysis = RowAnalysis(operations, self._graph.batch, special, given)
        return analysis, self._unproven(analysis)

    def states_of_drawn(self, part: loss_reader.LossGraph) -> dict:
        """Returns where the random numbers of a part hold the examples, by reference: as here."""
        pairs = zip(part.drawn, self._graph.drawn, strict=True)
        return {own.numbers.ref(): self._analysis.state(d.numbers) for own, d in pairs}

    def _unproven(self, analysis: RowAnalysis) -> str | None:
        for vector in self._graph.vectors:
            state = analysis.state(vector)
            if not isinstance(state, Rows):
                reason = getattr(state, "reason", f"the losses are held as {state}")
                return (
                    "The one-pass engine cannot prove which rows belong to which example, so that "
                    f"all gradients are clipped by the slower vectorized engine: {reason}."
                )
        return None

    @property
    def bytes_per_row(self) -> int:
        """About how many bytes the backward pass of one example takes.

        Of a model of which nothing is proven, what its largest operation takes: the vectorized
        engine works on few rows at a time, but the loss of all is computed at once.
        """
        if self.fallback:
            return memory.largest_operation(self._in_cone.values())
        return memory.bytes_per_row(self._analysis, self._handles)

    @property
    def has_loops(self) -> bool:
        """Returns whether the model has a loop."""
        return self._graph.has_operation(_LOOP_TYPES)

    def contributions(
        self,
        count: tf.Tensor,
        slow: Callable[[Sequence[int]], list[Callable[..., tf.Tensor]]],
        rows_per_example: int = 1,
    ) -> tuple[list[Contribution | None], Callable[[], Report]]:
        """Returns the per-example gradients of each variable, and which rules they come from.

        Args:
          count: Number of rows of the batch, a scalar.
          slow: Function from the indices of variables to functions that compute their gradients
            `[n, ...]` from the batch's tensors of n rows.
          rows_per_example: Consecutive rows whose gradients are added up to those of an example.

        Returns:
          For each variable its gradients, None where the loss has none; and a function that makes
          the report. What TensorFlow can vectorize is known once the gradients have been used.
        """
        sites: list[list[Site]] = []
        reasons: list[str | None] = []
        for handle in self._handles:
            try:
                sites.append(find_sites(handle, self._analysis))
                reasons.append(None)
            except CannotUse as error:
                sites.append([])
                reasons.append(str(error))
        bodies = self._bodies(sites, reasons)
        gradients, recurrent, taken = self._gradients(sites, bodies, count)
        result: list[Contribution | None] = []
        for i, (variable, own) in enumerate(zip(self._variables, sites, strict=True)):
            contribution = None
            if reasons[i] is None:
                try:
                    contribution = self._contribution(
                        variable, own, gradients, recurrent, taken, count
                    )
                except CannotUse as error:
                    reasons[i] = str(error)
            result.append(contribution)
        slow_ones = self._connected([i for i, why in enumerate(reasons) if why is not None])
        if slow_ones and self.has_loops:  # Not to be vectorized with them.
            raise NeedsWholeModel(
                "The model has a loop, and one of its variables has no rule, so that all gradients "
                "are clipped by the slower vectorized engine: "
                f"'{self._variables[slow_ones[0]].name}', {reasons[slow_ones[0]]}."
            )
        for i, function in zip(slow_ones, slow(slow_ones), strict=True):
            shape = self._variables[i].shape.as_list()
            tensors = self._graph.tensors
            result[i] = Direct(tensors, shape, "vectorized", function, as_they_are=True)
        result = [None if c is None else of_examples(c, rows_per_example) for c in result]

        def report() -> Report:
            rows = zip(self._variables, result, reasons, strict=True)
            return Report(tuple(_entry(v, c, why) for v, c, why in rows if c is not None))

        return result, report

    def _connected(self, indices: Sequence[int]) -> list[int]:
        """Returns those of some variables that the loss has gradients by."""
        if not indices:
            return []
        found = tf.gradients(self._graph.terms, [self._handles[i] for i in indices])
        return [i for i, gradient in zip(indices, found, strict=True) if gradient is not None]

    def _bodies(self, sites: list[list[Site]], reasons: list[str | None]) -> dict[str, Body]:
        """Returns what differentiates the calls of functions that sites are in, by name.

        Variables of which that is not possible lose their sites, and get a reason.
        """
        callers = {
            site.caller.name: site.caller
            for own in sites
            for site in own
            if site.caller is not None
        }
        bodies: dict[str, Body] = {}
        for name, op in callers.items():
            inside = [s for own in sites for s in own if s.caller is op]
            try:
                bodies[name] = body_of(op, self._analysis.inner[name], inside)
            except CannotUse as error:
                for i, own in enumerate(sites):
                    if any(site.caller is op for site in own):
                        sites[i], reasons[i] = [], str(error)
        return bodies

    def _gradients(
        self, sites: list[list[Site]], bodies: dict[str, Body], count: tf.Tensor
    ) -> tuple[dict, dict, dict[tuple, Taken]]:
        """Computes the gradients of operations' outputs, and those that special gradients recorded.

        One backward pass. Calls of recurrent layers and of functions with weights have their
        gradient function replaced meanwhile, by one that keeps what the weights' gradients follow
        from.
        """
        outputs = {}
        for site in [site for own in sites for site in own]:
            if site.op.name not in self._calls and site.caller is None:
                outputs[site.op.outputs[0].ref()] = site.op.outputs[0]
        used = [self._in_cone[name] for name in [*self._calls, *bodies]]
        kept: dict[str, dict] = {}
        taken: dict[tuple, Taken] = {}
        originals = {op.name: op._gradient_function for op in used}

        def keep_uses(op: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
            dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
            if op.name in bodies:
                inputs, found = bodies[op.name].backward(dense, count)
                keys = [site.key for site in bodies[op.name].sites]
                taken.update(zip(keys, found, strict=True))
            else:
                inputs, kept[op.name] = self._calls[op.name].backward(list(op.inputs), dense)
            return inputs

        # Towards the data, or what comes before a call whose data have no gradient.
        before = [
            t for op in used for t in op.inputs if t.dtype.is_floating or t.dtype == tf.variant
        ]
        try:
            for op in used:
                op._gradient_function = keep_uses
            targets = [*outputs.values(), *before]
            found = tf.gradients(self._graph.terms, targets) if targets else []
        finally:
            for op in used:
                op._gradient_function = originals[op.name]
        gradients = {
            ref: None if g is None else tf.convert_to_tensor(g)
            for ref, g in zip(outputs, found, strict=False)
        }
        return gradients, kept, taken

    def _contribution(
        self,
        variable: tf.Variable,
        sites: Sequence[Site],
        gradients: dict,
        recurrent: dict,
        taken: dict[tuple, Taken],
        count: tf.Tensor,
    ) -> Contribution | None:
        parts: list[Contribution] = []
        computed_parts: dict[tuple, list[tuple[View, Contribution]]] = {}
        for site in sites:
            if site.op.name in self._calls and site.caller is None:
                part = self._recurrent_part(site, recurrent)
            elif site.caller is not None:
                found = taken.get(site.key)
                part = None if found is None else self._part(site, found, variable, count)
            else:
                gradient = gradients[site.op.outputs[0].ref()]
                part = None if gradient is None else self._part(site, gradient, variable, count)
            if part is not None and site.view.end is not None:
                product = low_rank_weights.of_variable(part, site.view, variable.shape.as_list())
                if product is not None:
                    parts.append(product)
                    continue
                computed_parts.setdefault(site.view.key, []).append((site.view, part))
            elif part is not None:
                parts.append(part.through(site.view))
        shape = variable.shape.as_list()
        for same in computed_parts.values():  # Unrolled steps compute the same again and again.
            view = same[0][0]
            joined = combine([part for _, part in same], same[0][1].shape)
            parts.append(computed_weights.of_variable(joined, view, shape))
        return combine(parts, shape) if parts else None

    def _part(
        self, site: Site, found: tf.Tensor | Taken, variable: tf.Variable, count: tf.Tensor
    ) -> Contribution:
        shape = variable.shape.as_list()
        if isinstance(found, Taken):
            inner = self._analysis.inner[site.caller.name]
            use = recorded_use(site, found.data, found.gradient, shape, inner)
        else:
            use = make_use(site, found, shape, self._analysis, count)
        rule = op_gradients.find_op_gradients(site.op.type, site.weight, use.is_open)
        part = (rule(use) if rule else None) or op_gradients.generic.generic(use)
        if part is None:
            of = " with weights of open shape" if use.is_open else ""
            raise CannotUse(f"no rule for '{site.op.name}' ({site.op.type}){of}")
        return part

    def _recurrent_part(self, site: Site, recurrent: dict) -> Contribution | None:
        uses = recurrent.get(site.op.name)
        if uses is None:
            return None
        if site.weight not in uses:
            raise CannotUse(f"a recurrent layer does not use it as weights: '{site.op.name}'")
        a, g = uses[site.weight]
        shape = site.op.inputs[site.weight].shape.as_list()
        if a is None:
            floats = g.shape[1:].num_elements()
            return Direct([g], shape, "recurrent bias", lambda g: tf.reduce_sum(g, 1), floats)
        return OuterProducts(a, g, shape, g.shape[1], a.shape[2], g.shape[2], "recurrent")


def _entry(variable: tf.Variable, contribution: Contribution, why: str | None) -> Entry:
    """Returns the entry of a report; `why` is the reason that there is no rule, or None."""
    how = contribution.name if why is None else f"vectorized: {why}"
    if why is None and contribution.slow is not None:
        how = f"{how}: {contribution.slow}"
    return Entry(
        variable.name,
        variable.shape.num_elements(),
        how,
        why is None and contribution.slow is None,
        contribution.work_per_row,
    )
