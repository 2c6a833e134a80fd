"""Scores and checks of what an audit recorded."""

import dataclasses

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


# Correlated noise, cyclic sampling, and what is not trained.

BANDS = np.array([0.8, 0.5, 0.3]) / np.linalg.norm([0.8, 0.5, 0.3])
# Numbers of draws: one was skipped before the fifth step, and another object drew the last two.
DRAWS = [(1, 0), (1, 1), (1, 2), (1, 3), (1, 5), (1, 6), (2, 7), (2, 8)]


def correlated(sums, cycle_length=3, **kwargs):
    recording = recorded(sums, **kwargs)
    recording.bands, recording.cycle_length = BANDS, cycle_length
    recording.settings = [
        dataclasses.replace(setting, source=source, sequence=sequence)
        for setting, (source, sequence) in zip(recording.settings, DRAWS, strict=True)
    ]
    return recording


def matrix(renewal=100):
    """The matrix C of the steps: a band wherever draws follow one another."""
    found = np.zeros([len(DRAWS), len(DRAWS)])
    for row, (source, sequence) in enumerate(DRAWS):
        for column in range(max(0, row - 2), row + 1):
            same = DRAWS[column][1] // renewal == sequence // renewal
            if same and DRAWS[column] == (source, sequence - row + column):
                found[row, column] = BANDS[row - column]
    return found


def test_correlated_sums_are_multiplied_by_the_stated_matrix():
    independent = RANDOM.normal(size=(len(DRAWS), 7))
    sums = 3.0 * np.linalg.solve(matrix(), independent)
    np.testing.assert_allclose(correlated(sums).noise_units(), independent, atol=1e-5)
    recording = correlated(3.0 * np.linalg.solve(matrix(renewal=2), independent))
    assert not np.allclose(recording.noise_units(), independent, atol=1e-2)
    recording.renewal = 2
    np.testing.assert_allclose(recording.noise_units(), independent, atol=1e-5)


def test_scores_of_correlated_sums_are_likelihood_ratios_over_all_sets():
    sums, q = 4 * RANDOM.normal(size=(len(DRAWS), 6)), 0.3
    columns = matrix()
    seen = columns @ sums
    expected = np.zeros(6)
    for source in (1, 2):
        steps = [i for i, draw in enumerate(DRAWS) if draw[0] == source]
        of_sets = []
        for number in range(3):
            own = [i for i in steps if DRAWS[i][1] % 3 == number]
            ratio = np.ones(6)
            for i in own:  # In the rows of a column no other one of the set is.
                rows = columns[:, i] > 0
                means = 2.0 * columns[rows, i][:, np.newaxis]
                densities = [
                    scipy.stats.norm(mean, 3.0).pdf(seen[rows]).prod(axis=0) for mean in (means, 0)
                ]
                ratio *= 1 - q + q * densities[0] / densities[1]
            of_sets.append(ratio)
        expected += np.log(np.mean(of_sets, axis=0))
    np.testing.assert_allclose(correlated(sums).scores(q), expected, atol=1e-9)


def test_steps_that_do_not_train_a_coordinate_say_nothing():
    sums = RANDOM.normal(size=(3, 5))
    recording = recorded(sums)
    trained = RANDOM.random(size=(3, 5)) < 0.5
    trained[1] = False
    recording.settings = [
        dataclasses.replace(setting, trained=which)
        for setting, which in zip(recording.settings, [trained[0], False, trained[2]], strict=True)
    ]
    each = np.stack([recorded(sums[i : i + 1]).scores(0.2) for i in range(3)])
    np.testing.assert_allclose(recording.scores(0.2), np.where(trained, each, 0).sum(axis=0))


def test_what_is_kept_must_be_the_largest():
    recording = recorded([np.array([8.0, -4.0, 2.0]), np.array([1.0, 1.0, 3.0])])
    recording.kept = [np.array([True, False, False]), np.array([False, True, True])]
    found = recording.gradients(2.0, remembers=True)
    np.testing.assert_allclose(found, [[4, 0, 0], [0, -1.5, 2.5]])
    found = recording.gradients(2.0, remembers=False)
    np.testing.assert_allclose(found, [[4, 0, 0], [0, 0.5, 1.5]])
    recording.kept[0] = np.array([False, False, True])
    np.testing.assert_allclose(recording.gradients(2.0, remembers=True)[0], [4, -2, 1])
