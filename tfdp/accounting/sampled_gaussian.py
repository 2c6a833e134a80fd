"""The privacy of one Poisson-sampled Gaussian: the law that every private step is priced by.

With an example x the batch sum is, in units of the sensitivity and along x's gradient, z drawn from
P' = (1 - q) N(0, sigma^2) + q N(1, sigma^2); without it from P = N(0, sigma^2). Their ratio is
r(z) = 1 - q + q exp((2 z - 1) / (2 sigma^2)).

dp_accounting computes the same quantities value by value, in seconds where arrays take
milliseconds; the tests compare the two. 0 < q < 1 and sigma > 0 everywhere.
"""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special

# P[|z| > 10 sigma] is 1.5e-23. What lies further out counts as infinite loss.
_TAIL = 10.0


def log_moment(q: float, sigma: float, order: float) -> float:
    """The log of E_P[r(z)^order], which is (order - 1) times the Renyi divergence of P' from P.

    The divergence of P from P' is never larger. By the trapezoidal rule, whose error on an analytic
    integrand is exponentially small in the step h: exp(-2 pi^2 sigma^2 / h^2) by the Gaussian
    factor, and exp(-2 pi^2 sigma^2 / h) by the zeros of r, at pi sigma^2 from the real line. Both
    are below 1e-17 here.

    Args:
      q: Sampling probability.
      sigma: Noise multiplier. The cost grows as 1 / sigma^2 below 0.25.
      order: Renyi order > 1. The cost grows with it.

    Source: Mironov, Talwar, Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian
    Mechanism", Theorem 4 and section 3.3.

    Example:
      >>> round(log_moment(0.01, 1.0, 2.0), 9)  # log(1 + q^2 (e - 1))
      0.000171813
    """
    step = min(sigma / 8, sigma**2 / 2)
    z = np.arange(-12 * sigma, order + 12 * sigma, step)
    log_terms = order * _log_ratio(z, q, sigma) - z**2 / (2 * sigma**2)
    peak = log_terms.max()
    total = np.exp(log_terms - peak).sum() * step / (sigma * math.sqrt(2 * math.pi))
    return float(peak + math.log(total))


def privacy_loss(
    q: float, sigma: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """The privacy-loss distributions of P' against P and of P against P', rounded upwards.

    Args:
      q: Sampling probability.
      sigma: Noise multiplier.
      interval: Width of the grid of privacy losses, in units of epsilon.

    Source: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots", Algorithm 1.

    Example:
      >>> round(privacy_loss(0.01, 1.0, 1e-4).get_epsilon_for_delta(1e-5), 2)
      0.2
    """
    low, high = _log_ratio(np.array([-_TAIL * sigma, 1 + _TAIL * sigma]), q, sigma)
    return privacy_loss_distribution.PrivacyLossDistribution(
        pessimistic_pmf(lambda e: _removed_hockey_stick(e, q, sigma), low, high, interval),
        pessimistic_pmf(lambda e: _added_hockey_stick(e, q, sigma), -high, -low, interval),
    )


def pessimistic_pmf(
    hockey_stick: Callable[[np.ndarray], np.ndarray], first: float, last: float, interval: float
) -> pld_pmf.PLDPmf:
    """A distribution of privacy losses on a grid whose delta is nowhere below `hockey_stick`.

    Args:
      hockey_stick: delta at each of an array of epsilons, convex in e^epsilon.
      first: Least privacy loss.
      last: Largest privacy loss but for an infinite one.
      interval: Width of the grid.
    """
    cells = np.arange(math.floor(first / interval), math.ceil(last / interval) + 1)
    deltas = np.clip(hockey_stick(cells * interval), 0, 1)
    # Rounding must not make delta grow with epsilon: take the larger.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, int(cells[0]), int(cells[-1]), deltas
    )
    # Composing a sparse one T times first computes size^T, exactly: minutes for T = 10^8.
    return pmf.to_dense_pmf()


def _log_ratio(z: np.ndarray, q: float, sigma: float) -> np.ndarray:
    return np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))


def _removed_hockey_stick(epsilons: np.ndarray, q: float, sigma: float) -> np.ndarray:
    """sup_S P'(S) - e^epsilon P(S): S is z > t with r(t) = e^epsilon, or everything."""
    everything = epsilons <= math.log1p(-q)
    log_excess = _log_excess(np.where(everything, 0.0, epsilons), q)
    t = sigma**2 * (log_excess - math.log(q)) + 0.5
    part = q * special.ndtr((1 - t) / sigma) - np.exp(log_excess + special.log_ndtr(-t / sigma))
    return np.where(everything, -np.expm1(np.minimum(epsilons, 0)), part)


def _added_hockey_stick(epsilons: np.ndarray, q: float, sigma: float) -> np.ndarray:
    """sup_S P(S) - e^epsilon P'(S): S is z < t with r(t) = e^-epsilon, or nothing."""
    nothing = epsilons >= -math.log1p(-q)
    epsilons = np.where(nothing, 0.0, epsilons)
    t = sigma**2 * (_log_excess(-epsilons, q) - math.log(q)) + 0.5
    base = q - (1 - q) * np.expm1(epsilons)  # 1 - (1 - q) e^epsilon
    log_shifted = epsilons + special.log_ndtr((t - 1) / sigma)
    return np.where(nothing, 0.0, base * special.ndtr(t / sigma) - q * np.exp(log_shifted))


def _log_excess(epsilons: np.ndarray, q: float) -> np.ndarray:
    """log(e^epsilon - (1 - q)) for epsilon > log(1 - q), without overflow or cancellation."""
    large = epsilons > 1
    small = np.log(np.expm1(np.where(large, 0.0, epsilons)) + q)
    return np.where(large, epsilons + np.log1p(-(1 - q) * np.exp(-np.abs(epsilons))), small)
