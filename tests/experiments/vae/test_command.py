"""The experiments on variational autoencoders, from the command line to the figures."""

import csv
import dataclasses
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from absl import flags

from experiments import datasets
from experiments.settings import RefusedError
from experiments.vae import command as vae
from experiments.vae import data as vae_data
from experiments.vae import figures, training
from experiments.vae.settings import DEFAULTS, METHODS, OPTIMIZERS, VaeSettings, resolve
from tests import support
from tests.experiments.test_datasets import prepared_data

ROOT = Path(__file__).absolute().parents[3]
QUICK = ["--steps=3", "--importance_samples=2", "--num_samples=1", "--num_groups=2"]


def parse(*arguments):
    values = flags.FlagValues()
    vae.define_flags(values)
    values(["vae", *arguments])
    return values


def run(*arguments):
    return vae.run(parse(*QUICK, *arguments))


def read(folder):
    return list(csv.DictReader(io.StringIO((folder / "runs.csv").read_text())))


def assert_drawn(path):
    image = matplotlib.image.imread(path)
    assert image.ndim == 3 and min(image.shape[:2]) > 300
    assert image[..., :3].std() > 0.02  # not blank


# Flags and settings.


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--task=cifar10", "should be one of <digits|mnist|sparsity|pinwheel>"),
        ("--optimizer=adam", "should be one of <dpsgd|"),
        ("--eval_split=train", "should be one of <test|validation>"),
        ("--steps=0", "--steps"),
        ("--epochs=0", "--epochs"),
        ("--seeds=0", "--seeds"),
        ("--num_groups=0", "--num_groups"),
        ("--num_samples=-1", "--num_samples"),
        ("--evaluation_examples=1", "--evaluation_examples"),
        ("--learning_rate=fast", "--learning_rate"),
        ("--epsilon=1", "Unknown command line flag 'epsilon'"),
    ],
)
def test_bad_flag_is_refused(argument, complaint):
    with pytest.raises(flags.Error, match=complaint.replace("|", r"\|")):
        parse(argument)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods=term_wise,dpsgd"], "--methods must be among .* --methods=dpsgd"),
        (
            ["--target_epsilon=much"],
            r"--target_epsilon must be positive numbers\. Received: .*=much\.",
        ),
        (["--target_epsilon=1,0"], "--target_epsilon must be positive"),
        (["--target_epsilon=nan"], "--target_epsilon must be positive"),
        (["--target_epsilon=inf"], "--target_epsilon must be positive"),
        (["--epochs=1"], "--steps and --epochs exclude each other"),
        (["--delta=0.001"], "--delta must be below 1/N = 0.0007"),
        (["--delta=0"], "--delta must be positive"),
        (["--delta=1e-90", "--target_epsilon=0.1"], "--target_epsilon=0.1 .*cannot be reached"),
        (["--alpha=-1"], "--alpha must be at least 0"),
        (["--beta=nan"], "--beta must be at least 0"),
        (["--normal_scale=0"], "--normal_scale must be positive"),
        (["--l2_norm_clip=0"], "--l2_norm_clip must be positive"),
        (["--batch_clip=inf"], "--batch_clip must be positive"),
        (["--learning_rate=0"], "--learning_rate must be positive"),
        (["--expected_batch_size=1439"], "at most 1438, the number of training examples"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, arguments, complaint):
    with pytest.raises(RefusedError, match=complaint):
        run(f"--output_dir={tmp_path / 'new'}", *arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_refusal_ends_the_program_without_a_traceback(tmp_path):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-m", "experiments.vae", f"--output_dir={tmp_path}", "--delta=0.5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    assert process.returncode not in (0, None)
    assert "vae: --delta must be below" in process.stderr and "Traceback" not in process.stderr


def test_an_argument_that_is_no_flag_is_refused():
    with pytest.raises(SystemExit, match=r"vae: .*Received: pinwheel"):
        vae.main(["vae", "pinwheel"])


@pytest.mark.parametrize("task", vae_data.TASKS)
def test_every_task_and_method_has_defaults(task):
    defaults = DEFAULTS[task]
    assert defaults.optimizer in OPTIMIZERS and set(defaults.methods) <= set(METHODS)
    assert defaults.measure in training.MEASURES
    for method, how in METHODS.items():
        settings = resolve({"task": task, "delta": 1e-6}, method, 1.0, 1, 60_000)
        absent = {name for name, value in dataclasses.asdict(settings).items() if value is None}
        absent -= {"normal_scale"}  # The likelihood is that of the task.
        grouped = {"num_groups", "batch_clip"}
        expected = set() if method == "term_wise" else grouped
        assert absent == expected | (set() if how.private else {"delta", "l2_norm_clip"})
        assert (settings.alpha > 0) == how.divergence
        assert math.isfinite(settings.target_epsilon) == how.private
        assert settings.steps == round(defaults.epochs * 60_000 / settings.expected_batch_size)


def test_what_a_method_does_not_have_is_no_part_of_its_runs():
    given = {"task": "pinwheel", "batch_clip": 0.3, "num_groups": 7, "alpha": 5.0}
    for method in METHODS:
        plain = resolve({"task": "pinwheel"}, method, 1.0, 1, 400)
        changed = resolve(given, method, 1.0, 1, 400)
        assert (plain == changed) == (not METHODS[method].divergence)
    for epsilon in (1.0, 2.0):
        assert resolve({"task": "pinwheel"}, "non_private", epsilon, 1, 400).name == (
            resolve({"task": "pinwheel"}, "non_private", 5.0, 1, 400).name
        )
    # The term-wise method alone has groups.
    assert resolve(given, "micro", 1.0, 1, 400).batch_clip is None


def test_the_weight_of_the_kl_term_may_depend_on_the_other_term(monkeypatch):
    changed = dataclasses.replace(DEFAULTS["pinwheel"], beta=0.0, beta_without=1.0)
    monkeypatch.setitem(DEFAULTS, "pinwheel", changed)
    for given, expected in (({}, [0, 1]), ({"beta": 0.5}, [0.5, 0.5])):
        found = [
            resolve({"task": "pinwheel", **given}, method, 1.0, 1, 400).beta
            for method in ("micro", "no_divergence")
        ]
        assert found == expected


def test_a_method_without_privacy_is_run_once_per_seed():
    todo = vae.runs_to_make(
        parse("--target_epsilon=2,1", "--seeds=3", "--methods=term_wise,non_private"), 1438
    )
    found = [(s.method, s.target_epsilon, s.seed) for s in todo]
    assert len(found) == len(set(found)) == 3 * 2 + 3
    assert ("non_private", math.inf, 3) in found and ("term_wise", 2.0, 3) in found


# Runs.


@pytest.fixture(scope="module")
def pinwheel(tmp_path_factory):
    """Two methods at two epsilons."""
    folder = tmp_path_factory.mktemp("pinwheel")
    methods = "--methods=term_wise,non_private"
    arguments = ["--task=pinwheel", f"--output_dir={folder}", "--target_epsilon=1,4", methods]
    return folder, arguments, run(*arguments)


# Those that are not trained for `pinwheel`, above.
OTHER_METHODS = [method for method in METHODS if method not in ("term_wise", "non_private")]


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_every_method_is_trained_within_its_budget(method):
    settings = vae.runs_to_make(parse(*QUICK, "--task=pinwheel", f"--methods={method}"), 400)[0]
    outcome, arrays, statement = training.run(settings, vae_data.load("pinwheel"))
    assert math.isfinite(outcome.log_likelihood) and math.isfinite(outcome.mmd)
    assert arrays["latents"].shape == arrays["reconstructions"].shape == (400, 2)
    if METHODS[method].private:
        assert 0.99 < outcome.epsilon <= 1
        assert support.stated_epsilon(statement) == pytest.approx(outcome.epsilon, rel=1e-5)
    else:
        assert outcome.epsilon == math.inf and outcome.noise_multiplier is None
        assert statement.startswith("No differential privacy")


@pytest.mark.slow
def test_each_method_is_run_at_each_epsilon(pinwheel):
    folder, _, rows = pinwheel
    expected = [("term_wise", 1.0), ("non_private", math.inf), ("term_wise", 4.0)]
    assert [(row["method"], row["target_epsilon"]) for row in rows] == expected
    shown = read(folder)
    assert list(shown[0]) == [
        *VaeSettings.__dataclass_fields__,
        "noise_multiplier",
        "epsilon",
        "log_likelihood",
        "mmd",
        "sparsity",
        "purity",
        "accuracy",
        "kl",
        "explained",
        "diversity",
        "seconds",
    ]
    assert len(shown) == len(rows) == 3
    for row, text in zip(rows, shown, strict=True):
        assert float(text["purity"]) == row["purity"] and 0.25 <= row["purity"] <= 1
        assert math.isfinite(row["log_likelihood"]) and math.isfinite(row["mmd"])
        assert text["accuracy"] == text["sparsity"] == "" and row["accuracy"] is None


@pytest.mark.slow
def test_what_is_spent_is_within_the_target(pinwheel):
    folder, _, rows = pinwheel
    for row in rows:
        if METHODS[row["method"]].private:
            assert 0.99 * row["target_epsilon"] < row["epsilon"] <= row["target_epsilon"]
    noise = {(r["method"], r["target_epsilon"]): r["noise_multiplier"] for r in rows}
    assert 0 < noise["term_wise", 4.0] < noise["term_wise", 1.0]
    assert noise["non_private", math.inf] is None
    (path,) = (folder / "runs").glob("pinwheel_non_private_*.txt")
    assert path.read_text().startswith("No differential privacy")
    statements = list((folder / "runs").glob("pinwheel_term_wise_eps4_seed1_*.txt"))
    (row,) = [r for r in rows if (r["method"], r["target_epsilon"]) == ("term_wise", 4.0)]
    stated = support.stated_epsilon(statements[0].read_text())
    assert row["epsilon"] <= stated <= row["epsilon"] * (1 + 1e-5)


@pytest.mark.slow
def test_figures_are_drawn(pinwheel):
    folder, _, _ = pinwheel
    names = ["pinwheel.png", "purity.png", "runs", "runs.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert_drawn(folder / "pinwheel.png")
    assert_drawn(folder / "purity.png")


def test_nothing_of_the_training_set_is_drawn(tmp_path):
    run("--task=pinwheel", f"--output_dir={tmp_path}", "--methods=non_private")
    check_what_is_drawn(tmp_path, 1)


@pytest.mark.slow
def test_nothing_of_the_training_set_is_drawn_by_private_methods(pinwheel):
    folder, _, rows = pinwheel
    check_what_is_drawn(folder, len(rows))


def check_what_is_drawn(folder, runs):
    data = vae_data.load("pinwheel")
    train = {row.tobytes() for row in data.train_x}
    paths = list((folder / "runs").glob("*.npz"))
    assert len(paths) == runs
    for path in paths:
        with np.load(path) as arrays:
            assert {row.tobytes() for row in arrays["inputs"]}.isdisjoint(train)
            np.testing.assert_array_equal(arrays["inputs"], data.eval_x)


@pytest.mark.slow
def test_finished_runs_are_not_repeated(pinwheel, monkeypatch, capsys):
    folder, arguments, rows = pinwheel
    before = (folder / "runs.csv").read_bytes()

    def refuse(settings, data):
        raise AssertionError(settings)

    monkeypatch.setattr(training, "run", refuse)
    assert run(*arguments) == rows
    assert (folder / "runs.csv").read_bytes() == before
    printed = capsys.readouterr().out
    assert "| term_wise | 4 | 1 |" in printed and "| non_private | none | 1 |" in printed
    assert 0.99 < support.stated_epsilon(printed) <= 1
    assert "who sees several of them sees the sum" in printed
    with pytest.raises(AssertionError, match=r"learning_rate=0\.123"):
        run(*arguments, "--learning_rate=0.123")


@pytest.mark.slow
def test_an_interrupted_series_goes_on(tmp_path, monkeypatch):
    arguments = [
        "--task=pinwheel",
        f"--output_dir={tmp_path}",
        "--methods=non_private",
        "--seeds=2",
    ]
    made, results, train = [], [], training.run

    def interrupted(settings, data):
        if len(made) == 1:
            raise KeyboardInterrupt
        return once(settings, data)

    def once(settings, data):
        made.append(settings.seed)
        results.extend([] if results else [train(settings, data)])
        return results[0]

    monkeypatch.setattr(training, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*arguments)
    assert [row["seed"] for row in read(tmp_path)] == ["1"]
    monkeypatch.setattr(training, "run", once)
    run(*arguments)
    assert made == [1, 2] and [row["seed"] for row in read(tmp_path)] == ["1", "2"]
    # A run whose files are gone is made again, and has one row.
    next((tmp_path / "runs").glob("*seed1*.npz")).unlink()
    run(*arguments)
    assert made == [1, 2, 1] and [row["seed"] for row in read(tmp_path)] == ["2", "1"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "runs.csv").write_text("method,accuracy\nsgd,0.5\n")
    with pytest.raises(RefusedError, match="--output_dir must be a folder of this experiment"):
        run("--task=pinwheel", f"--output_dir={tmp_path}")


@pytest.mark.slow
def test_a_seed_fixes_what_is_not_private_and_no_noise(tmp_path):
    methods = ["--methods=no_divergence,non_private", "--task=pinwheel", "--learning_rate=1"]
    first, second = (run(f"--output_dir={tmp_path / name}", *methods) for name in "ab")
    assert first[0]["log_likelihood"] != pytest.approx(second[0]["log_likelihood"], rel=1e-3)
    # The estimates of the likelihood draw codes; purity does not.
    assert first[1]["purity"] == second[1]["purity"]


@pytest.mark.slow
def test_more_than_the_budget_is_an_error(monkeypatch):
    calibrate = training.calibrate
    monkeypatch.setattr(training, "calibrate", lambda *given: 0.9 * calibrate(*given))
    settings = vae.runs_to_make(parse(*QUICK, "--task=pinwheel"), 400)[0]
    with pytest.raises(RuntimeError, match="was spent, more than the target"):
        training.run(settings, vae_data.load("pinwheel"))


@pytest.mark.slow
def test_digits_are_generated_by_class(tmp_path, capsys):
    arguments = [f"--output_dir={tmp_path}", "--methods=term_wise", "--evaluation_examples=50"]
    (row,) = run(*arguments)
    assert 0 <= row["accuracy"] <= 1 and row["epsilon"] <= 3 and row["purity"] is None
    with np.load(next((tmp_path / "runs").glob("*.npz"))) as arrays:
        assert arrays["generated"].shape == (10, 8, 8, 8)
        assert arrays["generated"].min() >= 0 and arrays["generated"].max() <= 1
    assert_drawn(tmp_path / "generated.png")
    assert_drawn(tmp_path / "accuracy.png")
    printed = capsys.readouterr().out
    assert "A classifier of the real training images: 0.9" in printed
    assert "not private" in printed


@pytest.mark.slow
def test_sparsity_has_the_figures_of_the_paper(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    images = random.uniform(size=[120, 32, 32, 1]).astype("float32")
    data = datasets.Data(images[:80], np.zeros(80, int), images[80:], np.zeros(40, int))
    monkeypatch.setattr(vae_data, "load", lambda *given, **more: data)
    rows = run(
        "--task=sparsity",
        f"--output_dir={tmp_path}",
        "--methods=term_wise,non_private",
        "--expected_batch_size=20",
        "--delta=1e-3",
    )
    assert all(-0.1 < row["sparsity"] < 1 and row["accuracy"] is None for row in rows)
    assert_drawn(tmp_path / "sparsity.png")
    assert_drawn(tmp_path / "generated.png")


@pytest.mark.slow
@pytest.mark.data
def test_sparsity_on_fashion_mnist(tmp_path):
    rows = run(
        "--task=sparsity",
        f"--output_dir={tmp_path}",
        f"--data_dir={prepared_data()}",
        "--methods=term_wise",
        "--evaluation_examples=50",
    )
    assert rows[0]["epsilon"] <= 1 and math.isfinite(rows[0]["sparsity"])


# Figures and table.


def row(method, epsilon, **measures):
    target = epsilon if METHODS[method].private else math.inf
    return {"method": method, "target_epsilon": target, "mmd": 0.0, **measures}


ROWS = [
    row("term_wise", 1.0, sparsity=0.1),
    row("term_wise", 1.0, sparsity=0.3),
    row("term_wise", 2.0, sparsity=0.4),
    row("term_wise", 2.0, sparsity=0.4),
    row("non_private", 0.0, sparsity=0.6),
    row("non_private", 0.0, sparsity=0.8),
]


def test_bands_are_a_standard_deviation_over_the_seeds():
    found = figures.statistics(ROWS, "sparsity")
    np.testing.assert_allclose(found["term_wise", 1.0], [2, 0.2, 0.1 * math.sqrt(2)])
    figure = figures.draw_measures(ROWS, ["sparsity", "mmd"], "title")
    panel = figure.axes[0]
    np.testing.assert_allclose(panel.lines[0].get_xydata(), [[1, 0.2], [2, 0.4]])
    np.testing.assert_allclose(panel.lines[1].get_ydata(), [0.7, 0.7])  # horizontal
    (band,) = (c for c in panel.collections if c.get_paths()[0].vertices.shape[0] > 4)
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(0.2 - 0.1 * math.sqrt(2))
    assert panel.get_title() == "Hoyer sparsity" and panel.get_xlabel() == "ε"


def test_a_run_that_diverged_is_not_left_out_of_the_mean():
    rows = [*ROWS, row("term_wise", 2.0, sparsity=math.nan)]
    found = figures.statistics(rows, "sparsity")
    assert found["term_wise", 2.0][0] == 3 and math.isnan(found["term_wise", 2.0][1])
    assert "| term_wise | 2 | 3 | nan ± nan |" in figures.table(rows, ["sparsity"])


def test_the_table_has_means_and_deviations():
    assert figures.table(ROWS, ["sparsity", "mmd"]).splitlines() == [
        "| method | target epsilon | runs | sparsity | mmd |",
        "|---|---|---|---|---|",
        "| term_wise | 1 | 2 | 0.2 ± 0.14 | 0 ± 0 |",
        "| term_wise | 2 | 2 | 0.4 ± 0 | 0 ± 0 |",
        "| non_private | none | 2 | 0.7 ± 0.14 | 0 ± 0 |",
    ]
