import json
import math
import re
import time
import venv

import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import report, step, user
from benchmarks.contestants import CONTESTANTS, DEFAULT
from benchmarks.keras_steps import KerasSteps
from benchmarks.problems import problem
from benchmarks.settings import StepSettings, Unsupported
from benchmarks.together import Turn, timed_fit
from benchmarks.turns import Measurement, Rounds, plan
from benchmarks.worker import describe
from tests.front_ends import keras, needs_keras_3

KERAS = ("keras_sgd", "tfdp_one_pass")


def rows(text):
    """The cells of the rows of the first table in a Markdown text, by header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keras", "package", "sizes"), [("2", "tf-keras 2.", ["8", "16"]), ("3", "keras 3.", ["8"])]
)
def test_fit_beside_plain_fit(keras, package, sizes, capsys):
    arguments = ("--batch", *sizes, "--repeats", "2", "--turn_seconds", "0.01")
    step.main(["--user", "--keras", keras, "--dataset_size", "200", *arguments])
    text = capsys.readouterr().out
    assert f" {package}" in text
    found = rows(text)
    assert [row["B"] for row in found] == sizes
    for row in found:
        numbers = [float(n) for cell in row.values() for n in re.findall(r"\d+\.\d*", cell)]
        assert len(numbers) == 11 and all(number > 0 for number in numbers), row


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_policy_of_the_layers(policy, monkeypatch):
    found = []
    monkeypatch.setattr(user, "table", lambda results: "")
    monkeypatch.setattr(
        user, "measure", lambda *_: found.append(tf.keras.mixed_precision.global_policy().name)
    )
    arguments = ["--mixed_bfloat16"] if policy == "mixed_bfloat16" else []
    try:
        step.main(["--user", "--dataset_size", "200", "--batch", "8", *arguments])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert found == [policy]


def test_a_policy_is_for_fit_alone(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--mixed_bfloat16"])
    assert "--mixed_bfloat16 needs --user" in capsys.readouterr().err


def test_data_of_one_batch_are_too_few_to_time_fit():
    with pytest.raises(SystemExit, match=r"must be two batches at least\. Received: 200"):
        step.main(["--user", "--dataset_size", "200", "--batch", "8", "101"])


def test_neither_start_nor_end_of_fit_counts(monkeypatch):
    now = {"perf_counter": 0.0, "process_time": 0.0}
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name])

    def wait(wall, cpu):
        now["perf_counter"] += wall
        now["process_time"] += cpu

    def fit(callback):
        wait(100.0, 50.0)
        for number in range(5):
            wait(3.0, 4.0)
            callback.on_train_batch_end(number, {})
        wait(1000.0, 0.0)  # An iterator is dropped.

    assert timed_fit(fit, tf.keras) == Turn(wall=3.0, cpu=4.0)


@needs_keras_3
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("contestant", ["tfdp_one_pass", "keras_sgd", "tfdp_philox"])
def test_steps_of_keras_3_train(contestant):
    steps = KerasSteps(contestant, problem("mlp_7"), StepSettings(4, dataset_size=20, keras=3))
    assert isinstance(steps._model, keras.Model)
    before = steps._model.get_weights()
    steps.run(2)
    assert not np.array_equal(before[0], steps._model.get_weights()[0])
    if contestant != "keras_sgd":
        assert steps._model.optimizer.ledger.steps == 2


@pytest.mark.parametrize("contestant", ["tf_privacy", "tfdp_dpsur"])
def test_contestants_that_need_keras_2(contestant):
    with pytest.raises(Unsupported, match="needs Keras 2"):
        KerasSteps(contestant, problem("mlp_7"), StepSettings(4, dataset_size=9, keras=3))


def measured(contestant, seconds, batch=8, **others):
    return Measurement(
        contestant,
        "mnist_cnn",
        StepSettings(batch),
        seconds=seconds,
        first=1.0,
        peak=200.0,
        growth=100.0,
        **others,
    )


@pytest.mark.slow
def test_table_of_a_run_has_a_row_for_everyone_and_reasons_for_the_missing(capsys, tmp_path):
    step.main(
        [
            *("--batch", "8", "--repeats", "2", "--turn_seconds", "0.01", "--slow_batch", "4"),
            *("--contestants", ",".join([*KERAS, "tfdp_dpsur", "tf_privacy", "jax_privacy"])),
            *("--dataset_size", "100"),
            *("--peer_python", _python_without_anything(tmp_path)),
            *("--output", str(tmp_path / "results.json"), "--plot", str(tmp_path / "plot.png")),
        ]
    )
    text = capsys.readouterr().out
    assert "in Poisson batches out of 100" in text
    _, table, ratios, *_ = text.split("\n\n")
    found = rows(table)
    assert [row["step"] for row in found] == [
        "plain Keras SGD",
        "tfdp.DPSGD, one-pass",
        "tfdp.DPSURSGD, an attempt",
        "TF-Privacy DPKerasSGD",
        "JAX-Privacy",
    ]
    (ratio,) = rows(ratios)
    assert float(ratio["DPSUR attempt / DP-SGD step"]) > 0
    for row in found[:3]:
        cells = " ".join(cell for key, cell in row.items() if key != "step")
        numbers = [float(number) for number in re.findall(r"\d+\.?\d*", cells)]
        assert len(numbers) == 10 and all(number > 0 for number in numbers), row
    assert found[0]["× plain Keras"] == found[0]["× own plain step"] == "1.00"
    assert found[3]["median ms"] == "not run: slow; --slow_batch 8 runs it"
    assert found[4]["median ms"].startswith("not installed: No module named ")
    assert all(found[4][key] == "–" for key in ("first step s", "peak MiB", "× plain Keras"))
    assert "26,010 parameters" in text and "tensorflow 2." in text and " cores" in text

    results = json.loads((tmp_path / "results.json").read_text())
    assert [m["contestant"] for m in results["measurements"]][:2] == list(KERAS)
    assert all(m["seconds"] == [] for m in results["measurements"][3:])
    for m in results["measurements"][:3]:
        assert len(m["seconds"]) == len(m["cpu"]) == 2 and m["reason"] is None
        assert all(0 < seconds < 5 for seconds in m["seconds"] + m["cpu"])
        assert math.isfinite(m["first"]) and 0 <= m["growth"] < m["peak"]
    assert str(tmp_path) not in json.dumps(results)
    assert matplotlib.image.imread(tmp_path / "plot.png").std() > 0


def _python_without_anything(tmp_path):
    """A Python with the standard library alone."""
    venv.create(tmp_path / "python", symlinks=True, with_pip=False)
    return str(tmp_path / "python" / "bin" / "python")


def test_process_that_fails_or_hangs_gets_a_row_with_the_reason(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho warning >&2\necho no such thing >&2\nexit 3\n")
    script.chmod(0o755)
    measurements = plan(["jax_sgd"], "mnist_cnn", StepSettings(8))
    Rounds(1, peer_python=str(script)).measure(measurements)
    assert measurements[0].reason == "failed: no such thing"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    measurements = plan(["jax_sgd"], "mnist_cnn", StepSettings(8))
    Rounds(1, peer_python=str(script), timeout=0.1).measure(measurements)
    assert measurements[0].reason == "stopped: no answer within 0.1 s"


def test_error_of_a_step_is_told_in_one_line():
    assert describe(ValueError("in user code:\n\n  File x\n\n  ValueError: bad loss\n")) == (
        "ValueError: bad loss"
    )
    assert describe(RuntimeError("no memory\nfor this")) == "RuntimeError: no memory"
    assert describe(KeyError()) == "KeyError: "


def test_step_that_needs_too_much_memory_is_not_run():
    measurements = plan(["opacus_hooks"], "imdb_lstm", StepSettings(10_000_000))
    Rounds(1).measure(measurements)
    assert re.match(r"not run: would need about \d+ GiB", measurements[0].reason)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_has_a_plain_step_of_its_framework(name):
    contestant = CONTESTANTS[name]
    plain = CONTESTANTS[contestant.plain]
    assert plain.framework == contestant.framework and not plain.private
    assert contestant.private == (name not in ("keras_sgd", "keras_adam", "torch_sgd", "jax_sgd"))
    assert contestant.private or contestant.expected_bytes(problem("imdb_lstm"), 64) == 0
    assert (
        name in DEFAULT or "adam" in name or "sign" in name or "dpsur" in name or "philox" in name
    )


@pytest.mark.slow
def test_steps_on_batches_that_are_not_drawn():
    steps = KerasSteps("tfdp_one_pass", problem("mlp_7"), StepSettings(4))
    steps.run(2)
    assert int(steps._model.optimizer.iterations) == 2


def test_attempts_need_data_to_draw_from():
    with pytest.raises(Unsupported, match="needs --dataset_size"):
        KerasSteps("tfdp_dpsur", problem("mlp_7"), StepSettings(4))


def test_ratios_are_of_medians_at_the_same_batch():
    done = [
        measured("keras_sgd", [0.01, 0.02, 0.9]),
        measured("tfdp_one_pass", [0.03, 0.03, 0.03]),
        measured("torch_sgd", [0.04]),
        measured("opacus_ghost", [0.06]),
        measured("keras_sgd", [0.3], batch=16),
        measured("tfdp_one_pass", [0.6], batch=16),
    ]
    table = rows(report.step_table(done))
    own = [row["× own plain step"] for row in table]
    assert own == ["1.00", "1.50", "1.00", "1.50", "1.00", "2.00"]
    assert table[3]["× plain Keras"] == "3.00"
    assert table[0]["median ms"] == "20.0" and table[0]["quartiles ms"] == "15.0 to 460.0"
    small, large = rows(report.ratio_table(done))
    assert small["private / plain Keras"] == "1.50" and large["private / plain Keras"] == "2.00"
    assert small["Opacus ghost / tfdp"] == "2.00" and large["Opacus ghost / tfdp"] == "–"


def test_ratios_of_cpu_time_are_taken_turn_by_turn():
    done = [
        measured("keras_sgd", [1.0], cpu=[0.1, 0.2, 0.4]),
        measured("tfdp_one_pass", [9.0], cpu=[0.15, 0.4, 0.6]),
    ]
    assert rows(report.step_table(done))[1]["CPU time ms"] == "400.0"
    assert rows(report.ratio_table(done))[0]["private / plain Keras, CPU time"] == "1.50"
    assert report.cpu_ratio(done[1], measured("keras_sgd", [1.0])) == "–"


def test_busy_machine_is_reported():
    idle = report.versions([measured("keras_sgd", [1.0], others=0.01)])
    busy = report.versions([measured("keras_sgd", [1.0], others=0.5)])
    assert "up to 1%" in idle and "too much" not in idle
    assert "up to 50%" in busy and "too much" in busy


def test_quartiles_are_numpys():
    assert measured("keras_sgd", [4.0, 1.0, 2.0, 8.0]).quartiles == (1.75, 3.0, 5.0)
    assert measured("keras_sgd", [2.0]).quartiles == (2.0, 2.0, 2.0)
    assert measured("keras_sgd", []).median is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "mlp"], "must be one of"),
        (["--batch", "0"], "must be at least 1"),
        (["--repeats", "0"], "must be at least 1"),
        (["--contestants", "keras_sgd,pytorch"], "must be out of"),
    ],
)
def test_bad_argument_is_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        step.parse(arguments)
    assert complaint in capsys.readouterr().err
