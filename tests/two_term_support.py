"""A small loss with a batch-wise term, and its clipped sums computed with loops."""

import numpy as np
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine, TwoTermLoss
from tfdp.clipping.batch_losses.example_groups import draw_groups
from tfdp.clipping.batch_losses.two_term_loss import split_key

layers = tf.keras.layers
SEED = (5, 5)


class Codes(tf.keras.Model):
    """Codes of inputs, in both terms, and a head that is in the sample-wise one alone."""

    def __init__(self):
        super().__init__()
        tf.keras.utils.set_random_seed(3)
        self.codes = layers.Dense(2, activation="tanh")
        self.head = layers.Dense(1)
        self(tf.zeros([1, 3]))

    def call(self, x):
        return self.head(self.codes(x))[:, 0]

    def sample_wise(self, x, y):
        return (self(x) - y) ** 2

    def batch_wise(self, x, y, mask):
        """Squared mean, over the rows that exist, of the product of the codes."""
        keep = tf.cast(mask, tf.float32)
        product = tf.reduce_prod(self.codes(x), axis=1)
        return tf.math.divide_no_nan(tf.reduce_sum(product * keep), tf.reduce_sum(keep)) ** 2


def data(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype("float32")
    return x, rng.normal(size=n).astype("float32") * 3, rng.random(n) < 0.8


class Sum:
    """`Sum(model, aggregation)(x, y, mask)`: the sum, and the noise scales of the variables."""

    def __init__(self, model, aggregation, clip=0.5, expected_batch_size=32, **changes):
        self.model = model
        terms = {"sample_wise": model.sample_wise, "batch_wise": model.batch_wise, **changes}
        self.scales = None

        def run(x, y, mask):
            loss = TwoTermLoss(batch=(x, y), mask=mask, aggregation=aggregation, **terms)
            found = loss.clipped_sum(
                OnePassEngine(clip),
                model.trainable_variables,
                tf.constant(SEED, tf.int64),
                expected_batch_size,
            )
            self.scales = found.noise_scales
            assert found.mask is not None
            zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
            sums = [z if g is None else g for g, z in zip(found.gradients, zeros, strict=True)]
            public = [
                z if g is None else g
                for g, z in zip(found.regularizer_gradients, zeros, strict=True)
            ]
            return sums, public

        spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None]), tf.TensorSpec([None], tf.bool))
        self.run = tf.function(run, input_signature=spec)

    def __call__(self, x, y, mask):
        return support.flat(self.run(x, y, mask)[0])


def groups_of(x, y, mask, num_groups, capacity):
    """The groups that a batch falls into, with the seed of `Sum`."""
    _, seed, _ = split_key(tf.constant(SEED, tf.int64), 3)
    (xs, ys), there = draw_groups((x, y), tf.constant(mask), seed, num_groups, capacity)
    return [(xs[j], ys[j], there[j]) for j in range(num_groups)]


def gradient(model, function) -> np.ndarray:
    """The gradient of a scalar by all variables, a flat vector."""
    variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        value = function()
    return support.flat(tape.gradient(value, variables, unconnected_gradients="zero"))


def clip(vector: np.ndarray, limit: float) -> np.ndarray:
    norm = np.linalg.norm(vector)
    return vector / max(1.0, norm / limit) if np.isfinite(norm) else np.zeros_like(vector)


def looped_samples(model, x, y, mask, limit, extra=0.0) -> np.ndarray:
    """Returns the sum of the clipped per-example gradients, `extra` added before clipping."""
    return sum(
        clip(
            gradient(model, lambda i=i: model.sample_wise(x[i : i + 1], y[i : i + 1])[0]) + extra,
            limit,
        )
        for i in np.flatnonzero(mask)
    )


def looped_groups(model, groups, limit) -> np.ndarray:
    """Sum of the clipped gradients of the groups."""
    return sum(
        clip(gradient(model, lambda g=g: model.batch_wise(*g)), limit) for g in groups if any(g[2])
    )


class Pull(tf.keras.Model):
    """g is the weight times the sum of the examples: an example can turn its gradient round."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight("weight", [], initializer="zeros")

    def sample_wise(self, x, y):
        return self.weight * 0.0 * y

    def batch_wise(self, x, y, mask):
        return self.weight * tf.reduce_sum(tf.where(mask, x[:, 0], 0.0))


def noise_of_steps(optimizer, aggregation, steps):
    """What the weights of a model without gradients are after many single steps from zero."""

    class Still(Codes):
        def sample_wise(self, x, y):
            return 0.0 * super().sample_wise(x, y)

        def batch_wise(self, x, y, mask):
            return 0.0 * super().batch_wise(x, y, mask)

    model, (x, y, mask) = Still(), data()

    @tf.function
    def step(x, y, mask):
        for variable in model.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        loss = TwoTermLoss(model.sample_wise, model.batch_wise, (x, y), aggregation, mask)
        optimizer.minimize(loss, model.trainable_variables)
        return [tf.reshape(v.read_value(), [-1]) for v in model.trainable_variables]

    found = [step(tf.constant(x), tf.constant(y), tf.constant(mask)) for _ in range(steps)]
    codes = np.concatenate([np.concatenate(f[:2]) for f in found])
    head = np.concatenate([np.concatenate(f[2:]) for f in found])
    return codes, head
