"""What was released stays counted: across restores, copies, threads and optimizers."""

import copy
import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp._random import key_streams
from tfdp.accounting import PrivacyLedger
from tfdp.accounting.sampling import PoissonSampling
from tfdp.optimizers import lineage, record_table, release_count
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.record_table import (
    COLUMNS,
    COUNTS,
    GAUSSIAN,
    GAUSSIAN_UNPADDED,
    KIND,
    MIXED,
    STEPS,
    UID,
)
from tfdp.optimizers.release_count import ReleaseRecord

X, Y = support.small_data(64)
PARAMETERS = {
    "l2_norm_clip": 1.0,
    "noise_multiplier": 1.0,
    "expected_batch_size": 16.0,
    "num_microbatches": 0.0,
    "dataset_size": 64.0,
}


def batches(steps=3):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=steps)


def make(noise_multiplier=1.0, cls=tfdp.DPSGD):
    return cls(1.0, noise_multiplier, sampling=batches().sampling, learning_rate=0.1)


def compiled(optimizer=None, model=None, **kwargs):
    model = model or tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[4])])
    return support.compiled(optimizer or make(), model, **kwargs)


def train(model, steps=3):
    model.fit(batches(steps), verbose=0)


def steps_of(model):
    return tfdp_ledger(model).steps


def tfdp_ledger(model):
    from tfdp.optimizers.record_ledger import ledger_of_model

    return ledger_of_model(model)


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


# Tables.


def table(rows):
    return tf.constant(np.array(rows).reshape(-1, COLUMNS), tf.float64)


def row(uid, steps, noise=1.0):
    made = record_table.new_row(uid, GAUSSIAN, False, {**PARAMETERS, "noise_multiplier": noise})
    made[STEPS] = steps
    return made


def totals(rows):
    found = {}
    for one in np.asarray(rows)[np.asarray(rows)[:, UID] > 0]:
        key = record_table.parameters_of(one)["noise_multiplier"]
        found[key] = found.get(key, 0) + one[STEPS]
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_full_table_adds_rows_of_equal_parameters_up(jit_compile):
    known = np.zeros([6, COLUMNS])
    known[:5] = [row(i + 1, 10 + i, 1.0 + i % 2) for i in range(5)]
    incoming = table([row(3, 20), row(9, 5, 2.0), row(10, 7, 3.0), row(11, 99)])
    merge = tf.function(record_table.merge, jit_compile=jit_compile)
    own = tf.constant(11.0, tf.float64)
    merged = merge(tf.constant(known), incoming, own).numpy()
    assert merged.shape == known.shape
    assert totals(merged) == {1.0: 10 + 20 + 14, 2.0: 11 + 13 + 5, 3.0: 7}
    assert not set(merged[:, UID]) & {1, 2, 3, 4, 5, 9, 11} and 10 in merged[:, UID]
    # The same once more, and what came out of it: nothing is counted twice.
    again = merge(tf.constant(known), incoming, own).numpy()
    np.testing.assert_array_equal(again, merged)
    assert totals(merge(tf.constant(merged), tf.constant(again), own)) == totals(merged)
    # What was added up comes back by itself: it may be counted twice, but the total never falls.
    back = totals(merge(tf.constant(merged), table([row(1, 10)]), own))
    assert back[1.0] >= 44


def test_parameters_without_room_get_no_epsilon():
    known = np.zeros([3, COLUMNS])
    incoming = table([row(i, 10 + i, 1.0 + i) for i in range(1, 6)])
    merged = record_table.merge(tf.constant(known), incoming, tf.constant(0.0, tf.float64)).numpy()
    assert merged[:, COUNTS].sum() == sum(10 + i for i in range(1, 6))
    assert merged[2, KIND] == MIXED and merged[2, STEPS] == 0


@pytest.mark.slow
def test_more_optimizers_in_a_row_than_a_table_has_rows():
    saved, total = None, 0
    for _ in range(record_table.ROWS + 20):
        record = ReleaseRecord(GAUSSIAN, PARAMETERS, False)
        record._own.assign([1, 0, 0])
        if saved is not None:
            record.absorb(saved)
            record.refresh()
        saved, total = record._table().numpy(), total + 1
        assert saved[:, STEPS].sum() == total


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

    def add(self, fresh, begins=True):
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


def counts_afterwards(self, clipped):
    """Mutant of `_count_before`: what the step evaluates comes first."""
    use, lock = self._use_of(clipped)
    with tf.control_dependencies(clipped.gradients):
        self._released.add(use.fresh)
    return use, lock


def test_a_step_that_fails_on_an_example_is_counted():
    assert steps_that_failed() == (1, 0)


def test_counting_after_what_can_fail_is_caught(monkeypatch):
    monkeypatch.setattr(tfdp.DPSGD, "_count_before", counts_afterwards)
    assert steps_that_failed() == (0, 0)


# Other optimizers of the same variables.


def test_a_recompiled_model_has_cost_what_it_had():
    model = compiled()
    train(model)
    before = tfdp_ledger(model).epsilon(1e-3).epsilon
    compiled(make(), model)
    assert tfdp_ledger(model).epsilon(1e-3).epsilon == before
    train(model, 1)
    assert model.optimizer.ledger.steps == 4
    assert model.optimizer.ledger.epsilon(1e-3).epsilon > before


STRATEGIES = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["cpu:0"]),
    "one device": lambda: tf.distribute.OneDeviceStrategy("cpu:0"),
}


def steps_of_a_copy(first, second):
    """Counts those of a model, and of a copy of it that another distribution strategy trains."""
    found, weights = [], None
    for strategy in (first, second):
        with STRATEGIES[strategy]().scope():
            model = compiled()
            if weights is not None:
                model.set_weights(weights)
        train(model, 1)
        weights = model.get_weights()
        found.append(tfdp_ledger(model).steps)
    return found


@pytest.mark.slow
def test_models_of_several_distribution_strategies():
    assert steps_of_a_copy("mirrored", "one device") == [1, 2]


def test_records_that_belong_to_a_strategy_are_caught(monkeypatch):
    monkeypatch.setattr(release_count, "plain_variables", tf.init_scope)
    with pytest.raises((RuntimeError, ValueError), match=r"Mixing different|MirroredVariable"):
        steps_of_a_copy("mirrored", "one device")


def test_batches_drawn_from_mirrored_streams_are_caught(monkeypatch):
    """`compiled` calls `poisson_batches` in the scope of the strategy."""
    monkeypatch.setattr(key_streams, "plain_variables", tf.init_scope)
    with pytest.raises(ValueError, match="DistributedVariable"):
        steps_of_a_copy("mirrored", "one device")


def test_not_asking_the_variables_is_caught(monkeypatch):
    model = compiled()
    train(model)
    monkeypatch.setattr(lineage, "of", lambda variables: [])
    compiled(make(), model)
    train(model, 1)
    assert model.optimizer.ledger.steps == 1


def test_other_noise_and_other_classes_are_composed(tmp_path):
    model = compiled()
    train(model)
    compiled(make(2.0, tfdp.DPAdam), model)
    train(model, 2)
    expected = PrivacyLedger()
    for optimizer, count in ((make(), 3), (make(2.0), 2)):
        release = optimizer.release
        expected.record(release.event, count, release.truncation_probability)
    assert model.optimizer.ledger.releases == expected.releases
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    assert set(loaded.optimizer.ledger.releases) == set(expected.releases)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_the_ledger_charges_the_truncation_of_what_ran(padding, tmp_path):
    """Padded batches are cut off more often, and so were all batches of older records."""
    drawn = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, padding=padding)
    model = compiled(tfdp.DPSGD(1.0, 1.0, sampling=drawn.sampling, learning_rate=0.1))
    model.fit(drawn, steps_per_epoch=2, verbose=0)
    (release,) = model.optimizer.ledger.releases
    assert release.truncation_probability == drawn.sampling.truncation_probability
    assert release == dataclasses.replace(model.optimizer.release, count=2)
    assert (release.truncation_probability > 1e-60) == (padding != "none")
    # A checkpoint of an older version, of steps of kind 1, stays what it was in a new optimizer.
    saved = model.optimizer._released.rows()
    saved[:, [KIND, UID]] = GAUSSIAN, 77
    model.optimizer._released.absorb(saved)
    ledger = model.optimizer.ledger
    assert ledger.steps == 4
    old = PoissonSampling(64, 16, padding="full").truncation_probability
    expected = release.count * release.truncation_probability + 2 * old
    found = sum(r.count * r.truncation_probability for r in ledger.releases)
    assert found == pytest.approx(expected, rel=1e-12)


def test_mutant_that_charges_padded_batches_as_others_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(PrivateOptimizerMixin, "_kind", lambda self: GAUSSIAN_UNPADDED)
    with pytest.raises(AssertionError):
        test_the_ledger_charges_the_truncation_of_what_ran("full", tmp_path)


@pytest.mark.slow
def test_optimizers_that_alternate_see_each_other(tmp_path):
    model = compiled()
    first, second = make(), make(2.0)
    for optimizer in (first, second, first):
        compiled(optimizer, model)
        train(model, 2)
    assert first.released_steps() == second.released_steps() == (6, 0)
    path = tf.train.Checkpoint(optimizer=second).write(tmp_path / "c")
    saved = tf.train.load_checkpoint(path)
    (name,) = [n for n in saved.get_variable_to_shape_map() if "privacy_record/.ATTR" in n]
    assert saved.get_tensor(name)[:, STEPS].sum() == 6


def two_layers():
    return tf.keras.Sequential(
        [tf.keras.layers.Dense(5, input_shape=[4]), tf.keras.layers.Dense(3)]
    )


@pytest.mark.slow
def test_frozen_layers_are_part_of_what_a_loss_reads():
    model = two_layers()
    model.layers[1].trainable = False
    compiled(make(), model)
    train(model)
    model.layers[1].trainable, model.layers[0].trainable = True, False
    compiled(make(), model)
    train(model, 2)
    assert model.optimizer.ledger.steps == 5
    model.layers[0].trainable = True
    compiled(tf.keras.optimizers.legacy.SGD(), model)
    text = tfdp.privacy_statement(model, 1e-3)
    assert "5 steps" in text and "SGD does to the model" in " ".join(text.split())


@pytest.mark.slow
def test_what_is_trained_later_is_no_part_of_what_was_read_before():
    model = two_layers()
    model.layers[1].trainable = False
    compiled(make(), model)
    train(model)
    first = model.optimizer
    model.layers[1].trainable, model.layers[0].trainable = True, False
    compiled(make(), model)
    train(model, 2)
    # The second layer was read by the first optimizer while nobody had trained it.
    assert first.released_steps()[0] >= 3
    assert steps_of(model) == 5


def test_clones_have_cost_what_their_original_had():
    model = compiled()
    train(model)
    clone = tf.keras.models.clone_model(model)
    compiled(make(), clone)
    clone.set_weights(model.get_weights())
    assert steps_of(clone) == 3
    train(clone, 2)
    train(model, 1)
    assert clone.optimizer.ledger.steps == 5 and model.optimizer.ledger.steps == 4


def test_fresh_models_have_cost_nothing():
    train(compiled())
    fresh = compiled()
    train(fresh, 2)
    assert fresh.optimizer.ledger.steps == 2
    other = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[4])])
    other.compile(tf.keras.optimizers.legacy.SGD(), "mse")
    with pytest.raises(TypeError, match="that such an optimizer has trained"):
        tfdp.privacy_statement(other, 1e-3)


def test_a_variable_is_forgotten_when_it_is_gone():
    model = compiled()
    train(model, 1)
    key = id(model.trainable_variables[0].handle)
    handle = lineage._lineages[key]._handle
    assert handle() is not None
    variable = tf.Variable([1.0, 2.0])
    lineage.of([variable])
    key = id(variable.handle)
    assert key in lineage._lineages
    del variable
    assert key not in lineage._lineages


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
        model.fit(batches(), callbacks=[tfdp.callbacks.PrivacyBudget(9.0, 0.1)], verbose=0)
    with pytest.warns(UserWarning, match="not below 1 / 1000"):
        tfdp.calibrate_steps(
            target_epsilon=1.0,
            delta=1e-3,
            noise_multiplier=1.0,
            dataset_size=1000,
            expected_batch_size=10,
        )
