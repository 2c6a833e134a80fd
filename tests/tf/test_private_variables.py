"""Each way in which the value of a variable gets into a file or a copy."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from tfdp.base.tf import private_variables
from tfdp.base.tf.private_variables import is_private, keep_private

VALUE = [3.0, 4.0]


def like_a_metric(value=VALUE, **changes):
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        **changes,
    )


def in_checkpoint(variable, tmp_path, options=None):
    checkpoint = tf.train.Checkpoint(variable=variable)
    path = checkpoint.write(str(tmp_path / "checkpoint"), options=options)
    if options is not None:
        checkpoint.sync()
    return tf.train.load_variable(path, "variable/.ATTRIBUTES/VARIABLE_VALUE")


def in_file_of_saver(variable, tmp_path):
    tf.compat.v1.train.Saver({"variable": variable}).save(None, str(tmp_path / "saver"))
    return tf.train.load_variable(str(tmp_path / "saver"), "variable")


def in_background(variable, tmp_path):
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    return in_checkpoint(variable, tmp_path, options)


def in_saved_model(variable, tmp_path):
    module = tf.Module()
    module.variable = variable
    module.read = tf.function(lambda: variable.read_value(), input_signature=[])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.read(), loaded.variable)
    return loaded.variable.numpy()


# Each way out, and the methods by which it is closed.
_SERIALIZED = "_serialize_to_tensors read_value_no_copy"
WAYS = {
    "numpy": (lambda variable, _: variable.numpy(), "numpy"),
    "array": (lambda variable, _: np.asarray(variable), "numpy"),
    "pickle": (lambda variable, _: pickle.loads(pickle.dumps(variable)).numpy(), "numpy"),
    "deepcopy": (lambda variable, _: copy.deepcopy(variable).numpy(), "__deepcopy__"),
    "checkpoint": (in_checkpoint, _SERIALIZED),
    "background": (in_background, "_copy_trackable_to_cpu"),
    "saved_model": (in_saved_model, _SERIALIZED),
    "saver": (in_file_of_saver, "read_value_no_copy"),
}
CLOSED_BY = pytest.mark.parametrize(("way", "methods"), WAYS.values(), ids=WAYS)


@CLOSED_BY
def test_files_and_copies_hold_zeros(way, methods, tmp_path):
    variable = like_a_metric()
    np.testing.assert_array_equal(_taken(way, variable, tmp_path / "before"), VALUE)
    keep_private(variable)
    np.testing.assert_array_equal(_taken(way, variable, tmp_path / "after"), [0.0, 0.0])
    np.testing.assert_array_equal(tf.identity(variable), VALUE)  # It goes on undisturbed.


def _taken(way, variable, folder):
    folder.mkdir()
    return way(variable, folder)


@CLOSED_BY
def test_mutant_that_leaves_a_way_open_is_caught(way, methods, monkeypatch, tmp_path):
    variable = like_a_metric()
    keep_private(variable)
    for method in methods.split():
        monkeypatch.delattr(type(variable), method)
    assert np.any(way(variable, tmp_path))


def test_it_is_a_variable_as_before():
    variable, kept = like_a_metric(), like_a_metric()
    keep_private(kept)
    keep_private(kept)
    assert is_private(kept) and not is_private(variable)
    assert isinstance(kept, type(variable)) and repr(type(kept)) == repr(type(variable))
    assert type(kept).__mro__[1:] == type(variable).__mro__

    @tf.function
    def add():
        kept.assign_add([1.0, 1.0])
        return kept * 2

    np.testing.assert_array_equal(add(), [8.0, 10.0])
    with tf.Graph().as_default(), pytest.raises(NotImplementedError):
        kept.numpy()


def test_files_are_restored(tmp_path):
    """Those of before, too."""
    old = tf.train.Checkpoint(variable=like_a_metric()).write(str(tmp_path / "old"))
    kept = like_a_metric([1.0, 1.0])
    keep_private(kept)
    checkpoint = tf.train.Checkpoint(variable=kept)
    new = checkpoint.write(str(tmp_path / "new"))
    for path, expected in ((old, VALUE), (new, [0.0, 0.0])):
        checkpoint.restore(path).assert_nontrivial_match()
        np.testing.assert_array_equal(tf.identity(kept), expected)


@pytest.mark.parametrize("shape", [[None], None])
def test_a_shape_that_may_follow_from_data_is_not_saved(shape, tmp_path):
    variable = like_a_metric(shape=tf.TensorShape(shape))
    keep_private(variable)
    assert in_checkpoint(variable, tmp_path).size <= 1
    assert variable.numpy().shape == ((0,) if shape else ())


@pytest.mark.parametrize("value", [True, "text", np.int64(3), np.float64(3)])
def test_other_types(value, tmp_path):
    variable = like_a_metric(value)
    keep_private(variable)
    assert in_checkpoint(variable, tmp_path) in (0, b"")
    assert tf.identity(variable) == value


def of_replicas(value, in_function=False):
    """A variable with two parts; those made in a function have another class."""
    made = []

    @tf.function
    def make():
        if not made:
            made.append(like_a_metric(value))

    with (strategy := tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])).scope():
        make() if in_function else made.append(like_a_metric(value))
    strategy.run(lambda: made[0].assign_add(value))
    return made[0]


# Ways that are tested for variables with a part for each replica.
WAYS_OF_REPLICAS = ["numpy", "array", "deepcopy", "checkpoint", "background"]


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("part", [None, 0, 1])
def test_every_part_for_a_replica_is_private(part, in_function, tmp_path):
    variable = of_replicas([3.0, 4.0], in_function)
    before = tf.identity(variable).numpy()
    np.testing.assert_array_equal(before, [12.0, 16.0])  # The sum over both.
    keep_private(variable if part is None else variable.values[part])
    for number, one in enumerate([variable, *variable.values]):
        for name in WAYS_OF_REPLICAS:
            found = _taken(WAYS[name][0], one, tmp_path / f"{name}{number}")
            np.testing.assert_array_equal(found, [0.0, 0.0])
    np.testing.assert_array_equal(tf.identity(variable), before)


def test_mutant_whose_parts_numpy_sees_is_caught(monkeypatch):
    variable = of_replicas([3.0, 4.0])
    keep_private(variable)
    monkeypatch.delattr(type(variable).__mro__[1], "__array__")
    assert np.any(np.asarray(variable))


def test_of_replicas_are_restored(tmp_path):
    old = tf.train.Checkpoint(variable=of_replicas([3.0, 4.0])).write(str(tmp_path / "old"))
    kept = of_replicas([1.0, 1.0])
    keep_private(kept)
    tf.train.Checkpoint(variable=kept).restore(old).assert_nontrivial_match()
    np.testing.assert_array_equal(tf.identity(kept), [12.0, 16.0])


def test_mutant_that_forgets_the_other_replicas_is_caught(monkeypatch):
    variable = of_replicas([3.0, 4.0])
    monkeypatch.setattr(tf.distribute, "DistributedValues", type(None))
    monkeypatch.setattr(private_variables, "_class_of_replicas", private_variables._class_of_one)
    keep_private(variable.values[0])
    assert np.any(variable.values[1].numpy())
