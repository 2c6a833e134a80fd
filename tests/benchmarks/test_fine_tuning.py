import pytest

from benchmarks import fine_tuning
from benchmarks.fine_tuning import Case, Cost, Result


def result():
    steps = [(Cost(0.1, 0.2), Cost(0.15, 0.4)), (Cost(0.1, 0.2), Cost(0.2, 0.5))] * 3
    return Result(3, (100, 300), (Cost(2.0, 1.0), Cost(4.0, 3.0)), steps)


def test_a_row_shows_ratios():
    text = fine_tuning.row(Case("resnet50", "last_block"), result())
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert len(cells) == fine_tuning.HEADER.splitlines()[0].count("|") - 1
    assert cells == [
        "`resnet50`",
        "last block",
        "3",
        "100 / 300",
        "2.0 / 4.0",
        "2.00 (3.00)",
        "100 / 175",
        "**1.75** (2.25)",
    ]


def test_all_cases_are_measured(monkeypatch, capsys):
    cases = []
    monkeypatch.setattr(fine_tuning, "measure", lambda case: cases.append(case) or result())
    fine_tuning.main(["--model", "resnet50,mobilenet_v2", "--part", "head,whole", "--batch", "8"])
    assert [(case.model, case.part) for case in cases] == [
        ("resnet50", "head"),
        ("resnet50", "whole"),
        ("mobilenet_v2", "head"),
        ("mobilenet_v2", "whole"),
    ]
    out = capsys.readouterr().out
    assert "TensorFlow" in out and "batches of 8" in out and out.count("| `resnet50`") == 2


def test_unknown_names_are_errors(capsys):
    with pytest.raises(SystemExit):
        fine_tuning.main(["--part", "tail"])
    assert "--part must be of head" in capsys.readouterr().err


@pytest.mark.slow
def test_parts_of_a_network():
    trained = [
        len(fine_tuning.network(Case("mobilenet_v2", part, 32)).trainable_variables)
        for part in fine_tuning.PARTS
    ]
    assert trained == [2, 14, 158]
