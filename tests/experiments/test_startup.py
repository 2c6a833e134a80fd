import os
import subprocess
import sys

import pytest

from tests.without_keras_2 import needs_keras_2


@pytest.mark.slow
def test_tensorflow_starts_without_a_line():
    program = "from experiments import startup; import tensorflow as tf; tf.constant(1)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
@needs_keras_2
@pytest.mark.parametrize("module", ["experiments.startup", "benchmarks.data"])
def test_programs_find_keras_2(module):
    """Whoever starts them has set no variable."""
    program = f"import {module}\nfrom experiments.front_ends import front_end\nprint(front_end(2))"
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert "tfdp.keras2" in result.stdout, result.stderr[-2000:]
