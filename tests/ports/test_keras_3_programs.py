"""Programs of kinds that Keras 3 users write: their clipped sums are those of a loop."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from benchmarks import own_steps
from benchmarks.programs_keras_3 import PROGRAMS, table
from tests import support

N, CLIP = 7, 0.1
OWN_STEPS = [
    name for name, timed in PROGRAMS.items() if timed.build.__module__ == own_steps.__name__
]
COMPILED = [name for name in PROGRAMS if name not in OWN_STEPS]


def sum_of_clipped(weights, losses):
    """The sum of the clipped gradients of losses, which are functions."""
    total = 0.0
    for loss in losses:
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, [w.value for w in weights], unconnected_gradients="zero")
        gradient = support.flat(tf.convert_to_tensor(g) for g in found)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


def looped(model, data):
    """The clipped sum, one eager example at a time."""

    def loss(i):
        x, *others = (tf.nest.map_structure(lambda a: a[i : i + 1], t) for t in data)
        y, weight, *_ = [*others, None, None]
        return model.compute_loss(x, y, model(x, training=True), weight, training=True)

    losses = [functools.partial(loss, i) for i in range(N)]
    return sum_of_clipped(model.trainable_variables, losses)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", COMPILED)
def test_clipped_sum_is_that_of_a_loop_over_examples(name):
    """One step of `fit`, in one pass."""
    keras.utils.set_random_seed(1)
    model, loss, data = PROGRAMS[name].build(N)
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer, loss)
    model(tf.nest.map_structure(lambda a: a[:1], data[0]))
    expected = looped(model, data)
    before = support.flat(w.numpy() for w in model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(data)
    model.fit(batches.batch(N), verbose=0)
    found = before - support.flat(w.numpy() for w in model.trainable_variables)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    report = optimizer.clipping.report()
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["data", "transform", "array"])
def test_features_are_encoded_in_front_of_the_model(place):
    """In the data set, in the transform of each draw, or before both."""
    keras.utils.set_random_seed(1)
    rows, space = table(20)
    labels = np.arange(20) % 2
    data, options = tf.data.Dataset.from_tensor_slices((rows, labels)), {}
    if place == "data":
        data = data.map(lambda x, y: (space(x), y))
    elif place == "transform":
        options["transform"] = lambda x, y: (space(x), y)
    else:
        data = (np.asarray(space(rows)), labels)
    batches = tfdp.data.poisson_batches(
        data, expected_batch_size=10, steps_per_epoch=2, seed=1, **options
    )
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, sampling=batches.sampling, learning_rate=1.0)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(batches, verbose=0)
    assert optimizer.ledger.steps == 2
    report = optimizer.clipping.report()
    assert report.fallback is None and all(entry.fast for entry in report.entries)
    encoded = {tuple(row) for row in np.asarray(space(rows)).round(5)}
    found = [tuple(row) for x, _ in batches for row in x.numpy().round(5)]
    assert found and set(found) <= encoded
