"""The rule for learning rates where none is given."""

import numpy as np
import pytest

from tfdp.training import learning_rates


def test_the_peak_falls_with_the_steps_and_is_bounded():
    adam = learning_rates.ADAM
    peaks = [adam.peak(steps, 1.0, {}) for steps in (1, 400, 1600, 10**6)]
    assert peaks[0] == adam.largest and peaks[1] == pytest.approx(2 * peaks[2])
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] > 0
    assert adam.peak(400, 7.0, {"momentum": 0.9}) == peaks[1]  # Adam divides by the size.


def test_the_steps_of_sgd_are_as_long_with_momentum_and_another_clip():
    sgd = learning_rates.SGD
    rate = sgd.peak(900, 1.0, {})
    assert sgd.peak(900, 0.1, {"momentum": 0.9}) == pytest.approx(rate)
    assert sgd.peak(900, 0.1, {}) == pytest.approx(10 * rate)


def instead_of(optimizer, rate, is_task=True, **config):
    return learning_rates.instead_of(optimizer, {"learning_rate": rate, **config}, is_task)


def test_tasks_take_smaller_steps():
    tuned = instead_of("Adam", float(np.float32(2e-5)))
    assert tuned is learning_rates.FINE_TUNING and tuned.peak(900, 1.0, {}) == 0.001
    assert instead_of("Adam", float(np.float32(0.001))) is learning_rates.ADAM
    assert instead_of("Lion", 2e-5) is instead_of("Adam", {"a": "schedule"}) is None
    assert instead_of("Adam", 2e-5, is_task=False) is None


def test_momentum_that_is_kept_counts():
    with_momentum = instead_of("SGD", 0.01, momentum=0.9).peak(10**4, 1.0, {})
    assert with_momentum == pytest.approx(0.1 * learning_rates.SGD.peak(10**4, 1.0, {}))
    assert instead_of("RMSprop", 0.001, momentum=0.9) is learning_rates.ADAM
