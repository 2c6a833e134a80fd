"""The padded size of batches: almost nothing is cut off, on a data set and on its neighbors."""

import fractions
import math

import numpy as np
import pytest
import scipy.stats
from scipy import special

from tfdp.accounting import sampling
from tfdp.accounting.sampling import (
    FULL,
    NONE,
    PADDED_TRUNCATION_PROBABILITY,
    UNPADDED_TRUNCATION_PROBABILITY,
    PoissonSampling,
    padded_batch_size,
    truncation_probability,
)

_SIZES = [(60000, 256), (60000, 2048), (1437, 64), (64, 16), (50, 8), (11, 10), (10, 10), (1, 1)]


def _exact_tail(rows, n, q):
    """P[Binomial(n, q) > rows], in exact arithmetic."""
    q = fractions.Fraction(q)
    return float(
        sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(max(rows + 1, 0), n + 1))
    )


@pytest.fixture(autouse=True)
def _no_cache():
    """Sizes are cached; a mutant's must not stay."""
    padded_batch_size.cache_clear()
    yield
    padded_batch_size.cache_clear()


_MOST = {NONE: UNPADDED_TRUNCATION_PROBABILITY, FULL: PADDED_TRUNCATION_PROBABILITY}


@pytest.mark.parametrize("padding", _MOST)
@pytest.mark.parametrize(("n", "b"), _SIZES)
def test_padding_is_large_enough_and_no_larger(n, b, padding):
    rows = PoissonSampling(n, b, padding=padding).padded_batch_size
    for size in (n - 1, n, n + 1):
        assert scipy.stats.binom.sf(rows, size, b / n) <= _MOST[padding]
    assert scipy.stats.binom.sf(rows - 1, n + 1, b / n) > _MOST[padding]


@pytest.mark.parametrize(("n", "b"), [*_SIZES[:3], (10**9, 1), (10**9, 10**5), (10**12, 1000)])
def test_the_tail_is_as_precise_where_nothing_but_the_unpadded_is(n, b):
    """Against its terms in logarithms, whose sum no float64 loses."""
    rows, q = PoissonSampling(n, b).padded_batch_size, b / n
    k = np.arange(rows + 1, rows + 2000)
    k = k[k <= n + 1]
    terms = special.betaln(k + 1, n + 2 - k) + math.log(n + 2)
    terms = k * math.log(q) + (n + 1 - k) * math.log1p(-q) - terms
    stated = PoissonSampling(n, b).truncation_probability
    assert math.log(stated) == pytest.approx(special.logsumexp(terms), abs=3e-3)


@pytest.mark.parametrize(("n", "b"), [(64, 16), (50, 8), (11, 10), (10, 10), (1, 1)])
def test_the_charge_covers_both_data_sets_of_a_pair(n, b):
    q = b / n
    for rows in (b - 1, b, n - 1, n, n + 1):
        charge = truncation_probability(rows, n, q)
        tails = [_exact_tail(rows, size, q) for size in (n - 1, n, n + 1)]
        assert all(tail <= charge * (1 + 1e-9) for tail in tails)
        assert charge == pytest.approx(max(tails), rel=1e-9)
    for padding, most in _MOST.items():
        stated = PoissonSampling(n, b, padding=padding)
        largest = max(_exact_tail(stated.padded_batch_size, size, q) for size in (n - 1, n, n + 1))
        assert largest * (1 - 1e-9) <= stated.truncation_probability <= most


def test_a_neighbour_may_fill_more_rows_than_there_are_examples():
    """Eleven rows cut off one in three batches of twelve examples, and of eleven none."""
    assert truncation_probability(11, 11, 10 / 11) == pytest.approx((10 / 11) ** 12)
    assert padded_batch_size(11, 10) == 12
    assert truncation_probability(10, 10, 1.0) == 1
    assert padded_batch_size(10, 10) == 11


def _of_this_data_set_only(rows, dataset_size, sampling_probability):
    return float(scipy.stats.binom.sf(rows, dataset_size, sampling_probability))


@pytest.mark.parametrize("size", _SIZES[3:])
def test_mutant_that_charges_for_this_data_set_only_is_caught(monkeypatch, size):
    monkeypatch.setattr(sampling, "truncation_probability", _of_this_data_set_only)
    monkeypatch.setitem(globals(), "truncation_probability", _of_this_data_set_only)
    with pytest.raises(AssertionError):
        test_the_charge_covers_both_data_sets_of_a_pair(*size)


@pytest.mark.parametrize("size", [(64, 16), (11, 10), (10, 10), (1, 1)])
def test_mutant_that_pads_for_this_data_set_only_is_caught(monkeypatch, size):
    monkeypatch.setattr(sampling, "truncation_probability", _of_this_data_set_only)
    with pytest.raises(AssertionError):
        test_padding_is_large_enough_and_no_larger(*size, FULL)


@pytest.mark.parametrize(("n", "b"), _SIZES)
def test_few_batches_have_more_rows_than_is_usual(n, b):
    stated = PoissonSampling(n, b)
    assert b <= stated.usual_batch_size <= stated.padded_batch_size
    assert scipy.stats.binom.sf(stated.usual_batch_size, n, b / n) < 0.005
    full = PoissonSampling(n, b, padding="full")
    assert full.usual_batch_size == full.padded_batch_size


@pytest.mark.parametrize("exponent", [6, 12, 18, 30, 80])
def test_how_often_padded_batches_are_cut_off_can_be_chosen(exponent):
    chosen = float(f"1e-{exponent}")
    full = PoissonSampling(60000, 256, padding="full", max_truncation_probability=chosen)
    assert full.padded_batch_size == padded_batch_size(60000, 256, chosen)
    assert (
        full.truncation_probability
        <= chosen
        < truncation_probability(full.padded_batch_size - 1, 60000, 256 / 60000)
    )
    assert full.truncation_exponent == exponent
    whole = PoissonSampling(60000, 256, max_truncation_probability=chosen)
    assert whole.padded_batch_size == PoissonSampling(60000, 256).padded_batch_size
    assert whole.truncation_exponent == 0


@pytest.mark.parametrize("value", [0, 1e-5, 3e-12, 1e-81, 1.0, math.nan, "1e-12", None])
def test_other_probabilities_are_refused(value):
    with pytest.raises(ValueError, match=r"`max_truncation_probability`.*power of ten"):
        PoissonSampling(60000, 256, padding="full", max_truncation_probability=value)
