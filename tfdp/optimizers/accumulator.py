"""The sum over the batches that make one logical batch."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping import ClippedSum


class Accumulator:
    """Adds up clipped sums until a logical batch is complete.

    The sums have no noise yet. They lie in variables that no checkpoint holds, and are dropped when
    a logical batch is broken off, such as by an exception in `fit`: parts of two of them must not
    get into one sum, in which an example could be twice. `tfdp.data.poisson_batches` shows where a
    logical batch begins by delivering its first part with one row more than the others.

    Args:
      steps: Batches that make one logical batch.
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._sums: dict[Any, tf.Variable] = {}
        self._within_clip = tf.Variable(0.0, trainable=False)
        self._count = tf.Variable(0, trainable=False)
        self._first_rows = tf.Variable(0, trainable=False)
        self._restarts = tf.Variable(0, trainable=False)

    def prepare(self, variables: Sequence[tf.Variable]) -> None:
        """Makes room for the sums of `variables`, outside of any graph."""
        for variable in variables:
            if variable.ref() not in self._sums:
                total = tf.Variable(tf.zeros(variable.shape), trainable=False)
                self._sums[variable.ref()] = total

    def add(self, clipped: ClippedSum, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Adds one batch, in the graph being built.

        Returns:
          Whether the logical batch is complete: a scalar bool tensor.
        """
        rows, count = clipped.rows, self._count.read_value()
        begins = count == 0
        if clipped.masked:
            broken_off = tf.logical_and(count > 0, rows >= self._first_rows)
            restarts = self._restarts.assign(tf.where(broken_off, self._restarts + 1, 0))
            check = tf.debugging.assert_less(
                restarts,
                2,
                message="The first of the batches that make one logical batch must have one row "
                "more than the others, as `tfdp.data.poisson_batches` delivers them. All that "
                f"were received have as many rows, with gradient_accumulation_steps={self._steps}.",
            )
            with tf.control_dependencies([check] if check is not None else []):
                begins = tf.logical_or(begins, broken_off)
        keep = tf.cast(tf.logical_not(begins), tf.float32)
        self._within_clip.assign(self._within_clip * keep + clipped.within_clip)
        for variable, gradient in zip(variables, clipped.gradients, strict=True):
            if gradient is not None:
                total = self._sums[variable.ref()]
                total.assign(total * keep + tf.cast(gradient, tf.float32))
        self._first_rows.assign(tf.where(begins, rows, self._first_rows))
        return self._count.assign(tf.where(begins, 1, count + 1)) >= self._steps

    def take(
        self, like: Sequence[tf.Tensor | None], variables: Sequence[tf.Variable]
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """The sums of the complete logical batch; leaves nothing behind.

        Args:
          like: Tensors of the types to return, None where a variable has no gradient.
          variables: The trainable variables.

        Returns:
          The sums of gradients, and that of `ClippedSum.within_clip`.
        """
        taken: list[tf.Tensor | None] = []
        for variable, tensor in zip(variables, like, strict=True):
            if tensor is None:
                taken.append(None)
                continue
            total = self._sums[variable.ref()]
            taken.append(tf.cast(total.read_value(), tensor.dtype))
            total.assign(tf.zeros_like(total))
        within_clip = self._within_clip.read_value()
        with tf.control_dependencies([within_clip]):
            self._within_clip.assign(0.0)
        self._count.assign(0)
        return taken, within_clip

    @property
    def sums(self) -> list[tf.Variable]:
        """The variables that hold the sums."""
        return list(self._sums.values())
