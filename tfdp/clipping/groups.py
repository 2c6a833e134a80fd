"""Groups of examples, and the gradients of a loss of each group."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping import batch_state, loss_graph
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.clipping.two_term_loss import TwoTermLoss, check_own_data
from tfdp.clipping.vectorized import VectorizedClipping


def draw_groups(
    loss: TwoTermLoss, seed: tf.Tensor, num_groups: int, capacity: int
) -> tuple[Any, tf.Tensor]:
    """Every example draws its group on its own, uniformly.

    An example that is added moves no other one to another group. A group that more than `capacity`
    examples drew keeps the first of them: what it keeps is a function of the group alone, too.

    Args:
      loss: The loss, whose batch is to be grouped.
      seed: Secret seed, int64 `[2]`.
      num_groups: Number of groups, m.
      capacity: Most examples of a group, n.

    Returns:
      The batch, `[m, n, ...]`, zeros where no example is; and bool `[m, n]`, where one is.
    """
    rows = tf.shape(tf.nest.flatten(loss.batch)[0])[0]
    mask = tf.ones([rows], tf.bool) if loss.mask is None else loss.mask
    drawn = tf.random.stateless_uniform([rows], seed, 0, num_groups, tf.int32)
    is_member = tf.logical_and(drawn[:, tf.newaxis] == tf.range(num_groups), mask[:, tf.newaxis])
    count = tf.cast(is_member, tf.int32)
    place = tf.reduce_sum(count * (tf.cumsum(count, axis=0) - 1), axis=1)
    keep = tf.logical_and(mask, place < capacity)
    slots = num_groups * capacity
    slot = tf.where(keep, drawn * capacity + place, slots)
    row_of = tf.math.unsorted_segment_max(tf.range(rows), slot, slots + 1)[:slots]
    taken = row_of >= 0

    def grouped(tensor: tf.Tensor) -> tf.Tensor:
        values = _existing(tf.gather(tensor, tf.maximum(row_of, 0)), taken)
        shape = tf.concat([[num_groups, capacity], tf.shape(values)[1:]], 0)
        return tf.ensure_shape(tf.reshape(values, shape), [num_groups, capacity, *values.shape[1:]])

    batch = tf.nest.map_structure(grouped, tuple(loss.batch))
    return batch, tf.reshape(taken, [num_groups, capacity])


def one_group(loss: TwoTermLoss) -> tuple[Any, tf.Tensor]:
    """The whole batch as the only group: as `draw_groups`."""
    rows = tf.shape(tf.nest.flatten(loss.batch)[0])[0]
    mask = tf.ones([rows], tf.bool) if loss.mask is None else loss.mask
    batch = tf.nest.map_structure(lambda t: _existing(t, mask)[tf.newaxis], tuple(loss.batch))
    return batch, mask[tf.newaxis]


def _existing(tensor: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
    """Zeros in the rows that are no examples: nobody else's data may be there."""
    there = tf.reshape(there, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(there, tensor, tf.zeros([], tensor.dtype))


def clipped_group_sum(
    function: Callable[..., tf.Tensor],
    batch: Any,
    mask: tf.Tensor,
    variables: Sequence[tf.Variable],
    clip: float,
    rule: ClippingRule | str = "flat",
) -> list[tf.Tensor | None]:
    """The sum of the clipped gradients of the losses of groups.

    Args:
      function: Gets the tensors of a group and its mask; returns a scalar. See `TwoTermLoss`.
      batch: The groups, `[m, n, ...]`.
      mask: Where they have examples, bool `[m, n]`. Groups without any contribute nothing.
      variables: The trainable variables.
      clip: Largest l2 norm of a group's gradient, over all variables together.
      rule: How it is clipped.

    Returns:
      For each variable the sum, or None where the loss does not depend on it.

    Raises:
      ValueError: `function` does not return a scalar, or uses data that are not its arguments.
    """
    count = mask.shape[0]
    traced = _GroupLoss.trace(function, batch, mask)
    handles = [traced.graph.terms[0].graph.capture(variable.handle) for variable in variables]
    sums, connected, _ = VectorizedClipping(clip, None, rule).sum_over_chunks(
        traced, handles, variables, tf.reduce_any(mask, axis=1), tf.zeros([count], tf.int32), count
    )
    return [s if is_connected else None for s, is_connected in zip(sums, connected, strict=True)]


@dataclasses.dataclass(frozen=True)
class _GroupLoss:
    """The loss of groups, in the place where an engine expects that of rows.

    Attributes:
      graph: The loss of one group.
      batch: The groups, `[m, n, ...]`.
    """

    graph: loss_graph.LossGraph
    batch: list[tf.Tensor]

    @classmethod
    def trace(cls, function: Callable[..., tf.Tensor], batch: Any, mask: tf.Tensor) -> "_GroupLoss":
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), (batch, mask))
        concrete = tf.function(
            lambda batch, mask: function(*batch, mask), autograph=False
        ).get_concrete_function(*specs)
        result = concrete.outputs[0] if len(concrete.outputs) == 1 else None
        if result is None or result.shape.rank != 0:
            raise ValueError(
                "Argument `batch_wise` must return a scalar, the loss of a group. Received: "
                f"{concrete.structured_outputs}."
            )
        groups = tf.nest.flatten([batch, mask])
        own = concrete.inputs[: len(groups)]
        check_own_data("batch_wise", result, own)
        refs = {tensor.ref() for tensor in own}
        batch_state.check(concrete.graph, lambda t: loss_graph.depends_on(t, refs))
        graph = loss_graph.LossGraph(
            terms=[result], vectors=[], regularizer=None, batch=list(own), mask=None
        )
        return cls(graph, groups)

    def evaluate(self, row: Sequence[tf.Tensor]) -> tf.Tensor:
        """The loss of the group that is the only row of `[1, n, ...]`."""
        several = self.batch[-1].shape[0] != 1
        group = [tensor[0] for tensor in row]
        return self.graph.at(group, vectorizable_gradients=several).terms[0]

    def has_operation(self, types: frozenset[str]) -> bool:
        """See `LossGraph.has_operation`."""
        return self.graph.has_operation(types)
