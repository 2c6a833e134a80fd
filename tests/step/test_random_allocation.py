"""Epochs by random allocation in a training: what the ledger counts."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import with_both
from tfdp.accounting import RandomAllocationDpEvent
from tfdp.step.record.cycle_count import CycleCount

N, BATCH, CYCLE = 40, 10, 4


def batches_of(**kwargs):
    x = np.random.default_rng(0).normal(size=[N, 4]).astype("float32")
    arguments = {"expected_batch_size": BATCH, "cycle_length": CYCLE, "redraw_sets": True, **kwargs}
    return tfdp.data.poisson_batches((x, x[:, :1]), **arguments)


def counted(draws, cycles):
    """The number of cycles that draws, pairs of source and number, begin."""
    begun = []

    def add(begins, stage):
        begun.append(bool(begins))
        return tf.no_op(), None

    for source, sequence in draws:
        numbers = (tf.constant(source, tf.int64), tf.constant(sequence, tf.int64))
        cycles.count(*numbers, tf.constant(True), add)
    return sum(begun)


def uncovered(draws, cycles):
    """The number of random allocations (of a source, and a cycle of it) beyond those counted.

    The draws may leave some out, or come in any order.
    """
    return len({(source, sequence // CYCLE) for source, sequence in draws}) - counted(draws, cycles)


def some_draws(rng):
    draws, sequences = [], [int(rng.integers(10)), int(rng.integers(10))]
    for _ in range(int(rng.integers(1, 40))):
        source = int(rng.random() < 0.1)
        sequences[source] += int(rng.integers(1, 9)) if rng.random() < 0.1 else 1
        draws.append((source, sequences[source]))
    return draws


def test_every_allocation_is_counted():
    """Wherever runs start; a mutant counts from the start of a run, as for sets that stay."""
    rng = np.random.default_rng(0)
    excess = {True: [], False: []}
    for draws in (some_draws(rng) for _ in range(30)):
        for redraws, values in excess.items():
            values.append(uncovered(draws, CycleCount(CYCLE, redraws)))
    assert max(excess[True]) <= 0 < max(excess[False])


@pytest.mark.parametrize("steps", range(1, 10))
def test_what_is_planned_is_enough(steps):
    for first in range(CYCLE):
        cycles = CycleCount(CYCLE, True)
        planned = cycles.begun_by(steps, anew=True)
        half = steps // 2
        begun = counted([(0, first + i) for i in range(half)], cycles)
        rest = cycles.begun_by(steps - half, anew=half == 0)
        begun_later = counted([(0, first + i) for i in range(half, steps)], cycles)
        assert begun + begun_later <= planned
        assert begun_later <= rest if half == 0 else begun_later == rest


@with_both
def test_ledger_counts_epochs(front):
    batches = batches_of()
    optimizer = front.tfdp.DPSGD(1.0, 2.0, sampling=batches.sampling, learning_rate=0.1)
    assert optimizer.release.event.event == RandomAllocationDpEvent(2.0, CYCLE)
    layers = front.keras.layers
    model = front.keras.Sequential([layers.Input([4]), layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(batches, epochs=2, verbose=0)
    (release,) = optimizer.ledger.releases
    assert release.event == optimizer.release.event
    assert (release.count, release.cycle_length, release.event.sampling_probability) == (2, 4, 1)
    model.fit(batches_of(), steps_per_epoch=1, verbose=0)  # One step costs an epoch.
    (release,) = optimizer.ledger.releases
    assert release.count == 3
    whole = tfdp.accounting.PrivacyLedger()
    whole.record(RandomAllocationDpEvent(2.0, CYCLE), 3)
    found = optimizer.ledger.epsilon(1e-5).epsilon
    assert found == pytest.approx(whole.epsilon(1e-5).epsilon, rel=1e-3)
    assert "3 epochs of 4 steps" in " ".join(tfdp.privacy_statement(model, 1e-3).split())
    stay = front.tfdp.DPSGD(1.0, 2.0, sampling=batches_of(redraw_sets=False).sampling)
    assert stay.release.event.event == optimizer.event  # A Gaussian for each pass.


def test_correlated_noise_is_refused():
    with pytest.raises(ValueError, match="redraws_sets"):
        tfdp.DPSGD(
            1.0,
            2.0,
            sampling=batches_of().sampling,
            noise_correlation=tfdp.BandedNoise([2.0, 1.0]),
        )


def test_calibration_by_sampling():
    known = {"target_epsilon": 2.0, "delta": 1e-5, "steps": 12}
    noise = {
        redraws: tfdp.accounting.calibrate_noise_multiplier(
            sampling=batches_of(redraw_sets=redraws).sampling, **known
        )
        for redraws in (True, False)
    }
    assert noise[True] < 0.8 * noise[False]
    ledger = tfdp.accounting.PrivacyLedger()
    ledger.record(RandomAllocationDpEvent(noise[True], CYCLE), 3)
    assert 1.99 < ledger.epsilon(1e-5).epsilon <= 2.0
    with pytest.raises(ValueError, match="sampling"):
        tfdp.accounting.calibrate_noise_multiplier(
            sampling=batches_of().sampling, sampling_probability=0.1, **known
        )
