"""Engine for any model: each example's gradient by itself, vectorized."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.tf import op_types
from tfdp.base.validation import error, integer
from tfdp.clipping import norms
from tfdp.clipping.clipping_problem import ClippingProblem, RowLoss
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.engine import ClippedSum, ClippingEngine, random_parts, sum_error
from tfdp.clipping.loss_graph import copying, loss_reader
from tfdp.clipping.report import Report, of_last_step, vectorized_report
from tfdp.clipping.vectorized import faulty_products
from tfdp.clipping.vectorized.mapping import vectorized_map

# Bytes of the per-example gradients that are computed at once: as much as a cache holds.
# More is slower.
_GRADIENT_BYTES = 16 * 2**20
# Large models: still some rows at a time, in memory that a machine surely has.
_FEWEST_ROWS, _MOST_BYTES = 16, 512 * 2**20
# Operations that `tf.vectorized_map` cannot convert where they come with loops (LSTM, GRU).
_LOOP_TYPES = op_types.LOOPS | {"Scan"}
# Operations whose results have a length that depends on an example's values, so that those of
# several examples do not form a tensor; and branches, whose gradients `tf.vectorized_map` cannot
# convert.
_ROW_BY_ROW_TYPES = (
    op_types.BRANCHES
    | op_types.CASES
    | {"DynamicPartition", "ListDiff", "RaggedGather", "RaggedRange", "RaggedTensorToSparse"}
    | {"SparseCross", "SparseCrossHashed", "SparseCrossV2", "SparseFillEmptyRows", "SparseReshape"}
    | {"StringNGrams", "StringSplit", "StringSplitV2", "UnicodeDecode", "UnicodeDecodeWithOffsets"}
    | {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where"}
)
# A report's reason for all variables.
_WHY = 'engine="vectorized"'


class VectorizedEngine(ClippingEngine):
    """Engine that instantiates the gradient of every example, and clips it.

    The traced loss is evaluated on one row at a time, vectorized over rows with a
    `tf.vectorized_map` that keeps them apart (`mapping`). This is done chunk by chunk, so that the
    gradients of all examples are never in memory together. Models with loops (LSTM, GRU), branches,
    or texts that are split into words are evaluated row by row.

    Formal guarantees:
      * An example's contribution is a function of that example and the weights alone.
      * Its norm is at most `l2_norm_clip`, as computed norms are upper bounds
        (`tfdp.clipping.norms`). A non-finite gradient, or that of a lookup outside its table,
        contributes nothing.
      * Rows that the batch's boolean mask excludes contribute nothing.

    Args:
      l2_norm_clip: See `ClippingEngine`.
      num_microbatches: See `ClippingEngine`. Every example draws its microbatch independently and
        uniformly. Microbatches of consecutive rows would all change when one example is added.
      clipping_rule: See `ClippingEngine`.
      rows_per_pass: Rows that are computed at the same time; by default a number whose gradients
        take about 16 MB.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        num_microbatches: int | None = None,
        clipping_rule: ClippingRule | str = "flat",
        rows_per_pass: int | None = None,
    ):
        super().__init__(l2_norm_clip, num_microbatches, clipping_rule)
        self.rows_per_pass = integer("rows_per_pass", rows_per_pass, 1, optional=True)
        self._report: Report | None = None

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
        self.draw_secretly(loss)
        faulty_products.check(loss.graph.get_operations())
        graph = loss_reader.read_loss(loss).averaged(self.rows_per_example)
        self._report = vectorized_report(variables, _WHY)
        handles = [loss.graph.capture(variable.handle) for variable in variables]
        rows, each = graph.checked_rows(), self.rows_per_example
        examples, keep = self._examples_of(rows, graph.keeps(rows))
        most = examples if most_rows is None else -(-most_rows // each)
        microbatches = random_parts(seed, examples, self.num_microbatches or 1)
        uniforms = self._draw_uniforms(self.num_microbatches or examples, seed)
        problem = ClippingProblem(
            graph,
            variables,
            handles,
            examples,
            keep,
            uniforms,
            clip,
            rows_per_example=each,
            masks=masks,
            seed=seed,
        )
        sums, connected, within = self.sum_over_chunks(problem, microbatches)
        if self.num_microbatches is not None:
            sizes = tf.math.unsorted_segment_sum(
                tf.cast(problem.mask, tf.float32), microbatches, self.num_microbatches
            )
            means = [_scale(s, 1 / tf.maximum(sizes, 1)) for s in sums]
            everyone = tf.ones_like(sizes, tf.bool)
            means = self._prepared(means, problem, self._perturbation_keys(problem, 1), 0)
            means, within = self._clip(means, variables, everyone, clip, uniforms)
            sums = [tf.reduce_sum(mean, axis=0) for mean in means]
        return ClippedSum(
            gradients=[
                s if is_connected else None for s, is_connected in zip(sums, connected, strict=True)
            ],
            regularizer_gradients=graph.regularizer_gradients(handles),
            within_clip=within,
            batch=graph.batch,
            mask=graph.mask,
            error=sum_error(most, most, 1.0) if self.wide_sums else None,
        )

    def sum_over_chunks(
        self,
        problem: ClippingProblem,
        microbatches: tf.Tensor | None = None,
        common: Sequence[tf.Tensor] | None = None,
    ) -> tuple[list[tf.Tensor], list[bool], tf.Tensor]:
        """Adds up the clipped gradients; with microbatches, per microbatch and not yet clipped.

        Args:
          problem: The batch.
          microbatches: The microbatch of each example, int32 `[examples]`, where there are some.
          common: For each variable what to add to every example's gradient before it is clipped.

        Returns:
          The sums; whether the loss depends on each variable; and `ClippedSum.within_clip`.

        Raises:
          ValueError: The rule is random, and there are no random numbers.
        """
        graph, variables, examples = problem.graph, problem.variables, problem.examples
        if problem.uniforms is None and self.clipping_rule.is_random:
            raise error(
                "clipping_rule",
                "not random where no random numbers are drawn for it",
                self.clipping_rule,
            )
        clips_examples, each = self.num_microbatches is None, problem.rows_per_example
        lead = [] if self.num_microbatches is None else [self.num_microbatches]
        zeros = problem.zeros(self.wide_sums and clips_examples, lead)
        limit = max(1, self._largest_chunk(graph, variables) // each)
        num_chunks = (examples + limit - 1) // limit
        chunk = (examples + num_chunks - 1) // tf.maximum(num_chunks, 1)
        padding = num_chunks * chunk - examples

        def pad(tensor: tf.Tensor, rows: int = 1) -> tf.Tensor:
            return tf.pad(tensor, [[0, padding * rows], *[[0, 0]] * (tensor.shape.rank - 1)])

        batch = [pad(tensor, each) for tensor in graph.tensors]
        mask = pad(problem.mask)
        if microbatches is None:
            microbatches = tf.zeros([examples], tf.int32)
        microbatches = pad(microbatches)
        are_drawn = clips_examples and problem.uniforms is not None
        uniforms = pad(problem.uniforms if are_drawn else tf.zeros([examples]))
        connected = [False] * len(variables)
        keys = self._perturbation_keys(problem, num_chunks) if clips_examples else None

        def add_chunk(index: tf.Tensor, sums: list, within: tf.Tensor) -> tuple:
            start = index * chunk

            def cut(tensor: tf.Tensor, rows: int = 1) -> tf.Tensor:
                size = tf.concat([[chunk * rows], tf.shape(tensor)[1:]], axis=0)
                begin = tf.pad([start * rows], [[0, tensor.shape.rank - 1]])
                piece = tf.slice(tensor, begin, size)
                return tf.ensure_shape(piece, [None, *tensor.shape[1:]])

            piece = [cut(tensor, each) for tensor in batch]
            gradients = self.gradients_of_rows(problem, piece, connected, one=limit * each == 1)
            if each > 1:
                gradients = [
                    tf.reduce_sum(tf.reshape(g, [-1, each, *g.shape[1:]]), axis=1)
                    for g in gradients
                ]
            if common is not None:
                gradients = [g + c for g, c in zip(gradients, common, strict=True)]
            if clips_examples:
                gradients = self._prepared(gradients, problem, keys, index)
                gradients, more = self._clip(
                    gradients, variables, cut(mask), problem.clip, cut(uniforms)
                )
                within = within + more
                new = [tf.reduce_sum(gradient, axis=0) for gradient in gradients]
            else:
                keep = tf.logical_and(cut(mask), _finite(gradients))
                new = [
                    tf.math.unsorted_segment_sum(
                        _scale(gradient, tf.cast(keep, tf.float32)),
                        cut(microbatches),
                        self.num_microbatches,
                    )
                    for gradient in gradients
                ]
            return index + 1, [s + n for s, n in zip(sums, new, strict=True)], within

        _, sums, within = tf.while_loop(
            lambda index, *_: index < num_chunks, add_chunk, [0, zeros, 0.0], parallel_iterations=1
        )
        return sums, connected, within

    def report(self, model: Any = None) -> Report:
        """Reports as `OnePassEngine.report` does: everything is vectorized.

        Args:
          model: A model that was built. None: the training step that was traced last.

        Returns:
          The report.

        Raises:
          ValueError: There is no model, and no step was traced yet.
        """
        if model is not None:
            return vectorized_report(model.trainable_variables, _WHY)
        return of_last_step(self._report)

    def gradients_of_rows(
        self,
        problem: ClippingProblem,
        batch: list[tf.Tensor],
        connected: list[bool] | None = None,
        one: bool = False,
    ) -> list[tf.Tensor]:
        """Returns the gradients of every row, by themselves.

        Args:
          problem: Problem that the rows belong to.
          batch: The rows, as `problem.graph.tensors`.
          connected: Is told, for each variable, whether the loss depends on it.
          one: Whether there is a single row.

        Returns:
          For each variable the gradients, `[n, ...]`; zeros where the loss does not depend on it.
        """
        graph, variables = problem.graph, problem.variables
        dtypes = problem.gradient_dtypes()

        def gradient_of_row(row: list[tf.Tensor]) -> list[tf.Tensor]:
            target = tf.compat.v1.get_default_graph()
            local = [copying.bring(handle, target) for handle in problem.handles]
            loss = graph.evaluate([tf.expand_dims(tensor, 0) for tensor in row])
            gradients = tf.gradients(loss, local)
            for i, gradient in enumerate(gradients):
                if connected is not None:
                    connected[i] = gradient is not None
            return [
                tf.zeros(v.shape, dtype) if g is None else tf.cast(tf.convert_to_tensor(g), dtype)
                for g, v, dtype in zip(gradients, variables, dtypes, strict=True)
            ]

        def shaped(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # TensorFlow loses shapes, also the rank, in gradients of loops and in conversions.
            return [
                tf.ensure_shape(gradient, [None, *v.shape])
                for gradient, v in zip(gradients, variables, strict=True)
            ]

        if one:
            return shaped([g[tf.newaxis] for g in gradient_of_row([t[0] for t in batch])])
        # An example of several rows cannot be cut where the rows of a loop need to be.
        loops = _LOOP_TYPES if problem.rows_per_example > 1 else frozenset()
        if graph.has_operation(_ROW_BY_ROW_TYPES | loops):
            made = [
                tf.TensorSpec(v.shape, dtype) for v, dtype in zip(variables, dtypes, strict=True)
            ]
            return shaped(tf.map_fn(gradient_of_row, batch, fn_output_signature=made))
        try:
            with _without_conversion_warnings():
                return shaped(vectorized_map(gradient_of_row, batch))
        except (AttributeError, NotImplementedError, TypeError) as error:  # TensorFlow's own.
            raise ValueError(
                "The vectorized engine must be able to evaluate the loss for many examples at "
                "once. Received a model that TensorFlow cannot vectorize, such as one with a "
                "branch or a loop of its own (`tf.cond`, `tf.switch_case`, `tf.while_loop`, "
                "`tf.scan`): use layers without them. TensorFlow said: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _largest_chunk(
        self, graph: loss_reader.LossGraph | RowLoss, variables: Sequence[tf.Variable]
    ) -> int:
        if self.rows_per_pass is not None:
            return self.rows_per_pass
        if graph.has_operation(_LOOP_TYPES):
            return 1
        bytes_per_example = sum(v.shape.num_elements() * max(4, v.dtype.size) for v in variables)
        fewest = max(1, min(_FEWEST_ROWS, _MOST_BYTES // max(1, bytes_per_example)))
        return max(fewest, _GRADIENT_BYTES // max(1, bytes_per_example))

    def _perturbation_keys(
        self, problem: ClippingProblem, count: tf.Tensor | int
    ) -> tf.Tensor | None:
        """Returns keys of the noise on gradients, one for each part of a batch; or None."""
        if not (self.clipping_rule.perturbation and self.clips):
            return None
        if problem.seed is None:
            raise error(
                "clipping_rule",
                "one that adds no noise to gradients where no key is drawn for it",
                self.clipping_rule,
            )
        return self._draw_perturbation_keys(count, problem.seed)

    def _prepared(
        self,
        gradients: Sequence[tf.Tensor],
        problem: ClippingProblem,
        keys: tf.Tensor | None,
        part: tf.Tensor | int,
    ) -> list[tf.Tensor]:
        """Returns stacked gradients `[n, ...]` with the rule's noise, and with zeros by the masks.

        Args:
          gradients: Gradients before the clip.
          problem: The batch.
          keys: Secret keys of the noise, `[parts, 2]`; None: there is no noise.
          part: Which of the keys to use.
        """
        prepared = list(gradients)
        if keys is not None:  # The examples of a batch have independent noise.
            clip = self.l2_norm_clip if problem.clip is None else problem.clip
            stddev = self.clipping_rule.perturbation * clip
            sizes = [tf.size(gradient) for gradient in prepared]
            noises = tf.split(
                chacha.normals(keys[part], tf.add_n(sizes), dtype=tf.float32) * stddev,
                tf.stack(sizes),
                num=len(sizes),
            )
            prepared = [
                tf.ensure_shape(g + tf.cast(tf.reshape(noise, tf.shape(g)), g.dtype), g.shape)
                for g, noise in zip(prepared, noises, strict=True)
            ]
        if problem.masks is not None:
            prepared = [
                g * tf.cast(m, g.dtype) for g, m in zip(prepared, problem.masks, strict=True)
            ]
        return prepared

    def _clip(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        keep: tf.Tensor,
        clip: tf.Tensor | None,
        uniforms: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Clips stacked gradients `[n, ...]`; those that are dropped or non-finite become zero.

        Returns:
          The gradients, with `wide_sums` in float64; and `ClippedSum.within_clip`.
        """
        squares = [
            norms.of_slices(gradient, variable.shape.num_elements())
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        factors = self._factors(squares, self._blocks(variables), keep, clip, uniforms)
        if self.wide_sums:
            gradients = [tf.cast(gradient, tf.float64) for gradient in gradients]
        clipped = [_scale(g, factors.of_variable(i)) for i, g in enumerate(gradients)]
        return clipped, factors.within_clip


@contextlib.contextmanager
def _without_conversion_warnings() -> Iterator[None]:
    """Silences `vectorized_map` on operations that it runs row by row: right, if slower."""

    def keep(record: logging.LogRecord) -> bool:
        return "uses a while_loop" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _finite(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.math.is_finite(tf.add_n([norms.of_slices(gradient, 1) for gradient in gradients]))


def _scale(stacked: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Multiplies the slices of `stacked`; a factor of zero gives zero, also for NaN."""
    factors = tf.reshape(factors, [-1] + [1] * (stacked.shape.rank - 1))
    scaled = stacked * tf.cast(factors, stacked.dtype)
    return tf.where(factors == 0, tf.zeros_like(stacked), scaled)
