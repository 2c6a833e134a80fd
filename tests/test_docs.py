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
    "tfdp.accounting.sampling",
    "tfdp.accounting.selected_gaussian",
    "tfdp.accounting.selective_calibration",
    "tfdp.accounting.selective_release",
    "tfdp.accounting.statement",
    "tfdp.callbacks",
    "tfdp.data.poisson",
    "tfdp.models.selective_model",
    "tfdp.optimizers.dp_adam",
    "tfdp.optimizers.dp_sgd",
    "tfdp.optimizers.dp_sign_adam",
    "tfdp.optimizers.dp_sign_sgd",
    "tfdp.optimizers.dpsur",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def test_every_public_name_has_an_example_or_a_docstring():
    import tfdp

    for name in tfdp.__all__:
        assert getattr(tfdp, name).__doc__, name


def test_readme_examples(capsys):
    text = (ROOT / "README.md").read_text()
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    x, y = support.small_data(2000)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    exec(program, {"x_train": x, "y_train": y, "model": model})
    assert capsys.readouterr().out.count("epsilon = ") == 2
