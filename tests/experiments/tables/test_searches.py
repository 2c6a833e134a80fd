"""The record of the searches as Markdown."""

from experiments.tables import searches


def trial(row, epsilon, accuracy, seed=0, **settings):
    given = {"target_epsilon": epsilon, "seed": seed, "eval_split": "validation", **settings}
    place = {"dataset": "mnist", "row": row, "target_epsilon": epsilon, "seed": seed}
    return {**place, "accuracy": accuracy, "settings": given}


def rows(lines):
    table = [line for line in searches.section(lines).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_what_was_chosen_of_what_was_tried():
    lines = [
        trial("DPSGD", 1.0, 0.90, learning_rate=1.0, head="conv"),
        trial("DPSGD", 1.0, 0.95, learning_rate=2.0, head="conv"),
        trial("DPSGD", 1.0, 0.93, learning_rate=4.0, head="linear"),
        trial("SGD", None, 0.99, learning_rate=0.1),
    ]
    assert rows(lines) == [
        [
            "MNIST",
            "DPSGD",
            "1",
            "3",
            "95.00",
            "learning_rate 2 of 1, 2, 4; head conv of conv, linear",
        ],
        ["MNIST", "SGD", "–", "1", "99.00", "–"],
    ]
    assert "4 trials in 2 searches; 0 chose" in searches.section(lines)


def test_a_choice_at_the_end_of_what_was_tried_is_bold():
    lines = [trial("DPSGD", 1.0, 0.90 + rate / 100, learning_rate=rate) for rate in (8.0, 2.0, 4.0)]
    assert rows(lines)[0][-1] == "learning_rate **8** of 2, 4, 8"
    assert "3 trials in 1 searches; 1 chose" in searches.section(lines)


def test_runs_of_one_trial_are_averaged():
    lines = [
        trial("DPSGD", 1.0, 0.97, learning_rate=1.0),
        trial("DPSGD", 1.0, 0.91, seed=1, learning_rate=1.0),
        *(trial("DPSGD", 1.0, 0.95, seed=seed, learning_rate=2.0) for seed in (0, 1)),
    ]
    assert rows(lines)[0][3:] == ["2 (4 runs)", "95.00", "learning_rate **2** of 1, 2"]
    lines.append(trial("DPSGD", 1.0, 0.99, learning_rate=3.0))  # One run is not the best of all.
    lines.append(trial("DPSGD", 1.0, 0.95, seed=2, learning_rate=2.0, later_flag=None))
    assert rows(lines)[0][3:] == ["3 (6 runs)", "95.00", "learning_rate 2 of 1, 2, 3"]
