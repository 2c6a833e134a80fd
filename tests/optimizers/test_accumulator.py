"""Parts of two logical batches never get into one sum."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import compiled
from tfdp.optimizers.accumulator import Accumulator

X, Y = support.small_data(64)
CLIP = 0.5


def chunks():
    return tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=16, steps_per_epoch=2, seed=1, chunk_size=12
    )


def make():
    arguments = {"sampling": chunks().sampling}
    assert arguments["gradient_accumulation_steps"] == 4
    return compiled(tfdp.DPSGD(CLIP, 0.0, learning_rate=1.0, **arguments))


def weights(model):
    return support.flat(model.get_weights())


class NeverDrops(Accumulator):
    """Mutant: counts batches, and does not look where a logical batch begins."""

    def add(self, clipped, variables):
        import dataclasses

        return super().add(dataclasses.replace(clipped, masked=False), variables)


def steps_equal_to_uninterrupted(broken_off_after):
    whole, resumed = make(), make()
    whole.fit(chunks(), verbose=0)
    resumed.fit(chunks().take(broken_off_after), verbose=0)
    resumed.set_weights(support.small_model().get_weights())
    done = resumed.optimizer.iterations.numpy()
    resumed.fit(chunks(), verbose=0)
    assert resumed.optimizer.iterations.numpy() == done + 2
    np.testing.assert_allclose(weights(resumed), weights(whole), atol=1e-6)


@pytest.mark.parametrize("broken_off_after", [1, 2, 3, 4, 6])
def test_what_is_broken_off_is_dropped(broken_off_after):
    steps_equal_to_uninterrupted(broken_off_after)


@pytest.mark.parametrize("broken_off_after", [1, 3])
def test_mixing_two_logical_batches_is_caught(broken_off_after, monkeypatch):
    monkeypatch.setattr("tfdp.optimizers.base.Accumulator", NeverDrops)
    with pytest.raises(AssertionError):
        steps_equal_to_uninterrupted(broken_off_after)


def test_masked_batches_that_do_not_show_where_they_begin_are_refused():
    optimizer = tfdp.DPSGD(1.0, 1.0, 16, gradient_accumulation_steps=2)
    data = tf.data.Dataset.from_tensors((X, Y, np.ones(64, bool))).repeat(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="one row more than the others"):
        compiled(optimizer).fit(data, verbose=0)
