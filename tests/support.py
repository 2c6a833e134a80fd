"""Reference computations and small models that several test modules use."""

import dataclasses
import itertools
import re
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdp
from tfdp.clipping import OnePassEngine, VectorizedEngine

layers = tf.keras.layers


def crossentropy(reduction: str = "none") -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


_GROUP_KEYS = itertools.count(1000, 1000)


def mirrored(replicas: int) -> tf.distribute.MirroredStrategy:
    """Returns a strategy of CPU devices whose collectives share no key with those of another.

    Every strategy numbers its collectives alike, and TensorFlow remembers the shape of each
    number as long as the process lives: of two models under two strategies, the second fails.
    """
    with mock.patch.object(
        tf.distribute.MirroredStrategy, "_collective_key_base", next(_GROUP_KEYS)
    ):
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def open_spec(data):
    """Specs of tensors whose first dimension is left open."""
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *np.shape(t)[1:]], tf.as_dtype(np.asarray(t).dtype)), data
    )


class ClippedSum:
    """Runs an engine on a model, traced once: `ClippedSum(engine, model, x)(x, y, mask)`.

    `x_spec` says what is known of the shape of `x` when the step is traced: all but the batch.
    """

    def __init__(
        self,
        engine,
        model,
        x,
        loss=None,
        jit_compile=False,
        target_dtype=tf.int64,
        x_spec=None,
    ):
        self.model = model
        loss = loss or crossentropy()
        model(tf.nest.map_structure(lambda t: t[:1], x))  # Builds it.

        def run(x, y, mask):
            losses = loss(y, model(x, training=True), sample_weight=mask)
            result = engine.clipped_sum(losses, model.trainable_variables, tf.constant([1, 2]))
            return result.gradients, result.regularizer_gradients

        x_spec = open_spec(x) if x_spec is None else x_spec
        spec = (x_spec, tf.TensorSpec([None], target_dtype), tf.TensorSpec([None], tf.bool))
        self._run = tf.function(run, jit_compile=jit_compile, input_signature=spec)

    def gradients(self, x, y, mask=None):
        mask = np.ones(len(y), bool) if mask is None else mask
        return self._run(x, y, mask)

    def __call__(self, x, y, mask=None):
        """The clipped sum of all variables together, a flat vector."""
        return flat(self.gradients(x, y, mask)[0])


def stated_epsilon(text: str) -> float:
    """Returns the epsilon that a privacy statement begins with, which is rounded up."""
    return float(re.search(r"^Differential privacy: epsilon = ([\d.]+) at", text, re.MULTILINE)[1])


def flat(tensors) -> np.ndarray:
    return np.concatenate([np.ravel(t) for t in tensors if t is not None])


def looped_gradients(model, x, y, loss=None) -> list[np.ndarray]:
    """The gradient of each example, a flat vector; one eager example at a time."""
    loss = loss or crossentropy()
    gradients = []
    for i in range(len(y)):
        one = tf.nest.map_structure(lambda t, i=i: tf.constant(t[i : i + 1]), x)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(y[i : i + 1], model(one, training=True)))
        found = tape.gradient(value, model.trainable_variables)
        gradients.append(flat(tf.convert_to_tensor(g) for g in found))
    return gradients


def sum_of_clipped(gradients, l2_norm_clip) -> np.ndarray:
    return sum(g / max(1.0, np.linalg.norm(g) / l2_norm_clip) for g in gradients)


def looped_clipped_sum(model, x, y, l2_norm_clip, loss=None) -> np.ndarray:
    """The clipped sum, one eager example at a time."""
    return sum_of_clipped(looped_gradients(model, x, y, loss), l2_norm_clip)


def small_model(seed: int = 0) -> tf.keras.Model:
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential(
        [layers.Input([4]), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )


def small_data(n: int = 60, seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 4)).astype("float32"), rng.integers(0, 3, n)


def compiled(optimizer, model=None, **kwargs) -> tf.keras.Model:
    model = model or small_model()
    kwargs.setdefault("loss", crossentropy())
    model.compile(optimizer=optimizer, **kwargs)
    return model


OPTIMIZERS = [tfdp.DPSGD, tfdp.DPAdam, tfdp.DPSignSGD, tfdp.DPSignAdam]


def without_noise(cls, expected_batch_size, **kwargs):
    """An optimizer that computes exactly what its base does."""
    return cls(float("inf"), 0.0, expected_batch_size, **kwargs)


class ComparedClipping(OnePassEngine):
    """Clips by both engines, and fails in the step where their sums differ."""

    def clipped_sum(self, loss, variables, seed, clip=None, most_rows=None):
        asked = (loss, variables, seed, clip, most_rows)
        fast = super().clipped_sum(*asked)
        other = VectorizedEngine(self.l2_norm_clip, clipping_rule=self.clipping_rule)
        other.wide_sums = self.wide_sums
        slow = other.clipped_sum(*asked)
        pairs = [
            (a, b) for a, b in zip(fast.gradients, slow.gradients, strict=True) if a is not None
        ]
        difference = tf.linalg.global_norm([a - b for a, b in pairs])
        norm = tf.linalg.global_norm([b for _, b in pairs])
        same = tf.debugging.Assert(difference <= 1e-3 * norm + 1e-6, ["the engines' sums differ"])
        with tf.control_dependencies([same]):
            gradients = [None if g is None else tf.identity(g) for g in fast.gradients]
        return dataclasses.replace(fast, gradients=gradients)


class UnclippedEngine(VectorizedEngine):
    """Mutant: the clip is skipped."""

    @property
    def clips(self):
        return False


def crossentropy_metric() -> tf.keras.metrics.Metric:
    return tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="crossentropy")
