"""The examples of the docstrings and of the README run as written."""

import doctest
import importlib
import pathlib
import re

import pytest
import tensorflow as tf

from tests import support

ROOT = pathlib.Path(__file__).parent.parent
MODULES = [
    "tfdp.accounting.bounds",
    "tfdp.accounting.calibration",
    "tfdp.accounting.ledger",
    "tfdp.accounting.privacy_filter",
    "tfdp.accounting.sampling",
    "tfdp.accounting.selected_gaussian",
    "tfdp.accounting.selective_calibration",
    "tfdp.accounting.selective_release",
    "tfdp.accounting.statement",
    "tfdp.callbacks",
    "tfdp.clipping.batch_losses.aggregations",
    "tfdp.clipping.batch_losses.two_term_loss",
    "tfdp.data.features",
    "tfdp.data.poisson",
    "tfdp.models.batch_normalization",
    "tfdp.models.model_check",
    "tfdp.models.private_training",
    "tfdp.models.divergences",
    "tfdp.models.likelihoods",
    "tfdp.models.priors",
    "tfdp.models.selective.selective_model",
    "tfdp.models.term_wise_vae",
    "tfdp.optimizers.dp_adam",
    "tfdp.optimizers.dp_sgd",
    "tfdp.optimizers.dp_sign_adam",
    "tfdp.optimizers.dp_sign_sgd",
    "tfdp.optimizers.dpsur",
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def test_every_public_name_has_an_example_or_a_docstring():
    import tfdp

    for name in tfdp.__all__:
        assert getattr(tfdp, name).__doc__, name


def run_examples(path):
    """Runs the Python blocks of a page, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    x, y = support.small_data(2000)
    names = {"x_train": x, "y_train": y, "x_test": x[:50], "__name__": "examples"}
    for block in blocks:
        if path == "README.md":  # Each trains the reader's model.
            names["model"] = tf.keras.Sequential([tf.keras.layers.Dense(3)])
        exec(block, names)
    return names


def test_readme_examples(capsys):
    run_examples("README.md")
    assert capsys.readouterr().out.count("epsilon = ") == 4


@pytest.mark.slow
def test_examples_of_batch_wise_losses(capsys):
    names = run_examples("docs/vae.md")
    assert names["decorrelated"].optimizer.ledger.steps == 40
    assert capsys.readouterr().out.count("epsilon = ") == 1


def test_examples_of_accounting(capsys):
    run_examples("docs/accounting.md")
    assert capsys.readouterr().out.startswith("EpsilonInterval(lower=1.828")


@pytest.mark.slow
def test_examples_of_the_guarantee(capsys):
    names = run_examples("docs/guarantee.md")
    printed = capsys.readouterr().out
    assert "`map` must not be used on Poisson batches" in printed
    assert "refused: True\n1\n" in printed
    assert "running_mean/mean" in printed
    assert names["before"] < names["after"]
