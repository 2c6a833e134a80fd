"""Backbones of KerasHub are clipped as a loop over examples does it, and as docs/backbones.md says.

`python -m tests.hub.backbone_table` looks at all of them, which takes ten minutes.
"""

import pytest

from tests.hub import backbone_table as table
from tests.hub.backbones import BACKBONES

TRIED = ["Bert", "DebertaV3", "Gemma", "FNet", "Bert, masked", "T5", "EfficientNet", "ViT"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TRIED)
def test_a_step_is_a_loop_over_examples(name):
    result = table.take_one_step(name)
    assert result.error < table.LARGEST_ERROR
    assert table.row(name, result) in table.PAGE.read_text(), (
        "docs/backbones.md is out of date: run `python -m tests.hub.backbone_table --write`"
    )


def test_a_wrong_sum_is_seen(monkeypatch):
    """Mutant: the loop leaves out an example."""
    looped = table.looped_sum

    def without_the_last(model, examples):
        total, clip = looped(model, examples)
        return total * 0.99, clip

    monkeypatch.setattr(table, "looped_sum", without_the_last)
    assert table.take_one_step("DenseNet").error > table.LARGEST_ERROR


def test_the_page_has_every_backbone():
    page = table.PAGE.read_text()
    assert all(f"| {name} | {backbone.kind} |" in page for name, backbone in BACKBONES.items())
