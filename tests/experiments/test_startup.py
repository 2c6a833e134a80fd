import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tensorflow_starts_without_a_line():
    program = "from experiments import startup; import tensorflow as tf; tf.constant(1)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
