"""Compression of a private optimizer's gradient: fewer coordinates in each step."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdp.base.named import Named
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.validation import error, is_number
from tfdp.step import replicas


class Compression:
    """Base class of rules that set coordinates of the gradient to zero.

    Formal guarantee: what `masks` returns does not depend on the batch, and `keep` gets noisy
    gradients alone. The step therefore has the sensitivity and the cost of one without compression.

    Attributes:
      has_masks: Whether gradients are masked before the clip, and after the noise; else `keep`
        chooses among the noisy coordinates.
    """

    has_masks: ClassVar[bool] = False

    @property
    def has_memory(self) -> bool:
        """Whether what `keep` leaves out is added to the next step's gradient."""
        return False

    def masks(self, variables: Sequence[tf.Variable], step: tf.Tensor) -> list[tf.Tensor] | None:
        """Returns which coordinates the step trains: each example's gradient is zero elsewhere.

        Args:
          variables: The trainable variables.
          step: Number of the step, a scalar int64.

        Returns:
          For each variable a bool tensor, a scalar or shaped as the variable, by public numbers
          alone; or None: gradients are clipped as they are.
        """
        return None

    def keep(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns which coordinates of the noisy gradient to keep, bool tensors of their shapes."""
        return [tf.ones_like(gradient, tf.bool) for gradient in gradients]


NAMED: dict[str, type[Compression]] = {}  # `tfdp.contrib` adds its own.

_COMPRESSIONS: Named[Compression] = Named(
    "compression",
    Compression,
    NAMED,
    "a `tfdp.contrib.TopK` or `tfdp.contrib.RandomMask`, or None",
    by_name=False,
    more="tfdp.contrib",
)


def get(compression: Any) -> Compression | None:
    """Returns a compression from itself, or from what `serialize` returned."""
    return None if compression is None else _COMPRESSIONS.get(compression)


def serialize(compression: Compression | None) -> dict[str, Any] | None:
    """Returns plain values from which `get` makes the same compression."""
    return None if compression is None else _COMPRESSIONS.serialize(compression)


def check_fraction(fraction: Any) -> None:
    """Raises a ValueError unless an argument is a share of the coordinates."""
    if not (is_number(fraction) and 0 < fraction <= 1):
        raise error("fraction", "a number in (0, 1]", fraction)


class Compressor:
    """Compression of the steps of one optimizer, and its memory.

    The memory is a function of noisy gradients, as the optimizer's slots are: it is saved with
    them, and a selective update that is rejected leaves nothing in it.

    Args:
      compression: The rule.
    """

    def __init__(self, compression: Compression):
        self._compression = compression
        self._memories: dict[str, tf.Variable] = {}

    def create(
        self, add_weight: Callable[..., tf.Variable], variables: Sequence[tf.Variable]
    ) -> list[tf.Variable]:
        """Creates the memory of variables that have none, with the optimizer's `add_weight`."""
        new = [v for v in variables if _key(v) not in self._memories]
        if not self._compression.has_memory or not new:
            return []
        with plain_variables():  # Written once, for all replicas.
            created = [
                add_weight(
                    f"compression_memory_{len(self._memories) + i}",
                    shape=v.shape,
                    dtype=tf.float32 if v.dtype.size < 4 else v.dtype.base_dtype,
                    trainable=False,
                    initializer="zeros",
                )
                for i, v in enumerate(new)
            ]
        self._memories.update(zip(map(_key, new), created, strict=True))
        return created

    def masks(self, variables: Sequence[tf.Variable], step: tf.Tensor) -> list[tf.Tensor] | None:
        """See `Compression.masks`."""
        return self._compression.masks(variables, step)

    def compress(
        self,
        gradients: Sequence[tf.Tensor | None],
        variables: Sequence[tf.Variable],
        masks: Sequence[tf.Tensor] | None,
    ) -> list[tf.Tensor | None]:
        """Returns the noisy gradient with fewer coordinates, and remembers the others.

        Args:
          gradients: Noisy gradients, the same in each replica; None where there is none.
          variables: Their variables.
          masks: What `masks` returned for this step.
        """
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        present: list[Any] = [gradients[i] for i in places]
        memories = []
        if self._compression.has_memory:
            memories = [self._memories[_key(variables[i])] for i in places]
            present = [
                tf.cast(g, memory.dtype) + memory.read_value()
                for g, memory in zip(present, memories, strict=True)
            ]
        if masks is not None:
            kept = [masks[i] for i in places]
        else:
            kept = self._compression.keep(present) if present else []
        compressed: list[tf.Tensor | None] = [None] * len(gradients)
        for i, gradient, keep in zip(places, present, kept, strict=True):
            compressed[i] = tf.where(keep, gradient, tf.zeros_like(gradient))
        if memories:
            left = [
                tf.where(keep, tf.zeros_like(gradient), gradient)
                for gradient, keep in zip(present, kept, strict=True)
            ]
            self._remember(memories, left, [compressed[i] for i in places])
        return compressed

    def _remember(self, memories: list, left: list, used: list) -> None:
        """Writes the memories once every replica has read them."""

        def write(values: tuple, *read: Any) -> None:
            with tf.control_dependencies(tf.nest.flatten([values, read])):
                for memory, value in zip(memories, values[0], strict=True):
                    memory.assign(value)

        replicas.once(write, left, used)


def _key(variable: tf.Variable) -> str:
    """Returns what tells a variable from others, also in a copy of the optimizer, as slots do."""
    return str(variable._unique_id)
