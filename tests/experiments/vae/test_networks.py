"""The networks of the experiments on variational autoencoders."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.vae import networks as vae_networks

PAIRS = {
    "pinwheel": (vae_networks.pinwheel, [2], 2),
    "digits": (lambda: vae_networks.digits(8), [8, 8, 1], 8),
    "mnist": (vae_networks.mnist, [28, 28, 1], 16),
    "fashion_mnist": (vae_networks.fashion_mnist, [32, 32, 1], 50),
}


@pytest.mark.parametrize("name", PAIRS)
def test_decoders_mirror_encoders(name):
    make, shape, latent_dim = PAIRS[name]
    encoder, decoder = make()
    x = np.random.default_rng(0).normal(size=[3, *shape]).astype("float32")
    codes = encoder(x)
    assert codes.shape == (3, 2 * latent_dim)
    assert decoder(codes[:, :latent_dim]).shape == (3, *shape)


@pytest.mark.parametrize(
    ("name", "encoder_parameters", "decoder_parameters"),
    [
        ("pinwheel", 2 * 100 + 100 + 100 * 4 + 4, 2 * 100 + 100 + 100 * 2 + 2),
        ("digits", 64 * 128 + 128 + 128 * 16 + 16, 8 * 128 + 128 + 128 * 64 + 64),
        ("mnist", 784 * 256 + 256 + 256 * 32 + 32, 16 * 256 + 256 + 256 * 784 + 784),
        (
            "fashion_mnist",
            16 * (1 * 32 + 32 * 64 + 64 * 128) + 32 + 64 + 128 + 2048 * 100 + 100,
            50 * 2048 + 2048 + 16 * (128 * 64 + 64 * 32 + 32 * 1) + 64 + 32 + 1,
        ),
    ],
)
def test_networks_have_the_parameters_of_their_layers(name, encoder_parameters, decoder_parameters):
    encoder, decoder = PAIRS[name][0]()
    assert encoder.count_params() == encoder_parameters
    assert decoder.count_params() == decoder_parameters


def test_conditional_networks_use_image_and_class():
    encoder, decoder = vae_networks.digits(latent_dim=3, num_classes=10)
    random = np.random.default_rng(0)
    x, z = random.normal(size=[10, 8, 8, 1]), random.normal(size=[10, 3])
    one, other = np.eye(10), np.roll(np.eye(10), 1, axis=0)
    for network, given, shape in ((encoder, x, (10, 6)), (decoder, z, (10, 8, 8, 1))):
        given = given.astype("float32")
        found = network([given, one]).numpy()
        assert found.shape == shape
        assert (np.abs(found - network([given, other])).reshape(10, -1).max(axis=1) > 1e-3).all()
        assert (np.abs(found - network([given + 1, one])).reshape(10, -1).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("name", PAIRS)
def test_no_example_moves_another(name):
    make, shape, latent_dim = PAIRS[name]
    networks = make()
    random = np.random.default_rng(0)
    for network, given in zip(networks, (shape, [latent_dim]), strict=True):
        x = random.normal(size=[4, *given]).astype("float32")
        changed = x.copy()
        changed[0] += 10
        before, after = network(x, training=True), network(changed, training=True)
        np.testing.assert_array_equal(before[1:], after[1:])
        assert not np.allclose(before[0], after[0])
        assert not any(isinstance(x, tf.keras.layers.BatchNormalization) for x in network.layers)
