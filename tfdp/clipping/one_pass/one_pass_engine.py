"""The engine for speed: one backward pass for the whole batch, norms and sums by rules."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.validation import integer
from tfdp.clipping import shared_tensors
from tfdp.clipping.clipping_problem import ClippingProblem
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.engine import (
    ClippedSum,
    ClippingEngine,
    Factors,
    TouchedRows,
    sum_error,
    sum_error_of_chunks,
)
from tfdp.clipping.loss_graph import copying, loss_reader
from tfdp.clipping.one_pass.per_example_gradients import Contribution
from tfdp.clipping.one_pass.plan import NeedsWholeModel, Plan
from tfdp.clipping.one_pass.weighted_sums import WeightedSums, cut
from tfdp.clipping.report import (
    Report,
    SlowClippingWarning,
    of_last_step,
    trace_for_report,
    vectorized_report,
)
from tfdp.clipping.vectorized import faulty_products
from tfdp.clipping.vectorized.vectorized_engine import VectorizedEngine

_Touched: TypeAlias = list[TouchedRows | None] | None
_Sums: TypeAlias = tuple[list[tf.Tensor | None], tf.Tensor, tf.Tensor, _Touched]
"""The clipped sum of each variable; of `ClippedSum`, `within_clip`, `error` and `touched`."""


class OnePassEngine(ClippingEngine):
    """Engine that clips the gradients of all examples after one backward pass for all of them.

    The gradient of the summed loss with respect to the outputs of the layers is computed once, as
    in ordinary training (ghost clipping, book-keeping). For each operation that uses weights, a
    rule computes each example's norm and, in one weighted sum, the clipped sum, from the inputs of
    the layer and these gradients.

    Formal guarantees: as `VectorizedEngine`. They rest on a proof, made from the graph, of which
    rows belong to which example. `VectorizedEngine` handles what the proof does not cover, with a
    warning. An operation that is known to mix examples is an error. `report` says which rules are
    used.

    Args:
      l2_norm_clip: See `ClippingEngine`.
      num_microbatches: See `ClippingEngine`. Microbatches are left to `VectorizedEngine`.
      clipping_rule: See `ClippingEngine`.
      rows_per_pass: Rows of one backward pass. Larger batches are divided into parts of this size,
        and the model is evaluated again for each part. None: as many as `memory_budget` allows.
      memory_budget: Bytes that the layers' outputs and their gradients may take, estimated, in a
        batch of `usual_rows`; by default a quarter of the machine's (or container's) memory on a
        CPU, at least 2 GiB, and 8 GiB on a GPU.

    Attributes:
      bytes_per_row: About how many bytes of memory each row takes in the step that was traced last;
        None: not known.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        num_microbatches: int | None = None,
        clipping_rule: ClippingRule | str = "flat",
        *,
        rows_per_pass: int | None = None,
        memory_budget: int | None = None,
    ):
        self._vectorized = VectorizedEngine(l2_norm_clip, num_microbatches, clipping_rule)
        super().__init__(l2_norm_clip, num_microbatches, clipping_rule)
        self.rows_per_pass = integer("rows_per_pass", rows_per_pass, 1, optional=True)
        self.memory_budget = integer("memory_budget", memory_budget, 1, optional=True)
        self.bytes_per_row: int | None = None
        self._report: Report | None = None
        self._warned: str | None = None

    @property
    def wide_sums(self) -> bool:
        """See `ClippingEngine`."""
        return self._vectorized.wide_sums

    @wide_sums.setter
    def wide_sums(self, wide: bool) -> None:
        self._vectorized.wide_sums = wide

    @property
    def rows_per_example(self) -> int:
        """See `ClippingEngine`."""
        return self._vectorized.rows_per_example

    @rows_per_example.setter
    def rows_per_example(self, rows: int) -> None:
        self._vectorized.rows_per_example = rows

    def clipped_sum(
        self,
        loss: tf.Tensor,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        clip: tf.Tensor | None = None,
        most_rows: int | None = None,
        masks: Sequence[tf.Tensor] | None = None,
    ) -> ClippedSum:
        """See `ClippingEngine.clipped_sum`."""
        asked = (loss, variables, seed, clip, most_rows, masks)
        self.draw_secretly(loss)
        why = self._needs_gradients(masks)
        if self.num_microbatches is not None:
            why = "Microbatches need the vectorized engine."
        if why is not None:
            self._check_leaves_tables(why)
            self._report = vectorized_report(variables, why)
            return self._vectorized.clipped_sum(*asked)
        faulty_products.check(loss.graph.get_operations())
        graph = loss_reader.read_loss(loss).averaged(self.rows_per_example)
        handles = [loss.graph.capture(variable.handle) for variable in variables]
        plan = Plan(graph, handles, variables)
        self.bytes_per_row = plan.bytes_per_row
        if plan.fallback:
            return self._left_to_vectorized(plan.fallback, *asked)
        rows, each = graph.checked_rows(), self.rows_per_example
        examples, keep = self._examples_of(rows, graph.keeps(rows))
        most_known = graph.batch[0].shape[0] or most_rows
        expected = graph.batch[0].shape[0] or self.usual_rows or most_rows
        problem = ClippingProblem(
            graph,
            variables,
            handles,
            examples,
            keep,
            self._draw_uniforms(examples, seed),
            clip,
            examples if most_rows is None else -(-most_rows // each),
            None if expected is None else -(-expected // each),
            each,
            masks,
        )
        chunk = self._chunk_rows(plan, most_known, expected)
        if chunk is not None:
            self._check_leaves_tables(
                f"A batch takes more memory than one pass may, which is of {chunk} rows: make it "
                "smaller, or raise `optimizer.clipping.memory_budget`."
            )
        touched = None
        try:
            if chunk is None:
                sums, within, error, touched = self._sums_of(problem, plan)
            else:
                if plan.has_loops:  # Raises here, not once copies of the loops were differentiated.
                    self._contributions(problem, plan)
                sums, within, error, touched = self._in_chunks(problem, plan, chunk)
        except NeedsWholeModel as reason:
            return self._left_to_vectorized(str(reason), *asked)
        return ClippedSum(
            gradients=sums,
            regularizer_gradients=graph.regularizer_gradients(handles),
            within_clip=within,
            batch=graph.batch,
            mask=graph.mask,
            error=error if self.wide_sums else None,
            touched=touched,
        )

    def _check_leaves_tables(self, why: str) -> None:
        """Raises a ValueError if there are tables whose touched rows are to be summed."""
        if self.table_rows is not None:
            raise ValueError(
                "Argument `sparse_embeddings` must be None where gradients are not clipped in one "
                f"pass. Received a model or options for which this is so: {why}"
            )

    def _left_to_vectorized(
        self, why: str, loss: tf.Tensor, variables: Sequence[tf.Variable], *asked: Any
    ) -> ClippedSum:
        self._check_leaves_tables(why)
        self._tell(vectorized_report(variables, why))
        return self._vectorized.clipped_sum(loss, variables, *asked)

    def report(self, model: Any = None) -> Report:
        """Returns which rule clips the gradients of each variable, or why none does.

        Args:
          model: A model that was built or called; it is traced with a stand-in for the loss. None:
            the training step that was traced last.

        Returns:
          The report; `print` shows it as a table.

        Raises:
          ValueError: There is no model, and no step was traced yet; or the model was never called.

        Example:
          >>> import tensorflow as tf, tfdp
          >>> model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(3)])
          >>> engine = tfdp.clipping.OnePassEngine(l2_norm_clip=1.0)
          >>> [entry.how for entry in engine.report(model).entries]
          ['matmul, norms as products of norms', 'bias']
        """
        if model is not None:
            trace_for_report(self, model)
        return of_last_step(self._report)

    def _tell(self, report: Report) -> None:
        """Keeps the report of a step, and warns of what is slow: once for all tracings."""
        self._report = report
        if report.warning is not None and report.warning != self._warned:
            self._warned = report.warning
            warnings.warn(report.warning, SlowClippingWarning, stacklevel=2)

    def _chunk_rows(
        self, plan: Plan, most_rows: int | None, expected_rows: int | None
    ) -> int | None:
        """Returns the rows of a part, if the batch must be worked on in parts."""
        if self.rows_per_pass is not None:
            known_to_fit = most_rows is not None and most_rows <= self.rows_per_pass
            return None if known_to_fit else self.rows_per_pass
        budget = self.memory_budget or devices.memory_budget()
        chunk = max(1, budget // max(1, self.bytes_per_row or 0))
        return chunk if expected_rows is not None and expected_rows > chunk else None

    def _sums_of(self, problem: ClippingProblem, plan: Plan) -> _Sums:
        """Returns the clipped sums of a loss that is computed at once."""
        contributions, report = self._contributions(problem, plan)
        if self.table_rows is not None:
            contributions = self.table_rows.of(contributions)
        present = [c for c in contributions if c is not None]
        places = [i for i, c in enumerate(contributions) if c is not None]
        blocks = self._blocks(problem.variables)
        masks = None if problem.masks is None else [problem.masks[i] for i in places]
        found, factors = self._clipped_sums(problem, present, [blocks[i] for i in places], masks)
        within = tf.zeros([]) if factors is None else factors.within_clip
        self._tell(report())
        sums = iter(found)
        terms = [c.sum_terms() for c in present]
        of_row = tf.reduce_max([1, *[number for number, _ in terms]])
        # The largest possible number of examples, because the actual number is private.
        most = problem.most_examples
        additions = tf.cast(most, tf.float64) * tf.cast(of_row, tf.float64)
        error = sum_error(additions, most, max([1.0, *[share for _, share in terms]]))
        touched = None
        if self.table_rows is not None and factors is not None:
            counts = tf.logical_and(problem.mask, tf.logical_not(factors.bad))
            touched = self.table_rows.touched(contributions, counts)
        return [None if c is None else next(sums) for c in contributions], within, error, touched

    def _contributions(
        self, problem: ClippingProblem, plan: Plan
    ) -> tuple[list[Contribution | None], Callable[[], Report]]:
        slow = self._slow_gradients(problem)
        return plan.contributions(problem.rows, slow, problem.rows_per_example)

    def _in_chunks(self, problem: ClippingProblem, plan: Plan, chunk: int) -> _Sums:
        """Sums as `_sums_of` does, part by part; the loss is computed again for each part."""
        whole, each = cast(loss_reader.LossGraph, problem.graph), problem.rows_per_example
        examples, limit = problem.examples, max(1, chunk // each)
        count = (examples + limit - 1) // limit
        size = (examples + count - 1) // tf.maximum(count, 1)
        connected = [False] * len(problem.variables)  # Told by the trace of the loop.

        def body(
            index: tf.Tensor, sums: list, within: tf.Tensor, error: tf.Tensor
        ) -> tuple[tf.Tensor, list, tf.Tensor, tf.Tensor]:
            start = tf.minimum(index * size, examples - size)
            keep = cut(problem.mask, start, size)
            graph = whole.at([cut(tensor, start * each, size * each) for tensor in whole.tensors])
            here = tf.compat.v1.get_default_graph()
            part = dataclasses.replace(
                problem,
                graph=graph,
                handles=[copying.bring(handle, here) for handle in problem.handles],
                examples=size,
                mask=tf.logical_and(keep, start + tf.range(size) >= index * size),
                uniforms=cut(problem.uniforms, start, size),
                expected_examples=limit,
            )
            # The same operations: as proven as the whole.
            part_plan = Plan(graph, part.handles, part.variables, whole=plan)
            new, more, lost, _ = self._sums_of(part, part_plan)
            connected[:] = [n is not None for n in new]
            sums = [
                s if n is None else s + tf.cast(n, s.dtype) for s, n in zip(sums, new, strict=True)
            ]
            return index + 1, sums, within + more, tf.maximum(error, lost)

        start = [0, problem.zeros(self.wide_sums), 0.0, tf.zeros([], tf.float64)]
        _, sums, within, error = tf.while_loop(
            lambda index, *_: index < count, body, start, parallel_iterations=1
        )
        sums = [s if yes else None for s, yes in zip(sums, connected, strict=True)]
        # The bound for all examples covers those of every part: their terms are fewer.
        parts = (problem.most_examples + limit - 1) // limit
        return sums, within, sum_error_of_chunks(error, parts), None

    def _slow_gradients(self, problem: ClippingProblem) -> Callable:
        """Returns a function for variables without a rule: gradients by example, vectorized.

        It takes the indices of such variables, and returns functions that give their gradients,
        `[n, ...]`, of n rows of the batch. The model is evaluated once for all of them.
        """

        def of_variables(indices: Sequence[int]) -> list[Callable[..., tf.Tensor]]:
            of_these = dataclasses.replace(
                problem,
                variables=[problem.variables[i] for i in indices],
                handles=[problem.handles[i] for i in indices],
            )

            def together(batch: list[tf.Tensor]) -> list[tf.Tensor]:
                return self._vectorized.gradients_of_rows(of_these, batch)

            def of_one(place: int) -> Callable[..., tf.Tensor]:
                def function(*batch: tf.Tensor) -> tf.Tensor:
                    key = ("vectorized", *indices, *[t.ref() for t in batch])
                    return shared_tensors.shared(key, lambda: together(list(batch)))[place]

                return function

            return [of_one(place) for place in range(len(indices))]

        return of_variables

    def _clipped_sums(
        self,
        problem: ClippingProblem,
        contributions: list[Contribution],
        block_of: list[int],
        masks: list[tf.Tensor] | None,
    ) -> tuple[list[tf.Tensor], Factors | None]:
        """Returns the clipped sum of each variable, and the factors; None if there is no variable.

        With masks, each variable is a block of its own for the sums: its factor is that of the
        rule's block, times its mask.
        """
        if not contributions:
            return [], None
        own_blocks = block_of if masks is None else list(range(len(contributions)))

        def factors_of(
            squares: Sequence[tf.Tensor],
            blocks: Sequence[int],
            keep: tf.Tensor,
            uniforms: tf.Tensor,
        ) -> Factors:
            if masks is None:
                return self._factors(squares, blocks, keep, problem.clip, uniforms)
            # A square that is not finite stays so: the example does not count.
            squares = [s * tf.cast(masks[i], s.dtype) for s, i in zip(squares, blocks, strict=True)]
            rule_blocks = [block_of[i] for i in blocks]
            factors = self._factors(squares, rule_blocks, keep, problem.clip, uniforms)
            return _by_variable(factors, block_of, masks)

        sums, factors = WeightedSums(contributions, own_blocks, self.wide_sums).compute(
            problem.mask, problem.examples, problem.uniforms, factors_of, problem.expected_examples
        )
        totals = [c.view.pull_back(s) for c, s in zip(contributions, sums, strict=True)]
        return totals, factors


def _by_variable(factors: Factors, block_of: list[int], masks: list[tf.Tensor]) -> Factors:
    """Returns factors of which each variable has its own: that of its block, times its mask."""
    own = tf.gather(factors.by_block, block_of, axis=1)
    own *= tf.cast(tf.stack(masks), own.dtype)
    return dataclasses.replace(factors, by_block=own, block_of=list(range(len(masks))))
