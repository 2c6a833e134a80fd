"""The command `tfdp`: what it prints, its exit status, and what it loads."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import tfdp
from tests.forks import ROOT
from tfdp.accounting import PrivacyLedger, event_codec
from tfdp.accounting.sampling import UNPADDED_TRUNCATION_PROBABILITY
from tfdp.command_line import commands
from tfdp.command_line.main import run

TRAINING = ["--dataset-size=2000", "--batch-size=100"]
EPSILON = ["epsilon", *TRAINING, "--noise-multiplier=1.1", "--epochs=3", "--delta=1e-5"]
NOISE = ["noise", *TRAINING, "--epsilon=2", "--epochs=3", "--delta=1e-5"]
PLAN = ["plan", "--dataset-size=2000", "--epsilon=2", "--epochs=3", "--max-batch=200"]


def ran(capsys, *arguments):
    status = run(commands.tfdp, list(arguments))
    output, errors = capsys.readouterr()
    return status, output, errors


def ledger(noise, steps=60):
    made = PrivacyLedger()
    made.record(event_codec.sampled_gaussian(0.05, noise), steps, UNPADDED_TRUNCATION_PROBABILITY)
    return made


def test_epsilon_is_that_of_the_ledger(capsys):
    status, output, errors = ran(capsys, *EPSILON, "--format=json")
    facts, expected = json.loads(output), ledger(1.1).epsilon(1e-5).epsilon
    assert (status, errors, facts["steps"]) == (0, "", 60)
    assert expected <= facts["epsilon"] <= expected * (1 + 1e-5)
    assert 0 < facts["epsilon_lower_bound"] <= facts["epsilon"]
    assert 0 < facts["attack_true_positive_rates"]["0.01"] < 1
    text = ran(capsys, *EPSILON)[1]
    assert f"epsilon, upper bound  {facts['epsilon']:g}\n" in text
    assert f"epsilon, lower bound  {facts['epsilon_lower_bound']:g}\n" in text
    assert "\x1b" not in text  # No colors where the output is read by a program.
    by_steps = [one for one in EPSILON if "epochs" not in one]
    assert ran(capsys, *by_steps, "--steps=60")[1] == text


def test_groups_of_examples(capsys):
    group = [*EPSILON, "--group-size=3"]
    facts = json.loads(ran(capsys, *group, "--format=json")[1])
    expected = ledger(1.1).epsilon(1e-5, group_size=3).epsilon
    assert expected <= facts["epsilon"] <= expected * (1 + 1e-5) and facts["group_size"] == 3
    assert facts["gaussian_dp"]["mu"] > 0
    text = ran(capsys, *group)[1]
    assert "group size            3\n" in text and "the 3 examples of a group" in " ".join(
        text.split()
    )
    for bad in ([*group, "--signs"], [*EPSILON, "--group-size=1001"]):
        status, output, errors = ran(capsys, *bad)
        assert (status, output) == (1, "") and errors.count("\n") == 1
    assert "Option `--group-size` must be" in errors


def test_noise_is_within_the_budget(capsys):
    facts = json.loads(ran(capsys, *NOISE, "--format=json")[1])
    assert ledger(facts["noise_multiplier"]).epsilon(1e-5).epsilon <= 2
    assert ledger(0.99 * facts["noise_multiplier"]).epsilon(1e-5).epsilon > 2
    assert f"noise multiplier      {facts['noise_multiplier']:g}\n" in ran(capsys, *NOISE)[1]


def test_signs_cost_less(capsys):
    priced = PrivacyLedger()
    step = event_codec.sampled_gaussian(0.05, 1.1, releases_signs=True)
    priced.record(step, 60, UNPADDED_TRUNCATION_PROBABILITY)
    cost = json.loads(ran(capsys, *EPSILON, "--signs", "--format=json")[1])["epsilon"]
    assert cost == pytest.approx(priced.epsilon(1e-5).epsilon, rel=1e-5)
    gaussian, signs = (
        json.loads(ran(capsys, *NOISE, *more, "--format=json")[1]) for more in ([], ["--signs"])
    )
    assert signs["noise_multiplier"] < gaussian["noise_multiplier"] and signs["epsilon"] <= 2


@pytest.mark.slow
def test_plan_is_that_of_python(capsys, tmp_path):
    picture = tmp_path / "noise.svg"
    status, output, _ = ran(capsys, *PLAN, f"--plot={picture}")
    planned = tfdp.plan(2000, 2.0, epochs=3, max_batch_size=200)
    assert (status, output) == (0, f"{planned}\n")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    facts = json.loads(ran(capsys, *PLAN, "--format=json")[1])
    assert [row["batch_size"] for row in facts["rows"]] == [2, 4, 8, 16, 32]


BAD = {
    "zero": ([*EPSILON, "--batch-size=0"], "'--batch-size': must be a positive integer"),
    "negative": ([*EPSILON, "--epochs=-1"], "'--epochs': must be a positive integer"),
    "not whole": ([*EPSILON, "--epochs=1.5"], "'--epochs': must be a positive integer"),
    "NaN": ([*EPSILON, "--noise-multiplier=nan"], "'--noise-multiplier': must be a positive"),
    "infinite": ([*NOISE, "--epsilon=inf"], "'--epsilon': must be a positive finite"),
    "text": ([*NOISE, "--delta=small"], "'--delta': must be in (0, 1). Received: small"),
    "delta of 1": ([*EPSILON, "--delta=1"], "'--delta': must be in (0, 1). Received: 1"),
    "delta of 0": ([*PLAN, "--delta=0"], "'--delta': must be in (0, 1)"),
    "delta of NaN": ([*PLAN, "--delta=nan"], "'--delta': must be in (0, 1)"),
    "epsilon of 0": ([*PLAN, "--epsilon=0"], "'--epsilon': must be a positive finite number"),
    "batch": ([*EPSILON, "--batch-size=2001"], "'--batch-size': must be at most --dataset-size"),
    "largest batch": ([*PLAN, "--max-batch=2001"], "'--max-batch': must be at most"),
    "both": ([*EPSILON, "--steps=5"], "'--steps': must not be given with --epochs"),
    "many": ([*NOISE, "--epochs=10000000"], "'--epochs': must make at most 100000000 steps"),
    "neither": (NOISE[:-2], "Missing option '--epochs' or '--steps'"),
    "missing": (EPSILON[:1], "Missing option '--dataset-size'"),
    "picture": ([*PLAN, "--plot=x.png"], "'--plot': must end in .svg"),
    "unknown": ([*PLAN, "--bach=3"], "No such option"),
    "command": (["epsilonn"], "No such command 'epsilonn'"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_named_in_one_line(case, capsys):
    arguments, message = BAD[case]
    status, output, errors = ran(capsys, *arguments)
    assert (status, output) == (2, "")
    assert message in errors and errors.startswith("tfdp") and errors.count("\n") == 1


def test_failures_are_not_errors_of_usage(capsys, tmp_path):
    status, _, errors = ran(capsys, *PLAN, f"--plot={tmp_path}/none/x.svg")
    assert status == 1 and errors.startswith("tfdp: error: '--plot':") and errors.count("\n") == 1
    few = [*TRAINING, "--epochs=3", "--delta=1e-300"]
    status, _, errors = ran(capsys, "noise", "--epsilon=1", *few)
    assert status == 1 and "Option `--epsilon` must be larger" in errors


def test_no_guarantee_is_said(capsys):
    status, output, _ = ran(capsys, *EPSILON, "--noise-multiplier=1e-300")
    assert status == 0 and "epsilon, upper bound  inf\n" in output
    facts = json.loads(ran(capsys, *EPSILON, "--noise-multiplier=1e-300", "--format=json")[1])
    assert facts["epsilon"] is None and facts["attack_advantage"] == 1


@pytest.mark.slow
def test_a_delta_that_guarantees_nothing_is_warned_of(capsys):
    for arguments in (EPSILON, NOISE, PLAN):
        _, output, errors = ran(capsys, *arguments, "--delta=0.1")
        assert output and errors.startswith("tfdp: warning: delta = 0.1 is not below 1 / 2000")
        assert errors.count("\n") == 1


@pytest.mark.slow
def test_every_command_has_an_example_that_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, command in commands.tfdp.commands.items():
        status, output, _ = ran(capsys, name, "--help")
        assert status == 0
        example = output.partition("Example:\n")[2].replace("\\\n", " ").strip()
        assert example.startswith(f"tfdp {name} "), command
        if name != "statement":  # Its file is the reader's.
            assert ran(capsys, *example.split()[1:])[0] == 0, example
    status, output, errors = ran(capsys)
    assert (status, output) == (2, "") and "Usage: tfdp" in errors
    assert ran(capsys, "--version")[:2] == (0, f"tfdp {tfdp.__version__}\n")


PROGRAM = """
import sys
from unittest import mock
from tfdp.command_line import main
for arguments in {arguments}:
    with mock.patch.object(sys, "exit"), mock.patch.object(sys, "argv", ["tfdp", *arguments]):
        main.main()
names = ("tensorflow", "keras", "tf_keras", "h5py", "scipy.signal._signaltools")
print([name for name in names if name in sys.modules])
"""


@pytest.mark.slow
def test_accounting_loads_no_tensorflow():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arguments=[EPSILON, NOISE, PLAN])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.endswith("\n[]\n"), result.stdout + result.stderr[-2000:]
    assert "noise of the run" in result.stdout and "epsilon, lower bound" in result.stdout


def test_python_m_tfdp_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "tfdp", "noise", "--epsilon=nan"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tfdp noise: error: Invalid value for '--epsilon'")
