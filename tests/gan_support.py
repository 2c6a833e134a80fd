"""Small generative adversarial networks that several test modules use."""

import numpy as np

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS

KERAS_2 = FRONT_ENDS[0]
N, CLASSES = 64, 3
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = np.arange(N) % CLASSES


def gan_class(front):
    return tfdp.PrivateGAN if front is KERAS_2 else front.tfdp.PrivateGAN


def front_of(model):
    return next(front for front in FRONT_ENDS if isinstance(model, front.keras.Model))


def network(front, inputs, outputs, conditional=False, normalized=False):
    layers = front.keras.layers
    x, classes = layers.Input([inputs]), layers.Input([CLASSES])
    hidden = layers.Dense(6)(layers.Concatenate()([x, classes]) if conditional else x)
    if normalized:
        hidden = layers.BatchNormalization()(hidden)
    output = layers.Dense(outputs)(layers.LeakyReLU()(hidden))
    return front.keras.Model([x, classes] if conditional else x, output)


def gan(front, mutant=None, conditional=False, generator=None, critic=None, seed=0, **changes):
    front.keras.utils.set_random_seed(seed)
    generator = generator or network(front, 2, 4, conditional, normalized=True)
    critic = critic or network(front, 4, 1, conditional)
    arguments = {"gradient_penalty": 10.0, "num_classes": CLASSES if conditional else None}
    own = gan_class(front)
    cls = type(mutant.__name__, (mutant, own), {}) if mutant else own
    return cls(generator, critic, **{**arguments, **changes})


def batches(y=Y, **kwargs):
    return tfdp.data.poisson_batches(
        (X, y), expected_batch_size=16, steps_per_epoch=2, seed=1, **kwargs
    )


def compiled(model, **kwargs):
    optimizer = front_of(model).tfdp.DPSGD(
        l2_norm_clip=1.0, noise_multiplier=1.1, learning_rate=0.01, sampling=batches().sampling
    )
    model.compile(critic_optimizer=optimizer, generator_optimizer="adam", **kwargs)
    return model


def critic_of(model):
    return support.flat(model.critic.get_weights())
