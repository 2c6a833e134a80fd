"""Counter of the cycles of cyclic Poisson sampling that a training begins."""

from collections.abc import Callable

import tensorflow as tf

from tfdp._tf.plain_variables import plain_variables
from tfdp._tf.process_local import ProcessLocal

_SOURCE, _NEXT, _START = range(3)


class CycleCount(ProcessLocal):
    """Counter of cycles: of steps in a row in which every example has one chance to be sampled.

    A run is a chain of steps of which each takes the draw that follows the one before, of the same
    source. In its first c steps every set of examples is sampled once, and so in the next c. A step
    begins a cycle if it is the first of a run, or if a multiple of c steps went before it in its
    run. So in all steps together, an example is sampled at most as often as cycles were begun.

    That holds in any order of steps. Source, number and start of a run are read in one operation,
    and each is written by the only step that took the draw before. Of threads that take steps at
    the same time, those that do not find their predecessor begin a run.

    Args:
      length: Steps of a cycle, c.
    """

    def __init__(self, length: int):
        self._length = length
        with plain_variables():
            # Number of the source, of the draw that continues the run, and of its first draw.
            self._run = tf.Variable(tf.fill([3], tf.constant(-1, tf.int64)), trainable=False)

    def count(
        self,
        source: tf.Tensor,
        sequence: tf.Tensor,
        first: tf.Tensor,
        add: Callable[[tf.Tensor], tf.Operation],
    ) -> tf.Operation:
        """Counts a step, in the graph being built.

        Args:
          source: Number of the object that drew its batch, a scalar int64.
          sequence: Number of the draw among those of this source, a scalar int64.
          first: Whether the draw is unused, and this its first batch; a scalar bool. Other batches
            belong to a step that was counted, or to none.
          add: Counts the step; it gets whether the step begins a cycle.
        """
        run = self._run.read_value()
        own = tf.stack([source, sequence])
        continues = tf.reduce_all(run[: _NEXT + 1] == own)
        start = tf.where(continues, run[_START], sequence)
        with tf.control_dependencies([run]):
            added = add((sequence - start) % self._length == 0)
        # Last: a step that ends before it was counted is not one of the run.
        following = tf.stack([source, sequence + 1, start])
        with tf.control_dependencies([added]):
            return self._run.assign(tf.where(first, following, run), read_value=False)

    def begun_by(self, steps: int, anew: bool) -> int:
        """Returns how many cycles the next steps begin, outside of graphs.

        Args:
          steps: Number of steps, of which each takes the draw that follows.
          anew: Whether they begin a run, whatever was before.
        """
        with tf.init_scope():
            run = [int(value) for value in self._run.numpy()]
        done = 0 if anew or run[_SOURCE] < 0 else run[_NEXT] - run[_START]
        return -(-(done + steps) // self._length) - -(-done // self._length)

    def _arguments(self) -> tuple:
        return (self._length,)

    def begin_anew(self) -> None:
        """Has the next step begin a run."""
        self._run.assign(tf.fill([3], tf.constant(-1, tf.int64)))
