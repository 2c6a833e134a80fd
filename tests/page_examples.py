"""The Python blocks of a page of the manual, and a reader's names for them."""

import contextlib
import importlib
import pathlib
import re
from unittest import mock

import tensorflow as tf

from tests import support
from tfdp.accounting import planning
from tfdp.base import compat

ROOT = pathlib.Path(__file__).parent.parent


def shortened(source):
    """The program, with training that takes two epochs in the place of 20 or more."""
    return re.sub(r"((?:epochs|EPOCHS) ?= ?)[2-9]\d\b", r"\g<1>2", source)


def blocks_of(path, shorten=False):
    text = (ROOT / path).read_text()
    return re.findall(r"```python\n(.*?)```", shortened(text) if shorten else text, re.DOTALL)


def version_of(path):
    """Returns the Keras that a page is for: pages for Keras 2 import it from TensorFlow."""
    return 2 if any("tf.keras." in block for block in blocks_of(path)) else 3


def run_examples(path, shorten=False, few_steps=False):
    """Runs the Python blocks of a page, one after the other; for KerasHub, tests/hub does it."""
    blocks = [block for block in blocks_of(path, shorten) if "import keras_hub" not in block]
    with in_few_steps() if few_steps else contextlib.nullcontext():
        return run_blocks(blocks, version_of(path))


def in_few_steps():
    """Within it, `make_private` chooses batches that leave 50 steps, and not 500."""
    return mock.patch.object(planning, "_LEAST_STEPS", 50)


def run_blocks(blocks, version=3):
    """Runs blocks as where `tf.keras` is Keras `version`: `tfdp` has the names for it."""
    has_keras = version == 3 and compat.has_keras_3()
    keras = importlib.import_module("keras") if has_keras else tf.keras
    x, y = support.small_data(2000)
    names = {"x_train": x, "y_train": y, "__name__": "examples"}
    names |= {"x_test": x[:50], "y_test": y[:50]}
    names["model"] = keras.Sequential([keras.layers.Dense(3)])  # The reader's.
    with mock.patch.object(compat, "keras_of_tensorflow", return_value=version):
        for block in blocks:
            exec(block, names)
    return names
