import numpy as np
import pytest

from tests.front_ends import needs_keras_3

pytestmark = needs_keras_3


def line(setting, choice, score, epsilon=2.0, task="digits_mlp"):
    named = {"task": task, "epsilon": epsilon, "setting": setting, "seed": 1}
    return {**named, "choice": choice, "score": score}


def test_the_best_is_chosen_on_one_half_and_measured_on_the_other():
    from benchmarks import defaults

    lines = [
        line("default", 0, 80.0),
        line("default", 0, 82.0),
        line("default, in epochs", 0, 81.5),
        line("tuned", 0, 82.25),
        line("a", 90.0, 83.5),
        line("b", 89.0, 99.0),
        line(defaults.FIXED, 10.0, 79.0),
        line("default", 0, 70.0, task="breast_cancer"),
        line("a", 50.0, 70.5, task="breast_cancer"),
        line("not private", 0, 97.0, epsilon=None),
        line("a", 90.0, 83.5, epsilon=8.0),  # Has no default.
    ]
    rows = defaults.table(lines).splitlines()
    assert "| digits_mlp* | 2 | 79.0 | 81.0 | 81.5 | 82.2 | 83.5 | 2.5 | a | 3 | 97.0 |" in rows
    assert "| breast_cancer | 2 |  | 70.0 |  |  | 70.5 | 0.5 | a | 1 |  |" in rows
    assert rows[-3].endswith(
        "within 1 point in 0 of 1 cells; the largest gap is 2.5, and 0 are above 2.5."
    )
    assert "Other tasks: within 1 point in 1 of 1 cells" in rows[-1]


def test_scores_are_percent():
    from benchmarks.default_tasks import TASKS

    y = np.array([[0.0], [1.0], [0.0], [1.0]], "float32")
    auc = TASKS["breast_cancer"].measure
    assert auc(y, y) == 100 and auc(y, -y) == 0
    assert auc(y, np.array([[0.1], [0.4], [0.2], [0.15]])) == 75
    explained = TASKS["regression"].measure
    assert explained(y, y) == 100 and explained(y, np.full_like(y, 0.5)) == 0
    assert explained(y, np.full_like(y, np.nan)) == 0
    accuracy = TASKS["digits_mlp"].measure
    assert accuracy(np.array([0, 1, 1]), np.eye(3)) == pytest.approx(200 / 3)


def test_the_grid_has_40_settings_around_500_steps():
    from benchmarks import defaults

    for size, epochs, batches in ((60_000, 5, {256, 512, 2048}), (400, 30, {8, 32, 40, 64})):
        settings = set(defaults.grid(size, epochs))
        assert len(settings) == 40 and {one.batch_size for one in settings} == batches


@pytest.mark.slow
def test_a_run_that_ended_is_not_done_again(tmp_path, capsys):
    from benchmarks import defaults
    from experiments import records

    record = tmp_path / "record.jsonl"
    given = ["--tasks=breast_cancer", "--epsilons=8", "--seeds=1", f"--record={record}"]
    for _ in range(2):
        defaults.main([*given, "--in_epochs", "--settings=^adam, 32, 0.01, linear$"])
    lines = records.read(record)
    assert [line["setting"] for line in lines] == [
        "default",
        "default, in epochs",
        "not private",
        "adam, 32, 0.01, linear",
    ]
    assert all(60 < line["score"] <= 100 for line in lines)
    assert "| breast_cancer | 8 |" in capsys.readouterr().out
