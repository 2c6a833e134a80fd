"""`tfdp statement`: the ledger of files, read without making a model."""

import json
import types

import h5py
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import keras, needs_keras_3
from tests.support import small_data
from tfdp.accounting import ledger as ledgers
from tfdp.command_line import commands
from tfdp.command_line.main import run
from tfdp.step.record import file_ledger, record_table
from tfdp.step.record.file_ledger import NoRecordError, ledger_of_file
from tfdp.step.record.saved_lineage import FileTable

PARAMETERS = {
    "l2_norm_clip": 1.0,
    "noise_multiplier": 1.1,
    "expected_batch_size": 50,
    "num_microbatches": 50,
    "dataset_size": 500,
}


def row(uid, steps):
    made = record_table.new_row(uid, record_table.GAUSSIAN_UNPADDED, False, PARAMETERS)
    made[record_table.STEPS] = steps
    return made


def table(*rows):
    made = FileTable()
    made.add([([7, 8], np.array(rows))])
    return made.arrays()


def write_h5(path, *groups, record=None):
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.ones(3)
        for name, arrays in groups:
            for key, array in arrays.items():
                file[f"{name}/{key}"] = array
        if record is not None:
            file["optimizer/vars/privacy_record"] = record
    return path


def test_the_table_and_the_record_of_an_optimizer_are_one_past(tmp_path):
    """A release that both know of counts once, by the larger count."""
    group = "tfdp_lineage/vars", table(row(1, 20), row(2, 5))
    path = write_h5(tmp_path / "a.h5", group, record=np.array([row(1, 22), row(0, 0)]))
    found = ledger_of_file(path)
    assert found.ledger.steps == 27 and found.ledger.dataset_sizes == (500,)
    legacy = write_h5(tmp_path / "b.h5", ("model_weights/tfdp_lineage", table(row(1, 20))))
    assert ledger_of_file(legacy).ledger.steps == 20
    alone = write_h5(tmp_path / "c.h5", record=np.array([row(1, 22)]))
    assert ledger_of_file(alone).ledger.steps == 22


def test_links_in_a_circle_have_an_end(tmp_path):
    path = write_h5(tmp_path / "a.h5", ("tfdp_lineage/vars", table(row(1, 20))))
    with h5py.File(path, "a") as file:
        file["layers/again"] = file["/"]
    assert ledger_of_file(path).ledger.steps == 20


def test_damaged_tables_are_refused(tmp_path):
    arrays = table(row(1, 20))
    path = write_h5(tmp_path / "a.h5", ("tfdp_lineage", {**arrays, "rows": np.ones([1, 4])}))
    with pytest.raises(ValueError, match="must hold `hashes`"):
        ledger_of_file(path)
    path = write_h5(tmp_path / "b.h5", record=np.ones([3, 4]))
    with pytest.raises(ValueError, match="saved by another version of tfdp"):
        ledger_of_file(path)


def test_what_is_no_file_of_tfdp_is_a_failure_in_one_line(tmp_path, capsys):
    files = {
        "plain.h5": write_h5(tmp_path / "plain.h5"),
        "text.txt": tmp_path / "text.txt",
        "empty.keras": tmp_path / "empty.keras",
        "folder": tmp_path / "folder",
        "damaged.keras": tmp_path / "damaged.keras",
        "broken.index": tmp_path / "broken.index",
    }
    files["text.txt"].write_text("not a model")
    files["empty.keras"].write_bytes(b"")
    files["folder"].mkdir()
    files["damaged.keras"].write_bytes(b"PK\x03\x04" + bytes(50))
    files["broken.index"].write_bytes(bytes(20))
    for name, path in files.items():
        with pytest.raises(NoRecordError, match=name.removesuffix(".index")):
            ledger_of_file(path)
        assert run(commands.tfdp, ["statement", str(path)]) == 1
        output, errors = capsys.readouterr()
        assert output == "" and errors.startswith("tfdp: error: ") and errors.count("\n") == 1
    assert run(commands.tfdp, ["statement", str(tmp_path / "none")]) == 1
    assert "There is no file" in capsys.readouterr().err


def test_another_tensor_of_the_size_of_a_record_is_none(tmp_path):
    shape = [record_table.ROWS, record_table.COLUMNS]
    record = np.zeros(shape)
    record[0] = row(3, 12)
    weights = np.random.default_rng(0).normal(size=shape)
    for values, expected in ((weights, None), (record, 12)):
        path = tf.train.Checkpoint(v=tf.Variable(values)).write(str(tmp_path / "checkpoint"))
        if expected is None:
            with pytest.raises(NoRecordError):
                ledger_of_file(path)
        else:
            assert ledger_of_file(path).ledger.steps == expected


@pytest.fixture
def trained():
    """A model with a class of its own, which is not there when its files are read."""

    class OwnLayer(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    x, y = small_data(200)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Flatten(), OwnLayer()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdp.keras3.DPSGD(1.0, 1.1, sampling=batches.sampling)
    model.compile(optimizer, loss)
    model.fit(batches, epochs=1, verbose=0)
    return model


def _shards(model, path):
    model.save_weights(path, max_shard_size=1e-4)  # In GB; the record has 38 KB.


FORMATS = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "unzipped": lambda model, path: model.save(path, zipped=False),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "shards.weights.json": _shards,
    "exported": lambda model, path: model.export(path, verbose=False),
    "checkpoint": lambda model, path: tf.train.Checkpoint(model=model).write(path),
    "folder": lambda model, path: tf.train.Checkpoint(model=model).save(f"{path}/checkpoint"),
}


@needs_keras_3
@pytest.mark.slow
def test_every_format_has_the_ledger_of_the_model(trained, tmp_path, capsys):
    expected = ledgers.PrivacyLedger.from_dict(trained.optimizer.ledger.to_dict())
    for name, save in FORMATS.items():
        path = str(tmp_path / name)
        save(trained, path)
        assert ledger_of_file(path).ledger.to_dict() == expected.to_dict(), name
    path = str(tmp_path / "model.keras")
    assert run(commands.tfdp, ["statement", path]) == 0
    stated = tfdp.privacy_statement(trained, delta=0.0029)
    text = capsys.readouterr().out
    head, _, tail = stated.partition("Not covered by this guarantee:\n")
    assert text.startswith(head) and tail.strip() in text and "Attacks: " in text
    assert run(commands.tfdp, ["statement", path, "--format=json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"epsilon = {facts['epsilon']:g} at" in text and facts["steps"] == 4
    assert run(commands.tfdp, ["statement", path, "--format=markdown", "--delta=1e-4"]) == 0
    assert "at delta = 0.0001.**\n" in capsys.readouterr().out
    assert "does to the model" not in text
    # Compiled anew, its weights have cost what they had; what Adam did is not known.
    trained.compile("adam", "mse")
    for name in ("model.keras", "model.h5"):
        trained.save(tmp_path / name)
        found = ledger_of_file(tmp_path / name)
        assert found.ledger.steps == 4
        assert any("dam does to the model" in one for one in found.not_covered), found.not_covered


def test_mutant_that_forgets_the_record_of_the_optimizer_is_caught(tmp_path, monkeypatch):
    group = "tfdp_lineage/vars", table(row(1, 20))
    path = write_h5(tmp_path / "a.h5", group, record=np.array([row(1, 22)]))
    assert ledger_of_file(path).ledger.steps == 22
    monkeypatch.setattr(file_ledger, "_add_record", lambda *_: None)
    assert ledger_of_file(path).ledger.steps != 22


def test_the_delta_must_be_given_where_the_number_of_examples_is_unknown(capsys, monkeypatch):
    nothing = types.SimpleNamespace(ledger=ledgers.PrivacyLedger(), not_covered=())
    monkeypatch.setattr(file_ledger, "ledger_of_file", lambda path: nothing)
    assert run(commands.tfdp, ["statement", "x"]) == 2
    assert "'--delta': must be given" in capsys.readouterr().err
    assert run(commands.tfdp, ["statement", "x", "--delta=1e-5"]) == 0
    assert "Released: nothing yet" in capsys.readouterr().out
