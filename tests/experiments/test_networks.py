import numpy as np
import pytest
import tensorflow as tf

from experiments import datasets, networks


@pytest.mark.parametrize(
    ("dataset", "parameters"),
    [
        ("digits", 6_090),
        ("mnist", 26_010),
        ("fashion_mnist", 26_010),
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
    assert networks.imdb(relu)(np.zeros([3, 80], "int32")).shape == (3, 2)


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
