"""Counter of the cycles of cyclic Poisson sampling that a training begins."""

from collections.abc import Callable

import tensorflow as tf

from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal

_SOURCE, _NEXT, _START, _STAGE = range(4)
_NO_RUN = [-1, -1, -1, 0]


class CycleCount(ProcessLocal):
    """Counter of cycles: of steps in a row in which every example has one chance to be sampled.

    A run is a chain of steps of which each takes the draw that follows the one before, of the same
    source. In its first c steps every set of examples is sampled once, and so in the next c. A step
    begins a cycle if it is the first of a run, or if a multiple of c steps went before it in its
    run. So in all steps together, an example is sampled at most as often as cycles were begun.

    That holds in any order of steps. Source, number and start of a run are read in one operation,
    and each is written by the only step that took the draw before. Of threads that take steps at
    the same time, those that do not find their predecessor begin a run.

    A cycle is counted with the noise of its first step, in a stage of the noise's schedule, which
    the run carries to its other steps: whatever an example's chance in the cycle, it is hidden by
    the noise that was counted.

    Where the sets are drawn anew for each cycle of draws, numbers c k to c k + c - 1, a step also
    begins a cycle if its draw is the first of one. A run that starts within such a cycle counts it
    as a whole one: parts of one random allocation, counted or not, cost no more than all of it.

    Args:
      length: Steps of a cycle, c.
      redraws: Whether sets are drawn anew for each cycle of draws.
    """

    def __init__(self, length: int, redraws: bool = False):
        self._length, self._redraws = length, redraws
        with plain_variables():
            # Number of the source, of the draw that continues the run, and of its first draw; and
            # the stage of its last cycle.
            self._run = tf.Variable(_NO_RUN, dtype=tf.int64, trainable=False)

    def count(
        self,
        source: tf.Tensor,
        sequence: tf.Tensor,
        first: tf.Tensor,
        add: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Operation, tf.Tensor | None]],
    ) -> tuple[tf.Operation, tf.Tensor | None]:
        """Counts a step, in the graph being built.

        Args:
          source: Number of the object that drew its batch, a scalar int64.
          sequence: Number of the draw among those of this source, a scalar int64.
          first: Whether the draw is unused, and this its first batch; a scalar bool. Other batches
            belong to a step that was counted, or to none.
          add: Counts the step; it gets whether the step begins a cycle, and the stage of the cycle
            that it belongs to otherwise. It returns the operation and the step's stage, if the
            noise has a schedule.

        Returns:
          The operation that counts, and what `add` returned as the stage.
        """
        run = self._run.read_value()
        own = tf.stack([source, sequence])
        continues = tf.reduce_all(run[: _NEXT + 1] == own)
        # With sets that are drawn anew, a run begins where the cycle of its first draw does.
        first_draw = sequence - sequence % self._length if self._redraws else sequence
        start = tf.where(continues, run[_START], first_draw)
        begins = tf.logical_or((sequence - start) % self._length == 0, tf.logical_not(continues))
        with tf.control_dependencies([run]):
            added, stage = add(begins, run[_STAGE])
        # Last: a step that ends before it was counted is not one of the run.
        held = tf.zeros_like(start) if stage is None else stage
        following = tf.stack([source, sequence + 1, start, held])
        with tf.control_dependencies([added]):
            written = self._run.assign(tf.where(first, following, run), read_value=False)
        return written, stage

    def begun_by(self, steps: int, anew: bool) -> int:
        """Returns how many cycles the next steps begin, outside of graphs.

        Args:
          steps: Number of steps, of which each takes the draw that follows.
          anew: Whether they begin a run, whatever was before.
        """
        if anew and self._redraws:  # The first may be the last of its cycle.
            return min(steps, 1) + max(0, -(-(steps - 1) // self._length))
        done = 0 if anew else self._run_now()[0]
        return -(-(done + steps) // self._length) - -(-done // self._length)

    def stage_held(self) -> int | None:
        """Returns the stage of the cycle that the next draw continues, outside of graphs.

        None: it begins a cycle, also if it is of the source of the last one.
        """
        done, stage = self._run_now()
        return stage if done % self._length else None

    def _run_now(self) -> tuple[int, int]:
        """Returns the number of steps in the run, and the stage of its last cycle."""
        with tf.init_scope():
            run = [int(value) for value in self._run.numpy()]
        return 0 if run[_SOURCE] < 0 else run[_NEXT] - run[_START], run[_STAGE]

    def _arguments(self) -> tuple:
        return self._length, self._redraws

    def begin_anew(self) -> None:
        """Has the next step begin a run."""
        self._run.assign(_NO_RUN)
