"""The record of an optimizer's noisy steps, in variables that live in its checkpoints."""

import contextlib
import copy
import os
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.ledger import PrivacyParametersChangedError
from tfdp.base import devices
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.shared_function import shared_function
from tfdp.schedules import Stages
from tfdp.step.record import lineage, record_table
from tfdp.step.record.lineage import Lineage, value_of
from tfdp.step.record.record_table import COLUMNS, COUNTS, NOISE_SCHEDULE, ROWS, SHOWN, STEPS, UID

RECORD = "privacy_record"
_PARAMETERS = "privacy_parameters"


class ReleaseRecord:
    """Count of the steps of an optimizer, and of those that went before.

    (With cyclic Poisson sampling, it counts the cycles of steps that were begun.)

    Guarantees: the total never falls. Every optimizer counts in a row of its own, under a random
    number (uid) that no other optimizer has, also none in another process and no copy; rows are
    merged by the largest count of each uid. So restoring an older checkpoint does not lower the
    total, a checkpoint of another process is added to what was done here, and what was restored
    twice is counted once.

    With a schedule of the noise, every stage has a row (and a uid) of its own. A step is counted in
    the row of the stage whose noise it gets: both follow from one tensor.

    The rows are in one variable that is part of checkpoints, the own one first, and in variables
    that nothing restores. When both differ, a checkpoint was restored.

    Args:
      kind: Kind of step, as `record_table` has them.
      parameters: The privacy parameters by the names of their arguments.
      fixed_seed: Whether the noise has a seed that is known.
      stages: Stages of the noise multiplier; None: it is the one of `parameters`.
    """

    def __init__(
        self,
        kind: float,
        parameters: dict[str, float],
        fixed_seed: bool,
        stages: Stages | None = None,
    ):
        self._arguments = (kind, parameters, fixed_seed, stages)
        self.parameters, self.fixed_seed = parameters, fixed_seed
        self._stages = stages or Stages((), (parameters["noise_multiplier"],))
        self._facts = np.stack(
            [
                record_table.new_row(0, kind, fixed_seed, {**parameters, "noise_multiplier": noise})
                for noise in self._stages.values
            ]
        )
        count = len(self._stages.values)
        self.variables: dict[str, tf.Variable] = {}
        self.lineages: list[Lineage] = []
        self._waiting: list[np.ndarray] = []
        self._taken: dict[float, np.ndarray] = {}
        with plain_variables():
            self._uid = tf.Variable(_new_uids(count), dtype=tf.float64, trainable=False)
            # Steps on unused draws, other steps, and `note_shown`; of each stage.
            self._own = tf.Variable(tf.zeros([count, 3], tf.int64), trainable=False)
            # Stage of the step that was begun last, which may be a logical batch in parts.
            self._stage = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._others = tf.Variable(
                tf.zeros([ROWS - count, COLUMNS], tf.float64),
                trainable=False,
                name="other_releases",
            )
        _live.add(self)

    @property
    def created(self) -> bool:
        """True once the variables exist."""
        return bool(self.variables)

    def create(self, add_weight: Callable[..., tf.Variable]) -> list[tf.Variable]:
        """Creates the variables with the `add_weight` of an optimizer, which tracks them."""

        def add(name: str, value: Any) -> tf.Variable:
            constant = tf.constant(value, tf.float64)
            return add_weight(
                name,
                shape=constant.shape,
                dtype=tf.float64,
                trainable=False,
                initializer=lambda shape, dtype=None, **_: constant,
            )

        parameters = add(_PARAMETERS, list(self.parameters.values()))
        self.variables = {RECORD: add(RECORD, self._table().numpy()), _PARAMETERS: parameters}
        return list(self.variables.values())

    # What went before.

    def trains(self, variables: Iterable[Any]) -> None:
        """Records that these steps change variables, and takes over the cost of the variables."""
        for known in self.reads(variables):
            if self not in known.records:
                known.records.append(self)
                lineage.changed()

    def reads(self, variables: Iterable[Any]) -> list[Lineage]:
        """Takes over the cost of the variables on which these steps depend."""
        found = lineage.of(variables)
        if new := [known for known in found if known not in self.lineages]:
            self.lineages += new
            lineage.changed()
        self.refresh()
        return found

    def absorb(self, rows: np.ndarray) -> None:
        """Takes over rows of a saved record.

        Raises:
          ValueError: They are not rows of a record.
        """
        rows = np.asarray(rows, np.float64)
        if rows.ndim != 2 or rows.shape[1] != COLUMNS:
            raise ValueError(
                f"A `{RECORD}` must have the shape [rows, {COLUMNS}]. Received: {rows.shape}. It "
                "was saved by another version of tfdp."
            )
        self._waiting.append(rows)
        lineage.changed()

    def refresh(self) -> None:
        """Brings all that is known of other releases into the variables, outside of graphs."""
        with tf.init_scope():
            known = {row[UID]: row for row in value_of(self._others)}
            new = []
            for row in record_table.union(self._foreign()):
                # What was taken over before may have been added up with others.
                before = self._taken.get(row[UID], known.get(row[UID], np.zeros(COLUMNS)))
                if np.any(row[COUNTS] > before[COUNTS]):
                    self._taken[row[UID]] = row
                    new.append(row)
            for first in range(0, len(new), ROWS):
                incoming = tf.constant(np.array(new[first : first + ROWS]), tf.float64)
                self._others.assign(record_table.merge(self._others, incoming, self._uid))
            self._waiting.clear()
            if self.created:
                self.variables[RECORD].assign(self._table())

    def _foreign(self) -> list[np.ndarray]:
        """Returns tables of all other releases; some may be known already."""
        records = [other for known in self.lineages for other in known.records]
        others = [record for record in lineage.connected(records) if record is not self]
        tables = [table for record in others for table in record.tables()]
        past = [t for r in [self, *others] for known in r.lineages for t in known.past]
        restored = [value_of(self.variables[RECORD])] if self.created else []
        rows = np.concatenate([*self._waiting, *tables, *past, *restored, np.zeros([0, COLUMNS])])
        return [rows[~np.isin(rows[:, UID], value_of(self._uid))]]

    # Counting, in the graph being built.

    def stage(
        self,
        begins: tf.Tensor,
        costs: tf.Tensor | bool = True,
        held: tf.Tensor | None = None,
    ) -> tf.Tensor | None:
        """Returns the stage of the schedule that a batch belongs to, before its step is counted.

        A step that is not counted has the stage of what was counted in its place.

        Args:
          begins: Whether the batch is the first of its step; a scalar bool. Later ones are of the
            stage of the first.
          costs: See `add`.
          held: Stage of the cycle that the step is in, if it does not cost; a scalar int64.

        Returns:
          A scalar int64; None of noise that does not change.
        """
        if len(self._stages.values) == 1:
            return None
        with tf.control_dependencies([self._take_over_restored()]):
            number = self._scheduled_steps(self._own.read_value(), self._others.read_value())
        boundaries = tf.constant(self._stages.boundaries, tf.float64)
        stage = tf.reduce_sum(tf.cast(number >= boundaries, tf.int64))
        if held is not None:
            stage = tf.where(costs, stage, held)
        stage = tf.where(begins, stage, self._stage.read_value())
        with tf.control_dependencies([self._stage.assign(stage, read_value=False)]):
            return tf.identity(stage)

    def _scheduled_steps(self, own: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
        """Returns how many steps were counted under an equal schedule, as a float64."""
        equal = others[:, NOISE_SCHEDULE] == self._stages.fingerprint
        before = tf.where(equal[:, tf.newaxis], others[:, STEPS:SHOWN], 0)
        return tf.reduce_sum(before) + tf.cast(tf.reduce_sum(own[:, :2]), tf.float64)

    def add(
        self,
        fresh: tf.Tensor,
        begins: tf.Tensor | bool = True,
        stage: tf.Tensor | None = None,
        costs: tf.Tensor | bool = True,
    ) -> tf.Operation:
        """Counts one step.

        Args:
          fresh: Whether its batch is an unused draw, as accounted for; a scalar bool.
          begins: Whether it is the first batch of its step; a scalar bool.
          stage: What `stage` returned for it.
          costs: Whether a step on an unused draw is a release; not if it is within a cycle that
            was begun, and so counted. A scalar bool.
        """
        with tf.name_scope("privacy_record"):
            count = len(self._stages.values)
            one, fresh = tf.cast(begins, tf.int64), tf.cast(fresh, tf.int64)
            paid = one * fresh * tf.cast(costs, tf.int64)
            one = tf.stack([paid, one * (1 - fresh), 0])[tf.newaxis]
            if stage is not None:
                one *= tf.one_hot(stage, count, dtype=tf.int64)[:, tf.newaxis]
            in_rows = tf.pad(tf.cast(one, tf.float64), [[0, 0], [STEPS, COLUMNS - SHOWN - 1]])
            in_table = tf.pad(in_rows, [[0, ROWS - count], [0, 0]])
            # Each addition is one atomic operation. The saved row comes first, so that it is never
            # below the own counts, unless a checkpoint was restored.
            with tf.control_dependencies([self._take_over_restored()]):
                saved = self._saved.assign_add(in_table, read_value=False)
            with tf.control_dependencies([saved]):
                return self._own.assign_add(one, read_value=False)

    def total(self) -> tf.Tensor:
        """Returns the number of all steps so far, an int64 scalar."""
        with tf.control_dependencies([self._take_over_restored()]):
            others = tf.reduce_sum(self._others.read_value()[:, STEPS:SHOWN])
            return tf.cast(others, tf.int64) + tf.reduce_sum(self._own.read_value()[:, :2])

    def digest(self, iterations: tf.Tensor, clip: tf.Tensor | float) -> tf.Tensor:
        """Returns a number that differs where a worker has counted, or restored, something else.

        Args:
          iterations: Number of updates.
          clip: The clip of the step; 0: it is constant.

        Returns:
          A scalar int64.
        """
        facts = tf.stack([tf.cast(fact, tf.float64) for fact in (iterations, clip)])
        own = tf.reshape(tf.cast(self._own.read_value(), tf.float64), [-1])
        return record_table.digest(self._others.read_value(), tf.concat([facts, own], axis=0))

    def share_uids(self, uids: Sequence[int]) -> None:
        """Counts in the rows of another worker, which counts every step as this one does.

        So a checkpoint of any worker, restored on all of them, is counted once in each.

        Args:
          uids: What `uids` returned to that worker.

        Raises:
          RuntimeError: There are rows already.
        """
        if self.created or self.has_steps():
            raise RuntimeError("Rows must be shared before the record is created.")
        with tf.init_scope():
            self._uid.assign([float(uid) for uid in uids])

    @property
    def uids(self) -> list[int]:
        """The numbers under which this record counts."""
        with tf.init_scope():
            return [int(uid) for uid in value_of(self._uid)]

    def _take_over_restored(self) -> tf.Tensor:
        """Merges what a checkpoint brought, if one was restored."""
        own = tf.cast(self._own.read_value(), tf.float64)
        uid = self._uid.read_value()
        with tf.control_dependencies([own, uid]):
            first = self._saved.read_value()[: len(self._stages.values)]
        same = tf.reduce_all(first[:, UID] == uid) & tf.reduce_all(first[:, COUNTS] >= own)

        def merge() -> tf.Tensor:
            saved, others = self._saved.read_value(), self._others.read_value()
            merged = self._others.assign(_merge(others, saved, uid))
            self._saved.assign(tf.concat([self._own_rows(own), merged], axis=0))
            return tf.constant(True)

        return tf.cond(same, lambda: tf.constant(True), merge)

    def _table(self) -> tf.Tensor:
        own = self._own_rows(tf.cast(self._own.read_value(), tf.float64))
        return tf.concat([own, self._others.read_value()], axis=0)

    def _own_rows(self, counts: tf.Tensor) -> tf.Tensor:
        facts = tf.constant(self._facts[:, SHOWN + 1 :])
        return tf.concat([self._uid.read_value()[:, tf.newaxis], counts, facts], axis=1)

    @property
    def _saved(self) -> tf.Variable:
        return self.variables[RECORD]

    @property
    def counters(self) -> list[tf.Variable]:
        """The variables that `add` changes."""
        return [self._own, self._others, *([self._saved] if self.created else [])]

    # What has been counted.

    def note_shown(self) -> None:
        """Notes that something private was shown: see `record_ledger`."""
        self._own.assign(tf.maximum(self._own, tf.constant([[0, 0, 1]], tf.int64)))
        self.refresh()

    def tables(self) -> list[np.ndarray]:
        """Returns the rows that this record holds: the own ones last."""
        with tf.init_scope():
            restored = [value_of(self._saved)] if self.created else []
            own = self._facts.copy()
            own[:, UID], own[:, COUNTS] = value_of(self._uid), value_of(self._own)
            return [*self._waiting, value_of(self._others), *restored, own]

    def rows(self) -> np.ndarray:
        """Returns the rows of all releases on which these steps depend, the own ones last."""
        with tf.init_scope():
            *others, own = self.tables()
            others = [table[~np.isin(table[:, UID], own[:, UID])] for table in others]
            return record_table.union([*others, *self._foreign(), own])

    def has_steps(self) -> bool:
        """Returns whether there are any releases in what this record holds."""
        return any(table[:, COUNTS].any() for table in self.tables())

    def own_counts(self) -> bytes:
        """Returns what changes with each step that is counted."""
        # Fast, where there is no graph: it is asked at each read of a variable.
        scope = contextlib.nullcontext() if tf.executing_eagerly() else tf.init_scope()
        with scope:
            own = tf.raw_ops.ReadVariableOp(resource=self._own.handle, dtype=tf.int64)
            return own.numpy().tobytes()

    def own_steps(self) -> int:
        """Returns the number of steps (or cycles) of this optimizer alone, in this process."""
        with tf.init_scope():
            return int(value_of(self._own)[:, :2].sum())

    def scheduled_steps(self) -> int:
        """Returns the number of the next step in the schedule, after taking over what is known."""
        self.refresh()
        with tf.init_scope():
            return int(self._scheduled_steps(self._own, self._others).numpy())

    # The parameters.

    def check(self) -> tf.Operation:
        """Checks, whenever the graph being built runs, that the parameters are still the same."""
        own = tf.constant(list(self.parameters.values()), tf.float64)
        return check_now(
            tf.reduce_all(self.variables[_PARAMETERS] == own),
            "Training must resume with the privacy parameters that it began with: "
            f"{', '.join(self.parameters)}. The restored ones differ.",
        )

    def check_parameters(self, restored: Sequence[float] | None = None) -> None:
        """Checks the parameters of a saved state, or of the one that was restored last.

        Raises:
          PrivacyParametersChangedError: They differ; names the argument and both values.
        """
        if restored is None:
            if not self.created:
                return
            restored = list(value_of(self.variables[_PARAMETERS]))
        saved = dict(zip(self.parameters, restored, strict=False))
        schedule = "noise_schedule"
        if self.parameters.get(schedule, 0) != saved.get(schedule, 0):
            raise PrivacyParametersChangedError(
                "Argument `noise_multiplier` must stay the number or the schedule with which "
                "training began. Received another one. Start a new training to change it."
            )
        for (name, own), other in zip(self.parameters.items(), restored, strict=True):
            if own != other:
                digits = "g" if f"{own:g}" != f"{other:g}" else ".17g"
                raise PrivacyParametersChangedError(
                    f"Argument `{name}` must stay {other:{digits}}, with which training began. "
                    f"Received: {name}={own:{digits}}. Start a new training to change it."
                )

    # Copies count for themselves, and have cost what their original had.

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReleaseRecord":
        new = type(self)(*self._arguments)
        memo[id(self)] = new
        new.variables = copy.deepcopy(self.variables, memo)
        new._stage.assign(self._stage)
        new.absorb(self.rows())
        return new

    def _renew(self) -> None:
        """Starts rows of its own in a forked process, with no operation on large tensors."""
        self._waiting.append(self.tables()[-1])
        count = len(self._stages.values)
        self._uid.assign(_new_uids(count))
        self._own.assign([[0, 0, 0]] * count)


_merge = shared_function(record_table.merge)
_live: "weakref.WeakSet[ReleaseRecord]" = weakref.WeakSet()


def _new_uid() -> float:
    return float(random.SystemRandom().randrange(1, record_table.LARGEST_UID))


def _new_uids(count: int) -> list[float]:
    return [_new_uid() for _ in range(count)]


def _renew_all() -> None:
    for record in list(_live):
        record._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


def check_now(condition: tf.Tensor, message: str) -> tf.Operation:
    """Checks a condition in the graph being built, without waiting for what stands before it.

    (Automatic control dependencies would put it after all stateful operations that were made
    before, such as dropout, although it is to come before the model is evaluated.)

    XLA drops assertions, with a line in the log for each: there is none then.
    """
    if devices.compiled_by_xla():
        return tf.no_op()
    operation = tf.raw_ops.Assert(condition=condition, data=[message])
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)
    return operation
