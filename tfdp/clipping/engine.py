"""What every clipping engine is: a clipped sum of gradients, and how far one example moves it."""

import abc
import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The result of one pass of an engine over a batch.

    Attributes:
      gradients: For each variable the sum over examples (or microbatches) of their clipped
        gradients, shaped as the variable; None where the loss of an example does not depend on
        the variable. Private until noise is added.
      regularizer_gradients: For each variable the gradient of the part of the loss that does not
        depend on data (weight regularisers), or None. Not clipped: it is public.
      rows: Number of rows of the batch, padding included: a scalar int32 tensor.
      masked: Whether a boolean mask says which rows are examples.
    """

    gradients: list[tf.Tensor | None]
    regularizer_gradients: list[tf.Tensor | None]
    rows: tf.Tensor
    masked: bool


class ClippingEngine(abc.ABC):
    """Computes sums of clipped gradients, and knows their sensitivity.

    Formal guarantee: for two batches that are neighbours, the l2 distance of the two
    `clipped_sum(...).gradients` (all variables together) is at most `sensitivity(relation)`,
    whatever the model, the loss and the data.

    Args:
      l2_norm_clip: Largest l2 norm, over all variables together, that an example's gradient (a
        microbatch's, with `num_microbatches`) keeps; infinite for no clipping.
      num_microbatches: Number of groups that a batch is split into; the mean gradient of each
        group is clipped. None: every example is on its own.
    """

    def __init__(self, l2_norm_clip: float, num_microbatches: int | None = None):
        self.l2_norm_clip = l2_norm_clip
        self.num_microbatches = num_microbatches

    def sensitivity(self, relation: str = ADD_OR_REMOVE_ONE) -> float:
        """Largest l2 distance of the clipped sums of two neighbouring batches.

        One example on its own adds a vector of norm at most C. An example that joins a group
        changes the group's mean gradient, whose clipped value can swing from one point of the
        ball of radius C to the opposite one: 2C.

        Args:
          relation: "add_or_remove_one" or "replace_one".

        Returns:
          The sensitivity, in the units of the gradient.

        Raises:
          ValueError: `relation` is not one of the two.
        """
        if relation not in (ADD_OR_REMOVE_ONE, REPLACE_ONE):
            raise ValueError(
                f"Argument `relation` must be '{ADD_OR_REMOVE_ONE}' or '{REPLACE_ONE}'. "
                f"Received: relation={relation!r}."
            )
        alone = self.num_microbatches is None
        return self.l2_norm_clip * (1 if alone and relation == ADD_OR_REMOVE_ONE else 2)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped at all."""
        return math.isfinite(self.l2_norm_clip)

    @abc.abstractmethod
    def clipped_sum(
        self, loss: tf.Tensor, variables: Sequence[tf.Variable], group_seed: tf.Tensor
    ) -> ClippedSum:
        """Sums the clipped gradients of a batch.

        Args:
          loss: Losses of the examples, `[rows]`, a symbolic tensor of the graph being built; or a
            scalar that is provably their sum plus terms that do not depend on data.
          variables: The trainable variables.
          group_seed: Secret seed, int64 `[2]`, by which examples draw their microbatch.

        Returns:
          The clipped sum and what belongs to it.

        Raises:
          ValueError: `loss` is no such tensor, or examples cannot be told apart in it.
        """
