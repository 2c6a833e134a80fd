"""Tests that need Keras 2 are skipped without TensorFlow Privacy, and errors of tfdp are not."""

import os
import subprocess
import sys

import pytest

from tests.front_ends import needs_keras_3
from tests.without_keras_2 import _is_of_a_test

TEST, IMPORT = ("tests.test_x", "test_y"), ("importlib._bootstrap", "_find_and_load")
LAZY = [("tfdp.base.compat", "use_keras_2"), ("tfdp.base.lazy", "get")]
# Who needs Keras 2, from the innermost on; and whether it is a test that does.
CALLERS = {
    "a name": ([*LAZY, TEST], True),
    "a stand-in": ([("tests.without_keras_2", "__call__"), TEST], True),
    "an experiment": ([*LAZY, ("experiments.training", "train"), TEST], True),
    "a module": ([LAZY[0], ("tfdp.keras2.callbacks", "<module>"), IMPORT, TEST], True),
    # Mutants: code for Keras 3 that uses the front end of Keras 2.
    "tfdp: a name": ([*LAZY, ("tfdp.keras3.named", "f"), TEST], False),
    "tfdp: a stand-in": (
        [("tests.without_keras_2", "__call__"), ("tfdp.keras3.named", "f"), TEST],
        False,
    ),
    "tfdp: a module": (
        [LAZY[0], ("tfdp.keras2.callbacks", "<module>"), IMPORT, ("tfdp.keras3.named", "f"), TEST],
        False,
    ),
}


@pytest.mark.parametrize("case", CALLERS)
def test_who_needs_keras_2(case):
    callers, is_of_a_test = CALLERS[case]
    assert _is_of_a_test([(name, "", function) for name, function in callers]) == is_of_a_test


# TensorFlow Privacy cannot be imported, and code for Keras 3 that uses Keras 2 is put in.
PROGRAM = """
import sys
sys.modules["tensorflow_privacy"] = None
import pytest
class Mutant:
    def pytest_collection_modifyitems(self):
        import tfdp
        code = "def make_private(): return tfdp.DPSGD(1.0, 1.0, 1)"
        exec(code, {"__name__": "tfdp.keras3.mutant", "tfdp": tfdp}, vars(tfdp.keras3))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Mutant()]))
"""

MODULE = """
import pytest
import tfdp

class Optimizer(tfdp.DPSGD):
    pass

def test_of_keras_2():
    Optimizer(1.0, 1.0, 1)

def test_of_keras_3():
    tfdp.keras3.DPSGD(1.0, 1.0, expected_batch_size=1)

def test_of_the_mutant():
    with pytest.raises(ImportError, match="is for models of Keras 2"):
        tfdp.keras3.make_private()
"""


@pytest.mark.slow
@needs_keras_3
def test_what_needs_keras_2_is_left_out_and_listed(request, tmp_path):
    root = request.config.rootpath
    (tmp_path / "test_module.py").write_text(MODULE)
    options = [f"--rootdir={root}", f"-c{root / 'pyproject.toml'}", "-ptests.conftest"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options, str(tmp_path / "test_module.py")],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "2 passed, 1 skipped" in result.stdout, result.stdout[-3000:] + result.stderr[-1000:]
    assert "test_module.py needs Keras 2, and tensorflow_privacy is missing" in result.stdout
