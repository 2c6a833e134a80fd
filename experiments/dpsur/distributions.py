"""Distributions of accepted updates on a neighboring pair of data sets, and lower bounds.

The pair is that of `experiments.dpsur.counterexample`. Lower bounds on epsilon are strict: privacy
losses are rounded down, each to the least of its cell of w and that to the grid; what is cut off
counts as no loss; and delta is taken larger by what Fourier transforms may add.
"""

import dataclasses
import math

import numpy as np
from dp_accounting.pld import common
from scipy import special

from experiments.accounting.events import sampled_gaussian
from tfdp.accounting import SelectiveReleaseDpEvent, acceptance_bounds

# P and P' have 1e-32 of their mass further out, in standard deviations.
_TAIL = 12.0
_CELLS = 2**20
# Largest sum of what rounding down to the grid takes from the losses of all updates.
_LOST_TO_ROUNDING = 4e-3
# More than what a Fourier transform adds to delta, per update (against Gaussians of known delta).
_FFT_ROUNDING = 1e-15


@dataclasses.dataclass(frozen=True)
class Instance:
    """The pair of data sets, D and D' = D + {x}, and the mechanism.

    Attributes:
      dataset_size: N: examples of D.
      batch_size: Expected number of examples in the batch of an update.
      noise_multiplier: sigma_t.
      validation_batch_size: Expected number of examples in the batch of a test.
      validation_noise_multiplier: sigma_v.
      threshold: beta.
      cut: The loss falls if |w| > cut * sigma_t.
    """

    dataset_size: int = 60000
    batch_size: int = 2048
    noise_multiplier: float = 2.5
    validation_batch_size: int = 256
    validation_noise_multiplier: float = 1.0
    threshold: float = -1.0
    cut: float = 1.4

    @property
    def q(self) -> float:
        """Probability that x is in the batch of an update."""
        return self.batch_size / self.dataset_size

    @property
    def validation_q(self) -> float:
        """Probability that x is in the batch of a test."""
        return self.validation_batch_size / self.dataset_size

    @property
    def acceptance_bounds(self) -> tuple[float, float]:
        """A and B."""
        return acceptance_bounds(self.validation_noise_multiplier, self.threshold)

    @property
    def event(self) -> SelectiveReleaseDpEvent:
        """One accepted update."""
        return SelectiveReleaseDpEvent(
            sampled_gaussian(self.q, self.noise_multiplier),
            sampled_gaussian(self.validation_q, self.validation_noise_multiplier),
            self.threshold,
        )

    def acceptance(self, example: bool) -> float:
        """Z or, with x, Z': the probability that an attempt is accepted."""
        return float(self._accepted_below(np.array(math.inf), example))

    def cdf(self, w: np.ndarray, example: bool) -> np.ndarray:
        """Distribution function of an accepted update, without or with x: that of p a / Z."""
        return self._accepted_below(w, example) / self.acceptance(example)

    def unselected_cdf(self, w: np.ndarray, example: bool) -> np.ndarray:
        """Distribution function of an update before the test."""
        below = special.ndtr(w / self.noise_multiplier)
        if not example:
            return below
        return (1 - self.q) * below + self.q * special.ndtr((w - 1) / self.noise_multiplier)

    def log_ratio(self, w: np.ndarray) -> np.ndarray:
        """Log of the density of an accepted update with x over that without.

        The acceptance probabilities of both are the same, and cancel; their masses do not.
        """
        shifted = (2 * w - 1) / (2 * self.noise_multiplier**2)
        rest = math.log1p(-self.q) if self.q < 1 else -math.inf
        masses = math.log(self.acceptance(False) / self.acceptance(True))
        return np.logaddexp(rest, math.log(self.q) + shifted) + masses

    def edges(self) -> np.ndarray:
        """Returns the edges of the cells into which w is divided; a is constant in each."""
        far, jump = _TAIL * self.noise_multiplier, self.cut * self.noise_multiplier
        return np.sort(np.append(np.linspace(-far, 1 + far, _CELLS), [-jump, jump]))

    def masses(self, edges: np.ndarray, example: bool) -> np.ndarray:
        """Returns the cells' probabilities for an accepted update, precise in the tails too."""
        low, high = self.acceptance_bounds
        middle = (edges[1:] + edges[:-1]) / 2
        accepted = np.where(np.abs(middle) > self.cut * self.noise_multiplier, high, low)
        masses = _normal_masses(edges / self.noise_multiplier)
        if example:
            shifted = _normal_masses((edges - 1) / self.noise_multiplier)
            masses = (1 - self.q) * masses + self.q * shifted
        return masses * accepted / self.acceptance(example)

    def _accepted_below(self, w: np.ndarray, example: bool) -> np.ndarray:
        low, high = self.acceptance_bounds
        edge = self.cut * self.noise_multiplier

        def of(w: np.ndarray) -> np.ndarray:
            return self.unselected_cdf(w, example)

        inside = of(np.clip(w, -edge, edge)) - of(np.array(-edge))
        return high * of(w) - (high - low) * inside


def _normal_masses(z: np.ndarray) -> np.ndarray:
    """Standard normal probabilities between neighbors of z."""
    below, above = np.diff(special.ndtr(z)), -np.diff(special.ndtr(-z))
    return np.where(z[1:] > 0, above, below)


def renyi(instance: Instance, order: float) -> float:
    """Bounds the Renyi divergence of an accepted update with x from one without, from below.

    Of every cell of w the masses are taken, as if only the cell were released.
    """
    edges = instance.edges()
    p, r = (np.log(instance.masses(edges, example)) for example in (True, False))
    return float(special.logsumexp(order * p + (1 - order) * r)) / (order - 1)


def renyi_of_test(instance: Instance, order: float) -> float:
    """Bounds the Renyi divergence of the test's noisy number, given that it passed, from below.

    On D the clipped change of the loss is C_v; an example that is in the batch makes it -C_v.
    Theorem 5.5 says that it is at most that of the sampled Gaussian, before any selection.
    """
    sigma, q = instance.validation_noise_multiplier, instance.validation_q
    x = np.linspace(-_TAIL * sigma - order, (instance.threshold - 1) / 2, _CELLS)
    without, moved = (_normal_masses(z / sigma) for z in (x, x + 1))
    with_example = (1 - q) * without + q * moved
    p, r = (np.log(m / m.sum()) for m in (with_example, without))
    return float(special.logsumexp(order * p + (1 - order) * r)) / (order - 1)


def least_epsilon(instance: Instance, updates: int, delta: float) -> float:
    """Returns a lower bound on epsilon of `updates` accepted updates."""
    return max(_least_epsilon(instance, updates, delta, example) for example in (False, True))


def _least_epsilon(instance: Instance, updates: int, delta: float, example: bool) -> float:
    """Returns the same in one direction: with x (`example`) against without, or the reverse."""
    interval = min(1e-4, _LOST_TO_ROUNDING / updates)
    edges = instance.edges()
    losses = instance.log_ratio(edges) if example else -instance.log_ratio(edges)
    # The loss is monotone in w: it is least at an end of each cell.
    cells = np.floor(np.minimum(losses[:-1], losses[1:]) / interval).astype(np.int64)
    first = int(cells.min())
    pmf = np.bincount(cells - first, weights=instance.masses(edges, example))
    offset, pmf = common.self_convolve(pmf, updates, _FFT_ROUNDING)
    losses = (first * updates + offset + np.arange(len(pmf))) * interval
    # delta(epsilon) = sum over losses > epsilon of mass * (1 - e^(epsilon - loss)).
    above = np.cumsum(pmf[::-1])[::-1]
    discounted = np.cumsum((pmf * np.exp(-losses))[::-1])[::-1]
    deltas = above - np.exp(losses) * discounted
    reached = np.flatnonzero(deltas >= delta + (updates + 1) * _FFT_ROUNDING)
    return max(0.0, float(losses[reached[-1]])) if len(reached) else 0.0
