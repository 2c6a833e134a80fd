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


def test_tasks_take_smaller_steps():
    tuned = learning_rates.instead_of("Adam", float(np.float32(2e-5)), is_task=True)
    assert tuned is learning_rates.FINE_TUNING and tuned.peak(900, 1.0, {}) == 0.001
    assert learning_rates.instead_of("Adam", float(np.float32(0.001)), True) is learning_rates.ADAM
    assert learning_rates.instead_of("Lion", 2e-5, is_task=True) is None
    assert learning_rates.instead_of("Adam", {"a": "schedule"}, True) is None
