"""How tfdp is imported: each case in a process of its own."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

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


# By what is run before `import tfdp`, what may follow; then what `tf.keras` is, and whether names
# of Keras 2 are there. No variable of the environment says which: they are taken away.
ORDERS = {
    "": {
        "keras 2 alone": ("", "tf_keras", True),
        "keras after it": ("import keras", "tf_keras", True),
        "keras 3 front end": ("import tfdp.keras3", "keras.src", False),
        "keras 2, then both": ("tfdp.DPSGD; tfdp.keras3", "tf_keras", True),
        "all of tensorflow privacy": (
            "import tensorflow_privacy as tfp\n"
            "assert issubclass(tfdp.DPSGD, tfp.VectorizedDPKerasSGDOptimizer)",
            "tf_keras",
            True,
        ),
    },
    "import tensorflow": {"tensorflow first": ("", "tf_keras", True)},
    "import keras": {"keras first": ("", "keras.src", False)},
    "import tensorflow as tf; tf.keras.layers": {"tf.keras first": ("", "keras.src", False)},
    "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'; import keras": {
        "user chose keras 2": ("", "tf_keras", True)
    },
    "import os; os.environ['TF_USE_LEGACY_KERAS'] = '0'": {
        "user chose keras 3": ("", "keras.src", False)
    },
}
# What tfdp itself writes when it is imported is counted.
IMPORT = """
import os, tempfile
level = os.environ.pop('TF_CPP_MIN_LOG_LEVEL', '0')
with tempfile.TemporaryFile() as file:
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    import tfdp
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
try:
    print(tfdp.DPSGD(1.0, 1.0, 1))
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
def test_which_keras_an_order_of_imports_chooses(before):
    orders = ORDERS[before]
    arguments = [[after] for after, *_ in orders.values()]
    without = ["TF_USE_LEGACY_KERAS"]
    processes = forks.run_each(PROGRAM, arguments, before + IMPORT, without=without)
    for (name, (_, tf_keras, has_keras_2)), process in zip(orders.items(), processes, strict=True):
        assert process.status == 0, (name, process.errors[-2000:])
        check_which_keras(name, process.output, tf_keras, has_keras_2)
        assert before or process.output.startswith("0\n"), name


def check_which_keras(name, output, tf_keras, has_keras_2):
    _, module, same, keras_2, keras_3, drawn, unchanged = output.splitlines()
    assert module.startswith(tf_keras) and same == unchanged == "True", (name, output)
    assert drawn == "(3, 2)", name  # By TensorFlow Probability.
    assert keras_3.startswith("<tfdp.keras3.DPSGD"), name
    if has_keras_2:
        assert keras_2.startswith("<tfdp.DPSGD"), name
    else:
        assert keras_2.startswith("ImportError") and "use `tfdp.keras3.DPSGD`" in keras_2, name
        assert "TF_USE_LEGACY_KERAS=1" in keras_2, name


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
    for package in (tfdp, tfdp.models, tfdp.optimizers):
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
    before = compat._chosen, os.environ.get("TF_USE_LEGACY_KERAS")
    with pytest.raises(ImportError, match=r"needs Keras 3 .* Received: Keras 2\.15\.0\. For"):
        compat.use_keras_3()
    assert not imported
    assert (compat._chosen, os.environ.get("TF_USE_LEGACY_KERAS")) == before


@needs_keras_3
def test_errors_name_what_keras_3_has():
    """An error about a name of Keras 2 offers a name of `tfdp.keras3`, where it has one."""
    names = [*tfdp.models.__all__, *tfdp.optimizers.__all__, *tfdp.auditing._OF_KERAS_2]
    for name in names:
        offers = f"use `tfdp.keras3.{name}`" in compat._in_keras_3(f"tfdp.{name}")
        assert offers == hasattr(tfdp.keras3, name), name
    assert "use `tfdp.keras3.PrivacyBudget`" in compat._in_keras_3("tfdp.keras2.callbacks")
    assert tfdp.keras3.PrivacyBudget


def test_accounting_imports_no_tensorflow():
    """Accounting alone must be usable, and quick to import, where TensorFlow is not."""
    program = """
import importlib.util, sys, types
root = importlib.util.find_spec("tfdp").submodule_search_locations[0]
package = types.ModuleType("tfdp"); package.__path__ = [root]
sys.modules["tfdp"] = package
import tfdp.accounting
print([name for name in sys.modules if name.split(".")[0] in ("tensorflow", "tf_keras", "keras")])
"""
    result = run(program)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr[-2000:]
