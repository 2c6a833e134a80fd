"""CONTRIBUTING's recipes: what they name is there, and followed to the letter they work."""

import re
import shutil

import pytest

from tests import forks
from tests.without_keras_2 import needs_keras_2

PAGE = (forks.ROOT / "CONTRIBUTING.md").read_text()
RECIPES = PAGE[PAGE.index("## Where would I add") : PAGE.index("## Benchmarks")]
ITEMS = [item for item in re.split(r"\n(?=\d\. |\*\*)", RECIPES) if "`" in item]
LIBRARY = "".join(
    path.read_text()
    for room in ("tfdp", "experiments")
    for pattern in ("*.py", "*.toml")
    for path in (forks.ROOT / room).rglob(pattern)
)
_FILE = re.compile(r"[\w/]+\.(?:py|toml|md|jsonl)")
_NAME = re.compile(r"@?(_?[A-Z][A-Z_]{3,}|_[a-z]\w+|[a-z]+_[a-z_]+)")


def unknown(item):
    """Returns the files of an item of a recipe, and the names in it, that are not there."""
    quoted = re.findall(r"`([^`]+)`", item)
    paths = [path for path in map(str.strip, quoted) if _FILE.fullmatch(path)]
    folders = [folder.strip() for folder in quoted if folder.endswith("/")]
    files = []
    for path in (path for path in paths if "NAME" not in path):
        found = [forks.ROOT / path, *(forks.ROOT / "tfdp").rglob(path)]
        found += (forks.ROOT / "tests").rglob(path)
        files.append(next((one for one in found if one.exists()), path))
    for folder in folders:
        files += (forks.ROOT / folder).rglob("*.py")
    missing = [file for file in files if isinstance(file, str)]
    text = "\n".join(file.read_text() for file in files if not isinstance(file, str))
    names = [name.lstrip("@") for name in quoted if _NAME.fullmatch(name)]
    return missing + [name for name in names if name not in text + LIBRARY]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.split("\n")[0][:40])
def test_what_a_recipe_names_is_there(item):
    assert not unknown(item)


def test_mutant_what_is_gone_is_found():
    assert unknown("1. `tests/support.py`: `OPTIMIZERS`, `PESSIMIZERS`") == ["PESSIMIZERS"]
    assert unknown("1. `tests/gone.py`") == ["tests/gone.py"]


OPTIMIZER = '''
"""DP-SGD whose updates are halved."""

import tensorflow as tf

from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.keras_2 import VectorizedDPKerasSGDOptimizer, registered


@registered
class DPHalved(PrivateOptimizerMixin, VectorizedDPKerasSGDOptimizer):
    """DP-SGD whose updates are halved."""

    def _transform_private_gradient(self, gradient):
        return gradient / 2
'''
PROGRAM = """
import sys

sys.path.insert(0, sys.argv[1])
import numpy as np
import tensorflow as tf
import tfdp

assert tfdp.__file__.startswith(sys.argv[1])
x, y = np.random.default_rng(0).normal(size=[60, 3]).astype("float32"), np.ones([60, 1], "float32")
ends = {}
for name in ("DPSGD", "DPHalved"):
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=20, seed=1)
    cls = getattr(tfdp.keras2, name)
    layer = tf.keras.layers.Dense(1, kernel_initializer="zeros")
    model = tf.keras.Sequential([tf.keras.Input([3]), layer])
    model.compile(cls(1.0, 0.0, learning_rate=1.0, sampling=batches.sampling), "mse")
    model.fit(batches, steps_per_epoch=1, verbose=0)
    ends[name] = np.concatenate([w.ravel() for w in model.get_weights()])
    model.save(f"{sys.argv[1]}/{name}.keras")
    loaded = tf.keras.models.load_model(f"{sys.argv[1]}/{name}.keras")
    assert type(loaded.optimizer) is cls and loaded.optimizer.ledger.steps == 1
np.testing.assert_allclose(ends["DPHalved"], ends["DPSGD"] / 2, rtol=1e-5)
assert np.abs(ends["DPSGD"]).max() > 0.1

layer = tf.keras.layers.Dense(2)
curved = tf.keras.layers.Lambda(tf.math.bessel_i0e)
model = tf.keras.Sequential([tf.keras.Input([3]), layer, curved, tf.keras.layers.Dense(1)])
model.compile(tfdp.keras2.DPSGD(1.0, 0.0, 20), "mse")
print(tfdp.validate(model, data=(x, y)))
"""


@needs_keras_2
@pytest.mark.slow
def test_recipes_that_are_followed_work(tmp_path):
    """An optimizer of Keras 2, and a rule for an operation; without the rule it is slow."""
    folders = []
    for followed in (False, True):
        folder = tmp_path / str(followed)
        shutil.copytree(forks.ROOT / "tfdp", folder / "tfdp")
        (folder / "tfdp/keras2/dp_halved.py").write_text(OPTIMIZER)
        package = folder / "tfdp/keras2/__init__.py"
        text = package.read_text()
        for start, line in (
            ("_MODULES = {", '"DPHalved": "tfdp.keras2.dp_halved",'),
            ("__all__ = [", '"DPHalved",'),
        ):
            text = text.replace(start, f"{start}\n    {line}")
        package.write_text(text)
        if followed:
            rules = folder / "tfdp/clipping/row_analysis/transfer_functions/common.py"
            known = rules.read_text()
            rules.write_text(known.replace('"Abs Acos ', '"Abs Acos BesselI0e '))
        folders.append(folder)
    runs = [[folder] for folder in folders]
    without, following = forks.run_each(PROGRAM, runs, "import tensorflow")
    assert without.status == 0, without.errors[-2000:]
    assert following.status == 0, following.errors[-2000:]
    assert "slow" in without.output and "slow" not in following.output, following.output
