"""Keras 3's random layers for images that draw whole numbers, in the model and in front of it."""

import keras
import numpy as np
import pytest
from keras import layers

import tfdp
from tests.keras3.support import crossentropy

IMAGES = np.random.default_rng(0).random([24, 8, 8, 3]).astype("float32")
CLASSES = np.arange(24) % 3


def trained(in_front=(), **kwargs):
    """The private optimizer, after two steps of a model."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [layers.Input([8, 8, 3]), *in_front, layers.Flatten(), layers.Dense(3)]
    )
    batches = tfdp.data.poisson_batches(
        (IMAGES, CLASSES), expected_batch_size=8, steps_per_epoch=2, **kwargs
    )
    optimizer = tfdp.keras3.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model.compile(optimizer, crossentropy())
    model.fit(batches, verbose=0)
    return optimizer


@pytest.mark.slow
def test_posterization_is_in_one_pass():
    report = trained([layers.RandomPosterization((2, 6), value_range=(0, 1))]).clipping.report()
    assert report.fallback is None and all(entry.fast for entry in report.entries)


@pytest.mark.slow
def test_rand_augment_counts_over_the_batch_and_trains_in_front():
    """One of its functions equalizes the histogram of the whole batch."""
    layer = layers.RandAugment(value_range=(0, 1))
    with pytest.raises(ValueError, match=r"mixes examples.*RandAugment.*single images"):
        trained([layer])
    assert trained(transform=lambda x, y: (layer(x), y)).ledger.steps == 2
