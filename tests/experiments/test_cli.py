import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import cli

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("argument", "code"), [("--help", 0), ("--helpshort", 0), ("--no_flag", 1)]
)
def test_help_is_no_failure(argument, code):
    program = "from experiments import cli; cli.run(lambda arguments: 0)"
    done = subprocess.run([sys.executable, "-c", program, argument], cwd=ROOT, capture_output=True)
    assert done.returncode == code


def test_the_exit_code_of_a_program_stays(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "help"])
    for code in (0, 1, 3):
        monkeypatch.setattr(cli.app, "run", lambda main, code=code: sys.exit(code))
        with pytest.raises(SystemExit) as end:
            cli.run(print)
        assert end.value.code == code


def refused(arguments, error):
    with pytest.raises(SystemExit) as end, cli.refusing("tool", arguments, ValueError):
        raise error
    return end.value.code


def test_what_cannot_be_done_ends_with_a_sentence():
    assert refused(["tool"], ValueError("No data.")) == "tool: No data."
    assert "tool: Every argument must be a flag" in refused(["tool", "x"], ValueError("No data."))
    with pytest.raises(KeyError), cli.refusing("tool", ["tool"], ValueError):
        raise KeyError


@pytest.mark.parametrize("folder", ["experiments", "benchmarks"])
def test_flags_of_what_is_written_mean_one_thing(folder):
    """`--output_dir` is a folder, by default in results/; `--plot` a picture; `--output` JSON."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        for described in re.findall(r'"(?:--)?plot",(.{0,80})', text, re.DOTALL):
            assert re.search("[Pp]icture|path", described), path
        for described in re.findall(r'"(?:--)?output",(.{0,80})', text, re.DOTALL):
            assert "JSON" in described or "plot" in described, path
        for described in re.findall(r'"(?:--)?output_dir",(.{0,120})', text, re.DOTALL):
            assert re.search('results|None|folder|"required"|text', described), path
