"""Files that are read where only `tfdp` is imported; each in a process of its own."""

import importlib.util
import types

import pytest
import tensorflow as tf

import tfdp
from tests import forks
from tests.front_ends import keras, needs_keras_3
from tests.support import small_data
from tests.without_keras_2 import needs_keras_2
from tfdp.base import file_hooks
from tfdp.step.record import lineage

pytestmark = needs_keras_3
X, Y = small_data(64)
BATCHES = {"expected_batch_size": 16, "steps_per_epoch": 2}

ORDERS = ["import keras, tfdp", "import tfdp, keras"]
PROGRAM = """
import sys
assert "tfdp.keras3" not in sys.modules
import keras, tfdp
model = keras.models.load_model(sys.argv[1], compile=sys.argv[2] == "compiled")
if sys.argv[2] == "weights":
    model.compile(tfdp.keras3.DPSGD(1.0, 1.0, 16), "mse")
    model.optimizer.build(model.trainable_variables)
print(type(model.optimizer).__module__, type(model.optimizer).__name__)
steps, not_poisson = model.optimizer.released_steps()
print(steps, not_poisson, len(model.optimizer.variables))
"""


# The weights alone, into a model that was never compiled.
RESTORE = """
import sys
import keras, tfdp
import tensorflow as tf
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
tf.train.Checkpoint(model=model).restore(sys.argv[1]).expect_partial()
print("Released: 2 steps" in tfdp.privacy_statement(model, 1e-5))
"""


def model_of(optimizer):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of models after two steps, and the numbers of their optimizers' variables."""
    folder = tmp_path_factory.mktemp("files")
    batches = tfdp.data.poisson_batches((X, Y), **BATCHES)
    found = {}
    for make in (
        lambda: tfdp.keras3.DPAdam(1.0, 1.0, sampling=batches.sampling),
        lambda: tfdp.keras3.DPOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), 1.0, 1.0, sampling=batches.sampling
        ),
    ):
        model = model_of(make())
        model.fit(batches, verbose=0)
        name = type(model.optimizer).__name__
        for ending in (".keras", ".h5"):
            path = str(folder / name) + ending
            model.save(path)
            found[path] = name, len(model.optimizer.variables)
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("order", ORDERS)
def test_models_are_loaded_with_what_they_have_cost(order, files):
    """With their optimizer; and by another private one, which is made afterwards."""
    runs = [(path, how) for path in files for how in ("compiled", "weights")]
    if order != ORDERS[0]:  # Each hook once: what is read is the same.
        runs = [runs[0], runs[-1]]
    ended = forks.run_each(PROGRAM, runs, order, without=["TF_USE_LEGACY_KERAS"])
    for (path, how), process in zip(runs, ended, strict=True):
        assert process.status == 0, (path, how, process.errors[-2000:])
        kind, counts = process.output.splitlines()
        name, variables = files[path]
        assert kind.startswith("tfdp.keras3."), (path, how)
        assert kind.endswith(f" {name}" if how == "compiled" else " DPSGD"), (path, how)
        assert counts.startswith("2 0 "), (path, how)
        if path.endswith(".keras") and how == "compiled":  # The other kind has no slots.
            assert counts == f"2 0 {variables}", path


def test_weights_of_a_checkpoint_of_keras_3_have_cost_what_they_had(files, tmp_path, monkeypatch):
    model = keras.models.load_model(next(iter(files)))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    (ended,) = forks.run_each(RESTORE, [[path]], "import keras, tfdp")
    assert ended.output == "True\n", ended.errors[-2000:]
    # Mutant: as if there were no variables but TensorFlow's own.
    cost_of = lineage.cost_of_variable
    monkeypatch.setattr(
        lineage,
        "cost_of_variable",
        lambda variable: cost_of(variable) if isinstance(variable, tf.Variable) else [],
    )
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "mutant"))
    assert not tf.train.load_checkpoint(path).has_tensor("tfdp_lineage/rows")


# Read before a name of a front end is used: weights cost what they did.
READ = """
import sys
import tensorflow as tf, tfdp
path = sys.argv[1]
model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(3)])
if path.endswith("variables"):
    kernel, bias = tf.Variable(tf.zeros([4, 3])), tf.Variable(tf.zeros([3]))
    tf.train.Checkpoint(kernel=kernel, bias=bias).read(path).assert_consumed()
    model.set_weights([kernel.numpy(), bias.numpy()])
elif path.endswith("weights.h5"):
    model.load_weights(path)
else:
    model = tf.keras.models.load_model(path, compile=False)
model.compile(tfdp.DPSGD(1.0, 1.0, 16), "mse")
batch = tf.zeros([16, 4]), tf.zeros([16, 3])
model.fit(tf.data.Dataset.from_tensors(batch).repeat(1), verbose=0)
print(sum(map(int, model.optimizer.released_steps())))
"""
FILES_OF_KERAS_2 = ("model.keras", "model.h5", "saved", "model.weights.h5", "variables")
# What is imported before, and the files: all of them once, then one for each hook, of Keras and of
# TensorFlow.
ORDERS_OF_KERAS_2 = {
    "import tfdp, tensorflow.keras": FILES_OF_KERAS_2,
    "import tensorflow, tfdp": ("model.weights.h5", "variables"),
    "import tfdp": ("model.h5", "variables"),
}


@pytest.fixture(scope="module")
def files_of_keras_2(tmp_path_factory):
    """A folder with files of a model of Keras 2 after two steps."""
    folder = tmp_path_factory.mktemp("files")
    batches = tfdp.data.poisson_batches((X, Y), **BATCHES)
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling), loss)
    model.fit(batches, verbose=0)
    for name in ("model.keras", "model.h5", "saved"):
        model.save(folder / name)
    model.save_weights(folder / "model.weights.h5")
    kernel, bias = model.trainable_variables
    tf.train.Checkpoint(kernel=kernel, bias=bias).write(str(folder / "variables"))
    return folder


@needs_keras_2
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("order", ORDERS_OF_KERAS_2)
def test_files_of_keras_2_are_read_before_a_front_end_is_used(order, files_of_keras_2):
    prelude = f"import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'; {order}"
    paths = [files_of_keras_2 / name for name in ORDERS_OF_KERAS_2[order]]
    ended = forks.run_each(READ, [[path] for path in paths], prelude)
    for path, process in zip(paths, ended, strict=True):
        assert process.output == "3\n", (path, process.output, process.errors[-2000:])


@pytest.mark.slow
@needs_keras_2
def test_files_that_nobody_prepares_for_are_caught(files_of_keras_2):
    """Mutant: what weights cost is lost."""
    prelude = (
        "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'\nfrom tfdp.base import file_hooks\n"
    )
    without = "import sys\nsys.modules['tfdp.base.file_hooks'] = type(sys)('without')\n"
    without += "sys.modules['tfdp.base.file_hooks'].prepare = lambda: None\n"
    (ended,) = forks.run_each(READ, [[files_of_keras_2 / "model.weights.h5"]], without + prelude)
    assert ended.output == "1\n", ended.errors[-2000:]


def test_stand_ins_are_those_that_keras_saves():
    registry = keras.saving.get_custom_objects()
    for name in tfdp.keras3.__all__:
        getattr(tfdp.keras3, name)  # It is registered when it is first used.
    registered = {
        name.partition(">")[2]
        for name, cls in registry.items()
        if name.startswith("tfdp>") and cls.__module__.startswith("tfdp.")
    }
    assert registered == set(file_hooks.NAMES)
    for name in file_hooks.NAMES:
        assert registry[f"tfdp>{name}"] is getattr(tfdp.keras3, name)


def test_a_stand_in_makes_an_object_of_the_class():
    config = tfdp.keras3.DPSGD(1.0, 1.5, 16).get_config()
    made = file_hooks._stand_in("DPSGD").from_config(config)
    assert type(made) is tfdp.keras3.DPSGD and made.noise_multiplier == 1.5


def test_modules_that_are_imported_later_are_prepared_once(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    prepared = []
    file_hooks._after_import("imported_later", prepared.append)
    assert importlib.util.find_spec("imported_later") is not None  # It is not imported by that.
    import math

    assert prepared == [] and math
    import imported_later

    assert prepared == [imported_later] and imported_later.value == 1


def test_another_keras_is_left_alone():
    keras_2 = types.SimpleNamespace(__version__="2.15.0")
    file_hooks._prepare_keras_3(keras_2)  # It has no `saving`: this would raise.
    with pytest.raises(AttributeError):
        file_hooks._prepare_keras_3(types.SimpleNamespace(__version__="3.0.0"))
