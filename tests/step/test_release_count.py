"""What was released stays counted: across restores, copies, threads and optimizers."""

import copy
import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.step.release_support import PARAMETERS, X, Y, batches, compiled, make, train
from tfdp.accounting import PrivacyLedger
from tfdp.clipping import ClippedSum
from tfdp.data.draw_record import Use
from tfdp.step.record import release_count
from tfdp.step.record.record_table import GAUSSIAN, STEPS, UID
from tfdp.step.record.release_count import ReleaseRecord, check_now


class Steps:
    """A record and a function that counts steps in it."""

    def __init__(self, jit_compile=False, record=None, cls=ReleaseRecord):
        self.record = record or cls(GAUSSIAN, PARAMETERS, False)
        self.record.create(
            lambda name, shape, dtype, trainable, initializer: tf.Variable(
                initializer(shape), trainable=trainable, name=name
            )
        )
        self.take = tf.function(
            lambda: [self.record.add(tf.constant(True)), tf.constant(0)][1], jit_compile=jit_compile
        )

    @property
    def saved(self):
        return self.record.variables[release_count.RECORD]

    def count(self):
        return int(self.record.rows()[:, STEPS].sum())


# Restoring.


def restored_counts(jit_compile=False, cls=ReleaseRecord):
    """50 steps here; elsewhere restored, 40, restored, 40, and merged back here."""
    first = Steps(jit_compile, cls=cls)
    for _ in range(5):
        first.take()
    old = first.saved.numpy()
    second = Steps(jit_compile, cls=cls)
    counts = []
    for _ in range(2):
        second.saved.assign(old)
        counts.append(second.count())
        for _ in range(4):
            second.take()
        counts.append(second.count())
    first.saved.assign(second.saved)
    first.take()
    return [*counts, first.count(), int(first.saved.numpy()[:, STEPS].sum())]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_restoring_never_lowers_the_count_and_counts_nothing_twice(jit_compile):
    assert restored_counts(jit_compile) == [5, 9, 9, 13, 14, 14]


class Overwrites(ReleaseRecord):
    """Mutant: what was restored replaces what was known."""

    def _take_over_restored(self):
        self._others.assign(self._saved[:-1])
        return tf.constant(True).op


def test_overwriting_is_caught():
    assert restored_counts(cls=Overwrites) != [5, 9, 9, 13, 14, 14]


def test_an_older_checkpoint_of_the_same_optimizer_takes_nothing_back():
    steps = Steps()
    steps.take()
    old = steps.saved.numpy()
    steps.take()
    steps.saved.assign(old)
    assert steps.count() == 2
    steps.take()
    assert steps.count() == 3 and steps.saved.numpy()[0, STEPS] == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["checkpoint", "weights", "keras"])
def test_restoring_into_a_new_optimizer(form, tmp_path):
    model = compiled()
    train(model)
    state = model.optimizer.get_weights()
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(tmp_path / "c")
    model.save(tmp_path / "m.keras")
    other = compiled()
    other.optimizer.build(other.trainable_variables)
    for taken in (2, 4):
        if form == "keras" and taken == 2:
            other = tf.keras.models.load_model(tmp_path / "m.keras")
        elif form == "checkpoint":
            tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
        elif form == "weights":
            other.optimizer.set_weights(state)
        train(other, 2)
        assert other.optimizer.released_steps() == (3 + taken, 0)


# Copies.


def uids(record):
    return record.tables()[-1][0, UID]


def copies_of(optimizer):
    return [copy.copy(optimizer), copy.deepcopy(optimizer)]


def test_copies_draw_other_noise_and_have_cost_what_their_original_had():
    model = compiled()
    train(model)
    original = model.optimizer
    secret = original._noise.secret().numpy()
    made = copies_of(original)
    for new in made:
        assert new.released_steps() == (3, 0)
        assert not np.any(new._noise.secret().numpy() == secret)
        assert uids(new._released) != uids(original._released)
    again = compiled(made[1], tf.keras.models.clone_model(model))
    train(again, 2)
    assert made[1].released_steps() == (5, 0) and original.released_steps() == (3, 0)
    from_config = type(original).from_config(original.get_config())
    assert not np.any(from_config._noise.secret().numpy() == secret)
    # Both resume, and meet: what was done twice is counted twice.
    train(model, 1)
    original._released.absorb(np.concatenate(made[1]._released.tables()))
    assert original.released_steps() == (6, 0)


def meets_its_copy():
    first = Steps()
    first.take()
    second = Steps(record=copy.deepcopy(first.record))
    second.take()
    first.take()
    first.record.absorb(np.concatenate(second.record.tables()))
    return first.count()


def test_a_uid_that_copies_share_is_caught(monkeypatch):
    assert meets_its_copy() == 3
    monkeypatch.setattr(release_count, "_new_uid", lambda: 7.0)
    assert meets_its_copy() < 3


def test_a_forked_process_counts_in_a_row_of_its_own():
    steps = Steps()
    steps.take()
    before = uids(steps.record)
    release_count._renew_all()
    assert uids(steps.record) != before and steps.count() == 1
    steps.take()
    assert steps.count() == 2 and steps.saved.numpy()[:, STEPS].sum() == 2


# Threads.


class ReadsThenAssigns(ReleaseRecord):
    """Mutant: the counter is not advanced in one operation."""

    def add(self, fresh, begins=True, stage=None):
        self._own.assign(self._own.read_value() + tf.constant([1, 0, 0], tf.int64))
        return self._saved.assign_add(tf.zeros_like(self._saved)).op


def counts_atomically(steps):
    """Whether the own counter is changed by additions only."""
    graph = steps.take.get_concrete_function().graph
    handles = [inner for outer, inner in graph.captures if outer is steps.record._own.handle]
    writes = {op.type for handle in handles for op in handle.consumers()}
    return writes & {"AssignVariableOp", "AssignAddVariableOp"} == {"AssignAddVariableOp"}


def test_steps_are_counted_in_one_operation():
    assert counts_atomically(Steps())
    assert not counts_atomically(Steps(cls=ReadsThenAssigns))


def test_threads_lose_no_step():
    steps = Steps()
    steps.take()
    threads = [threading.Thread(target=lambda: [steps.take() for _ in range(100)]) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps.count() == 401 == steps.saved.numpy()[0, STEPS]


# Errors.


class Inverse(tf.keras.layers.Layer):
    """Fails on examples whose sum is -1."""

    def call(self, x):
        sums = tf.reduce_sum(x, axis=1)[:, tf.newaxis, tf.newaxis]
        return x * tf.linalg.inv(sums + 1)[:, 0]


def steps_that_failed():
    """Counts the steps of a training that fails on an example which each batch holds."""
    x = X.copy()
    x[0] = -0.25
    data = tfdp.data.poisson_batches((x, Y), expected_batch_size=len(x), steps_per_epoch=1)
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=data.sampling)
    model = tf.keras.Sequential([Inverse(input_shape=[4]), tf.keras.layers.Dense(3)])
    compiled(optimizer, model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not invertible"):
        model.fit(data, verbose=0)
    return optimizer.released_steps()


def counts_afterwards(self, clipped, use, clip):
    """Mutant of `_count_before`: what the step evaluates comes first."""
    with tf.control_dependencies(clipped.gradients):
        return None, None, self._released.add(use.fresh)


def test_a_step_that_fails_on_an_example_is_counted():
    assert steps_that_failed() == (1, 0)


@pytest.mark.slow
def test_counting_after_what_can_fail_is_caught(monkeypatch):
    monkeypatch.setattr(tfdp.DPSGD, "_count_before", counts_afterwards)
    assert steps_that_failed() == (0, 0)


def weights_after_a_refusal(monkeypatch, empty):
    """Returns the weights before and after a step that is refused late, by a slow check."""

    def slow_check(condition, message):
        loop = (lambda i, _: i < 1000, lambda i, t: (i + 1, t @ t), (0, tf.eye(100)))
        with tf.control_dependencies(tf.while_loop(*loop)):
            return check_now(tf.identity(condition), message)

    monkeypatch.setattr("tfdp.step.private_step.check_now", slow_check)
    if empty:
        use = dataclasses.replace(Use.unrecorded(), empty=tf.constant(True))
        monkeypatch.setattr("tfdp.step.record.draw_use.use_of", lambda *_: use)
    model = compiled()
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), verbose=0)
    assert model.optimizer.released_steps() == (0, 0)
    return before, model.get_weights()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("empty", [False, True])
def test_a_refused_step_changes_nothing(monkeypatch, empty):
    """Also where the sum is over no examples, and is there without the model's evaluation."""
    np.testing.assert_array_equal(*map(support.flat, weights_after_a_refusal(monkeypatch, empty)))


@pytest.mark.slow
def test_an_update_that_does_not_wait_for_the_check_is_caught(monkeypatch):
    monkeypatch.setattr(ClippedSum, "after", lambda self, _: self)
    before, after = map(support.flat, weights_after_a_refusal(monkeypatch, empty=True))
    assert not np.array_equal(before, after)


# The view.


def test_the_ledger_can_only_be_read():
    model = compiled()
    train(model)
    ledger = model.optimizer.ledger
    other = PrivacyLedger()
    other.record(make(3.0).release.event, 7)
    with pytest.raises(TypeError, match=r"`record`.*`prior`"):
        ledger.record(make().release.event)
    with pytest.raises(TypeError, match=r"`add_note`.*`prior`"):
        ledger.add_note("Other costs.")
    assert ledger.dataset_sizes == (64,)
    assert "7 steps" in " ".join(tfdp.privacy_statement(model, 1e-3, prior=other).split())
    again = PrivacyLedger.from_dict(ledger.to_dict())
    again.record(make().release.event)
    assert model.optimizer.ledger.steps == 3


@pytest.mark.slow
def test_a_delta_that_is_too_large_is_warned_about():
    model = compiled()
    train(model, 1)
    text = " ".join(tfdp.privacy_statement(model, 0.1).split())
    assert "Warning: delta = 0.1 is not below 1 / 64" in text
    assert "Warning" not in tfdp.privacy_statement(model, 1e-3)
    assert "of 64 examples, 16 expected" in text
    with pytest.warns(UserWarning, match="not below 1 / 64"):
        model.fit(batches(), callbacks=[tfdp.PrivacyBudget(9.0, 0.1)], verbose=0)
    with pytest.warns(UserWarning, match="not below 1 / 1000"):
        tfdp.calibrate_steps(
            target_epsilon=1.0,
            delta=1e-3,
            noise_multiplier=1.0,
            dataset_size=1000,
            expected_batch_size=10,
        )
