"""Calibrated parameters meet the budget, and better ones would not."""

import math
import os
import subprocess
import sys

import dp_accounting
import pytest

from tfdp.accounting import PrivacyLedger, calibrate_noise_multiplier, calibrate_steps
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.sampling import TRUNCATION_PROBABILITY, PoissonSampling

_Q = 256 / 60000


def _epsilon(q, noise_multiplier, steps, delta, tau=TRUNCATION_PROBABILITY, past=()):
    ledger = PrivacyLedger()
    for event, count in past:
        ledger.record(event, count)
    if steps:
        ledger.record(sampled_gaussian(q, noise_multiplier), steps, truncation_probability=tau)
    return ledger.epsilon(delta).epsilon


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("q", "target", "delta", "steps"),
    [
        (_Q, 1.0, 1e-5, 3500),
        (0.1, 3.0, 1e-6, 200),
        (_Q, 0.1, 1e-6, 1000),
        (1.0, 2.0, 1e-5, 20),
        (0.1, 12.0, 1e-5, 30),
    ],
)
def test_noise_meets_the_target_and_less_noise_does_not(q, target, delta, steps):
    budget = {"target_epsilon": target, "delta": delta}
    sigma = calibrate_noise_multiplier(**budget, steps=steps, sampling_probability=q)
    assert _epsilon(q, sigma, steps, delta) <= target
    assert _epsilon(q, 0.999 * sigma, steps, delta) > target
    # And the other calibration agrees: exactly these steps, or a few more.
    most = calibrate_steps(**budget, noise_multiplier=sigma, sampling_probability=q)
    assert steps <= most <= 1.01 * steps + 1


@pytest.mark.parametrize(
    ("q", "sigma", "target", "delta"), [(_Q, 1.1, 1.0, 1e-5), (0.1, 4.0, 2.0, 1e-6)]
)
def test_steps_meet_the_target_and_one_more_does_not(q, sigma, target, delta):
    steps = calibrate_steps(
        target_epsilon=target, delta=delta, noise_multiplier=sigma, sampling_probability=q
    )
    assert _epsilon(q, sigma, steps, delta) <= target
    assert _epsilon(q, sigma, steps + 1, delta) > target


MACHINES = """
import tfdp
from tfdp.accounting import RdpFilter, Repetitions, calibrate_private_selection
from tfdp.accounting.event_codec import sampled_gaussian
budget = dict(target_epsilon=2.0, delta=1e-5, steps=500)
few = dict(dataset_size=10_000, expected_batch_size=500)
decay = tfdp.schedules.ExponentialDecayNoise(2.0, decay_steps=7, decay_rate=0.97, least=0.9)
found = [
    tfdp.calibrate_noise_multiplier(**budget, **few),
    tfdp.calibrate_noise_multiplier(**budget | {"target_epsilon": 0.3}, sampling_probability=0.01),
    tfdp.calibrate_correlated_noise(**budget, **few).noise_multiplier,
    calibrate_private_selection(Repetitions("geometric", mean=10), **budget, **few),
    RdpFilter(2.0, 1e-5, expected_event=sampled_gaussian(0.01, 1.0)).order,
]
del budget["steps"]
descent = tfdp.contrib.calibrate_descent(
    **budget, **few, selection_batch_size=100, iterations=100
)
found += [descent[0].order, *descent[1:]]
schedule = tfdp.calibrate_noise_schedule(decay, **budget, steps=500, sampling_probability=0.05)
print(found, decay.stages().values, schedule.stages().fingerprint)
print(all(float(f"{x:.6g}") == x for x in found))
"""


@pytest.mark.slow
def test_every_machine_finds_the_same():
    """With other instructions of the processor, which round sums and powers otherwise."""
    printed = []
    for missing in ("", "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"):
        instructions = {
            "NPY_DISABLE_CPU_FEATURES": missing,
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2,-FMA4" if missing else "",
        }
        run = subprocess.run(
            [sys.executable, "-c", MACHINES],
            env={**os.environ, **instructions},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        printed.append(run.stdout.splitlines())
    assert printed[0] == printed[1]
    assert printed[0][-1] == "True"


def test_many_steps_are_the_most_but_for_a_five_thousandth():
    budget = {"target_epsilon": 1.0, "delta": 1e-5}
    steps = calibrate_steps(**budget, noise_multiplier=20.0, sampling_probability=0.01)
    assert steps > 100_000
    assert (
        _epsilon(0.01, 20.0, steps, 1e-5)
        <= 1.0
        < _epsilon(0.01, 20.0, steps + steps // 5_000, 1e-5)
    )


def test_a_delta_above_the_probability_of_ever_being_sampled_takes_no_noise():
    """The least noise that is returned at all: no attack sees more than who was sampled."""
    budget = {"target_epsilon": 1.0, "steps": 10, "sampling_probability": 1e-3}
    ever = 1 - 0.999**10
    assert calibrate_noise_multiplier(**budget, delta=1.001 * ever) == 0.01
    assert calibrate_noise_multiplier(**budget, delta=0.99 * ever) > 0.1


def test_sampling_may_be_given_as_sizes():
    budget = {"target_epsilon": 1.0, "delta": 1e-5}
    sizes = {"dataset_size": 60000, "expected_batch_size": 256}
    assert calibrate_steps(**budget, noise_multiplier=2.0, **sizes) == calibrate_steps(
        **budget, noise_multiplier=2.0, sampling_probability=_Q
    )


def test_what_was_spent_before_counts():
    past = [(sampled_gaussian(0.02, 2.0), 1000)]
    ledger = PrivacyLedger()
    for event, count in past:
        ledger.record(event, count)
    budget = {"target_epsilon": 2.0, "delta": 1e-5, "sampling_probability": 0.01}

    sigma = calibrate_noise_multiplier(**budget, steps=400, prior=ledger)
    assert _epsilon(0.01, sigma, 400, 1e-5, past=past) <= 2.0
    assert _epsilon(0.01, 0.999 * sigma, 400, 1e-5, past=past) > 2.0
    # A calibration that ignored the past would overspend.
    forgetful = calibrate_noise_multiplier(**budget, steps=400)
    assert _epsilon(0.01, forgetful, 400, 1e-5, past=past) > 2.1

    steps = calibrate_steps(**budget, noise_multiplier=2.0, prior=ledger)
    assert _epsilon(0.01, 2.0, steps, 1e-5, past=past) <= 2.0
    assert _epsilon(0.01, 2.0, steps + 1, 1e-5, past=past) > 2.0
    assert ledger.steps == 1000


def test_events_that_only_pld_supports_may_be_in_the_past():
    ledger = PrivacyLedger()
    laplace = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.LaplaceDpEvent(20.0))
    ledger.record(laplace, 3)
    steps = calibrate_steps(
        target_epsilon=0.5,
        delta=1e-5,
        noise_multiplier=2.0,
        sampling_probability=0.01,
        prior=ledger,
    )
    past = [(laplace, 3)]
    assert _epsilon(0.01, 2.0, steps, 1e-5, past=past) <= 0.5
    assert _epsilon(0.01, 2.0, steps + 1, 1e-5, past=past) > 0.5


def test_truncation_is_part_of_the_budget():
    budget = {"target_epsilon": 1.0, "delta": 1e-5, "sampling_probability": 0.02}
    tau = 3e-9
    sigma = calibrate_noise_multiplier(**budget, steps=200, truncation_probability=tau)
    assert _epsilon(0.02, sigma, 200, 1e-5, tau) <= 1.0
    assert sigma > calibrate_noise_multiplier(**budget, steps=200)
    few = calibrate_steps(**budget, noise_multiplier=2.0, truncation_probability=tau)
    assert few < calibrate_steps(**budget, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="no noise is enough"):
        calibrate_noise_multiplier(**budget, steps=200, truncation_probability=1e-6)


def test_sampling_says_how_often_batches_are_cut_off():
    budget = {"target_epsilon": 1.0, "delta": 1e-5, "steps": 100_000}
    sampling = PoissonSampling(60000, 256, padding="full", max_truncation_probability=1e-12)
    noise = calibrate_noise_multiplier(**budget, sampling=sampling)
    tau = sampling.truncation_probability
    assert _epsilon(_Q, noise, 100_000, 1e-5, tau) <= 1.0
    assert _epsilon(_Q, 0.998 * noise, 100_000, 1e-5, tau) > 1.0
    # The charge is worth two thousandths of the noise, or a mutant forgets it.
    assert _epsilon(_Q, 0.999 * noise, 100_000, 1e-5) <= 1.0
    given = {**budget, "sampling": sampling, "truncation_probability": tau}
    with pytest.raises(ValueError, match="`sampling` must be a PoissonSampling without other"):
        calibrate_noise_multiplier(**given)


def test_a_spent_budget():
    ledger = PrivacyLedger()
    ledger.record(sampled_gaussian(0.1, 0.7), 1000)
    budget = {"target_epsilon": 1.0, "delta": 1e-5, "sampling_probability": 0.1, "prior": ledger}
    assert calibrate_steps(**budget, noise_multiplier=1.0) == 0
    with pytest.raises(ValueError, match="above what `prior` has spent"):
        calibrate_noise_multiplier(**budget, steps=1)


@pytest.mark.slow
def test_extremes():
    budget = {"delta": 1e-5, "sampling_probability": 0.1}
    assert calibrate_steps(target_epsilon=5, noise_multiplier=0, **budget) == 0
    assert calibrate_steps(target_epsilon=0.1, noise_multiplier=0.3, **budget) == 0
    assert calibrate_steps(target_epsilon=1, noise_multiplier=1e6, **budget) == 10**8
    sigma = calibrate_noise_multiplier(
        target_epsilon=1e9, steps=1, truncation_probability=0.0, **budget
    )
    assert sigma == 0.01


_GOOD = {
    "target_epsilon": 1.0,
    "delta": 1e-5,
    "steps": 10,
    "noise_multiplier": 1.0,
    "sampling_probability": 0.1,
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"delta": 0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"sampling_probability": 0}, "sampling_probability"),
        ({"sampling_probability": 1.1}, "sampling_probability"),
        ({"dataset_size": 10}, "sampling_probability"),
        ({"sampling_probability": None}, "sampling_probability"),
        ({"sampling_probability": None, "dataset_size": 10}, "sampling_probability"),
        (
            {"sampling_probability": None, "dataset_size": 0, "expected_batch_size": 1},
            "dataset_size",
        ),
        (
            {"sampling_probability": None, "dataset_size": 10, "expected_batch_size": 11},
            "expected_batch_size",
        ),
        ({"truncation_probability": 1.0}, "truncation_probability"),
        ({"prior": {}}, "prior"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, name):
    arguments = {**_GOOD, **change}
    for function, other in (
        (calibrate_noise_multiplier, "noise_multiplier"),
        (calibrate_steps, "steps"),
    ):
        if other not in change:
            with pytest.raises(ValueError, match=rf"Argument `{name}`.*Received: .*{name}="):
                function(**{key: value for key, value in arguments.items() if key != other})
