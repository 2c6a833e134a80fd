"""MultiOptimizer of Keras 3, one optimizer for each part of a model, as the inner optimizer."""

import contextlib
import copy
import pickle

import keras
import numpy as np
import pytest

import tfdp
from tests.keras3.support import weights
from tests.support import small_data
from tfdp.keras3 import several_optimizers

optimizers = keras.optimizers
pytestmark = pytest.mark.skipif(
    not hasattr(optimizers, "MultiOptimizer"), reason="This Keras has no MultiOptimizer."
)
X, Y = small_data(64)


def batches(first_step=0):
    return tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=16, steps_per_epoch=3, seed=1, first_step=first_step
    )


def multi(*patterns, default=None):
    """Patterns share an optimizer, if there are several."""
    adam = optimizers.Adam(0.1)
    given = optimizers.OptimizerMap(
        default or optimizers.SGD(0.01, momentum=0.9), dict.fromkeys(patterns, adam)
    )
    return optimizers.MultiOptimizer(given)


def private(inner, **kwargs):
    kwargs = {"sampling": batches().sampling, "noise_seed": 2, **kwargs}
    return tfdp.keras3.DPOptimizer(inner, 1.0, 1.1, **kwargs)


def model_of(inner, kind=keras.Sequential):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    parts = [dense(4, "relu", name="encoder"), dense(4, name="neck"), dense(3, name="head")]
    model = keras.Sequential([keras.Input([4]), *parts])
    if kind is keras.Model:
        model = keras.Model(model.inputs, model.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=private(inner), loss=loss)
    return model


def choices(optimizer):
    """For each variable the class, rate and momentum of its optimizer, and which it shares."""
    parts = optimizer.inner_optimizer.optimizers
    of = {
        id(v): (type(part).__name__, round(float(part.learning_rate), 4), i)
        for i, part in enumerate(parts)
        for v in (part._trainable_variables if part.built else ())
    }
    return [of[id(v)] for v in optimizer.inner_optimizer._trainable_variables]


def slots(optimizer):
    return [v.numpy() for v in optimizer.inner_optimizer.variables]


def keras_file(model, folder):
    model.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def pickled(model, folder):
    return pickle.loads(pickle.dumps(model))


# "head/.*" fits no path before a sequential model is saved, and one afterwards.
CASES = {
    "a pattern of a sequential model": (keras.Sequential, [".*/head/.*"]),
    "a pattern that fits after loading": (keras.Sequential, ["head/.*"]),
    "patterns that share": (keras.Sequential, [".*encoder/.*", ".*head/.*"]),
    "a functional model": (keras.Model, ["head/.*"]),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", [keras_file, pickled])
@pytest.mark.parametrize("name", CASES)
def test_training_resumes_bit_for_bit(name, form, tmp_path):
    kind, patterns = CASES[name]
    whole = model_of(multi(*patterns), kind)
    whole.fit(batches(), epochs=2, verbose=0)
    first = model_of(multi(*patterns), kind)
    first.fit(batches(), verbose=0)
    resumed = form(first, tmp_path)
    assert resumed.optimizer.ledger.releases == first.optimizer.ledger.releases
    assert resumed.optimizer.ledger.steps == 3
    assert choices(resumed.optimizer) == choices(first.optimizer)
    for loaded, saved in zip(slots(resumed.optimizer), slots(first.optimizer), strict=True):
        np.testing.assert_array_equal(loaded, saved)
    np.testing.assert_array_equal(weights(resumed), weights(first))
    resumed.fit(batches(first_step=3), verbose=0)
    np.testing.assert_array_equal(weights(resumed), weights(whole))
    assert resumed.optimizer.ledger.steps == 6


def test_choices_that_are_not_kept_are_caught(tmp_path, monkeypatch):
    """By path alone, the loaded model would train its head with another optimizer."""
    first = model_of(multi("head/.*"))
    first.optimizer.build(first.trainable_variables)
    assert {kind for kind, *_ in choices(first.optimizer)} == {"SGD"}
    assert choices(keras_file(first, tmp_path).optimizer) == choices(first.optimizer)
    unaware = lambda *_: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(several_optimizers, "choosing", unaware)
    with pytest.raises(ValueError, match="could not be loaded"):
        keras_file(first, tmp_path)


def test_config_round_trip():
    first = private(multi(".*encoder/.*", ".*head/.*"))
    model = model_of(multi(".*encoder/.*", ".*head/.*"))
    model.optimizer.build(model.trainable_variables)
    for optimizer in (first, model.optimizer):
        made = tfdp.keras3.DPOptimizer.from_config(optimizer.get_config())
        assert made.get_config() == optimizer.get_config()
    again = tfdp.keras3.DPOptimizer.from_config(model.optimizer.get_config())
    again.build(model.trainable_variables)
    assert choices(again) == choices(model.optimizer)
    assert len(again.inner_optimizer.optimizers) == 2  # They share one, and the default.


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_copies_choose_alike(make_copy):
    model = model_of(multi(".*/head/.*"))
    model.optimizer.build(model.trainable_variables)
    made = make_copy(model.optimizer)
    assert made.get_config() == model.optimizer.get_config()


def test_a_config_for_other_variables_chooses_by_patterns():
    model = model_of(multi(".*/head/.*"))
    model.optimizer.build(model.trainable_variables)
    other = tfdp.keras3.DPOptimizer.from_config(model.optimizer.get_config())
    dense = keras.layers.Dense
    layers = [dense(4, name="head"), dense(4, name="neck"), dense(3, name="encoder")]
    turned = keras.Sequential([keras.Input([4]), *layers])
    other.build(turned.trainable_variables)
    assert [kind for kind, *_ in choices(other)] == ["Adam"] * 2 + ["SGD"] * 4


def sgd_that_has_trained():
    sgd = optimizers.SGD(0.1, momentum=0.9)
    variable = keras.Variable(np.ones([2]))
    sgd.build([variable])
    sgd.apply([np.ones([2], "float32")], [variable])
    return sgd


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (sgd_that_has_trained, "taken no steps"),
        (lambda: optimizers.SGD(gradient_accumulation_steps=2), "gradient_accumulation_steps"),
    ],
)
def test_parts_that_cannot_be_private_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        private(multi(default=make()))
    with pytest.raises(ValueError, match=match):
        private(optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(), {"a": make()})))
    part = make()
    model = model_of(optimizers.MultiOptimizer(lambda variable: part))
    with pytest.raises(ValueError, match=match):
        model.optimizer.build(model.trainable_variables)


def test_make_private_takes_the_parts_without_what_they_have_seen(capsys):
    model = model_of(multi())
    inner = multi(".*encoder/.*", ".*head/.*", default=optimizers.AdamW(0.01))
    inner.optimizers[1].exclude_from_weight_decay(var_names=["bias"])
    model.compile(inner, "mse")
    model.fit(X, np.zeros([64, 3]), verbose=0)
    arguments = {"epochs": 1, "target_epsilon": 4.0}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model, _, _ = tfdp.keras3.make_private(model, (X, Y), loss=loss, **arguments)
    assert "learning rate 0.1 and 0.01." in capsys.readouterr().out
    parts = model.optimizer.inner_optimizer.optimizers
    assert len(parts) == 2 and not any(part.built for part in parts)
    uses = [parts[1]._use_weight_decay(v) for v in model.trainable_variables]
    assert uses == [True, False] * 3
    model.compile(inner, loss)
    with pytest.raises(ValueError, match="learning_rate"):
        tfdp.keras3.make_private(model, (X, Y), learning_rate=0.1, **arguments)


def test_states_that_do_not_fit_are_refused():
    optimizer = model_of(multi(".*/head/.*")).optimizer
    model = model_of(optimizers.SGD(0.1))
    model.optimizer.build(model.trainable_variables)
    store = {}
    model.optimizer.save_own_variables(store)
    store = {key: np.asarray(value) for key, value in store.items()}
    optimizer.load_own_variables(store)
    with pytest.raises(ValueError, match="as many variables"):
        optimizer.build(model_of(optimizers.SGD(0.1)).trainable_variables)
