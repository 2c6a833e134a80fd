"""Programs of Keras 3 users with training steps of their own: a line of the step is changed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from benchmarks.programs_keras_3 import PROGRAMS
from tests import support
from tests.ports.test_keras_3_programs import CLIP, OWN_STEPS, N, sum_of_clipped

DRAWS = {"variational_autoencoder", "diffusion", "dcgan"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OWN_STEPS)
def test_steps_of_ones_own(name):
    """In one pass, on Poisson batches; without random numbers, as a loop over examples."""
    keras.utils.set_random_seed(1)
    model, _, (x,) = PROGRAMS[name].build(N)
    batches = tfdp.data.poisson_batches((x,), expected_batch_size=4, steps_per_epoch=2)
    private = tfdp.keras3.DPOptimizer(
        keras.optimizers.Adam(0.01), 1.0, 1.0, sampling=batches.sampling
    )
    model.compile(private)
    model.fit(batches, verbose=0)
    assert private.ledger.steps == 2
    report = private.clipping.report()
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []
    if name in DRAWS:
        return
    optimizer = tfdp.keras3.DPSGD(CLIP, 0.0, 1, learning_rate=1.0)
    model.compile(optimizer)
    weights = model.trained.trainable_weights
    expected = sum_of_clipped(
        weights,
        [lambda i=i: tf.reduce_sum(model.losses_of(tf.constant(x[i : i + 1]))) for i in range(N)],
    )
    before = support.flat(w.numpy() for w in weights)
    model.fit(tf.data.Dataset.from_tensor_slices((x,)).batch(N), verbose=0)
    np.testing.assert_allclose(
        before - support.flat(w.numpy() for w in weights), expected, atol=2e-6
    )
