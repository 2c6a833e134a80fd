import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from experiments import datasets, networks
from experiments.settings import make_network, resolve
from tests import support
from tests.front_ends import needs_keras_3
from tfdp.clipping import OnePassEngine


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dataset", "parameters"),
    [
        ("digits", 6_090),
        ("mnist", 26_010),
        ("fashion_mnist", 26_010),
        # Two convolutions of each width; 4 x 4 of the last are left.
        ("cifar10", 28 * 32 + 289 * (32 + 64) + 577 * (64 + 128) + 1153 * 128 + 2049 * 128 + 1290),
        # Embedding, dense, two LSTMs (4 gates of 32 x (32 + 32 + 1)), dense, dense.
        ("imdb_reviews", 20_000 * 100 + 101 * 32 + 2 * 4 * 32 * 65 + 65 * 16 + 17 * 2),
    ],
)
@pytest.mark.parametrize("activation", networks.ACTIVATIONS)
def test_networks_have_the_published_number_of_parameters(dataset, parameters, activation):
    model = networks.NETWORKS[dataset](networks.make_activation(activation))
    assert model.count_params() == parameters


def test_every_dataset_has_a_network_of_its_input_shape():
    assert set(networks.NETWORKS) == set(datasets.DATASETS)
    relu = networks.make_activation("relu")
    assert networks.digits(relu)(np.zeros([3, 8, 8, 1], "float32")).shape == (3, 10)
    assert networks.mnist(relu)(np.zeros([3, 28, 28, 1], "float32")).shape == (3, 10)
    assert networks.cifar10(relu)(np.zeros([3, 32, 32, 3], "float32")).shape == (3, 10)
    assert networks.imdb(relu)(np.zeros([3, 80], "int32")).shape == (3, 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dataset", datasets.IMAGES)
def test_the_residual_network(dataset):
    given = {"dataset": dataset, "architecture": "residual", "activation": "relu"}
    model = make_network(resolve(given))
    shape = datasets.IMAGES[dataset]
    assert model.count_params() == 78_090 + 9 * 16 * (shape[-1] - 1)
    assert model(np.zeros([3, *shape], "float32")).shape == (3, 10)
    names = {type(layer).__name__ for layer in model.layers}
    assert "GroupNormalization" in names and "BatchNormalization" not in names


def test_a_standardized_kernel_has_mean_0_and_the_norm_of_the_gain():
    layer = networks.StandardizedConv2D(4, 3, use_bias=False)
    x = np.random.default_rng(0).normal(size=[2, 3, 3, 2]).astype("float32")
    layer(x)
    layer.gain.assign([1.0, 2.0, 0.0, -1.0])
    layer.kernel.assign_add(tf.ones_like(layer.kernel))
    kernel = layer.kernel.numpy().reshape(18, 4)
    kernel = kernel - kernel.mean(0)
    kernel *= layer.gain.numpy() / np.linalg.norm(kernel, axis=0)
    np.testing.assert_allclose(layer(x)[:, 0, 0], x.reshape(2, 18) @ kernel, atol=1e-4)


@pytest.mark.slow
def test_the_residual_network_is_clipped_in_one_pass():
    model = make_network(resolve({"dataset": "digits", "architecture": "residual"}))
    x = np.random.default_rng(0).uniform(size=[6, 8, 8, 1]).astype("float32")
    y = np.arange(6)
    expected = support.looped_clipped_sum(model, x, y, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # The vectorized engine warns.
        found = support.ClippedSum(OnePassEngine(0.1), model, x)(x, y)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def layers(model):
    return [type(layer).__name__ for layer in model.layers]


@pytest.mark.parametrize("dataset", datasets.DATASETS)
def test_pixels_of_large_images_are_centred_and_nothing_else_is(dataset):
    model = networks.NETWORKS[dataset](networks.make_activation("relu"))
    most = {"mnist": 1, "fashion_mnist": 1, "cifar10": 2}.get(dataset)
    if most is None:
        assert "Rescaling" not in layers(model)
        return
    first = model.layers[0]
    shape = datasets.IMAGES[dataset]
    x = np.linspace(0, 1, np.prod(shape), dtype=np.float32).reshape(1, *shape)
    np.testing.assert_allclose(first(x), most * (2 * x - 1), atol=1e-6)
    assert layers(model)[0] == "Rescaling" and not first.weights
    rest = tf.keras.Sequential(model.layers[1:])
    np.testing.assert_allclose(model(x), rest(most * (2 * x - 1)), atol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "given",
    [
        *({"dataset": dataset, "keras": 2} for dataset in datasets.DATASETS),
        *(
            pytest.param({"dataset": dataset, "keras": 3}, marks=needs_keras_3)
            for dataset in datasets.DATASETS
        ),
        {"dataset": "digits", "features": "scattering", "head": "conv"},
        {"dataset": "digits", "architecture": "residual"},
    ],
)
def test_networks_in_bfloat16_have_logits_and_weights_in_float32(given):
    constant = {"learning_rate_schedule": "constant"}
    settings = resolve({**constant, **given, "mixed_bfloat16": True})
    policy = settings.front_end.keras.mixed_precision.global_policy
    before = policy().name
    model = make_network(settings)
    assert policy().name == before
    *hidden, last = [layer for layer in model.layers if layer.weights]
    assert {layer.compute_dtype for layer in hidden} <= {"bfloat16"}
    assert last.compute_dtype == "float32"
    assert {tf.as_dtype(weight.dtype) for weight in model.weights} == {tf.float32}
    x = np.zeros([2, *model.input_shape[1:]], "float32")
    assert model(x).dtype == tf.float32


@pytest.mark.parametrize(
    ("shape", "head", "parameters"),
    [
        ((7, 7, 81), "linear", 7 * 7 * 81 * 10 + 10),
        ((2, 2, 81), "linear", 2 * 2 * 81 * 10 + 10),
        # A convolution of 3 x 3, which keeps the image's size.
        ((7, 7, 81), "conv", (9 * 81 + 1) * 16 + (7 * 7 * 16 + 1) * 10),
        ((2, 2, 81), "conv", (9 * 81 + 1) * 16 + (2 * 2 * 16 + 1) * 10),
    ],
)
@pytest.mark.parametrize("activation", networks.ACTIVATIONS)
def test_heads_have_their_number_of_parameters(shape, head, parameters, activation):
    model = networks.head_on_features(shape, head, networks.make_activation(activation))
    assert model.count_params() == parameters
    assert model(np.zeros([3, *shape], "float32")).shape == (3, 10)
    assert "Rescaling" not in layers(model) and "BatchNormalization" not in layers(model)


def test_a_linear_head_is_linear():
    model = networks.head_on_features((2, 2, 3), "linear", networks.make_activation("tanh"))
    x, y = np.random.default_rng(1).normal(size=[2, 4, 2, 2, 3]).astype("float32")
    np.testing.assert_allclose(model(x + y), model(x) + model(y) - model(0 * x), atol=1e-5)


@pytest.mark.parametrize("dataset", datasets.IMAGES)
@pytest.mark.parametrize("head", networks.HEADS)
def test_heads_take_the_features_of_every_data_set_of_images(dataset, head):
    images = np.random.default_rng(1).random([2, *datasets.IMAGES[dataset]], "float32")
    features = tfdp.data.scattering_features(images)
    model = make_network(resolve({"dataset": dataset, "features": "scattering", "head": head}))
    assert model.name == f"features_{head}" and model(features).shape == (2, 10)


def test_unknown_head_is_refused():
    with pytest.raises(ValueError, match="'deep'"):
        networks.head_on_features((7, 7, 81), "deep", networks.make_activation("relu"))


def test_tempered_sigmoid_is_tanh_by_default():
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    tempered = networks.make_activation("tempered_sigmoid")()
    np.testing.assert_allclose(tempered(x), np.tanh(x), atol=3e-7)


def test_tempered_sigmoid_follows_its_formula():
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    tempered = networks.make_activation("tempered_sigmoid", 1.58, 3.0, 0.71)()
    np.testing.assert_allclose(tempered(x), 1.58 / (1 + np.exp(-3.0 * x)) - 0.71, atol=3e-7)


def test_tempered_sigmoid_is_saved_with_a_model(tmp_path):
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((3,)), networks.TemperedSigmoid(1.5, 3.0, 0.7)]
    )
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(1).normal(size=[4, 3]).astype("float32")
    np.testing.assert_array_equal(loaded(x), model(x))


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'gelu'"):
        networks.make_activation("gelu")
