"""Private training of Keras 3 in one call."""

import keras
import numpy as np
import pytest
from keras import ops

import tfdp
from tests import support
from tests.keras3.support import crossentropy, small_model
from tfdp.base import devices
from tfdp.clipping import clipping_rules

X, Y = support.small_data(200)


def make(model, **kwargs):
    arguments = {"epochs": 2, "target_epsilon": 2.0, "batch_size": 50, "loss": crossentropy()}
    return tfdp.keras3.make_private(model, (X, Y), **{**arguments, **kwargs})


def test_training_costs_no_more_than_the_budget(capsys):
    model, batches, budget = make(small_model(), metrics=["accuracy"])
    assert "Optimizer: DPAdam, learning rate 0.04, which" in capsys.readouterr().out
    model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 8
    assert 1.9 < model.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
    # What the weights have cost is not spent twice.
    again, batches, budget = make(model, optimizer="sgd")
    again.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert again.optimizer.ledger.steps == 16
    assert again.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0


class OwnStep(keras.Sequential):
    """Has a training step that takes no weights."""

    def train_step(self, data):
        x, y = data
        loss = self.optimizer.scale_loss(crossentropy()(y, self(x, training=True)))
        self.optimizer.apply([None] * 4, self.trainable_variables)
        return {"loss": loss}


def test_for_a_gpu_batches_have_few_sizes_and_metrics_leave_out_what_fills_them(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    model, batches, budget = make(small_model(), metrics=["accuracy"], verbose=False)
    assert batches.sampling.padding == "buckets"
    history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0).history
    assert "accuracy" in history and model._compile_metrics._user_metrics is None
    assert make(small_model(), chunk_size=20, verbose=False).batches.sampling.padding == "full"


@pytest.mark.slow
def test_for_a_gpu_what_takes_no_weights_gets_none(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    model = OwnStep([keras.Input([4]), keras.layers.Dense(5), keras.layers.Dense(3)])
    model.compile("sgd", jit_compile=True)  # As Keras chooses there.
    model, batches, budget = make(model, verbose=False)
    assert batches.sampling.padding == "none"
    with pytest.warns(UserWarning, match="Steps are slow on a GPU"):
        model.fit(batches, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 4 and not model.jit_compile


@pytest.mark.slow
def test_for_a_gpu_recurrent_layers_are_not_left_to_cudnn(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(2))
    model = keras.Sequential([keras.Input([4]), keras.layers.Reshape([2, 2]), lstm])
    make(model, loss="mse", verbose=False)
    assert lstm.forward_layer.use_cudnn is False and lstm.backward_layer.use_cudnn is False


@pytest.mark.slow
def test_without_a_batch_size_few_examples_get_that_of_the_plan():
    model, batches, budget = make(small_model(), batch_size=None, verbose=False)
    model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert batches.sampling.expected_batch_size == 8 and model.optimizer.ledger.steps == 50


def test_what_the_model_was_compiled_with_is_kept():
    model = small_model()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.2)
    first, *others = model.trainable_variables
    optimizer.exclude_from_weight_decay([first], var_names=["bias"])
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    model.fit(X, Y, verbose=0)
    make(model, loss=None, verbose=False)
    inner = model.optimizer.inner_optimizer
    assert type(inner) is keras.optimizers.AdamW and type(model.optimizer).__name__ == "DPOptimizer"
    assert (inner.weight_decay, float(inner.learning_rate)) == (0.2, np.float32(0.01))
    assert int(inner.iterations) == 0  # It has forgotten the data.
    shrinks = [inner._use_weight_decay(v) for v in model.trainable_variables]
    assert shrinks == [False, *(v.name != "bias" for v in others)]
    assert model.loss is not None


@pytest.mark.parametrize(
    ("arguments", "rule", "clip"),
    [
        ({}, tfdp.clipping.AutomaticClipping(0.1), 1.0),
        ({"l2_norm_clip": 0.5}, "flat", 0.5),
        ({"clipping_rule": "per_layer"}, "per_layer", 1.0),
        ({"clipping_rule": "automatic", "l2_norm_clip": 0.5}, "automatic", 0.5),
    ],
)
def test_a_clip_that_is_given_clips_and_none_scales(arguments, rule, clip, capsys):
    optimizer = make(small_model(), **arguments).model.optimizer
    config = optimizer.get_config()["clipping_rule"]
    assert clipping_rules.get(config) == clipping_rules.get(rule)
    assert optimizer.l2_norm_clip == clip
    verb = "clipped" if rule in ("flat", "per_layer") else "scaled"
    assert f"each example's is {verb} to l2 norm {clip:g}" in capsys.readouterr().out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("signsgd", "DPSignSGD"),
        ("lion", "DPOptimizer of Lion"),
        (tfdp.keras3.DPSGD, "DPSGD"),
        (keras.optimizers.Nadam(0.1), "DPOptimizer of Nadam, learning rate 0.1"),
    ],
)
def test_optimizers(optimizer, name, capsys):
    make(small_model(), optimizer=optimizer)
    assert f"Optimizer: {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": tfdp.DPAdam}, "Argument `optimizer` must be given"),
        ({"optimizer": tfdp.keras3.DPAdam(1.0, 1.0, 50)}, "class such as"),
        ({"optimizer": tfdp.keras3.DPOptimizer}, "class such as"),
        ({"loss": None}, "Argument `loss` must be given"),
        ({"batch_size": 500}, "batch_size"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(small_model(), **arguments)


def test_a_model_is_built_and_all_reasons_to_refuse_it_are_listed():
    model = keras.Sequential(
        [
            keras.layers.BatchNormalization(name="first"),
            keras.layers.Dense(3),
            keras.layers.Lambda(lambda x: x - ops.mean(x, axis=0), name="second"),
        ]
    )
    with pytest.raises(ValueError, match=r"(?s)'first'.*tfdp\.keras3\.replace_batch.*'second'"):
        make(model)
    assert model.built and getattr(model, "optimizer", None) is None


def test_models_of_keras_2_are_refused():
    with pytest.raises(ValueError, match="a model of Keras 3"):
        make(support.small_model())
    with pytest.raises(ValueError, match="must be a model of Keras 2"):
        tfdp.keras2.make_private(small_model(), (X, Y), epochs=1, target_epsilon=1.0, loss="mse")
