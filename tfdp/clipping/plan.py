"""What the one-pass engine does for each variable of a model: which rule, or why none."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.clipping import loss_graph, rules
from tfdp.clipping.contributions import Contribution, Direct, OuterProducts, combine
from tfdp.clipping.recurrent import RecurrentCall, recognise
from tfdp.clipping.report import Entry, Report
from tfdp.clipping.rows import RowAnalysis
from tfdp.clipping.states import Rows
from tfdp.clipping.transfers import recurrent_transfer
from tfdp.clipping.uses import CannotUse, Site, find_sites, make_use

_CALL_TYPES = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


class Plan:
    """How the clipped sum of a loss is computed.

    Args:
      graph: The loss.
      handles: The variables' handles in its graph.
      variables: The variables.

    Attributes:
      fallback: Why nothing is proven of the model, or None.

    Raises:
      ValueError: The model mixes examples.
    """

    def __init__(
        self,
        graph: loss_graph.LossGraph,
        handles: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
    ):
        self._graph, self._handles, self._variables = graph, handles, variables
        operations = graph.operations()
        self._in_cone = {op.name: op for op in operations}
        calls = [op for op in operations if op.type in _CALL_TYPES]
        found = {op.name: recognise(graph.sources.get(op.name, op)) for op in calls}
        self._calls: dict[str, RecurrentCall] = {k: v for k, v in found.items() if v is not None}
        special = {name: recurrent_transfer(call) for name, call in self._calls.items()}
        self._analysis = RowAnalysis(operations, graph.batch, special)
        self.fallback = self._unproven()
        self.entries: list[Entry] = []

    def _unproven(self) -> str | None:
        for vector in self._graph.vectors:
            state = self._analysis.state(vector)
            if not isinstance(state, Rows):
                reason = getattr(state, "reason", f"the losses are held as {state}")
                return (
                    "The one-pass engine cannot prove which rows belong to which example, so that "
                    f"all gradients are clipped by the slower vectorised engine: {reason}."
                )
        return None

    @property
    def bytes_per_row(self) -> int:
        """About how many bytes what the model computes of one example takes, and its gradient."""
        total = 0
        for op in self._in_cone.values():
            for tensor in op.outputs:
                state = self._analysis.state(tensor)
                if isinstance(state, Rows):
                    rest = [64 if d is None else d for d in tensor.shape]
                    rest[state.axis] = state.each or 64
                    total += 2 * math.prod(rest) * tensor.dtype.size
        return total

    def report(self) -> Report:
        """What was decided, once `contributions` was called."""
        return Report(tuple(self.entries))

    def contributions(
        self, count: tf.Tensor, slow: Callable[[Sequence[int]], list[Callable[..., tf.Tensor]]]
    ) -> list[Contribution | None]:
        """The gradients of each variable for every example; None where the loss has none.

        Args:
          count: Number of rows of the batch, a scalar.
          slow: From the indices of variables to functions that compute their gradients `[n, ...]`
            from the batch's tensors of n examples.
        """
        sites: list[list[Site]] = []
        reasons: list[str | None] = []
        for handle in self._handles:
            try:
                sites.append(find_sites(handle, self._in_cone, self._analysis))
                reasons.append(None)
            except CannotUse as error:
                sites.append([])
                reasons.append(str(error))
        gradients, recurrent = self._gradients([site for own in sites for site in own])
        result: list[Contribution | None] = []
        for i, (variable, own) in enumerate(zip(self._variables, sites, strict=True)):
            contribution = None
            if reasons[i] is None:
                try:
                    contribution = self._contribution(variable, own, gradients, recurrent, count)
                except CannotUse as error:
                    reasons[i] = str(error)
            result.append(contribution)
        without = self._connected([i for i, why in enumerate(reasons) if why is not None])
        for i, function in zip(without, slow(without), strict=True):
            shape = self._variables[i].shape.as_list()
            result[i] = Direct(self._graph.batch, shape, "vectorised", function, as_they_are=True)
        for variable, contribution, why in zip(self._variables, result, reasons, strict=True):
            if contribution is not None:
                self._record(variable, contribution, why)
        return result

    def _record(self, variable: tf.Variable, contribution: Contribution, why: str | None) -> None:
        self.entries.append(
            Entry(
                variable.name,
                variable.shape.num_elements(),
                contribution.name if why is None else f"vectorised: {why}",
                why is None,
                contribution.work_per_row,
            )
        )

    def _connected(self, indices: Sequence[int]) -> list[int]:
        """Returns those of some variables that the loss has gradients by."""
        if not indices:
            return []
        found = tf.gradients(self._graph.terms, [self._handles[i] for i in indices])
        return [i for i, gradient in zip(indices, found, strict=True) if gradient is not None]

    def _gradients(self, sites: Sequence[Site]) -> tuple[dict, dict]:
        """Gradients of operations' outputs; and what the recurrent layers' own gradients gave.

        One backward pass. Calls of recurrent layers have their gradient function replaced
        meanwhile, by one that keeps what the weights' gradients follow from.
        """
        outputs = {}
        for site in sites:
            if site.op.name not in self._calls:
                outputs[site.op.outputs[0].ref()] = site.op.outputs[0]
        used = [self._in_cone[name] for name in self._calls]
        kept: dict[str, dict] = {}
        originals = {op.name: op._gradient_function for op in used}

        def keep_uses(op: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
            inputs, kept[op.name] = self._calls[op.name].backward(list(op.inputs), list(gradients))
            return inputs

        try:
            for op in used:
                op._gradient_function = keep_uses
            targets = [*outputs.values(), *[op.inputs[0] for op in used]]
            found = tf.gradients(self._graph.terms, targets) if targets else []
        finally:
            for op in used:
                op._gradient_function = originals[op.name]
        gradients = {
            ref: None if g is None else tf.convert_to_tensor(g)
            for ref, g in zip(outputs, found, strict=False)
        }
        return gradients, kept

    def _contribution(self, variable, sites, gradients, recurrent, count) -> Contribution | None:
        parts = []
        for site in sites:
            if site.op.name in self._calls:
                part = self._recurrent_part(site, recurrent)
            else:
                gradient = gradients[site.op.outputs[0].ref()]
                part = None if gradient is None else self._part(site, gradient, variable, count)
            if part is not None:
                part.view = site.view
                parts.append(part)
        return combine(parts, variable.shape.as_list()) if parts else None

    def _part(self, site: Site, gradient: tf.Tensor, variable, count) -> Contribution:
        use = make_use(site, gradient, variable.shape.as_list(), self._analysis, count)
        rule = rules.find_rule(site.op.type, site.weight)
        part = (rule(use) if rule else None) or rules.generic.generic(use)
        if part is None:
            raise CannotUse(f"no rule for '{site.op.name}' ({site.op.type})")
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
