"""Small variational autoencoders that several test modules use, and their loss once more."""

import math

import numpy as np
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS
from tfdp import divergences, likelihoods, priors

KERAS_2 = FRONT_ENDS[0]

N, SEED = 64, 3
C1, C2, B, M = 10.0, 0.8, 32, 4
X = np.random.default_rng(0).normal(size=(N, 6)).astype("float32")
MASK = np.random.default_rng(1).random(N) < 0.7
Y = np.arange(N) % 3
# Enough for what any test needs: the numbers of the first rows are always the same.
NOISE = np.random.default_rng(2).normal(size=(N, 20, 2)).astype("float32")
PRIOR = np.random.default_rng(3).normal(size=(N, 2)).astype("float32")


def front_of(model):
    """The front end that has a model's class, or a class that it is derived from."""
    return next(front for front in FRONT_ENDS if isinstance(model, front.tfdp.TermWiseVAE))


def network(inputs, outputs, hidden=None, front=KERAS_2, **first):
    layers = front.keras.layers
    hidden = [layers.Dense(hidden, "tanh", **first)] if hidden else []
    return front.keras.Sequential([layers.Input([inputs]), *hidden, layers.Dense(outputs)])


def vae(front=KERAS_2, cls=None, hidden=None, seed=0, **changes):
    """A small one, with a divergence that is traced quickly."""
    front.keras.utils.set_random_seed(seed)
    arguments = {
        "encoder": network(6, 4, hidden, front),
        "decoder": network(2, 6, hidden, front),
        "prior": priors.StandardNormal(2),
        "likelihood": likelihoods.Normal(0.7),
        "divergence": divergences.RbfMMD([1.0]),
        "batch_clip": C2,
        "num_groups": M,
    }
    return (cls or front.tfdp.TermWiseVAE)(**{**arguments, **changes})


def conditional(front=KERAS_2, **changes):
    layers = front.keras.layers

    def network(inputs, outputs):
        both = [layers.Input([inputs]), layers.Input([3])]
        return front.keras.Model(both, layers.Dense(outputs)(layers.Concatenate()(both)))

    front.keras.utils.set_random_seed(0)
    return vae(front, encoder=network(6, 4), decoder=network(2, 6), num_classes=3, **changes)


def batches(y=X, steps=2, first_step=0, padding="none"):
    return tfdp.data.poisson_batches(
        (X, y),
        expected_batch_size=16,
        steps_per_epoch=steps,
        seed=1,
        first_step=first_step,
        padding=padding,
    )


def optimizer(cls=tfdp.DPSGD, **changes):
    arguments = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1, "learning_rate": 0.01}
    return cls(**{**arguments, "sampling": batches().sampling, **changes})


def compiled(model, name="DPSGD", **changes):
    model.compile(optimizer(getattr(front_of(model).tfdp, name), **changes))
    return model


def not_private(model, optimizer="sgd", **kwargs):
    model.compile(optimizer, **kwargs)
    return model


def flat(model):
    return support.flat([*model.encoder.get_weights(), *model.decoder.get_weights()])


class Table:
    """In the place of a distribution: row i gets the numbers of row i."""

    def __init__(self, values):
        self.values = values

    def sample(self, rows, seed=None):
        return tf.constant(self.values)[:rows]


def tables(self):
    """Returns fixed tables in place of the distributions of `_draws`."""
    return [Table(NOISE[:, : self.num_samples]), Table(PRIOR)]


def one_batch(x=X, y=X, mask=MASK):
    return tf.data.Dataset.from_tensors((x, y, mask))


# The loss, written down once more: for the standard normal and a normal likelihood.


def encoded(model, x):
    loc, raw = tf.split(model.encoder(x), 2, axis=1)
    return loc, tf.math.log(1 + tf.exp(raw)) + 1e-4


def negative_elbo(model, x, noise):
    """Of each row."""
    loc, scale = encoded(model, x)
    kl = 0.5 * tf.reduce_sum(loc**2 + scale**2 - 1 - 2 * tf.math.log(scale), axis=1)
    deviation = model.likelihood.scale
    terms = []
    for k in range(model.num_samples):
        error = (x - model.decoder(loc + scale * noise[:, k])) / deviation
        log_density = -0.5 * error**2 - math.log(deviation * math.sqrt(2 * math.pi))
        terms.append(-tf.reduce_sum(log_density, axis=1))
    return tf.add_n(terms) / model.num_samples + model.beta * kl


def penalty(model, x, noise, prior_samples, there):
    """The divergence with its weight, of the rows that are there."""
    loc, scale = encoded(model, x)
    codes = tf.boolean_mask(loc + scale * noise[:, 0], there)
    others, n = tf.boolean_mask(prior_samples, there), int(np.sum(there))
    if n < 2:
        return 0.0 * tf.reduce_sum(codes)

    def kernel(a, b):
        return tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, axis=2) / 4)

    within = tf.reduce_sum(kernel(codes, codes) + kernel(others, others)) - 2 * n
    return model.alpha * (within / (n * (n - 1)) - 2 * tf.reduce_sum(kernel(codes, others)) / n**2)
