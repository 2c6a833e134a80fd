"""Groups of examples, and the gradients of a loss of each group."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.validation import error
from tfdp.clipping import function_checks, replica_sync
from tfdp.clipping.clipping_problem import ClippingProblem
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.engine import random_parts
from tfdp.clipping.loss_graph import loss_reader
from tfdp.clipping.vectorized.vectorized_engine import VectorizedEngine


def draw_groups(
    rows: Sequence[Any], mask: tf.Tensor | None, seed: tf.Tensor, num_groups: int, capacity: int
) -> tuple[Any, tf.Tensor]:
    """Draws a group for each example, independently and uniformly.

    An example that is added moves no other one to another group. A group that more than `capacity`
    examples drew keeps the first of them: what it keeps is a function of the group alone, too.

    Args:
      rows: Tensors of the batch, `[rows, ...]`, nested.
      mask: Mask of the rows that are examples, bool `[rows]`; None if all are.
      seed: Secret key, int64 `[5]` or `[2]`.
      num_groups: Number of groups, m.
      capacity: Most examples of a group, n.

    Returns:
      The batch, `[m, n, ...]`, zeros where no example is; and bool `[m, n]`, where one is.
    """
    count = tf.shape(tf.nest.flatten(rows)[0])[0]
    mask = tf.ones([count], tf.bool) if mask is None else mask
    drawn = random_parts(seed, count, num_groups)
    is_member = tf.logical_and(drawn[:, tf.newaxis] == tf.range(num_groups), mask[:, tf.newaxis])
    member = tf.cast(is_member, tf.int32)
    place = tf.reduce_sum(member * (tf.cumsum(member, axis=0) - 1), axis=1)
    keep = tf.logical_and(mask, place < capacity)
    slots = num_groups * capacity
    slot = tf.where(keep, drawn * capacity + place, slots)
    row_of = tf.math.unsorted_segment_max(tf.range(count), slot, slots + 1)[:slots]
    taken = row_of >= 0

    def grouped(tensor: tf.Tensor) -> tf.Tensor:
        values = _existing(tf.gather(tensor, tf.maximum(row_of, 0)), taken)
        shape = tf.concat([[num_groups, capacity], tf.shape(values)[1:]], 0)
        return tf.ensure_shape(tf.reshape(values, shape), [num_groups, capacity, *values.shape[1:]])

    return tf.nest.map_structure(grouped, tuple(rows)), tf.reshape(taken, [num_groups, capacity])


def draw_groups_of_replica(
    rows: Sequence[Any], mask: tf.Tensor | None, seed: tf.Tensor, num_groups: int, capacity: int
) -> tuple[Any, tf.Tensor]:
    """Draws the groups of a step, and returns those whose gradients this replica computes.

    Under a distribution strategy, the examples of all replicas are drawn into `num_groups` groups,
    by the seed of the first replica: as in `draw_groups` of the whole batch. Each replica gets some
    of these groups, and every group is some replica's.

    Args:
      rows: This replica's rows, see `draw_groups`.
      mask: Likewise. A row that is no example must be excluded.
      seed: Likewise.
      num_groups: Number of groups of all replicas together, m.
      capacity: See `draw_groups`.

    Returns:
      This replica's groups, as `draw_groups` returns them.

    Raises:
      ValueError: There are fewer groups than replicas.
    """
    replicas = devices.replicas()
    if replicas == 1:
        return draw_groups(rows, mask, seed, num_groups, capacity)
    if num_groups < replicas:
        raise error(
            "num_groups",
            f"at least the number of replicas, {replicas}: they share groups out",
            num_groups,
        )
    # Each replica's own tensors, even if all were given the same rows.
    flat = [tf.identity(tensor) for tensor in tf.nest.flatten(tuple(rows))]
    mask = tf.ones([tf.shape(flat[0])[0]], tf.bool) if mask is None else tf.identity(mask)
    ends = [replica * num_groups // replicas for replica in range(replicas + 1)]

    def draw(seeds: Sequence[tf.Tensor], *per_replica: Sequence[tf.Tensor]) -> list:
        *whole, kept = [tf.concat(parts, axis=0) for parts in per_replica]
        batch, there = draw_groups(whole, kept, seeds[0], num_groups, capacity)
        return [
            tf.nest.map_structure(lambda t: t[start:end], (*batch, there))  # noqa: B023
            for start, end in itertools.pairwise(ends)
        ]

    *own, there = replica_sync.once(draw, seed, *flat, mask)[replica_sync.index()]
    return tf.nest.pack_sequence_as(tuple(rows), own), there


def one_group(rows: Sequence[Any], mask: tf.Tensor | None) -> tuple[Any, tf.Tensor]:
    """Returns the whole batch as the only group: as `draw_groups`."""
    if mask is None:
        mask = tf.ones([tf.shape(tf.nest.flatten(rows)[0])[0]], tf.bool)
    kept = tf.nest.map_structure(lambda t: _existing(t, mask)[tf.newaxis], tuple(rows))
    return kept, mask[tf.newaxis]


def _existing(tensor: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
    """Replaces rows that are not examples by zeros, so that they hold nobody's data."""
    there = tf.reshape(there, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(there, tensor, tf.zeros([], tensor.dtype))


def clipped_group_sum(
    function: Callable[..., tf.Tensor],
    batch: Any,
    mask: tf.Tensor,
    variables: Sequence[tf.Variable],
    clip: float,
    clipping_rule: ClippingRule | str = "flat",
) -> list[tf.Tensor | None]:
    """Returns the sum of the clipped gradients of the losses of groups.

    Args:
      function: Gets the tensors of a group and its mask; returns a scalar. See `TwoTermLoss`.
      batch: The groups, `[m, n, ...]`.
      mask: Mask of their examples, bool `[m, n]`. Groups without any contribute nothing.
      variables: The trainable variables.
      clip: Largest l2 norm of a group's gradient, over all variables together.
      clipping_rule: Clipping rule of a group's gradient.

    Returns:
      For each variable the sum, or None where the loss does not depend on it.

    Raises:
      ValueError: `function` does not return a scalar, or uses data that are not its arguments.
    """
    traced = _GroupLoss.trace(function, batch, mask, variables)
    handles = [traced.graph.terms[0].graph.capture(variable.handle) for variable in variables]
    problem = ClippingProblem(
        traced, variables, handles, mask.shape[0], tf.reduce_any(mask, axis=1)
    )
    sums, connected, _ = VectorizedEngine(clip, None, clipping_rule).sum_over_chunks(problem)
    return [s if is_connected else None for s, is_connected in zip(sums, connected, strict=True)]


@dataclasses.dataclass(frozen=True)
class _GroupLoss:
    """The loss of groups, in the place where an engine expects that of rows.

    Attributes:
      graph: The loss of one group.
      tensors: The groups, `[m, n, ...]`.
    """

    graph: loss_reader.LossGraph
    tensors: list[tf.Tensor]

    @classmethod
    def trace(
        cls,
        function: Callable[..., tf.Tensor],
        batch: Any,
        mask: tf.Tensor,
        variables: Sequence[tf.Variable],
    ) -> "_GroupLoss":
        def of_group(batch: tuple, mask: tf.Tensor) -> tf.Tensor:
            value = function(*batch, mask)
            if not tf.is_tensor(value) or value.shape.rank != 0:
                raise ValueError(
                    "Argument `batch_wise` must return a scalar, the loss of a group. Received: "
                    f"{value}."
                )
            # Only to see what the gradient uses: that of a custom gradient may be anything.
            tf.gradients(value, [variable.handle for variable in variables])
            return value

        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), (batch, mask))
        concrete = function_checks.trace("batch_wise", of_group, specs)
        groups = tf.nest.flatten([batch, mask])
        graph = loss_reader.LossGraph(
            terms=[concrete.outputs[0]],
            vectors=[],
            regularizer=None,
            batch=list(concrete.inputs[: len(groups)]),
            mask=None,
        )
        return cls(graph, groups)

    def evaluate(self, row: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss of the group that is the only row of `[1, n, ...]`."""
        several = self.tensors[-1].shape[0] != 1
        group = [tensor[0] for tensor in row]
        return self.graph.at(group, vectorizable_gradients=several).terms[0]

    def has_operation(self, types: frozenset[str]) -> bool:
        """See `LossGraph.has_operation`."""
        return self.graph.has_operation(types)
