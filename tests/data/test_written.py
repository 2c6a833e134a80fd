"""Folders of examples that are written once."""

import functools
import json
import shutil
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import forks
from tfdp.data import written as written_module

N = 90
X = np.arange(N * 4, dtype="float32").reshape([N, 4]) / 100
Y = np.arange(N)


def written(folder, part_rows=40):
    original, written_module._PART_BYTES = written_module._PART_BYTES, 24 * part_rows
    try:
        tfdp.data.write_examples(tf.data.Dataset.from_tensor_slices((X, Y)), folder)
    finally:
        written_module._PART_BYTES = original
    return tfdp.data.read_examples(folder)


@pytest.mark.parametrize("verbose", [True, False])
def test_the_progress_bar(tmp_path, capsys, verbose):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    tfdp.data.write_examples(data, tmp_path, verbose=verbose)
    assert (f"{N}/{N} [====" in capsys.readouterr().out) == verbose


def test_a_written_folder_that_is_not_complete_is_gone_on_with(tmp_path):
    class Killed(Exception):
        pass

    def interrupted():
        for i in range(N):
            if i == 60:
                raise Killed
            yield X[i], Y[i]

    spec = (tf.TensorSpec([4]), tf.TensorSpec([], tf.int64))
    broken = tf.data.Dataset.from_generator(interrupted, output_signature=spec)
    original, written_module._PART_BYTES = written_module._PART_BYTES, 24 * 25
    try:
        with pytest.raises(tf.errors.OpError):
            tfdp.data.write_examples(broken, tmp_path)
    finally:
        written_module._PART_BYTES = original
    with pytest.raises(ValueError, match="Call `write_examples` again"):
        tfdp.data.read_examples(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert before[:2] == ["00000", "00001"]
    times = [(tmp_path / name / "0.npy").stat().st_mtime_ns for name in before[:2]]
    examples = written(tmp_path)  # The folder's part size is kept.
    assert [(tmp_path / name / "0.npy").stat().st_mtime_ns for name in before[:2]] == times
    assert len(examples) == N
    for i in (0, 24, 25, 74, N - 1):
        np.testing.assert_array_equal(examples[i][0], X[i])
        assert examples[i][1] == Y[i]
    tfdp.data.write_examples(broken, tmp_path)  # It is complete: nothing is read.


KILLED = """
import os, pathlib, signal, sys
import numpy as np, tensorflow as tf, tfdp
from tfdp.data import written

folder, where, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
written._PART_BYTES = 24 * 25
calls = []

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def counted(original, before):
    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            before(*args)
            kill()
        return original(*args, **kwargs)
    return call

def half(path, array):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array)
        file.truncate(file.tell() // 2)

def half_text(path, text):
    path.with_name(f".unfinished.{path.name}").write_text(text[: len(text) // 2])

if where == "array":
    written._save = counted(written._save, half)
elif where == "rename":
    pathlib.Path.rename = counted(pathlib.Path.rename, lambda *_: None)
else:
    written.write_text = counted(written.write_text, half_text)
x, y = np.arange(90 * 4, dtype="float32").reshape([90, 4]) / 100, np.arange(90)
tfdp.data.write_examples(tf.data.Dataset.from_tensor_slices((x, y)), folder)
"""


# Places of kills in four parts of two arrays each: the first array, the second array of the third
# part, the last array; between a part's arrays and its name; the first index, the last index.
KILLS = [
    *(("array", 1), ("array", 6), ("array", 8)),
    *(("rename", 1), ("rename", 4), ("index", 1), ("index", 2)),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Copies into a folder what a process has written that was killed with SIGKILL."""

    @functools.cache
    def written_until_killed():
        folders = [tmp_path_factory.mktemp("killed") for _ in KILLS]
        arguments = [(folder, *kill) for folder, kill in zip(folders, KILLS, strict=True)]
        for process in forks.run_each(KILLED, arguments):
            assert process.status == -signal.SIGKILL, process.errors
        return dict(zip(KILLS, folders, strict=True))

    def copy(folder, *kill):
        shutil.copytree(written_until_killed()[kill], folder, dirs_exist_ok=True)

    return copy


def assert_is_resumed(folder):
    with pytest.raises(ValueError, match="Call `write_examples` again"):
        tfdp.data.read_examples(folder)
    examples = written(folder)
    assert len(examples) == N
    for i in range(N):
        x, y = examples[i]
        np.testing.assert_array_equal(x, X[i])
        assert y == Y[i]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "at"), KILLS)
def test_a_killed_process_is_resumed(where, at, killed, tmp_path):
    killed(tmp_path, where, at)
    assert_is_resumed(tmp_path)


@pytest.mark.slow
def test_parts_that_are_written_in_place_are_caught(killed, tmp_path, monkeypatch):
    """Mutant: a part that was not complete is taken for a complete one."""
    original = written_module._part_folders

    def with_unfinished(place):
        for part in place.glob("*.unfinished"):
            if part.is_dir():
                part.rename(part.with_suffix(""))
        return original(place)

    killed(tmp_path, "array", 6)
    monkeypatch.setattr(written_module, "_part_folders", with_unfinished)
    with pytest.raises((AssertionError, ValueError)):
        assert_is_resumed(tmp_path)


def test_nested_examples_and_strings(tmp_path):
    data = ({"a": X, "b": (Y, Y.astype("S"))}, Y)
    tfdp.data.write_examples(tf.data.Dataset.from_tensor_slices(data), tmp_path)
    examples = tfdp.data.read_examples(tmp_path)
    x, y = examples[7]
    assert x["b"] == (7, b"7") and y == 7
    batches = tfdp.data.poisson_batches(examples, expected_batch_size=20)
    x, y = (tf.nest.map_structure(np.asarray, part) for part in next(iter(batches)))
    np.testing.assert_array_equal(x["b"][1], y.astype("S").astype(object))


def test_a_folder_of_other_examples_is_refused(tmp_path):
    written(tmp_path)
    other = tf.data.Dataset.from_tensor_slices((Y, Y))
    with pytest.raises(ValueError, match="Argument `folder` must be empty"):
        tfdp.data.write_examples(other, tmp_path)
    assert json.loads((tmp_path / "examples.json").read_text())["complete"]


def test_examples_without_a_fixed_shape_are_refused(tmp_path):
    data = tf.data.Dataset.from_generator(
        lambda: [(X[0], 0)], output_signature=(tf.TensorSpec([None]), tf.TensorSpec([], tf.int64))
    )
    with pytest.raises(ValueError, match="fixed shapes"):
        tfdp.data.write_examples(data, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.batch(9, drop_remainder=True), "single examples"),
        (lambda data: data.repeat(), "must be finite"),
        (lambda data: data.map(lambda x, y: (x, y, x, y)), "choose x and y"),
        (lambda data: data.map(lambda x, y: (tf.cast(x, tf.bfloat16), y)), "types that NumPy has"),
        (lambda data: data.map(lambda x, y: (x, tf.constant(b"a\0"))), "zero byte"),
    ],
)
def test_data_sets_that_cannot_be_written_are_refused(change, message, tmp_path):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=message):
        tfdp.data.write_examples(change(data), tmp_path)


def test_a_folder_of_another_data_set_is_not_taken_for_this_one(tmp_path):
    written(tmp_path)
    other = tf.data.Dataset.from_tensor_slices((X[:20], Y[:20]))
    with pytest.raises(ValueError, match="holds 90 examples, and a dataset of 20"):
        tfdp.data.write_examples(other, tmp_path)


def test_several_writers_of_one_folder_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(written_module, "_PART_BYTES", 24 * 20)
    dataset, failed = tf.data.Dataset.from_tensor_slices((X, Y)), []

    def write():
        try:
            tfdp.data.write_examples(dataset, tmp_path, verbose=False)
        except Exception as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert not failed
    found = tfdp.data.read_examples(tmp_path)
    assert len(found) == N
    assert all(np.array_equal(found[i][0], X[i]) and found[i][1] == Y[i] for i in range(N))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"rows": 3}', "\x00"])
def test_a_damaged_index_is_named(tmp_path, text):
    written(tmp_path)
    (tmp_path / "examples.json").write_text(text)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    for use in (tfdp.data.read_examples, lambda p: tfdp.data.write_examples(dataset, p)):
        with pytest.raises(ValueError, match=r"`folder` .* whose examples\.json is damaged"):
            use(tmp_path)
