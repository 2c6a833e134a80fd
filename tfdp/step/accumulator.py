"""The sum over the batches that make one logical batch."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal
from tfdp.clipping.engine import ClippedSum, sum_error_of_chunks
from tfdp.data.draw_record import Use

_numbers = itertools.count()


class Accumulator(ProcessLocal):
    """Accumulator of clipped sums until a logical batch is complete.

    The sums have no noise yet. They lie in variables that no checkpoint holds, and are dropped when
    a logical batch is broken off, such as by an exception in `fit`. Parts of two batches must not
    get into one sum, in which an example could occur twice. So a sum begins with the first chunk of
    a draw, and accepts only the next chunk of the same draw. One thread at a time reads and adds.
    Copies and forked processes begin without a sum: a draw that was begun is released once.

    Args:
      steps: Batches that make one logical batch.
      dtype: Type of the sums.
    """

    def __init__(self, steps: int, dtype: tf.DType = tf.float32):
        self._steps, self._dtype = steps, dtype
        self._sums: dict[Any, tf.Variable] = {}
        # No int32: such variables are on the CPU, which functions compiled for a GPU cannot read.
        with plain_variables(hold_data=True):
            self._within_clip = tf.Variable(0.0, trainable=False)
            self._error = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._draw = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._numbers = tf.Variable(tf.zeros([2], tf.float64), trainable=False)
        self._mutex = tf.raw_ops.MutexV2(shared_name=f"accumulator_{next(_numbers)}")

    def lock(self) -> tf.Tensor | None:
        """Waits for other threads, in the graph being built.

        Returns:
          The lock, for `unlock`: if a step fails before that, it ends with the step. None where XLA
          makes threads wait.
        """
        if devices.compiled_by_xla():  # Such a function locks the variables that it writes.
            return None
        return tf.raw_ops.MutexLock(mutex=self._mutex)

    @staticmethod
    def unlock(lock: tf.Tensor | None, after: Sequence[tf.Tensor]) -> None:
        """Lets other threads continue once all of `after` is there, in the graph being built."""
        if lock is not None:
            with tf.control_dependencies(list(after)):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def prepare(self, variables: Sequence[tf.Variable]) -> None:
        """Makes room for the sums of `variables`, outside of any graph."""
        for variable in variables:
            if variable.ref() not in self._sums:
                with plain_variables(hold_data=True):
                    total = tf.Variable(tf.zeros(variable.shape, self._dtype), trainable=False)
                self._sums[variable.ref()] = total

    def count(self) -> int:
        """Returns the number of batches in the sum, outside of graphs."""
        with tf.init_scope():
            return int(self._count.numpy())

    @property
    def next(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Number of the draw in the sum, and how many of its chunks; int64, in the graph built."""
        return self._draw.read_value(), self._count.read_value()

    def fits(self, use: Use) -> tf.Tensor:
        """Returns whether a batch may come next: it begins a draw, or is its next chunk."""
        draw, chunk = self.next
        goes_on = tf.logical_and(use.draw == draw, use.chunk == chunk)
        return tf.logical_or(use.chunk == 0, goes_on)

    def numbers(self, current: tf.Tensor) -> tf.Tensor:
        """Returns the public numbers of the logical batch in the sum, in the graph being built.

        They are read while the sum is empty, and are the same until it is empty again: whatever is
        in one sum was computed with them.

        Args:
          current: What they are now, float64 `[2]`.
        """
        empty = self._count.read_value() == 0
        numbers = tf.where(empty, current, self._numbers.read_value())
        with tf.control_dependencies([self._numbers.assign(numbers, read_value=False)]):
            return tf.identity(numbers)

    def add(self, clipped: ClippedSum, variables: Sequence[tf.Variable], use: Use) -> tf.Tensor:
        """Adds one batch, in the graph being built; one that is not `fresh` empties the sum.

        Returns:
          Whether the logical batch is complete: a scalar bool tensor.
        """
        begins = use.chunk == 0
        goes_on = tf.logical_and(use.fresh, tf.logical_not(begins))

        def added(total: tf.Variable, new: tf.Tensor) -> tf.Tensor:
            new = tf.cast(new, total.dtype)
            return total * tf.cast(goes_on, total.dtype) + tf.where(
                use.fresh, new, tf.zeros_like(new)
            )

        written = [self._within_clip.assign(added(self._within_clip, clipped.within_clip))]
        if clipped.error is not None:
            written.append(self._error.assign(added(self._error, clipped.error)))
        for variable, gradient in zip(variables, clipped.gradients, strict=True):
            if gradient is not None:
                total = self._sums[variable.ref()]
                written.append(total.assign(added(total, gradient)))
        written.append(self._draw.assign(use.draw))
        count = self._count.assign(tf.where(use.fresh, use.chunk + 1, 0))
        with tf.control_dependencies(written):  # The lock is kept until then.
            return count >= self._steps

    def take(self, last: ClippedSum, variables: Sequence[tf.Variable]) -> ClippedSum:
        """Returns the sum over the complete logical batch, and leaves nothing behind.

        Args:
          last: The sum over the last of its batches, which says what else there is to know.
          variables: The trainable variables.
        """
        taken: list[tf.Tensor | None] = []
        for variable, tensor in zip(variables, last.gradients, strict=True):
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
        # None stays None: without `wide_sums` nothing is known of the rounding.
        error = None
        if last.error is not None:
            error = sum_error_of_chunks(self._error.read_value(), self._steps)
        return dataclasses.replace(last, gradients=taken, within_clip=within_clip, error=error)

    def _arguments(self) -> tuple:
        return self._steps, self._dtype

    def begin_anew(self) -> None:
        """Drops the sum."""
        self._count.assign(0)

    @property
    def sums(self) -> list[tf.Variable]:
        """The variables that hold the sums."""
        return list(self._sums.values())
