import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import support
from tests.clipping import models
from tests.clipping.models import (
    CLIP,
    FAST,
    IMAGES,
    TOKENS,
    ExpectsRows,
    N,
    Y,
    assert_equals_loop,
    built,
)
from tfdp.clipping import OnePassEngine, SlowClippingWarning
from tfdp.clipping.one_pass import op_gradients, weight_uses
from tfdp.clipping.one_pass.op_gradients import registry

layers = tf.keras.layers


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FAST)
def test_rules_equal_a_loop_over_examples(name):
    engine = ExpectsRows(CLIP)
    assert_equals_loop(engine, *FAST[name])
    report = engine.report()
    assert report.fast_fraction == 1, str(report)


OF_ANY_SIZE = {
    "images": (
        models.sequential(
            lambda: layers.Conv2D(4, 3, 2, "same", activation="tanh"),  # Padded.
            lambda: layers.DepthwiseConv2D(2, padding="same", depth_multiplier=2),
            lambda: layers.Conv2DTranspose(6, 3, strides=2),
            lambda: layers.DepthwiseConv2D([4, 3], padding="same"),  # A kernel of many pixels.
            lambda: layers.Conv2D(16, (3, 2), dilation_rate=(2, 1), activation="tanh"),
            lambda: layers.Conv2D(4, 1),
            layers.GlobalAveragePooling2D,
        ),
        IMAGES,
    ),
    "groups": (
        models.sequential(lambda: layers.Conv2D(4, 3, groups=2), layers.GlobalMaxPooling2D),
        IMAGES,
    ),
    "sequences": (
        models.sequential(
            lambda: layers.Conv1D(3, 3, padding="causal", activation="tanh"),
            lambda: layers.Conv1D(6, 2, groups=3, dilation_rate=2),
            layers.GlobalMaxPooling1D,
        ),
        models.SEQUENCES,
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_convolutions_of_any_size_equal_a_loop_over_examples(name):
    """Images of unknown size, as `fit` gets them from a generator."""
    engine, (make, x) = ExpectsRows(CLIP), OF_ANY_SIZE[name]
    spec = tf.TensorSpec([None] * x.ndim)
    assert_equals_loop(engine, make, x, x_spec=spec, jit_compile=name == "sequences")
    report = engine.report()
    assert report.fast_fraction == 1, str(report)
    assert "vectorized" not in str(report)


def test_a_loop_over_examples_is_called_slow():
    """TensorFlow vectorizes no volumes; ours need to know how many channels they have."""
    engine, (make, x) = OnePassEngine(CLIP), FAST["conv3d"]
    with pytest.warns(SlowClippingWarning, match="by a slow rule.*in a loop over the examples"):
        assert_equals_loop(engine, make, x, x_spec=tf.TensorSpec([None] * 5))
    assert [entry.fast for entry in engine.report().entries] == [False, True, True, True]


IMAGE_LAYERS = {
    "conv": lambda o: layers.Conv2D(
        o["filters"],
        o["kernel"],
        o["stride"],
        o["padding"],
        dilation_rate=o["dilation"],
        use_bias=o["bias"],
        activation="tanh",
    ),
    "depthwise": lambda o: layers.DepthwiseConv2D(
        o["kernel"], o["stride"], o["padding"], use_bias=o["bias"]
    ),
    "transpose": lambda o: layers.Conv2DTranspose(o["filters"], o["kernel"], o["stride"], "same"),
    "norm": lambda o: layers.LayerNormalization(),
    "prelu": lambda o: layers.PReLU(shared_axes=[1, 2]),
    "pool": lambda o: layers.AveragePooling2D(2, 1, "same"),
}


SEQUENCE_LAYERS = {
    "dense": lambda o: layers.Dense(o["units"], "tanh"),
    "lstm": lambda o: layers.LSTM(o["units"], return_sequences=True, go_backwards=o["backwards"]),
    "gru": lambda o: layers.GRU(o["units"], return_sequences=True, go_backwards=o["backwards"]),
    "conv": lambda o: layers.Conv1D(
        o["units"], 3, padding=o["padding"], dilation_rate=o["dilation"]
    ),
    "norm": lambda o: layers.LayerNormalization(),
    "both": lambda o: layers.Bidirectional(layers.GRU(2, return_sequences=True)),
}


def later(layer):
    """Makes the layer again and again, with the same options."""
    return lambda: type(layer).from_config(layer.get_config())


@st.composite
def image_models(draw):
    """A stack of layers on images, with every kind of stride, padding and dilation."""
    makers = []
    for _ in range(draw(st.integers(1, 3))):
        options = {
            "kernel": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            "padding": draw(st.sampled_from(["same", "valid"])),
            "stride": draw(st.integers(1, 2)),
            "bias": draw(st.booleans()),
            "filters": draw(st.sampled_from([1, 4, 6])),
        }
        options["dilation"] = draw(st.integers(1, 2)) if options["stride"] == 1 else 1
        if options["padding"] == "valid":  # Leave something of the image.
            options["kernel"], options["dilation"] = (2, 1), 1
        makers.append(later(IMAGE_LAYERS[draw(st.sampled_from(sorted(IMAGE_LAYERS)))](options)))
    return models.sequential(*makers, layers.Flatten)


@st.composite
def sequence_models(draw):
    """A stack of layers on tokens that ends in a vector; the tokens may be masked."""
    masked = draw(st.booleans())
    makers = [later(layers.Embedding(9, 4, mask_zero=masked, input_length=6))]
    for _ in range(draw(st.integers(0, 2))):
        options = {
            "padding": draw(st.sampled_from(["same", "causal"])),
            "dilation": draw(st.integers(1, 2)),
            "units": draw(st.integers(1, 4)),
            "backwards": draw(st.booleans()),
        }
        kind = draw(st.sampled_from(sorted(SEQUENCE_LAYERS)))
        makers.append(later(SEQUENCE_LAYERS[kind](options)))
    last = draw(st.sampled_from([lambda: layers.LSTM(3), layers.Flatten]))
    return models.sequential(*makers, last)


RANDOM = settings(
    max_examples=7,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_random_model(make, x, mask_seed):
    model = built(make, x, mask_seed)
    mask = np.random.default_rng(mask_seed).random(N) < 0.7
    engine = OnePassEngine(CLIP)
    actual = support.ClippedSum(engine, model, x)(x, Y, mask)
    expected = support.looped_clipped_sum(model, x[mask], Y[mask], CLIP) if any(mask) else 0
    np.testing.assert_allclose(actual, expected, atol=5e-6)
    assert engine.report().fast_fraction == 1, str(engine.report())


@pytest.mark.slow
@RANDOM
@given(make=image_models(), seed=st.integers(0, 1000))
def test_random_models_on_images(make, seed):
    assert_random_model(make, IMAGES, seed)


@pytest.mark.slow
@RANDOM
@given(make=sequence_models(), seed=st.integers(0, 1000))
def test_random_models_on_tokens(make, seed):
    assert_random_model(make, TOKENS, seed)


RULE_MODELS = {
    ("MatMul", 1): "dense",
    ("BatchMatMulV2", 1): "time major",
    ("Conv2D", 1): "conv2d",
    ("Conv3D", 1): "conv3d",
    ("Conv2DBackpropInput", 1): "transposed convolutions",
    ("Conv3DBackpropInputV2", 1): "conv3d, transposed",
    ("DepthwiseConv2dNative", 1): "depthwise",
    ("BiasAdd", 1): "dense",
    ("AddV2", 1): "einsum dense",
    ("Sub", 0): "distance to a center",
    ("Sub", 1): "time major",
    ("Mul", 1): "dense on sequences",
    ("Mul", 0): "depthwise",
    ("Einsum", 1): "attention",
    ("Einsum", 0): "einsum, reordered",
    ("ResourceGather", 0): "embedding",
    ("GatherV2", 0): "distance to a center",
    ("FusedBatchNormV3", 1): "batch normalization, frozen statistics",
    ("FusedBatchNormV3", 2): "batch normalization, frozen statistics",
    ("BroadcastTo", 0): "learned first state",
    ("Tile", 0): "positions and a class token",
    ("SparseMatMul", 1): "locally connected, 1d, 2",
    ("SparseTensorDenseMatMul", 1): "locally connected, 1d, 3",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("key", RULE_MODELS)
def test_a_wrong_rule_is_caught(key, monkeypatch):
    """Mutant: the gradients of the first example are not seen."""
    rule = registry.find_op_gradients(*key)

    def wrong(use):
        seen = tf.concat([tf.zeros_like(use.gradient[:1]), use.gradient[1:]], 0)
        return rule(weight_uses.Use(**{**use.__dict__, "gradient": seen}))

    monkeypatch.setitem(registry._RULES, key, wrong)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), *FAST[RULE_MODELS[key]])


@pytest.mark.slow
def test_a_wrong_generic_rule_is_caught(monkeypatch):
    monkeypatch.delitem(registry._RULES, ("RealDiv", 1), raising=False)  # If it ever gets a rule.
    original = op_gradients.generic.generic

    def wrong(use):
        return original(weight_uses.Use(**{**use.__dict__, "gradient": 2 * use.gradient}))

    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, *FAST["division"])
    assert any("RealDiv" in entry.how for entry in engine.report().entries)
    monkeypatch.setattr(op_gradients.generic, "generic", wrong)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), *FAST["division"])


def test_every_rule_has_a_mutant():
    aliases = {("BatchMatMul", 1), ("BatchMatMulV3", 1), ("Add", 0), ("Add", 1), ("AddV2", 0)}
    aliases |= {(f"FusedBatchNorm{v}", weight) for v in ("", "V2") for weight in (1, 2)}
    assert set(registry._RULES) - aliases == set(RULE_MODELS)
