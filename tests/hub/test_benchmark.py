"""`benchmarks.hub` builds tasks that are trained in part, and shows what they cost."""

import dataclasses
import math

import keras_hub
import pytest

from benchmarks import hub
from benchmarks.fine_tuning import Cost
from benchmarks.hub import Case, Fresh, Model, Result


def result():
    fresh = (Fresh(Cost(2.0, 2.0), 2000.0, 100.0), Fresh(Cost(3.0, 5.0), 2500.0, 150.0))
    steps = [(Cost(0.1, 0.2), Cost(0.15, 0.4)), (Cost(0.1, 0.2), Cost(0.2, 0.5))] * 3
    return Result(1234, "one pass", fresh, steps)


def test_a_row_shows_ratios():
    text = hub.row(Case("bert", "head"), result())
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    assert len(cells) == hub.HEADER.splitlines()[0].count("|") - 1
    assert cells == [
        "`bert`",
        "head",
        "1,234",
        "one pass",
        "100 / 175",
        "**1.75** (2.25)",
        "2.0 / 3.0",
        "1.50 (2.50)",
        "2,000 / 2,500",
        "1.25 (1.50)",
    ]


def test_parts_that_a_task_has_are_measured(monkeypatch, capsys):
    cases = []
    monkeypatch.setattr(hub, "measure", lambda case: cases.append(case) or result())
    hub.main(["--model", "gemma,vit", "--part", "head,whole", "--repeats", "2"])
    assert cases == [Case("gemma", "whole", 2), Case("vit", "head", 2), Case("vit", "whole", 2)]
    out = capsys.readouterr().out
    assert keras_hub.__version__ in out and out.count("| `vit` |") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tail"], "--model must be of bert"),
        (["--part", "tail"], "--part must be of whole"),
        (["--repeats", "0"], "--repeats must be positive"),
    ],
)
def test_bad_arguments_are_errors(arguments, message, capsys):
    with pytest.raises(SystemExit):
        hub.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_task_is_trained_in_part(monkeypatch):
    def build():
        sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
        backbone = keras_hub.models.BertBackbone(30, **sizes, max_sequence_length=4)
        return keras_hub.models.BertTextClassifier(backbone, num_classes=hub.CLASSES)

    monkeypatch.setitem(hub.MODELS, "bert", Model(build, 2, 4, 30))
    trained = {
        part: sum(math.prod(v.shape) for v in hub.network("bert", part).trainable_variables)
        for part in hub.PARTS
    }
    assert trained["head"] == 8 * hub.CLASSES + hub.CLASSES
    assert trained["head"] < trained["biases"] < trained["whole"]
    assert trained["head"] < trained["adapters"] < trained["whole"]
    count, how, steps = hub.turns(Case("bert", "biases", 1))
    assert count == trained["biases"] and how == "one pass" and len(steps) == 1
    fresh = hub.start(Case("bert", "head"), private=False)
    assert min(dataclasses.astuple(fresh.first)) > 0 and fresh.peak > fresh.growth
