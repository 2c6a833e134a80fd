"""Makes the tests repeatable: what they draw is the same in every run.

tfdp takes its secret keys from the operating system, whatever is seeded, so that tests of what is
drawn with them would fail by chance now and then. Here `os.urandom` gives tfdp numbers that follow
from the name of the test: never the same twice within a test, and the same in every run. A test
needs no seed of tfdp's for that, which would take another path through the code. What several tests
share, such as the fixture of a module, draws by its own name, whichever test needs it first.

Hypothesis tries the same examples in every run. `pytest --hypothesis-profile=explore` tries others.

`pytest` runs what takes little time, `pytest --slow` everything: tests marked `slow`, and all cases
of those marked `quick_cases`. A test that is named by its `path::name` is run in any case.

Graphs run as they were traced, but for some folders and modules marked `rewritten_graphs`: what
TensorFlow rewrites before the first run takes a fifth of the time of a test that trains for a step.

Python's garbage collector runs once in some tests and at the end of each module, and passes only
over what is newer than the last module's end: it took a sixth of all time. A test leaves some 40 MB
of graphs, which only it frees.
"""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import sys

import hypothesis
import pytest

from tests import without_keras_2
from tests.entropy_support import RepeatableEntropy

without_keras_2.leave_out()

from tfdp.base.tf.autotuning import without_autotuning  # noqa: E402
from tfdp.step.record import lineage  # noqa: E402

import tensorflow as tf  # noqa: E402  # isort: skip

hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The allocator of `run test` is for processes that train many models. Those that a test starts
    # train few; and of such, two were seen to die in mimalloc, in some five runs of all tests.
    os.environ.pop("LD_PRELOAD", None)

# Its modules need Keras 3, which TensorFlow 2.15 of `bash run oldest` does not know.
_HAS_KERAS_3 = importlib.metadata.version("keras").startswith("3.")
collect_ignore = [] if _HAS_KERAS_3 else ["keras3"]
# Its modules need KerasHub, which `bash run setup` installs from Python 3.11 on.
if importlib.util.find_spec("keras_hub") is None:
    collect_ignore.append("hub")
collect_ignore_glob = [] if _HAS_KERAS_3 else ["ports/test_keras_3_*.py"]

ENTROPY = RepeatableEntropy(os.urandom)
os.urandom = ENTROPY

# For the replicas of distribution strategies: it must be said before TensorFlow uses a device.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)

# Iterators over all datasets, those of Keras and of the tests, too: a dropped one that TensorFlow
# tunes may wait for a minute (`tfdp.base.tf.autotuning`).
tf.data.Dataset._apply_debug_options = without_autotuning

_REWRITTEN = {"benchmarks", "ports", "random", "test_docs.py"}
_rewritten = True

_TESTS_PER_COLLECTION = 20
_run = 0


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run all tests, the slow ones too")


def pytest_collection_modifyitems(config, items):
    """Leaves out what is slow, unless `--slow` or the very test is asked for."""
    if any("::" in argument for argument in config.args):
        return
    left_out = [] if config.getoption("--slow") else slow_ones(items)
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]


def slow_ones(items):
    """Returns the tests that are run with `--slow` alone, in their order."""
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    slow = []
    for same in cases.values():
        marker = same[0].get_closest_marker("quick_cases")
        count = marker.args[0] if marker else len(same)
        quick = {len(same) * place // count for place in range(count)}  # From first to last.
        for place, item in enumerate(same):
            if item.get_closest_marker("slow") or place not in quick:
                slow.append(item)
    return slow


def pytest_collection_finish():
    gc.set_threshold(50_000, 20, 50)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # Fixtures trace, too.
def pytest_runtest_setup(item):
    global _rewritten  # In this process.
    folder = item.nodeid.partition("::")[0].removeprefix("tests/").split("/")[0]
    rewritten = folder in _REWRITTEN or item.get_closest_marker("rewritten_graphs") is not None
    if rewritten != _rewritten:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not rewritten})
        _rewritten = rewritten


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Frees what the test has left, once its fixtures are torn down."""
    global _run  # Tests that this process has run.
    result = yield
    _run += 1
    module_ends = nextitem is None or nextitem.path != item.path
    if module_ends or _run % _TESTS_PER_COLLECTION == 0:
        gc.collect()
    if module_ends:  # What is alive outlives the module: frozen, it is never freed.
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    with ENTROPY.named(f"{fixturedef.baseid}::{fixturedef.argname} {request.param_index}"):
        return (yield)


@pytest.fixture(autouse=True)
def _nothing_of_another_test():
    """Forgets what would reach other tests of the process.

    A global seed, with which DPSUR refuses models that draw random numbers; and what variables have
    cost: models of one seed begin with equal weights, and the ledger takes one for the copy of
    another whose step was counted, but failed.
    """
    yield
    tf.random.set_seed(None)
    lineage._lineages.clear()
    lineage.known.clear()


@pytest.fixture(autouse=True)
def _no_keras_2_by_its_own_name():
    """Fails the test that imports Keras 2.15 as `keras`, rather than those that follow.

    It registers its classes under the names of those of `tf_keras`, which then loads `.keras` files
    into models of the wrong classes: with their first weights, or without end.
    """
    yield
    assert _HAS_KERAS_3 or sys.modules.pop("keras", None) is None


@pytest.fixture(autouse=True)
def _repeatable_entropy(request):
    ENTROPY.restart(request.node.nodeid)
