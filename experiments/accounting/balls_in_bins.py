"""Monte Carlo estimates of epsilon for correlated noise on sets that are drawn once, in secret.

An example draws one of t bins, uniformly, and takes part in steps i, i + t, i + 2t, ... of all
passes. Its noisy sums, times C, are compared on neighboring data sets (docs/correlated_noise.md):

    P = mean over i of N(m_i, sigma^2 I),  Q = N(0, sigma^2 I),  m_i = C e_i + C e_(i+t) + ...

These are **estimates**, and of this pair alone: no ledger counts them. An example attains the pair
whose gradient is the same in each step. Choquette-Choo et al., 2024, "Near Exact Privacy
Amplification for Matrix Mechanisms" (https://arxiv.org/abs/2410.06266), compare such a pair, for C
without negative entries.

Only the inner products u_i = <m_i, z> of an outcome z matter: normal numbers of t dimensions,
however many the passes. Outcomes are drawn where the loss is large (importance sampling), from a
mixture of Gaussians whose means are `own` m_i + `all` mean(m).
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.optimize

from tfdp.correlated_noise import CorrelatedNoise

_CHUNK = 2 * 10**6  # Numbers of an array.


class Estimate(NamedTuple):
    """An estimate from random samples, and its standard error."""

    value: float
    standard_error: float


class Tilt(NamedTuple):
    """A mixture over i of N(own m_i + all mean(m), sigma^2 I). (1, 0) is P, and (0, 0) is Q."""

    own: float
    all: float


class Losses(NamedTuple):
    """Privacy losses of outcomes that are drawn from several mixtures, as many from each.

    Attributes:
      values: Privacy losses `[mixtures, samples]`.
      weights: Density of the first distribution of the pair over that of the mean of all mixtures.
    """

    values: np.ndarray
    weights: np.ndarray

    def delta(self, epsilon: float) -> Estimate:
        """Estimates the hockey-stick divergence at `epsilon`."""
        terms = self.weights * np.maximum(-np.expm1(np.minimum(epsilon - self.values, 0.0)), 0.0)
        mixtures, samples = terms.shape
        variance = terms.var(axis=1, ddof=1).sum() / mixtures**2 / samples
        return Estimate(float(terms.mean()), math.sqrt(variance))


class Pair:
    """The distributions P and Q.

    Args:
      means: The means m_i, of non-negative entries `[bins, steps]`.
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
    """

    def __init__(self, means: np.ndarray, noise_multiplier: float):
        if np.min(means) < 0:
            raise ValueError(
                "Argument `means` must be without negative entries. "
                f"Received: {np.min(means):g} as the least."
            )
        self._variance = noise_multiplier**2
        self._products = means @ means.T
        values, vectors = np.linalg.eigh(self._products)
        self._root = vectors * np.sqrt(np.maximum(values, 0.0))
        self._squares = np.diag(self._products)
        self._with_mean = self._products.mean(axis=1)

    @property
    def bins(self) -> int:
        """The number of bins, t."""
        return len(self._products)

    def tilts(self, removes: bool, epsilon: float) -> list[Tilt]:
        """Returns mixtures some of which have losses above `epsilon` often."""
        # So much raises all u_i, and with them the loss, by epsilon.
        shift = self._variance * epsilon / self._with_mean.mean()
        if not removes:
            return [Tilt(0.0, -share * shift) for share in (0.0, 0.5, 1.0, 1.5)]
        # So much of one m_i alone does it.
        most = 0.5 + self._variance * (epsilon + math.log(self.bins)) / self._squares.mean()
        own = max(1.0, most)
        half = (1 + own) / 2
        pairs = [(1, 0), (half, 0), (own, 0), (1, 0.5), (1, 1), (half, 0.5)]
        return [Tilt(a, share * shift) for a, share in pairs]

    def losses(
        self, removes: bool, epsilon: float, samples: int, rng: np.random.Generator
    ) -> Losses:
        """Draws privacy losses, many of them above `epsilon`.

        Args:
          removes: Whether of P against Q; else of Q against P.
          epsilon: Where delta is to be precise.
          samples: Number of samples of each mixture, at least 2.
          rng: Source of the random numbers.
        """
        tilts = self.tilts(removes, epsilon)
        rows = max(1, _CHUNK // self.bins)
        sizes = [min(rows, samples - start) for start in range(0, samples, rows)]
        values, weights = [], []
        for tilt in tilts:
            chunks = [self._weighed(self._draw(tilt, size, rng), tilts, removes) for size in sizes]
            values.append(np.concatenate([loss for loss, _ in chunks]))
            weights.append(np.concatenate([weight for _, weight in chunks]))
        return Losses(np.array(values), np.array(weights))

    def _draw(self, tilt: Tilt, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the inner products u of outcomes `[size, bins]`."""
        bins = rng.integers(self.bins, size=size)
        noise = rng.standard_normal([size, self.bins]) @ self._root.T
        return (
            tilt.own * self._products[bins]
            + tilt.all * self._with_mean
            + math.sqrt(self._variance) * noise
        )

    def _weighed(
        self, products: np.ndarray, tilts: list[Tilt], removes: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the losses and weights of outcomes."""
        loss = self._log_ratio(Tilt(1.0, 0.0), products)
        drawn = _log_mean_exp(np.array([self._log_ratio(t, products) for t in tilts]).T)
        return (loss, np.exp(loss - drawn)) if removes else (-loss, np.exp(-drawn))

    def _log_ratio(self, tilt: Tilt, products: np.ndarray) -> np.ndarray:
        """Returns the logarithm of the density of a mixture over that of Q."""
        square = (
            tilt.own**2 * self._squares
            + 2 * tilt.own * tilt.all * self._with_mean
            + tilt.all**2 * self._with_mean.mean()
        )
        exponents = -square / 2 + tilt.all * products.mean(axis=1, keepdims=True)
        exponents = (tilt.own * products + exponents) / self._variance
        return _log_mean_exp(exponents)


def _log_mean_exp(values: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the mean of e^values over the last axis."""
    most = values.max(axis=-1)
    return most + np.log(np.exp(values - most[..., np.newaxis]).mean(axis=-1))


def means(noise: CorrelatedNoise | None, pass_steps: int, passes: int) -> np.ndarray:
    """Returns the means m_i of an example with the same gradient in each step `[bins, steps]`.

    Args:
      noise: Correlated noise; None: independent.
      pass_steps: Steps of a pass, the number of bins.
      passes: Number of passes, in which the noise does not begin anew.
    """
    steps = pass_steps * passes
    if noise is not None and noise.renewal is not None and noise.renewal < steps:
        raise ValueError(
            f"Argument `passes` must be at most {noise.renewal // pass_steps}, after which the "
            f"noise begins anew. Received: {passes}."
        )
    column = np.zeros(steps)
    coefficients = np.array([1.0] if noise is None else noise.coefficients)[:steps]
    column[: len(coefficients)] = coefficients
    first = np.zeros(steps)
    for start in range(0, steps, pass_steps):
        first[start:] += column[: steps - start]
    return np.array([np.pad(first[: steps - i], (i, 0)) for i in range(pass_steps)])


def estimate_deltas(
    means: np.ndarray, noise_multiplier: float, epsilon: float, samples: int, seed: int
) -> tuple[Estimate, Estimate]:
    """Estimates delta of P against Q, and of Q against P.

    Args:
      means: The means m_i `[bins, steps]`.
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      epsilon: The epsilon.
      samples: Number of samples of each mixture that is drawn from.
      seed: Seed of the random numbers.
    """
    rng, pair = np.random.default_rng(seed), Pair(means, noise_multiplier)
    remove, add = (pair.losses(removes, epsilon, samples, rng) for removes in (True, False))
    return remove.delta(epsilon), add.delta(epsilon)


def estimate_epsilon(
    means: np.ndarray, noise_multiplier: float, delta: float, samples: int, seed: int
) -> float:
    """Estimates epsilon: the larger of both directions. It is no bound.

    Args:
      means: The means m_i `[bins, steps]`.
      noise_multiplier: Standard deviation of the noise over the sensitivity, positive.
      delta: The delta.
      samples: Number of samples of each mixture that is drawn from.
      seed: Seed of the random numbers.
    """
    rng, pair = np.random.default_rng(seed), Pair(means, noise_multiplier)
    guess = 1.0
    for number in (samples // 10 + 2, samples // 10 + 2, samples):  # Each where the last one was.
        drawn = [pair.losses(removes, guess, number, rng) for removes in (True, False)]

        def excess(epsilon: float, drawn: list[Losses] = drawn) -> float:
            return max(losses.delta(epsilon).value for losses in drawn) - delta

        guess = 0.0
        if excess(0.0) > 0:
            most = max(losses.values.max() for losses in drawn)  # Delta is 0 there.
            guess = float(scipy.optimize.brentq(excess, 0.0, most, xtol=1e-6))
    return guess


def estimate_noise(
    means: np.ndarray, epsilon: float, delta: float, samples: int, seed: int, most: float
) -> float:
    """Estimates the least noise multiplier for an epsilon, up to `most`, to 0.1%.

    Args:
      means: The means m_i `[bins, steps]`.
      epsilon: The epsilon.
      delta: The delta.
      samples: Number of samples of each mixture that is drawn from.
      seed: Seed of the random numbers, the same for each noise that is tried.
      most: A noise multiplier that is enough.
    """

    def excess(log_noise: float) -> float:
        found = estimate_deltas(means, math.exp(log_noise), epsilon, samples, seed)
        return math.log(max(max(estimate.value for estimate in found), 1e-300) / delta)

    high = math.log(most)
    low = high - 0.5
    while excess(low) < 0:
        low -= 0.5
    if excess(high) > 0:  # By chance, where `most` is the least.
        high += 0.05
    return math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-3))
