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


class ComposedGaussian:
    """Epsilon of many sampled Gaussians in one direction, exact to about seven digits.

    With M(s) = E[e^(s loss)] under the upper distribution, delta is the inverse Laplace transform
    of M(s)^steps / (s (s + 1)) at epsilon: an integral over a line Re s = tilt > 0, where the tilt
    makes the integrand peak at the line's real point. Both integrals are by the trapezoidal rule,
    and there is no grid of losses. Losses of probability 1e-8 delta in all are left out.
    """

    def __init__(self, q, sigma, steps, delta, remove):
        self.steps, self.log_delta, tail = steps, math.log(delta), 1e-8 * delta / steps
        high = -sigma * special.ndtri(tail / 2)
        shifted = 1 - sigma * special.ndtri(min(1.0, tail / (2 * q)))
        z = np.arange(-high, max(high, shifted) if remove else high, min(sigma / 40, sigma**2 / 12))
        mixture, p = log_densities(z, q, sigma)
        self.log_p = (mixture if remove else p) + math.log(z[1] - z[0])
        ratio = (2 * z - 1) / (2 * sigma**2)
        change = q * np.expm1(np.minimum(ratio, 30.0))
        self.loss = np.where(np.abs(change) < 0.5, np.log1p(np.maximum(change, -0.9)), mixture - p)
        self.loss = self.loss if remove else -self.loss

    def _tilted(self, tilt):
        log_terms = self.log_p + tilt * self.loss
        peak = log_terms.max()
        p = np.exp(log_terms - peak)
        mean = p @ self.loss / p.sum()
        return peak + math.log(p.sum()), p / p.sum(), mean

    def _saddle(self, log_tilt):
        """Log of the saddle-point approximation of delta, over delta."""
        tilt = math.exp(log_tilt)
        log_m, p, mean = self._tilted(tilt)
        variance = self.steps * (p @ (self.loss - mean) ** 2)
        log_delta = self.steps * (log_m - tilt * mean) - math.log(tilt * (1 + tilt))
        return log_delta - math.log(2 * math.pi * variance + tilt**-2) / 2 - self.log_delta

    def epsilon(self):
        """Exact epsilon; None if the integrand falls too slowly, or has too few points."""
        if self._saddle(-6.0) < 0:
            tilt = 0.1
        else:
            tilt = math.exp(optimize.brentq(self._saddle, -6.0, 18.0, xtol=1e-2))
        log_m, p, mean = self._tilted(tilt)
        deviation = math.sqrt(self.steps * (p @ (self.loss - mean) ** 2))
        step = min(tilt / 10, 0.25 / deviation)
        u, pieces = step * np.arange(2048), []
        for part in u.reshape(16, 128):
            waves = np.exp(1j * np.outer(part, self.loss - mean))
            pieces.append(self.steps * np.log(waves @ p))
            if pieces[-1][-1].real < -25:
                break
        log_characteristic = np.concatenate(pieces)
        u = u[: len(log_characteristic)]
        if log_characteristic[-1].real > -25:
            return None

        def log_ratio(epsilon, every=1):
            s = tilt + 1j * u
            shift = 1j * u * (self.steps * mean - epsilon)
            terms = (np.exp(log_characteristic + shift) / (s * (s + 1))).real
            total = (terms[::every].sum() - terms[0] / 2) * every * step / math.pi
            return (
                self.steps * log_m - tilt * epsilon + math.log(max(total, 1e-300)) - self.log_delta
            )

        if log_ratio(0.0) <= 0:
            return 0.0
        high = 1e-3
        while log_ratio(high) > 0:
            high *= 2
        epsilon = optimize.brentq(log_ratio, 0.0, high, xtol=1e-12)
        # Half of the points must say the same.
        return epsilon if abs(log_ratio(epsilon, 2)) < 1e-6 * tilt * epsilon + 1e-9 else None


def composed_epsilon(q, sigma, steps, delta):
    """Exact epsilon of many sampled Gaussians; None where it is not known."""
    if steps == 1:
        return sampled_gaussian_epsilon(q, sigma, delta)
    values = [ComposedGaussian(q, sigma, steps, delta, r).epsilon() for r in (False, True)]
    return None if None in values else max(values)


def _legendre(edges, count):
    """Nodes and weights of Gauss and Legendre's rule in each of the intervals."""
    x, weights = np.polynomial.legendre.leggauss(count)
    middle, half = (edges[1:] + edges[:-1])[:, None] / 2, np.diff(edges)[:, None] / 2
    return (middle + half * x).ravel(), (half * weights).ravel()


def rarely_large_delta(epsilon, q, sigma, steps, remove=True, end=200):
    """Delta of many sampled Gaussians of which few have large losses, in one direction.

    The integral of `ComposedGaussian`, up to Im s = `end`. Large losses make waves that fall slowly
    and follow the loss, not the noise: both integrals are by Gauss and Legendre's rule, the inner
    one in intervals of the loss.

    Returns:
      Delta, or None if what is left out may be more than 1e-6 of it.
    """
    low, high, width = -13 * sigma, 1 + 13 * sigma, 10 / end
    top = math.log1p(q * math.expm1((2 * high - 1) / (2 * sigma**2)))
    losses = np.concatenate([np.geomspace(1e-9, width, 60), np.arange(width, top, width)])
    of_losses = sigma**2 * np.log((np.expm1(losses) + q) / q) + 0.5
    edges = np.concatenate([np.arange(low, high, sigma / 4), [high], of_losses])
    z, weights = _legendre(np.unique(np.clip(edges, low, high)), 40)
    change = q * np.expm1((2 * z - 1) / (2 * sigma**2))
    p = weights * np.exp(-((z / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))
    p, loss = (p * (1 + change), np.log1p(change)) if remove else (p, -np.log1p(change))

    def log_power(s):
        """Log of M(s)^steps."""
        parts = np.array_split(np.atleast_1d(s), max(1, np.size(s) // 64))
        return steps * np.log1p(
            np.concatenate([(np.exp(np.outer(t, loss)) - 1) @ p for t in parts])
        )

    def log_peak(tilt):
        with np.errstate(over="ignore"):
            return log_power(tilt)[0] - tilt * epsilon - math.log(tilt * (1 + tilt))

    tilt = optimize.minimize_scalar(log_peak, bounds=(0.05, 30.0), method="bounded").x
    u, widths = _legendre(np.arange(0, end + 0.5), 14)
    s = tilt + 1j * u
    log_terms = log_power(s) - s * epsilon
    total = (np.exp(log_terms) / (s * (s + 1))).real @ widths / math.pi
    rest = math.exp(log_terms[-1].real) / (math.pi * end)
    return float(total) if rest < 1e-6 * total else None


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

    def distributions(self, a, b):
        """Masses of the accepted update without the example and with it, not normalized."""
        return self.p * a, self.p_with * ((1 - self.validation_q) * a + self.validation_q * b)

    def divergence(self, a, b, order, remove=False):
        without, with_it = self.distributions(a, b)
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
