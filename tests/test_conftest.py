"""What tests draw is the same in every run, and within a test never the same twice."""

import os

import pytest
import tensorflow as tf
from hypothesis import settings

import tfdp
from tests import support
from tests.entropy_support import RepeatableEntropy
from tfdp.base.random.key_streams import KeyStream


def drawn():
    """Secrets of tfdp: a key, and who is in the batches."""
    data = tfdp.data.poisson_batches(support.small_data(40), expected_batch_size=20)
    batches = [x.numpy().tobytes() for x, _ in data]
    return KeyStream().secret().numpy().tobytes(), *batches


def test_no_two_draws_are_the_same_within_a_test_or_in_two():
    seen = []
    for name in ("a test", "another"):
        os.urandom.restart(name)
        seen.extend(drawn() + drawn())
    assert len(set(seen)) == len(seen) == 12


ASK = "draws = [ask(8), ask(8)]"


def asked(name, entropy, package="tfdp.data"):
    entropy.restart(name)
    variables = {"__name__": package, "ask": entropy}
    exec(ASK, variables)
    return tuple(variables["draws"])


def test_draws_follow_from_the_name_of_the_test():
    first, again, other = (
        asked(name, RepeatableEntropy(os.urandom)) for name in ("a test", "a test", "another")
    )
    assert first == again
    assert len({*first, *other}) == 4
    assert first[0].hex() == "4ee24d493f8d04d0"  # The same in any process.


def test_what_is_drawn_for_a_fixture_does_not_change_what_the_test_draws():
    entropy = RepeatableEntropy(os.urandom)
    variables = {"__name__": "tfdp.data", "ask": entropy}
    entropy.restart("a test")
    exec("draws = [ask(8)]", variables)
    with entropy.named("a fixture"):
        exec("inner = [ask(8), ask(8)]", variables)
    exec("draws.append(ask(8))", variables)
    assert tuple(variables["draws"]) == asked("a test", RepeatableEntropy(os.urandom))
    assert tuple(variables["inner"]) == asked("a fixture", RepeatableEntropy(os.urandom))


@pytest.fixture(scope="module")
def shared():
    return tuple(drawn())


@pytest.mark.parametrize("test", ["first", "second"])
def test_a_shared_fixture_draws_by_its_own_name(shared, test):
    """Whichever test needs it first."""
    with os.urandom.named("tests/test_conftest.py::shared 0"):
        assert tuple(drawn()) == shared


def test_others_than_tfdp_and_forked_processes_get_real_entropy(monkeypatch):
    entropy = RepeatableEntropy(lambda size: b"real")
    assert asked("a test", entropy, "uuid") == (b"real", b"real")
    assert asked("a test", entropy, "tfdp_other") == (b"real", b"real")
    assert b"real" not in asked("a test", entropy)
    variables = {"__name__": "tfdp.data", "ask": entropy}
    monkeypatch.setattr(os, "getpid", lambda: -1)
    exec(ASK, variables)
    assert variables["draws"] == [b"real", b"real"]


def test_it_is_installed(pytestconfig):
    assert type(os.urandom).__name__ == "RepeatableEntropy"
    if pytestconfig.getoption("--hypothesis-profile") != "explore":
        assert settings().derandomize


def test_models_of_two_strategies_have_no_collective_in_common():
    x, y = support.small_data(8)
    for strategy in (support.mirrored(2), support.mirrored(2)):
        for units in (3, 5, 4):
            with strategy.scope():
                layers = [tf.keras.layers.Input([4]), tf.keras.layers.Dense(units)]
                model = tf.keras.Sequential(layers)
                model.compile("sgd", support.crossentropy("sum_over_batch_size"))
            assert model.fit(x, y, batch_size=4, verbose=0).history["loss"][0] > 0


@pytest.mark.parametrize(
    "rewritten", [False, pytest.param(True, marks=pytest.mark.rewritten_graphs), False]
)
def test_graphs_are_rewritten_for_tests_that_are_marked(rewritten):
    options = tf.config.optimizer.get_experimental_options()
    assert options["disable_meta_optimizer"] != rewritten
