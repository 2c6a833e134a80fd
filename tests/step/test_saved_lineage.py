"""Files hold what their weights have cost, whoever saves and loads them."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import front_ends, support
from tfdp.step.record import lineage, record_ledger, record_table, saved_lineage

X, Y = support.small_data(64)
STEPS = 2


def network(front, dtype=None):
    layers = front.keras.layers
    return front.keras.Sequential([layers.Input([4]), layers.Dense(3, dtype=dtype)])


def trained(front, model=None):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=STEPS)
    model = model or network(front)
    optimizer = front.tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling, learning_rate=0.1)
    model.compile(optimizer=optimizer, loss=front.crossentropy())
    model.fit(batches, verbose=0)
    return model


def save(front, model, folder):
    """Saves a model in every way."""
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    with warnings.catch_warnings():  # Keras warns of the old format.
        warnings.simplefilter("ignore")
        model.save(folder / "m.h5")
    tf.train.Checkpoint(variables=variables(front, model)).write(folder / "variables")
    tf.saved_model.save(tf.train.Checkpoint(variables=variables(front, model)), folder / "m")
    part = front.keras.Sequential([front.keras.layers.Input([4]), model.layers[-1]])
    part.save(folder / "part.keras")


def variables(front, model):
    return [getattr(v, "value", v) if front.keras is not tf.keras else v for v in model.weights]


def load_saved_model(front, folder):
    model, loaded = network(front), tf.saved_model.load(folder / "m")
    model.set_weights([variable.numpy() for variable in loaded.variables])
    return model


def load_checkpoint(front, folder):
    model = network(front)
    checkpoint = tf.train.Checkpoint(variables=variables(front, model))
    checkpoint.read(folder / "variables").expect_partial()
    return model


def with_weights(front, path, dtype=None):
    model = network(front, dtype)
    model.load_weights(path)
    return model


LOAD = {
    "model": lambda front, folder: front.keras.models.load_model(folder / "m.keras", compile=False),
    "weights": lambda front, folder: with_weights(front, folder / "m.weights.h5"),
    "other type": lambda front, folder: with_weights(front, folder / "m.weights.h5", "bfloat16"),
    "old format": lambda front, folder: front.keras.models.load_model(
        folder / "m.h5", compile=False
    ),
    "part": lambda front, folder: front.keras.models.load_model(folder / "part.keras"),
    "checkpoint": load_checkpoint,
    "SavedModel": load_saved_model,
}


def in_another_process():
    """Forgets what only this process knows."""
    lineage._lineages.clear()
    lineage.known.clear()


def steps_of(model):
    ledger = record_ledger.ledger_of_model(model)
    return 0 if ledger is None else ledger.steps


def lost(front, folder):
    """Returns the ways of loading that lose the ledger."""
    found = []
    for name, load in LOAD.items():
        in_another_process()
        if steps_of(load(front, folder)) != STEPS:
            found.append(name)
    return found


@pytest.fixture(scope="module", params=front_ends.FRONT_ENDS, ids=lambda front: front.part)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(request.param, trained(request.param), folder)
    return request.param, folder


def test_every_file_holds_the_ledger(saved):
    assert lost(*saved) == []
    in_another_process()
    assert steps_of(network(saved[0])) == 0  # Nothing is read: nothing is known.


def test_the_statement_of_a_loaded_model_is_that_of_the_trained_one(saved):
    front, folder = saved
    in_another_process()
    loaded = LOAD["model"](front, folder)
    assert f"{STEPS} steps" in tfdp.privacy_statement(loaded, 1e-3)
    assert trained(front, loaded).optimizer.ledger.steps == 2 * STEPS
    again = LOAD["model"](front, folder)  # The file is as it was.
    assert steps_of(again) == STEPS


def steps_after_the_arrays(front, folder):
    """Counts those of a loaded model whose weights had come before, as arrays without a ledger."""
    arrays = LOAD["model"](front, folder).get_weights()
    in_another_process()
    model = network(front)
    model.set_weights(arrays)
    lineage.of(variables(front, model))
    return steps_of(LOAD["model"](front, folder))


def test_a_file_knows_more_than_this_process(saved):
    assert steps_after_the_arrays(*saved) == STEPS


def test_mutant_that_believes_what_came_first_is_caught(saved, monkeypatch):
    note = lineage.known.note
    monkeypatch.setattr(lineage.known, "note", lambda hashes, rows, certain: note(hashes, rows))
    assert steps_after_the_arrays(*saved) == 0


def test_mutant_that_does_not_read_the_table_is_caught(saved, monkeypatch):
    monkeypatch.setattr(saved_lineage, "read", lambda arrays: False)
    assert lost(*saved) == list(LOAD)


@pytest.mark.slow
@front_ends.with_both
def test_mutant_that_writes_no_table_is_caught(front, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_lineage.FileTable, "arrays", lambda self: {})
    save(front, trained(front), tmp_path)
    assert lost(front, tmp_path) == list(LOAD)


@front_ends.with_both
def test_weights_that_cost_nothing_have_no_table(front, tmp_path, monkeypatch):
    written = []
    arrays = saved_lineage.FileTable.arrays
    monkeypatch.setattr(
        saved_lineage.FileTable, "arrays", lambda self: written.append(arrays(self)) or {}
    )
    save(front, network(front), tmp_path)
    assert len(written) == 6 and not any(written)


def test_a_table_of_another_form_is_refused():
    table = saved_lineage.FileTable()
    row = record_table.new_row(7, record_table.GAUSSIAN, False, {})[np.newaxis]
    row[0, record_table.STEPS] = 3
    table.add([([2**64 - 1, 6], row), ([5], None), ([], row)])
    arrays = table.arrays()
    assert saved_lineage.read(arrays) and not saved_lineage.read({})
    for one in (2**64 - 1, 6):
        np.testing.assert_array_equal(lineage.known.rows_of(one), row)
    assert lineage.known.rows_of(5) is None
    for name in arrays:
        with pytest.raises(ValueError, match="another version of tfdp"):
            saved_lineage.read({**arrays, name: arrays[name][:, :-1]})


class Task:
    """A `compile` of its own, which takes an optimizer of its own when a model is loaded."""

    def compile(self, optimizer="auto", loss="auto", **kwargs):
        adam = self.front.keras.optimizers.Adam()
        optimizer = adam if isinstance(optimizer, str) else optimizer
        loss = self.front.crossentropy() if isinstance(loss, str) else loss
        super().compile(optimizer=optimizer, loss=loss, **kwargs)

    def compile_from_config(self, config):
        self.compile()


def task_class(front):
    return type("Task", (Task, front.keras.Sequential), {"front": front})


def load_task(front, folder):
    """Trains, saves and loads a model with a `compile` of its own; returns it."""
    cls, layers = task_class(front), front.keras.layers
    model = trained(front, cls([layers.Input([4]), layers.Dense(3)]))
    model.save(folder / "task.keras")
    in_another_process()
    path, objects = folder / "task.keras", {"Task": cls}
    return front.keras.models.load_model(path, custom_objects=objects)


@pytest.mark.filterwarnings(
    "ignore:Skipping variable loading"
)  # Keras warns of the other optimizer.
@front_ends.with_both
def test_a_model_that_comes_back_without_its_optimizer_warns_and_keeps_its_ledger(front, tmp_path):
    with pytest.warns(UserWarning, match="Adam, which is not private: `fit` would train"):
        model = load_task(front, tmp_path)
    assert type(model.optimizer).__name__ == "Adam"
    assert steps_of(model) == STEPS
    training = front.tfdp.make_private(
        model, (X, Y), epochs=1, target_epsilon=50.0, delta=1e-3, batch_size=16, verbose=False
    )
    training.model.fit(training.batches, epochs=1, callbacks=[training.budget], verbose=0)
    assert training.model.optimizer.ledger.steps == STEPS + 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@front_ends.with_both
def test_mutant_that_does_not_warn_is_caught(front, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_lineage, "_warn_of_optimizer", lambda model: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_model_that_comes_back_without_its_optimizer_warns_and_keeps_its_ledger(
            front, tmp_path
        )
