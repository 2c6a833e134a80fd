"""Optimizers and models that share variables have cost what went into these."""

import copy
import dataclasses

import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

import tfdp
from tests import support
from tests.step.release_support import X, Y, compiled, make, steps_of, tfdp_ledger, train
from tfdp.accounting import PrivacyLedger
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base.random import key_streams
from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.step.known_values import KnownValues
from tfdp.step.record import lineage, release_count
from tfdp.step.record.record_table import GAUSSIAN, GAUSSIAN_UNPADDED, KIND, STEPS, UID


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
    "mirrored": lambda: support.mirrored(1),
    "one device": lambda: tf.distribute.OneDeviceStrategy("cpu:0"),
}


def steps_of_a_copy(first, second):
    """Counts those of a model, and of a copy of it that another distribution strategy trains.

    The first model is alive while the copy trains: what is left of one that was collected are
    numbers, which belong to no strategy.
    """
    models, found = [], []
    for strategy in (first, second):
        # Outside of the scope: weights of another strategy's model cannot be read within.
        weights = models[-1].get_weights() if models else None
        with STRATEGIES[strategy]().scope():
            model = compiled()
            if weights is not None:
                model.set_weights(weights)
        models.append(model)
        train(model, 1)
        found.append(tfdp_ledger(model).steps)
    return found


@pytest.mark.slow
def test_models_of_several_distribution_strategies():
    assert steps_of_a_copy("mirrored", "one device") == [1, 2]


@pytest.mark.slow
def test_records_that_belong_to_a_strategy_are_caught(monkeypatch):
    monkeypatch.setattr(release_count, "plain_variables", tf.init_scope)
    with pytest.raises(
        (RuntimeError, ValueError), match=r"Mixing different|(Mirrored|Distributed)Variable"
    ):
        steps_of_a_copy("mirrored", "one device")


def test_batches_drawn_from_mirrored_streams_are_caught(monkeypatch):
    """`compiled` calls `poisson_batches` in the scope of the strategy."""
    monkeypatch.setattr(key_streams, "plain_variables", lambda **_: tf.init_scope())
    with pytest.raises(ValueError, match="DistributedVariable"):
        steps_of_a_copy("mirrored", "one device")


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("padding", "most"), [("none", None), ("buckets", None), ("full", None), ("full", 1e-9)]
)
def test_the_ledger_charges_the_truncation_of_what_ran(padding, most, tmp_path):
    """Padded batches are cut off more often, and so were all batches of older records."""
    drawn = tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=16, padding=padding, max_truncation_probability=most
    )
    model = compiled(tfdp.DPSGD(1.0, 1.0, sampling=drawn.sampling, learning_rate=0.1))
    model.fit(drawn, steps_per_epoch=2, verbose=0)
    (release,) = model.optimizer.ledger.releases
    assert release.truncation_probability == drawn.sampling.truncation_probability
    assert release == dataclasses.replace(model.optimizer.release, count=2)
    assert (release.truncation_probability > 1e-60) == (padding != "none")
    assert (release.truncation_probability > 1e-12) == (most is not None)
    # A checkpoint of an older version, of steps of kind 1, stays what it was in a new optimizer.
    saved = model.optimizer._released.rows()
    saved[:, [KIND, UID]] = GAUSSIAN, 77
    model.optimizer._released.absorb(saved)
    ledger = model.optimizer.ledger
    assert ledger.steps == 4
    old = PoissonSampling(64, 16, padding="full", max_truncation_probability=1e-30)
    old = old.truncation_probability
    expected = release.count * release.truncation_probability + 2 * old
    found = sum(r.count * r.truncation_probability for r in ledger.releases)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_mutant_that_charges_padded_batches_as_others_is_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(PrivateOptimizerMixin, "_kind", lambda self: GAUSSIAN_UNPADDED)
    with pytest.raises(AssertionError):
        test_the_ledger_charges_the_truncation_of_what_ran("full", None, tmp_path)


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


@pytest.mark.slow
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


def network(dtype=None):
    return tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[4], dtype=dtype)])


def steps_of_copies():
    """Counts the steps that copies of the second of three states of a model have cost."""
    model, found = compiled(), {}
    initial = model.get_weights()
    train(model, 2)
    weights = model.get_weights()
    train(model, 1)
    copies = {"earlier": network(), "initial": network(), "average": network()}
    for dtype in ("float64", "bfloat16", "float16"):
        copies[dtype] = network(dtype)
    del model
    for name, of in copies.items():
        values = {"initial": initial, "average": [0.5 * w for w in weights]}.get(name, weights)
        of.set_weights(values)
        ledger = tfdp_ledger(of)
        found[name] = 0 if ledger is None else ledger.steps
    # Into a model that was trained, and goes on without being traced again.
    other = compiled()
    train(other, 1)
    other.set_weights(weights)
    train(other, 1)
    found["into a trained model"] = other.optimizer.ledger.steps
    return found


COPIES = {
    **dict.fromkeys(["earlier", "float64", "bfloat16", "float16"], 2),
    **{"initial": 0, "average": 0, "into a trained model": 4},
}


def test_copies_have_cost_what_their_original_had_then():
    assert steps_of_copies() == COPIES


def moved_copies():
    """Counts the steps that values have cost which moved on, in graphs, from a trained model's."""
    model = compiled()
    train(model, 2)
    weights, found = model.get_weights(), {}
    path = tf.train.Checkpoint(v=model.trainable_variables).write(f"ram://weights/{id(model)}")
    initializer = tf.keras.initializers.Constant(weights[0])
    made = tf.keras.Sequential(
        [tf.keras.layers.Dense(3, input_shape=[4], kernel_initializer=initializer)]
    )
    restored, assigned = network(), network()
    tf.train.Checkpoint(v=restored.trainable_variables).read(path)
    assigned.set_weights(weights)
    ways = {"itself": model, "deepcopy": copy.deepcopy(model), "initializer": made}
    for name, moving in {**ways, "restored": restored, "assigned": assigned}.items():
        move(moving.trainable_variables)
        moved = network()
        moved.set_weights(moving.get_weights())
        ledger = tfdp_ledger(moved)
        found[name] = 0 if ledger is None else ledger.steps
    return found


def move(variables):
    """Moves variables in a graph, as an optimizer without privacy does on public data."""

    @tf.function
    def step():
        for variable in variables:
            variable.assign_add(tf.random.normal(variable.shape))

    step()


MOVED = dict.fromkeys(["itself", "deepcopy", "initializer", "restored", "assigned"], 2)


def test_values_that_were_trained_on_without_privacy_have_cost_what_they_came_from():
    assert moved_copies() == MOVED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_init_from_args", ["initializer"]),
        ("_restore_from_tensors", ["restored"]),
        ("assign", ["assigned", "deepcopy"]),  # Keras 2 copies a model by `set_weights`.
    ],
)
def test_mutants_without_notice_of_new_values_are_caught(name, wrong, monkeypatch):
    without_notice_of(monkeypatch, name)
    assert moved_copies() == MOVED | dict.fromkeys(wrong, 0)


def test_mutant_that_hashes_values_once_for_each_step_is_caught(monkeypatch):
    def once(self, values, hashed, releases=None, note=lineage.Lineage.note):
        counts = lineage.Releases(self.records).counts
        if getattr(self, "_at", None) != counts:
            self._at = counts
            note(self, values, hashed, releases)

    monkeypatch.setattr(lineage.Lineage, "note", once)
    found = moved_copies()
    assert found["itself"] == 0 == found["assigned"]


def test_records_are_read_once_for_all_variables(monkeypatch):
    model = compiled()
    train(model, 1)
    tables, read = release_count.ReleaseRecord.tables, []
    monkeypatch.setattr(
        release_count.ReleaseRecord, "tables", lambda self: read.append(1) or tables(self)
    )
    lineage.of(model.trainable_variables)
    of_two = len(read)
    lineage.of([*model.trainable_variables] * 50)
    assert len(read) - of_two <= of_two <= 4


def without_notice_of(monkeypatch, name):
    for cls in (BaseResourceVariable, ResourceVariable):
        if name in vars(cls):
            monkeypatch.setattr(cls, name, vars(cls)[name].__wrapped__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_read_variable_op", ["earlier", "float64", "bfloat16", "float16"]),
        ("assign", ["into a trained model"]),
    ],
)
def test_mutants_without_notice_of_reads_or_writes_are_caught(name, wrong, monkeypatch):
    without_notice_of(monkeypatch, name)
    found = steps_of_copies()
    assert set(wrong) <= {name for name, steps in found.items() if steps < COPIES[name]}


@pytest.mark.slow
def test_mutant_without_free_values_charges_initial_ones(monkeypatch):
    monkeypatch.setattr(KnownValues, "note_free", lambda self, one: None)
    model = compiled()
    initial = model.get_weights()
    train(model, 1)
    model.set_weights(initial)
    model.get_weights()
    other = network()
    other.set_weights(initial)
    assert tfdp_ledger(other).steps == 1


def test_initial_values_that_come_back_cost_nothing():
    model = compiled()
    initial = model.get_weights()
    train(model, 1)
    model.set_weights(initial)
    model.get_weights()
    other = network()
    other.set_weights(initial)
    assert tfdp_ledger(other) is None
