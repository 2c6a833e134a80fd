"""Slow, independent numbers that the accountants are compared with."""

import itertools
import math

import numpy as np
from scipy import integrate, optimize, special


def log_densities(z, q, sigma):
    """Log densities at z of P' = (1 - q) N(0, sigma^2) + q N(1, sigma^2) and P = N(0, sigma^2)."""
    norm = math.log(sigma * math.sqrt(2 * math.pi))
    p = -(z**2) / (2 * sigma**2) - norm
    shifted = -((z - 1) ** 2) / (2 * sigma**2) - norm
    mixture = np.logaddexp(math.log1p(-q) + p, math.log(q) + shifted) if q < 1 else shifted
    return mixture, p


def _integrate(log_integrand, low, high):
    """log of the integral of exp(log_integrand): in pieces, and scaled by the peak."""
    z = np.linspace(low, high, 4001)
    peak = float(np.max(log_integrand(z)))
    pieces = np.linspace(low, high, 41)
    total = sum(
        integrate.quad(lambda x: math.exp(log_integrand(x) - peak), a, b, epsabs=0, epsrel=1e-11)[0]
        if np.max(log_integrand(np.linspace(a, b, 101))) > peak - 60
        else 0.0
        for a, b in itertools.pairwise(pieces)
    )
    return peak + math.log(total)


def renyi_divergence(q, sigma, order, remove=False):
    """Renyi divergence of P' from P ("add"), or of P from P' ("remove")."""

    def log_integrand(z):
        mixture, p = log_densities(z, q, sigma)
        return order * p + (1 - order) * mixture if remove else order * mixture + (1 - order) * p

    span = 12 * sigma
    return _integrate(log_integrand, -span - 1, order + span) / (order - 1)


def hockey_stick(q, sigma, epsilon):
    """The larger of both hockey-stick divergences, at epsilon >= 0: delta of one step."""

    def excess(z, sign):
        mixture, p = log_densities(z, q, sigma)
        above, below = (mixture, p) if sign > 0 else (p, mixture)
        gap = epsilon + below - above
        return math.exp(above) * -math.expm1(gap) if gap < 0 else 0.0

    def delta(sign):
        # Where the integrand stops being zero.
        def margin(z):
            mixture, p = log_densities(z, q, sigma)
            return sign * (mixture - p) - epsilon

        low, high = -14 * sigma, 1 + 14 * sigma
        if margin(low) * margin(high) >= 0:
            kinks = [low, high]
        else:
            kink = optimize.brentq(margin, low, high, xtol=1e-14)
            kinks = [kink, high] if sign > 0 else [low, kink]
        grid = np.linspace(*kinks, 60)
        return sum(
            integrate.quad(excess, a, b, args=(sign,), epsabs=1e-18, epsrel=1e-11)[0]
            for a, b in itertools.pairwise(grid)
        )

    return max(delta(+1), delta(-1))


def sampled_gaussian_epsilon(q, sigma, delta):
    """Exact epsilon of one step."""
    if hockey_stick(q, sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while hockey_stick(q, sigma, high) > delta:
        high *= 2
    return optimize.brentq(lambda e: hockey_stick(q, sigma, e) - delta, 0, high, xtol=1e-9)


def gaussian_epsilon(sigma, delta):
    """Exact epsilon of one Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""

    def log_ratio(epsilon):
        a = special.log_ndtr(1 / (2 * sigma) - epsilon * sigma)
        b = epsilon + special.log_ndtr(-1 / (2 * sigma) - epsilon * sigma)
        return a + math.log(-math.expm1(b - a)) - math.log(delta)

    if log_ratio(1e-12) <= 0:
        return 0.0
    return optimize.brentq(log_ratio, 1e-12, 1 / sigma**2 + 60 / sigma, xtol=1e-12)


class SelectedUpdate:
    """Renyi divergences of one accepted update, for given acceptance probabilities on cells of w.

    Cells are seen instead of w, so that every value is below that of the best functions of w.
    """

    def __init__(self, q, sigma, validation_q, cells=240):
        edges = np.concatenate([[-np.inf], np.linspace(-6, 6, cells - 1) * sigma, [np.inf]])
        self.p = np.diff(special.ndtr(edges / sigma))
        shifted = np.diff(special.ndtr((edges - 1) / sigma))
        self.p_with = (1 - q) * self.p + q * shifted
        self.validation_q = validation_q

    def laws(self, a, b):
        """Masses of the accepted update without the example and with it, not normalized."""
        return self.p * a, self.p_with * ((1 - self.validation_q) * a + self.validation_q * b)

    def divergence(self, a, b, order, remove=False):
        without, with_it = self.laws(a, b)
        num, den = (without, with_it) if remove else (with_it, without)
        terms = order * np.log(num / num.sum()) + (1 - order) * np.log(den / den.sum())
        return special.logsumexp(terms) / (order - 1)

    def search(self, low, high, order, remove, rng, starts=6):
        """The largest divergence found: from random intervals, changing cell after cell."""
        best = 0.0
        for _ in range(starts):
            best = max(best, self._climb(low, high, order, remove, rng))
        return best

    def _climb(self, low, high, order, remove, rng):
        n, corners = len(self.p), np.array([(a, b) for a in (low, high) for b in (low, high)])
        a_with = (1 - self.validation_q) * corners[:, 0] + self.validation_q * corners[:, 1]
        without, with_it = self.p[:, None] * corners[:, 0], self.p_with[:, None] * a_with
        num, den = (without, with_it) if remove else (with_it, without)
        # What each cell adds to N, Z and Z' at each corner.
        parts = np.stack([num * (num / den) ** (order - 1), den, num], axis=2)
        choice = rng.integers(4, size=2)[np.digitize(np.arange(n), [rng.integers(n)])]
        total = parts[np.arange(n), choice].sum(axis=0)
        weights = np.array([1, order - 1, -order])
        value, gain = weights @ np.log(total), np.inf
        while gain > 1e-9 * abs(value):
            begin = value
            for i in rng.permutation(n):
                options = total - parts[i, choice[i]] + parts[i]
                values = np.log(options) @ weights
                if values.max() > value:
                    choice[i] = values.argmax()
                    total, value = options[choice[i]], values[choice[i]]
            gain = value - begin
        return value / (order - 1)
