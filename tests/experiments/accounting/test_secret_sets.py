"""Passes whose sets are drawn once, in secret: the bound, against attacks, and the table."""

import math

import numpy as np
import pytest
from absl import flags

import tfdp
from experiments.accounting import secret_sets
from experiments.settings import RefusedError
from tfdp.accounting import composition, dominating_pairs, random_allocation

BANDS = (
    ([1.0], 5, 2),
    ([3.0, 2.0, 1.0], 6, 2),
    ([3.0, 2.0, 1.0], 7, 1),
    ([1.0, 0.9, 0.9], 8, 2),
    ([1.0, -0.5], 6, 2),
    ([2.0, 1.0, 1.0, 1.0], 4, 2),
)
SIGMA, EPSILON, SAMPLES = 1.2, 0.6, 100_000


def gradient(strategy, step, last, rng):
    """The example's gradient in a step, of norm 1, from the last release `[samples, 2]`."""
    if strategy == "same":
        return np.broadcast_to([1.0, 0.0], last.shape)
    if strategy == "in turns":
        return np.broadcast_to([[1.0, 0.0], [0.0, 1.0]][step % 2], last.shape)
    if strategy == "random":
        last = rng.standard_normal(last.shape)
    found = last / np.maximum(np.linalg.norm(last, axis=1, keepdims=True), 1e-9)
    return -found if strategy == "against" else found


def attacked(coefficients, pass_steps, passes, strategy):
    """6-sigma lower limits of delta, of each direction, of an example with adaptive gradients."""
    bands = np.array(tfdp.BandedNoise(coefficients).coefficients)
    found = []
    for with_it in (True, False):
        rng = np.random.default_rng([3, with_it])
        bins = rng.integers(pass_steps, size=SAMPLES)
        last, gradients = np.zeros([SAMPLES, 2]), []
        ratios = np.zeros([SAMPLES, pass_steps])
        for step in range(pass_steps * passes):
            gradients.append(gradient(strategy, step, last, rng))
            means = np.zeros([SAMPLES, pass_steps, 2])
            for back in range(min(len(bands), step + 1)):
                means[:, (step - back) % pass_steps] += bands[back] * gradients[step - back]
            last = SIGMA * rng.standard_normal([SAMPLES, 2])
            if with_it:
                last = last + means[np.arange(SAMPLES), bins]
            inner = np.einsum("nij,nj->ni", means, last)
            ratios += (inner - np.square(means).sum(axis=2) / 2) / SIGMA**2
        loss = np.log(np.exp(ratios).mean(axis=1)) * (1 if with_it else -1)
        terms = np.maximum(1 - np.exp(EPSILON - loss), 0)
        found.append(terms.mean() - 6 * terms.std() / math.sqrt(SAMPLES))
    return found


def deltas(releases):
    """The certified deltas of one release, of each direction."""
    (release,) = releases
    pair = random_allocation.pair(1.0, release.event.noise_multiplier, release.event.steps)
    return [
        composition.delta([(dominating_pairs.Pair(one, one), 1)], EPSILON)
        for one in (pair.remove, pair.add)
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["same", "in turns", "random", "follow", "against"])
@pytest.mark.parametrize("coefficients, pass_steps, passes", BANDS)
def test_no_attack_reaches_more_than_the_bound(coefficients, pass_steps, passes, strategy):
    releases = secret_sets.secret_sets(len(coefficients), pass_steps, passes, SIGMA)
    attacks = attacked(coefficients, pass_steps, passes, strategy)
    for attack, bound in zip(attacks, deltas(releases), strict=True):
        assert 0 < attack <= bound


def test_mutants_are_reached():
    """Mutants: bands that do not overlap, and one pass for all passes."""
    coefficients, pass_steps, passes = BANDS[1]
    (remove, _) = attacked(coefficients, pass_steps, passes, "same")
    for mutant in (
        secret_sets.secret_sets(1, pass_steps, passes, SIGMA),
        secret_sets.secret_sets(3, pass_steps, 1, SIGMA),
    ):
        assert deltas(mutant)[0] < remove


@pytest.mark.parametrize("coefficients, pass_steps, passes", BANDS)
def test_bins_of_a_group_share_no_row(coefficients, pass_steps, passes):
    """The groups of the proof, by the matrix C."""
    bands, steps = len(coefficients), pass_steps * passes
    column = np.array(tfdp.BandedNoise(coefficients).coefficients)
    matrix = np.zeros([steps, steps])
    for step in range(steps):
        matrix[step : step + bands, step] = column[: steps - step]
    means = np.array([matrix[:, i::pass_steps].sum(axis=1) for i in range(pass_steps)])
    size = pass_steps // bands
    times = np.zeros(pass_steps)
    for first in range(pass_steps):
        group = (first + bands * np.arange(size)) % pass_steps
        times[group] += 1
        products = means[group] @ means[group].T
        used = np.abs(matrix[:, np.concatenate([np.arange(g, steps, pass_steps) for g in group])])
        assert (np.count_nonzero(used, axis=1) <= 1).all()
        assert np.abs(products - np.diag(np.diag(products))).max() < 1e-12
        assert np.diag(products).max() <= passes
    assert (times == size).all()
    (release,) = secret_sets.secret_sets(bands, pass_steps, passes, SIGMA)
    assert (release.event.steps, release.count) == (size, 1)
    assert release.event.noise_multiplier == pytest.approx(SIGMA / math.sqrt(passes))


@pytest.mark.slow
def test_known_sets_need_more_noise_and_the_estimate_less():
    noise = tfdp.BandedNoise.optimal(bands=3, steps=24)
    known, most, estimate, cyclic = secret_sets.multipliers(noise, 12, 2, 1.0, 2000, 1)
    assert estimate < most < known and cyclic > 0
    buffered = tfdp.BufferedNoise.optimal(cycle_length=12, cycles=2, buffers=1)
    known, most, estimate, cyclic = secret_sets.multipliers(buffered, 12, 2, 1.0, 2000, 1)
    assert most is None and cyclic is None and estimate < known
    independent = secret_sets.multipliers(tfdp.BandedNoise([1.0]), 12, 2, 1.0, 2000, 1)
    assert independent[2] == pytest.approx(independent[1], rel=0.01)


def parsed(*arguments):
    values = flags.FlagValues()
    secret_sets.define_flags(values)
    values(["secret_sets", *arguments])
    return values


@pytest.mark.slow
def test_the_table():
    sizes = ("--passes=1,2", "--pass_steps=5", "--bands=1,3,8")
    lines = secret_sets.table(parsed("--epsilons=2", "--samples=200", *sizes)).splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    assert [row[1:3] for row in rows[2:]] == [
        [passes, noise] for passes in "12" for noise in ("independent", "3 bands", "4 buffers")
    ]
    assert {len(row) for row in rows} == {11}


@pytest.mark.parametrize(
    "flag", ["passes=0", "passes=1000", "passes=", "bands=1.5", "bands=-1", "epsilons=a"]
)
def test_what_cannot_be_is_refused(flag):
    with pytest.raises(RefusedError, match=f"--{flag.partition('=')[0]}"):
        secret_sets.table(parsed(f"--{flag}"))
