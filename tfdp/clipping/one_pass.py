"""The engine for speed: one backward pass for the whole batch, norms and sums by rules."""

import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.clipping import devices, loss_graph
from tfdp.clipping.contributions import Contribution, squares_of, weighted_sum
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.plan import Plan, Report
from tfdp.clipping.vectorized import VectorizedClipping

_LOGGER = logging.getLogger("tfdp")


class OnePassClipping(ClippingEngine):
    """Clips the gradients of all examples after one backward pass for all of them.

    The gradient of the summed loss with respect to the outputs of the layers is computed once, as
    in ordinary training. What the layers saw and these gradients give each example's norm and, in
    one weighted sum, the clipped sum: by a rule for each operation that uses weights.

    Formal guarantees: as `VectorizedClipping`. They rest on a proof, made from the graph, of which
    rows belong to which example; what it does not cover is left to `VectorizedClipping`, with a
    warning; an operation that is known to mix examples is an error. `report` says what is done.

    Args:
      l2_norm_clip: See `ClippingEngine`.
      num_microbatches: See `ClippingEngine`. Microbatches are left to `VectorizedClipping`.
    """

    def __init__(self, l2_norm_clip: float, num_microbatches: int | None = None):
        super().__init__(l2_norm_clip, num_microbatches)
        self._vectorized = VectorizedClipping(l2_norm_clip, num_microbatches)
        self._plan: Plan | None = None

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(
        self, loss: tf.Tensor, variables: Sequence[tf.Variable], group_seed: tf.Tensor
    ) -> ClippedSum:
        """See `ClippingEngine.clipped_sum`."""
        if self.num_microbatches is not None:
            return self._vectorized.clipped_sum(loss, variables, group_seed)
        graph = loss_graph.read_loss(loss)
        handles = [loss.graph.capture(variable.handle) for variable in variables]
        self._plan = plan = Plan(graph, handles, variables)
        if plan.fallback:
            _LOGGER.warning("%s", plan.fallback)
            return self._vectorized.clipped_sum(loss, variables, group_seed)
        rows = graph.checked_rows()
        mask = tf.ones([rows], tf.bool) if graph.mask is None else graph.mask
        contributions = plan.contributions(rows, self._slow_gradients(graph, handles, variables))
        present = [c for c in contributions if c is not None]
        sums = iter(self._clipped_sums(present, mask, rows))
        public = [None] * len(variables)
        if graph.regularizer is not None:
            public = tf.gradients(graph.regularizer, handles)
        return ClippedSum(
            gradients=[None if c is None else next(sums) for c in contributions],
            regularizer_gradients=[None if g is None else tf.convert_to_tensor(g) for g in public],
            rows=rows,
            masked=graph.mask is not None,
        )

    def _slow_gradients(self, graph, handles, variables) -> Callable:
        """For variables without a rule: their gradients of each example, vectorised."""

        def of_variable(index: int) -> Callable[..., tf.Tensor]:
            def function(*batch: tf.Tensor) -> tf.Tensor:
                (gradients,) = self._vectorized.gradients_of_rows(
                    graph, [handles[index]], [variables[index]], list(batch)
                )
                return gradients

            return function

        return of_variable

    def _clipped_sums(
        self, contributions: list[Contribution], mask: tf.Tensor, rows: tf.Tensor
    ) -> list[tf.Tensor]:
        """The clipped sum of each variable."""
        if not contributions:
            return []
        early = {i: c.squares(c.tensors) for i, c in enumerate(contributions) if c.whole}
        if len(early) == len(contributions):
            factors, bad = self._factors(list(early.values()), mask)
            return _totals(contributions, factors, tf.reduce_any(bad))
        flats, factors, bad = self._in_parts(contributions, early, mask, rows)
        late = [c for i, c in enumerate(contributions) if i not in flats]
        totals = iter(_totals(late, factors, bad))
        return [
            c.view.pull_back(c.unflatten(flats[i])) if i in flats else next(totals)
            for i, c in enumerate(contributions)
        ]

    def _in_parts(
        self,
        contributions: list[Contribution],
        early: dict[int, tf.Tensor],
        mask: tf.Tensor,
        rows: tf.Tensor,
    ) -> tuple[dict[int, tf.Tensor], tf.Tensor, tf.Tensor]:
        """Norms and clip factors, part by part, each small enough for a processor's cache.

        The last part begins early, so that all have the same size; its first rows, which have been
        counted, are left out.

        Returns:
          Sums of those gradients that are instantiated, by index; the clip factors of all rows;
          whether the gradient of any row is not finite.
        """
        floats = sum(c.floats_per_row for i, c in enumerate(contributions) if i not in early)
        limit = max(1, devices.working_set_bytes() // (4 * max(1, floats)))
        count = (rows + limit - 1) // limit
        size = (rows + count - 1) // tf.maximum(count, 1)
        instantiated = [i for i, c in enumerate(contributions) if not (c.factored or i in early)]
        zeros = [tf.zeros([contributions[i].size]) for i in instantiated]

        def body(index, sums, factors, bad):
            start = tf.minimum(index * size, rows - size)
            flats, squares = {}, []
            for i, c in enumerate(contributions):
                if i in early:
                    squares.append(_cut(early[i], start, size))
                    continue
                tensors = [_cut(t, start, size) for t in c.tensors]
                if c.factored:
                    squares.append(c.squares(tensors))
                else:
                    flats[i] = c.flat(tensors)
                    squares.append(squares_of(flats[i]))
            new = tf.range(start, start + size) >= index * size
            part, part_bad = self._factors(squares, tf.logical_and(_cut(mask, start, size), new))
            any_bad = tf.reduce_any(part_bad)
            parts = tf.cond(
                any_bad,
                lambda: [weighted_sum(_zeroed(flats[i], part_bad), part) for i in instantiated],
                lambda: [weighted_sum(flats[i], part) for i in instantiated],
            ) if instantiated else []
            sums = [s + p for s, p in zip(sums, tf.nest.flatten(parts), strict=True)]
            places = tf.range(start, start + size)[:, tf.newaxis]
            factors = tf.tensor_scatter_nd_add(factors, places, part)
            return index + 1, sums, factors, tf.logical_or(bad, any_bad)

        _, sums, factors, bad = tf.while_loop(
            lambda index, *_: index < count,
            body,
            [0, zeros, tf.zeros([rows]), False],
            parallel_iterations=2,
        )
        return dict(zip(instantiated, sums, strict=True)), factors, bad

    def _factors(
        self, squares: Sequence[tf.Tensor], keep: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """By what to multiply each example's gradient; and whether it is not finite.

        Args:
          squares: Squared norms of the gradients of each variable, `[n]`.
          keep: Which rows are examples, bool `[n]`.
        """
        norms = tf.sqrt(tf.add_n([tf.cast(s, tf.float32) for s in squares]))
        finite = tf.math.is_finite(norms)
        factors = tf.ones_like(norms)
        if self.clips:
            factors = 1 / tf.maximum(1.0, norms / self.l2_norm_clip)
        return tf.where(tf.logical_and(finite, keep), factors, 0.0), tf.logical_not(finite)


def _cut(tensor: tf.Tensor, start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Some rows of a tensor, as many in every part."""
    rest = tensor.shape[1:]
    begin = tf.pad([start], [[0, tensor.shape.rank - 1]])
    piece = tf.slice(tensor, begin, tf.concat([[size], tf.shape(tensor)[1:]], 0))
    return tf.ensure_shape(piece, [None, *rest])


def _zeroed(tensor: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
    """Zeros in the rows that are not finite: zero times NaN would not be zero."""
    bad = tf.reshape(bad, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(bad, tf.zeros_like(tensor), tensor)


def _totals(
    contributions: list[Contribution], factors: tf.Tensor, bad: tf.Tensor
) -> list[tf.Tensor]:
    """The weighted sums of contributions, for all rows at once."""
    if not contributions:
        return []

    def totals(clean: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        return [
            c.view.pull_back(c.total([clean(t) for t in c.tensors], factors))
            for c in contributions
        ]

    # Rows with factor zero are left out; those with NaN or inf must not be multiplied either.
    return tf.nest.flatten(
        tf.cond(
            bad,
            lambda: totals(lambda tensor: _zeroed(tensor, tf.equal(factors, 0))),
            lambda: totals(lambda tensor: tensor),
        )
    )
