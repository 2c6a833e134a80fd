"""A batch whose gradients are to be clipped and added up, as the engines pass it on."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tfdp.clipping.loss_graph import loss_reader


class RowLoss(Protocol):
    """A loss that can be evaluated for one row: a `loss_reader.LossGraph`, or that of groups."""

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The tensors that belong to the rows, `[rows, ...]`."""

    def evaluate(self, row: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss of a single row, a scalar."""

    def has_operation(self, types: frozenset[str]) -> bool:
        """Returns whether the loss uses an operation of one of some types."""


@dataclasses.dataclass(frozen=True)
class ClippingProblem:
    """A batch, its loss, and how its gradients are to be clipped.

    Attributes:
      graph: The loss.
      variables: The trainable variables.
      handles: Their handles in the graph of the loss.
      examples: Number of examples, an int32 scalar.
      mask: Mask of the examples that count, bool `[examples]`.
      uniforms: For each example the random number of a random rule, `[examples]`; None: there are
        none.
      clip: The clip to use in place of the engine's, a scalar; or None.
      most_examples: The most examples that there can be, for bounds on rounding.
      expected_examples: The examples for which memory is planned, if that is known.
      rows_per_example: Consecutive rows of the batch that make up one example.
      masks: See `ClippingEngine.clipped_sum`.
      seed: The step's secret key, for rules that add noise to gradients; None: there is none.
    """

    graph: loss_reader.LossGraph | RowLoss
    variables: Sequence[tf.Variable]
    handles: Sequence[tf.Tensor]
    examples: tf.Tensor | int
    mask: tf.Tensor
    uniforms: tf.Tensor | None = None
    clip: tf.Tensor | None = None
    most_examples: tf.Tensor | int = 0
    expected_examples: int | None = None
    rows_per_example: int = 1
    masks: Sequence[tf.Tensor] | None = None
    seed: tf.Tensor | None = None

    @property
    def rows(self) -> tf.Tensor | int:
        """The number of rows of the batch."""
        each = self.rows_per_example
        return self.examples if each == 1 else self.examples * each

    def gradient_dtypes(self) -> list[tf.DType]:
        """Returns the type of each variable's gradients: float32 at least."""
        return [tf.float32 if v.dtype.size < 4 else v.dtype.base_dtype for v in self.variables]

    def zeros(self, wide: bool, lead: Sequence[int] = ()) -> list[tf.Tensor]:
        """Returns zeros to which the gradients of each variable can be added.

        Args:
          wide: Whether they are of float64.
          lead: Dimensions in front of the variables' own.
        """
        dtypes = [tf.float64] * len(self.variables) if wide else self.gradient_dtypes()
        return [
            tf.zeros([*lead, *v.shape], dtype)
            for v, dtype in zip(self.variables, dtypes, strict=True)
        ]
