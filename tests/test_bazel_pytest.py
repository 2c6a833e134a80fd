"""How Bazel runs pytest: the exit codes that it sees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parent / "bazel_pytest.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "body", "code"),
    [
        ("other", "def test_one(): pass", 0),  # The filter matches a test of another module.
        ("one", "def test_one(): pass", 0),
        ("one", "def test_one(): assert False", 1),
        (None, "x = 1", 5),  # A module without tests is a mistake.
    ],
)
def test_exit_codes(tmp_path, only, body, code):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    runner = tmp_path / "tests" / "bazel_pytest.py"
    runner.write_text(RUNNER.read_text())
    option = "def pytest_addoption(parser):\n    parser.addoption('--slow', action='store_true')\n"
    (tmp_path / "conftest.py").write_text(option)
    (tmp_path / "test_it.py").write_text(body)
    environment = {k: v for k, v in os.environ.items() if k != "TESTBRIDGE_TEST_ONLY"}
    if only:
        environment["TESTBRIDGE_TEST_ONLY"] = only
    done = subprocess.run(
        [sys.executable, str(runner), "test_it.py"], capture_output=True, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
