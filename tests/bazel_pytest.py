"""Runs pytest on the modules given, inside Bazel's sandbox; the BUILD files of tests/ use it."""

import os
import sys
from pathlib import Path


def main(modules: list[str]) -> int:
    """Returns the exit code of pytest: 0 when no test failed, and some ran or were filtered out."""
    root = Path(__file__).absolute().parent.parent
    scratch = os.environ.get("TEST_TMPDIR", "")
    if scratch:
        os.environ.setdefault("HOME", scratch)
        os.environ.setdefault("MPLCONFIGDIR", scratch)
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)
    # Python put this file's folder first, where tests/data would be `data`.
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != root / "tests"]
    os.chdir(root)

    try:
        import pytest
    except ImportError:
        sys.exit(
            f"{sys.executable} has no pytest: run `bash run setup` and activate the environment "
            "(`. .venv/bin/activate`) before calling bazel."
        )

    options = [
        "--rootdir",
        str(root),
        "-c",
        str(root / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        "--slow",
    ]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    only = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter=...
    if only:
        options += ["-k", only]
    result = int(pytest.main([*options, *modules]))
    # A filter may leave a module without a test.
    return 0 if only and result == pytest.ExitCode.NO_TESTS_COLLECTED else result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
