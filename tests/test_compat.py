"""How tfdp is imported: each case in a process of its own."""

import os
import subprocess
import sys

import pytest

from tfdp import _compat


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "before", ["", "import tensorflow as tf"], ids=["alone", "after tensorflow"]
)
def test_import_needs_no_environment_variable(before):
    result = run(f"{before}\nimport tfdp, tensorflow as tf\nprint(tf.keras.optimizers.legacy.SGD)")
    assert "tf_keras" in result.stdout, result.stderr[-2000:]


def test_import_writes_nothing():
    program = "import os; os.environ.pop('TF_CPP_MIN_LOG_LEVEL', None); import tfdp"
    result = run(program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_is_written_before_an_exception_is_shown(capfd):
    with _compat.quiet_stderr():
        os.write(2, b"dropped")
    os.write(2, b"kept")
    with pytest.raises(ZeroDivisionError), _compat.quiet_stderr():
        os.write(2, b" shown")
        1 / 0  # noqa: B018
    assert capfd.readouterr().err == "kept shown"


@pytest.mark.slow
def test_import_with_standard_error_closed():
    result = run("import os, sys; os.close(2); sys.stderr = None\nimport tfdp\nprint('imported')")
    assert result.stdout == "imported\n"


@pytest.mark.slow
def test_import_after_keras_3_says_what_to_do():
    result = run("import tensorflow as tf\ntf.keras.layers.Dense(1)\nimport tfdp")
    assert result.returncode != 0
    assert "ImportError: tfdp needs Keras 2" in result.stderr
    assert "TF_USE_LEGACY_KERAS=1" in result.stderr


@pytest.mark.slow
def test_all_of_tensorflow_privacy_can_be_imported_too():
    result = run(
        "import tfdp, tensorflow_privacy as tfp\n"
        "print(isinstance(tfdp.DPSGD(1., 1., 1), tfp.VectorizedDPKerasSGDOptimizer))"
    )
    assert result.stdout.strip() == "True", result.stderr[-2000:]


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
