"""Private parts of other packages: the index is complete, and each guard acts when one is gone."""

import importlib.metadata
import importlib.util
import warnings

import pytest

from tests import forks
from tests.front_ends import needs_keras_3
from tfdp.base import private_apis

ROOT = forks.ROOT


@pytest.fixture(name="tool", scope="module")
def fixture_tool():
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/private_apis.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_has_what_is_used(tool):
    assert tool.compared() == (set(), set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["._update_input", "tf.__internal__.FuncGraph"])
def test_mutant_an_entry_that_is_missing_is_found(name, tool, monkeypatch):
    index = [api for api in private_apis.INDEX if api.name != name]
    monkeypatch.setattr(private_apis, "INDEX", index)
    assert tool.compared() == ({name}, set())


def test_mutant_an_entry_that_nobody_uses_is_found(tool, monkeypatch):
    index = [*private_apis.INDEX, private_apis.PrivateApi("._unused", "")]
    monkeypatch.setattr(private_apis, "INDEX", index)
    assert tool.compared() == (set(), {"._unused"})


def test_nothing_is_done_where_a_part_that_is_replaced_is_gone():
    private_apis.replace("tensorflow.Variable._gone", lambda function: 1 / 0)
    private_apis.replace("tensorflow.python.gone.Variable._gone", lambda function: 1 / 0)
    assert not private_apis._missing


def test_the_page_is_that_of_the_index(tool):
    assert tool.PAGE.read_text() == tool.page(), "Run `python tools/private_apis.py --write`."


@pytest.mark.parametrize(
    "name", [api.name for api in private_apis.INDEX if api.without == private_apis.IMPORT]
)
def test_what_cannot_be_done_without_is_named(name, monkeypatch):
    find = private_apis.find

    def without(other):
        if other == name:
            raise AttributeError(name)
        return find(other)

    monkeypatch.setattr(private_apis, "find", without)
    package = name.split(".")[0].replace("tf", "tensorflow", name.startswith("tf."))
    with pytest.raises(private_apis.PrivateApiMissingError) as refused:
        private_apis.check(package)
    assert f"without {name}. Install" in str(refused.value)
    assert "tensorflow 2." in str(refused.value) and "TensorFlow 2.15 to" in str(refused.value)


PROGRAM = """
import importlib, sys, warnings
for name in sys.argv[1:]:
    path, _, last = name.rpartition(".")
    module, *cls = path.split(":")
    owner = importlib.import_module(module)
    for part in cls:
        owner = getattr(owner, part)
    delattr(owner, last)
import tfdp.keras3
import keras
import numpy as np
x, y = np.ones([40, 3], "float32"), np.ones([40, 1], "float32")
batches = tfdp.data.poisson_batches((x, y), expected_batch_size=8)
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(tfdp.keras3.DPSGD(1.0, 1.0, sampling=batches.sampling), "mse")
for _ in range(2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(batches, steps_per_epoch=1, verbose=0)
    print(*[str(warning.message) for warning in caught if "lacks" in str(warning.message)])
"""
NEEDED = "tensorflow.python.ops.handle_data_util.get_resource_handle_data"
REPLACED = (
    "keras.src.saving.saving_lib._save_state",
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver._gather_serialized_tensors",
)


@pytest.mark.slow
@needs_keras_3
def test_versions_without_a_part_are_refused_or_warned_of_once():
    runs = [[NEEDED], REPLACED[:1], REPLACED[1:], []]
    refused, files, checkpoints, whole = forks.run_each(PROGRAM, runs, "import tensorflow, keras")
    assert refused.status == 1 and f"without {NEEDED}" in refused.errors
    for name, ended in ((REPLACED[0], files), (REPLACED[1], checkpoints)):
        assert ended.status == 0, ended.errors[-2000:]
        first, second = ended.output.split("\n")[:2]
        assert f"lacks `{name.replace(':', '.')}`" in first and "give it as `prior`" in first
        assert second == ""
    assert whole.status == 0 and whole.output.strip() == "", whole.output + whole.errors[-2000:]


def warnings_of(monkeypatch, **versions):
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private_apis.warn_of_versions.__wrapped__()
    return [str(one.message) for one in caught]


def test_versions_outside_the_range_are_warned_of(monkeypatch):
    tested = {"tensorflow": "2.21.0", "keras": "3.15.1", "tf-keras": "2.21.0"}
    assert not warnings_of(monkeypatch, **tested)
    assert not warnings_of(monkeypatch, **tested | {"tensorflow": "2.15.0", "keras": "2.15.0"})
    for wrong in ({"tensorflow": "2.22.0rc1"}, {"keras": "3.16.0"}, {"tensorflow": "2.14.1"}):
        (message,) = warnings_of(monkeypatch, **tested | wrong)
        (version,) = wrong.values()
        assert version in message and "tfdp is tested with TensorFlow 2.15 to 2.21" in message
