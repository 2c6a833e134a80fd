"""Baselines for losses with a batch-wise term: micro and batch aggregation.

Both are correct, and need more noise than `tfdp.clipping.TermWiseAggregation`.
"""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.batch_losses.aggregations import NAMED, check_mask, clipped_sample_sum
from tfdp.clipping.batch_losses.example_groups import clipped_group_sum, one_group
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss, split_key
from tfdp.clipping.clipping_problem import ClippingProblem
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.loss_graph import loss_reader
from tfdp.clipping.vectorized.vectorized_engine import VectorizedEngine


@dataclasses.dataclass(frozen=True)
class MicroAggregation(Aggregation):
    """Baseline that clips each example's gradient of f + g(X), with the noise that this needs.

    An example affects all clipped gradients, through g: in a batch with n - 1 others it moves each
    of theirs by up to 2C, and adds its own. As n is at most the number of rows of the largest
    batch, the sensitivity is `(2 rows - 1) C`: the update's noise does not shrink as the batch
    grows. Without g, this is DP-SGD.

    References:
      - Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation,
        Proposition 2. (B C there, for a replaced example, half of what it can be.)
    """

    def sensitivity(self, l2_norm_clip: float, rows: int | tf.Tensor) -> float | tf.Tensor:
        """Returns how far an example moves the sum, under zero-out.

        Args:
          l2_norm_clip: The clip C.
          rows: The most examples that a batch can have.
        """
        if isinstance(rows, tf.Tensor):
            rows = tf.cast(rows, tf.float32)
        return (2 * rows - 1) * l2_norm_clip

    def is_shared(self, loss: TwoTermLoss) -> bool:
        """See `Aggregation.is_shared`: g(X) needs the whole batch."""
        return loss.batch_wise is None

    def clipped_sum(
        self,
        loss: TwoTermLoss,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None,
    ) -> ClippedSum:
        """See `TwoTermLoss.clipped_sum`."""
        row_seed, rule_seed = split_key(seed, 2)
        rows = loss.with_draws(row_seed)
        if loss.batch_wise is None:
            return clipped_sample_sum(loss, rows, engine, variables, rule_seed, most_rows)
        whole = one_group(rows, loss.mask)
        common = clipped_group_sum(loss.batch_wise, *whole, variables, math.inf)
        vectorized = VectorizedEngine(engine.l2_norm_clip, None, engine.clipping_rule)
        shared = [
            tf.zeros(v.shape) if c is None else c for c, v in zip(common, variables, strict=True)
        ]
        found: dict[str, list[bool]] = {}

        def compute(total: tf.Tensor, *shared: tf.Tensor) -> tuple:
            graph = loss_reader.read_loss(total)
            check_mask(graph.mask is not None, loss)
            handles = [total.graph.capture(variable.handle) for variable in variables]
            count = graph.checked_rows()
            problem = ClippingProblem(graph, variables, handles, count, graph.keeps(count))
            sums, found["connected"], within = vectorized.sum_over_chunks(problem, common=shared)
            return sums, graph.regularizer_gradients(handles), within, count

        sums, regularizer_gradients, within, count = loss.in_function_of_rows(
            rows, compute, *shared
        )
        moved = self.sensitivity(engine.l2_norm_clip, count if most_rows is None else most_rows)
        return ClippedSum(
            gradients=[
                s if own or c is not None else None
                for s, own, c in zip(sums, found["connected"], common, strict=True)
            ],
            regularizer_gradients=regularizer_gradients,
            within_clip=within,
            batch=loss.data,
            mask=loss.data_mask,
            noise_scales=[moved] * len(variables),
        )


@dataclasses.dataclass(frozen=True)
class BatchAggregation(Aggregation):
    """Baseline that clips the gradient of the whole batch's loss, with the noise that it needs.

    The sensitivity of an update is 2C for any size of the batch: there is nothing to average the
    noise over.

    References:
      - Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation,
        section 3.1. (C there, half of what an example can do.)
    """

    def sensitivity(self, l2_norm_clip: float) -> float:
        """Returns how far an example moves the clipped gradient of the batch: 2C."""
        return 2 * l2_norm_clip

    def clipped_sum(
        self,
        loss: TwoTermLoss,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None,
    ) -> ClippedSum:
        """See `TwoTermLoss.clipped_sum`."""

        def of_batch(*arguments: tf.Tensor) -> tf.Tensor:
            *batch, mask = arguments
            losses = loss.sample_wise(*batch)
            loss.public_regularizer()  # Raises if, after the model was called, it is not public.
            total = tf.reduce_sum(tf.where(mask, losses, tf.zeros_like(losses)))
            total = total / expected_batch_size
            return total if loss.batch_wise is None else total + loss.batch_wise(*batch, mask)

        batch, mask = one_group(loss.with_draws(seed), loss.mask)
        sums = clipped_group_sum(
            of_batch, batch, mask, variables, engine.l2_norm_clip, engine.clipping_rule
        )
        moved = expected_batch_size * self.sensitivity(engine.l2_norm_clip)
        public = [None] * len(variables)
        if loss.regularizer is not None:
            handles = [v.handle for v in variables]
            public = tf.gradients(loss.public_regularizer(), handles)
        return ClippedSum(
            gradients=[None if s is None else expected_batch_size * s for s in sums],
            regularizer_gradients=public,
            within_clip=tf.constant(0.0),
            batch=loss.data,
            mask=loss.data_mask,
            noise_scales=[moved] * len(variables),
        )


NAMED.update(micro=MicroAggregation, batch=BatchAggregation)
