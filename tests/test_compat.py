"""How tfdp is imported: each case in a process of its own."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import tfdp
from tests import forks
from tests.front_ends import HAS_KERAS_3, needs_keras_3
from tests.without_keras_2 import needs_keras_2
from tfdp.base import compat


def run(program, **environment):
    inherited = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**inherited, **environment},
    )


def test_what_is_written_before_an_exception_is_shown(capfd):
    with compat.quiet_stderr():
        os.write(2, b"dropped")
    os.write(2, b"kept")
    with pytest.raises(ZeroDivisionError), compat.quiet_stderr():
        os.write(2, b" shown")
        1 / 0  # noqa: B018
    assert capfd.readouterr().err == "kept shown"


@pytest.mark.slow
def test_import_with_standard_error_closed():
    result = run("import os, sys; os.close(2); sys.stderr = None\nimport tfdp\nprint('imported')")
    assert result.stdout == "imported\n"


KERAS_2 = "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'"
# By what is run before `import tfdp`, what may follow. `tf.keras` is what it is without tfdp.
ORDERS = {
    "": {
        "nothing": "",
        "keras after it": "import keras",
        "keras 3 front end": "tfdp.keras3.DPSGD",
        "accounting first": "tfdp.accounting",
    },
    "import tensorflow": {"tensorflow first": ""},
    "import keras": {"keras first": ""},
    "import tensorflow as tf; tf.keras.layers": {"tf.keras first": ""},
    KERAS_2: {
        "keras 2": "",
        "keras 3 beside it": "import keras; tfdp.keras3.DPSGD",
        "all of tensorflow privacy": (
            "tfdp.keras2; import tensorflow_privacy as tfp\n"
            "assert issubclass(tfdp.DPSGD, tfp.VectorizedDPKerasSGDOptimizer)"
        ),
    },
    f"{KERAS_2}; import keras": {"keras 2, with keras first": ""},
    f"{KERAS_2}; import tensorflow": {"keras 2, with tensorflow first": ""},
}
# What tfdp itself writes and changes when it is imported.
IMPORT = """
import os, sys, tempfile
level = os.environ.pop('TF_CPP_MIN_LOG_LEVEL', '0')
with tempfile.TemporaryFile() as file:
    kept, environment = os.dup(2), dict(os.environ)
    os.dup2(file.fileno(), 2)
    loaded = 'tensorflow' in sys.modules
    import tfdp
    assert dict(os.environ) == environment and ('tensorflow' in sys.modules) == loaded
    tfdp.data
    os.dup2(kept, 2)
    os.environ['WRITTEN'] = str(os.fstat(file.fileno()).st_size)
os.environ['TF_CPP_MIN_LOG_LEVEL'] = level
"""
PROGRAM = """
import os, sys, tfdp
exec(sys.argv[1])
import tensorflow as tf
print(os.environ['WRITTEN'])
print(tf.keras.layers.Dense.__module__)
from tensorflow.keras.layers import Dense
print(Dense is tf.keras.layers.Dense)
print(tfdp.DPSGD(1.0, 1.0, 1))
try:
    print(tfdp.keras2.DPSGD(1.0, 1.0, 1))
except ImportError as error:
    print("ImportError", error)
import keras
print(keras.optimizers.get(tfdp.keras3.DPSGD(1.0, 1.0, 1)))
print(tfdp.keras3.priors.StandardNormal(2).distribution().sample(3).shape)
print(tf.compat.v2.keras.layers.Dense is tf.keras.layers.Dense)
"""


@needs_keras_3
@needs_keras_2
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("before", ORDERS)
def test_tfdp_follows_tf_keras(before):
    orders = ORDERS[before]
    without = ["TF_USE_LEGACY_KERAS"]
    arguments = [[after] for after in orders.values()]
    processes = forks.run_each(PROGRAM, arguments, before + IMPORT, without=without)
    for name, process in zip(orders, processes, strict=True):
        assert process.status == 0, (name, process.errors[-2000:])
        check_which_keras(name, process.output, 2 if before.startswith(KERAS_2) else 3)
        assert before or process.output.startswith("0\n"), name


def check_which_keras(name, output, version):
    _, module, same, own, keras_2, keras_3, drawn, unchanged = output.splitlines()
    assert module.startswith("tf_keras" if version == 2 else "keras.src"), (name, output)
    assert same == unchanged == "True", (name, output)
    assert drawn == "(3, 2)", name  # By TensorFlow Probability.
    assert keras_3.startswith("<tfdp.keras3.DPSGD"), name
    assert own.startswith("<tfdp.DPSGD" if version == 2 else "<tfdp.keras3.DPSGD"), name
    if version == 2:
        assert keras_2 == own, name
    else:
        assert keras_2.startswith("ImportError") and "use `tfdp.keras3.DPSGD`" in keras_2, name
        assert "TF_USE_LEGACY_KERAS=1" in keras_2, name


@needs_keras_3
@needs_keras_2
def test_functions_look_at_the_model():
    import keras

    for package in (tf.keras, keras):
        model = package.Sequential([package.layers.Input([3]), package.layers.Dense(2)])
        check = tfdp.validate(model, loss=package.losses.MeanSquaredError(reduction="none"))
        assert check.ok, (package, check)
        assert tfdp.validate(model=model, loss="mse").ok
    with pytest.raises(ValueError, match="Argument `model` must be"):
        tfdp.validate("model")


@needs_keras_3
@needs_keras_2
def test_names_of_the_other_keras_say_where_they_are():
    assert tfdp.ExponentialMovingAverage is tfdp.keras2.ExponentialMovingAverage
    with pytest.raises(AttributeError, match=r"Use `tfdp\.keras3\.DPOptimizer`"):
        tfdp.DPOptimizer  # noqa: B018
    assert "DPOptimizer" not in dir(tfdp) and "ExponentialMovingAverage" in dir(tfdp)


@pytest.mark.slow
def test_other_backends_of_keras_3_are_refused():
    program = """
from unittest import mock
import keras
for backend in ("jax", "torch"):
    with mock.patch("keras.backend.backend", lambda: backend):
        try:
            import tfdp.keras3
        except ImportError as error:
            print(error)
"""
    result = run(program)
    assert result.returncode == 0, result.stderr[-2000:]
    for line, backend in zip(result.stdout.splitlines(), ("jax", "torch"), strict=True):
        assert "KERAS_BACKEND=tensorflow" in line and repr(backend) in line


def test_lazy_names_are_listed_and_unknown_ones_are_not_there():
    for package in (tfdp, tfdp.keras2, tfdp.auditing, tfdp.accounting, tfdp.clipping, tfdp.data):
        names = set(package.__all__) - (set() if HAS_KERAS_3 else {"keras3"})
        assert compat.missing_for_keras_2() or names <= set(dir(package))
        for name in names:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'unknown'"):
            package.unknown  # noqa: B018


@pytest.mark.parametrize("is_there", [True, False])
def test_keras_3_is_listed_where_it_is_installed(is_there, monkeypatch):
    """Else `help(tfdp)` would end in an error, with TensorFlow 2.15."""
    version = "3.1.0" if is_there else "2.15.0"
    monkeypatch.setattr(importlib.metadata, "version", {"keras": version}.get)
    assert ("keras3" in dir(tfdp)) == is_there


def test_keras_2_is_refused_without_importing_it(monkeypatch):
    """Keras 2.15 takes the names by which `tf_keras` loads models: their weights would be lost."""
    imported = []
    monkeypatch.setattr(importlib.metadata, "version", {"keras": "2.15.0"}.get)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    with pytest.raises(ImportError, match=r"needs Keras 3 .* Received: Keras 2\.15\.0\. For"):
        compat.check_keras_3()
    assert not imported


@needs_keras_3
def test_errors_name_what_keras_3_has():
    """An error about a name of Keras 2 offers a name of `tfdp.keras3`, where it has one."""
    names = [*tfdp.keras2.__all__, *tfdp.auditing._OF_KERAS_2]
    for name in names:
        offers = f"use `tfdp.keras3.{name}`" in compat._in_keras_3(f"tfdp.{name}")
        assert offers == hasattr(tfdp.keras3, name), name


def test_accounting_imports_no_tensorflow():
    """Accounting alone must be usable, and quick to import, where TensorFlow is not."""
    program = """
import sys
import tfdp.accounting, tfdp.schedules, tfdp.correlated_noise
tfdp.calibrate_noise_multiplier
print([name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tf_keras", "keras")])
"""
    result = run(program)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr[-2000:]


@pytest.mark.slow
@needs_keras_3
def test_names_of_contrib_are_known_where_it_was_not_imported():
    program = """
import sys, tfdp
if sys.argv[1:] == ["rule"]:
    optimizer = tfdp.keras3.DPSGD(1.0, 1.0, 1, clipping_rule="importance_sampling")
    print(type(optimizer.clipping.clipping_rule).__name__)
else:
    assert tfdp.keras3.TermWiseVAE
    from tfdp.clipping.batch_losses import aggregations
    print(sorted(aggregations.NAMED))
"""
    for ended, printed in zip(
        forks.run_each(program, [["rule"], ["aggregation"]], "import tfdp, tensorflow"),
        ["ImportanceSamplingClipping\n", "['batch', 'micro']\n"],
        strict=True,
    ):
        assert ended.output == printed, ended.errors[-2000:]
