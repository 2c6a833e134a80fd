"""Base class of losses over the batch, for private steps."""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping.engine import ClippedSum, ClippingEngine


class BatchLoss(abc.ABC):
    """Base class of losses that clip by themselves, such as `tfdp.clipping.TwoTermLoss`.

    Attributes:
      batch: Nested tensors whose rows are the examples `[rows, ...]`.
      mask: Which rows are examples, bool `[rows]`, or None.
      aggregation: How the gradients are added up; the same for all replicas.
    """

    batch: Sequence[Any]
    mask: tf.Tensor | None
    aggregation: Any

    @abc.abstractmethod
    def batch_alone(self) -> ClippedSum:
        """Returns the batch as that of a clipped sum which is not computed yet."""

    @abc.abstractmethod
    def clipped_sum(
        self,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None = None,
        empty: tf.Tensor | None = None,
    ) -> ClippedSum:
        """Sums clipped gradients, so that `1 / expected_batch_size` of the sum is the update.

        See `tfdp.clipping.TwoTermLoss.clipped_sum`.
        """
