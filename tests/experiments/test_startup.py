import os
import subprocess
import sys

import pytest

from experiments import startup


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.slow
def test_tensorflow_starts_without_a_line():
    result = run("from experiments import startup; import tensorflow as tf; tf.constant(1)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_what_is_written_before_an_exception_is_shown():
    program = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from experiments import startup; import os\n"
        "with startup.quiet_stderr(): os.write(2, b'dropped')\n"
        "with startup.quiet_stderr(): os.write(2, b'shown'); 1 / 0\n"
    )
    result = run(program)
    assert result.stderr.startswith("shown") and "ZeroDivisionError" in result.stderr


def test_standard_error_is_put_back(capfd):
    with startup.quiet_stderr():
        os.write(2, b"dropped")
    os.write(2, b"kept")
    assert capfd.readouterr().err == "kept"
