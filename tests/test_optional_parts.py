"""A private step loads no more than it uses: whoever must trust it has less to read."""

import ast
import importlib
import pathlib
import sys

import pytest

from tests import forks
from tests.front_ends import needs_keras_3

PROGRAM = """
import sys
import keras
import numpy as np
import tfdp

option = sys.argv[1]
x, y = np.ones([60, 5, 2], "float32"), np.ones([60, 1], "float32")
options = {
    "compression": {"compression": {"name": "top_k", "fraction": 0.5}},
    "noise_correlation": {"noise_correlation": tfdp.BandedNoise([1.0, 0.5])},
    "sparse_embeddings": {"sparse_embeddings": {"threshold": 2.0, "min_rows": 3}},
}.get(option, {})
cycle = 2 if options.keys() & {"noise_correlation"} else 1
batches = tfdp.data.poisson_batches((x, y), expected_batch_size=6, cycle_length=cycle)
first = keras.layers.Flatten()
if option == "sparse_embeddings":
    first = keras.Sequential([keras.layers.Embedding(3, 2), first])
model = keras.Sequential([first, keras.layers.Dense(1)])
inner = keras.optimizers.SGD(0.1)
model.compile(
    tfdp.keras3.DPOptimizer(inner, 1.0, 1.0, sampling=batches.sampling, **options), "mse"
)
model.fit(batches, epochs=1, steps_per_epoch=2, verbose=0)
assert model.optimizer.ledger.epsilon(1e-5).epsilon > 0
loaded = {name for name in sys.modules if name.startswith("tfdp.")}
print(*sorted(name for name in loaded if name in sys.argv[2:]))
"""
PARTS = {
    "compression": "tfdp.step.compression",
    "noise_correlation": "tfdp.step.noise_memory",
    "sparse_embeddings": "tfdp.step.sparse_embeddings",
}
NEVER = (
    "tfdp.accounting.privacy_filter",
    "tfdp.accounting.run_selection",
    "tfdp.accounting.selective_release",
    "tfdp.accounting.statement",
    "tfdp.clipping.batch_losses.two_term_loss",
    "tfdp.clipping.one_pass.recurrent",
    "tfdp.contrib",
    "tfdp.step.selective",
    "tfdp.training.private_training",
)


@pytest.mark.slow
@needs_keras_3
def test_a_step_loads_the_parts_that_it_uses():
    """The parts in use are found, so that the step without them would be caught loading them."""
    names = [*PARTS.values(), *NEVER]
    names += ["tfdp.clipping.one_pass.table_rows", "tfdp.keras3.row_updates"]
    runs = [[option, *names] for option in ("none", *PARTS)]
    ended = forks.run_each(PROGRAM, runs, "import tensorflow, keras, tfdp")
    for (option, *_), process in zip(runs, ended, strict=True):
        assert process.status == 0, process.errors[-2000:]
        loaded = set(process.output.split())
        if option == "none":
            assert not loaded
        else:
            assert loaded & set(PARTS.values()) == {PARTS[option]}
        of_rows = loaded & {"tfdp.clipping.one_pass.table_rows", "tfdp.keras3.row_updates"}
        assert len(of_rows) == (2 if option == "sparse_embeddings" else 0)


@pytest.mark.parametrize(
    "package", ["accounting", "clipping", "data", pytest.param("keras3", marks=needs_keras_3)]
)
def test_names_of_lazy_packages_are_those_that_type_checkers_read(package):
    module = importlib.import_module(f"tfdp.{package}")
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    sources = {name.name: one.module for one in typed.body for name in one.names}
    assert sorted(sources) == sorted(module.__all__)
    for name, source in sources.items():
        own = importlib.import_module(source)
        assert getattr(module, name) is getattr(own, name, sys.modules.get(f"{source}.{name}"))
