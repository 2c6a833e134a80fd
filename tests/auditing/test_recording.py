"""Scores and checks of what an audit recorded."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tfdp.auditing.recording import (
    Recording,
    StepSetting,
    deviation_of_updates,
    noise_p_value,
    repetition_p_value,
)

RANDOM = np.random.default_rng(0)


def recorded(sums, clip=2.0, stddev=3.0, sign=1.0):
    settings = [StepSetting(clip, stddev, 0.1) for _ in sums]
    return Recording(list(sums), [np.zeros_like(s) for s in sums], settings, sign)


def test_scores_are_likelihood_ratios():
    sums, q = RANDOM.normal(size=(4, 6)) * 5, 0.2
    present, absent = (scipy.stats.norm(mean, 3.0).pdf(sums) for mean in (2.0, 0.0))
    expected = np.log((1 - q) + q * present / absent)
    np.testing.assert_allclose(recorded(sums).scores(q), expected.sum(axis=0))
    np.testing.assert_allclose(recorded(sums).scores(q, 2), expected[:2].sum(axis=0))
    np.testing.assert_allclose(recorded(-sums, sign=-1.0).scores(q), expected.sum(axis=0))
    np.testing.assert_allclose(
        recorded(sums).scores(1.0), np.log(present / absent).sum(axis=0), rtol=1e-9
    )


def test_scores_without_noise_are_sums_in_units_of_the_clip():
    sums = RANDOM.normal(size=(4, 6))
    np.testing.assert_allclose(recorded(sums, stddev=0.0).scores(0.2), sums.sum(axis=0) / 2)


def test_scores_of_sums_that_are_far_too_long_are_finite():
    assert np.all(np.isfinite(recorded([np.array([1e9, -1e9])]).scores(0.2)))


@pytest.mark.parametrize("cls", [tfdp.DPSGD, tfdp.DPAdam, tfdp.DPSignSGD, tfdp.DPSignAdam])
def test_updates_follow_from_sums_if_they_are_those_of_the_base_optimizer(cls):
    """Written down once more in NumPy, but for Adam, whose Keras optimizer is used."""
    optimizer = cls(2.0, 1.5, expected_batch_size=10, learning_rate=0.1)
    sums = [RANDOM.normal(size=6).astype("float32") for _ in range(5)]
    recording = recorded(sums)
    where, variable = np.zeros(6), tf.Variable(tf.zeros(6))
    adam = tf.keras.optimizers.legacy.Adam(0.1)
    for step, total in enumerate(sums):
        gradient = total / 10
        if cls is tfdp.DPSignAdam:
            gradient = np.sign(gradient)
        if cls in (tfdp.DPAdam, tfdp.DPSignAdam):
            adam.apply_gradients([(tf.constant(gradient), variable)])
            where = variable.numpy()
        else:
            where = where - 0.1 * (np.sign(gradient) if cls is tfdp.DPSignSGD else gradient)
        recording.coordinates[step] = where.copy()
    assert deviation_of_updates(recording, optimizer) < 1e-3
    recording.coordinates[3] = recording.coordinates[3] + 0.05
    assert deviation_of_updates(recording, optimizer) > 0.05


def test_noise_of_the_stated_size_passes_and_other_noise_does_not():
    """Of the size that is stated 0 of 1000 fail at 1e-3 by much; 0.95 of it does, in many steps."""
    low = 0
    for seed in range(1000):
        noise = np.random.default_rng(seed).normal(size=(10, 50))
        low += noise_p_value(noise) < 0.01
        assert noise_p_value(1.05 * noise) > 1e-6
    assert low <= 25  # 10 are expected at most.
    noise = RANDOM.normal(size=(100, 500))
    assert noise_p_value(0.95 * noise) < 1e-6 < noise_p_value(noise)
    noise[17] *= 0.7
    assert noise_p_value(noise) < 1e-6


def test_noise_that_comes_again_is_found():
    low = 0
    for seed in range(1000):
        low += repetition_p_value(np.random.default_rng(seed).normal(size=(10, 20)))[1] < 0.01
    assert low <= 25
    noise = RANDOM.normal(size=(100, 100))
    assert repetition_p_value(noise)[1] > 1e-6
    for again in (noise[3], -noise[3], 0.5 * noise[3] + 0.2 * RANDOM.normal(size=100)):
        repeated = np.vstack([noise, again])
        correlation, p_value = repetition_p_value(repeated)
        assert correlation > 0.9 and p_value < 1e-6
    assert repetition_p_value(noise[:1]) == (0.0, 1.0)
