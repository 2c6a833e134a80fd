"""Group privacy: what is released about several examples together, such as all of one person.

A group has up to k examples (or users: units of privacy), which are there in one data set and
contribute nothing in the other. Each is in a Poisson sample independently, so that the number of
those in a batch is Binomial(k, q), and j of them move the sum by at most j times the sensitivity of
one: they are added one after the other, which is a chain of j zero-outs.

**The pair.** Given all other random numbers, and in units of the sensitivity, the release is N(0,
sigma^2 I) without the group and sum_J P[J] N(v_J, sigma^2 I) with it, over the sets J that are
drawn, where |v_J| <= |J|. Let A be a test of level a. By Neyman and Pearson's lemma its power
against N(v_J, sigma^2 I) is at most Phi(Phi^-1(a) + |J| / sigma), and so that against the mixture
is at most sum_j P[j] Phi(Phi^-1(a) + j / sigma): the power of the half-line of level a for the
scalar pair N(0, sigma^2) and sum_j P[j] N(j, sigma^2). So the scalar pair dominates. It does so in
the other direction, too: the trade-off function of the swapped pair is the inverse. Adaptive
composition is that of all dominating pairs.

References:
  Ganesh 2024, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians
  Mechanisms", https://arxiv.org/abs/2401.10294.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import attr
import dp_accounting
import numpy as np

from tfdp.accounting import mechanisms
from tfdp.accounting.bounds import Release
from tfdp.accounting.dominating_pairs import Gaussian, Masses, Pair
from tfdp.base import validation

# More examples would take seconds.
MOST_EXAMPLES = 1000

_EPS = float(np.finfo(float).eps)
# Numbers of examples that are less likely count as an infinite loss, or as no example.
_UNLIKELY = 1e-60
# With less noise for the whole group, or more, the price is that of no noise, or of a batch with
# the whole group.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_MOST_ITERATIONS = 200
# Error of the log of a ratio, in eps: log weights up to 138, sums of up to 1000 terms, and the
# iteration's rest.
_ROUNDINGS = 400


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SampledGroupDpEvent(dp_accounting.DpEvent):
    """A Gaussian mechanism on a Poisson sample, for a group of examples.

    Attributes:
      noise_multiplier: Standard deviation of the noise over the sensitivity of one example.
      sampling_probability: Probability that an example is in the sample.
      group_size: Number of examples in the group.
    """

    noise_multiplier: float
    sampling_probability: float
    group_size: int


def check_group_size(group_size: int) -> int:
    """Returns `group_size` as an int, or raises a ValueError."""
    return int(validation.integer("group_size", group_size, 1, MOST_EXAMPLES))


def group_releases(releases: Sequence[Release], group_size: int) -> tuple[Release, ...]:
    """Returns what releases are for a group of up to so many units of privacy.

    Args:
      releases: What was released.
      group_size: Number of units of privacy in the group; 1 returns `releases`.

    Raises:
      ValueError: `group_size` is out of its range.
      dp_accounting.UnsupportedEventError: An event is neither a Gaussian mechanism, nor one on a
        Poisson sample, nor a composition of these; or an example has one chance in several steps
        (cyclic sampling).

    Example:
      >>> step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))
      >>> (release,) = group_releases([Release(step, 10)], 3)
      >>> release.event
      SampledGroupDpEvent(noise_multiplier=2.0, sampling_probability=0.01, group_size=3)
    """
    group_size = check_group_size(group_size)
    if group_size == 1:
        return tuple(releases)
    return tuple(_for_group(release, group_size) for release in releases)


def _for_group(release: Release, group_size: int) -> Release:
    if release.cycle_length > 1:
        raise _unsupported("cyclic sampling, which draws the examples of a group in several steps")
    event = _event_for_group(release.event, group_size)
    return Release(event, release.count, release.truncation_probability)


def _event_for_group(event: dp_accounting.DpEvent, group_size: int) -> dp_accounting.DpEvent:
    if isinstance(event, dp_accounting.NoOpDpEvent | dp_accounting.NonPrivateDpEvent):
        return event
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = tuple(_event_for_group(part, group_size) for part in event.events)
        return dp_accounting.ComposedDpEvent(parts)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        part = _event_for_group(event.event, group_size)
        return dp_accounting.SelfComposedDpEvent(part, event.count)
    noise, q = event, 1.0
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        noise, q = event.event, event.sampling_probability
    if type(noise) is not dp_accounting.GaussianDpEvent:  # Those derived from it cost less.
        raise _unsupported(repr(event))
    sigma = noise.noise_multiplier
    if q == 0:
        return dp_accounting.NoOpDpEvent()
    if sigma / group_size < _LEAST_NOISE:
        return dp_accounting.NonPrivateDpEvent()
    if q == 1 or sigma > _MOST_NOISE:
        return dp_accounting.GaussianDpEvent(sigma / group_size)
    return SampledGroupDpEvent(sigma, q, group_size)


def _unsupported(what: str) -> dp_accounting.UnsupportedEventError:
    return dp_accounting.UnsupportedEventError(
        "Groups of several examples are priced for Gaussian mechanisms, alone and on Poisson "
        f"samples. Received: {what}. Leave `group_size` at 1, or train with users as the unit of "
        "privacy (`privacy_unit=`)."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class GroupSample:
    """One direction of the pair of N(0, sigma^2) and a mixture of N(j, sigma^2).

    Attributes:
      sigma: Standard deviation of the noise.
      shifts: Numbers j of examples in the sample, increasing [shifts].
      weights: Their probabilities, each rounded once [shifts].
      remove: Whether upper is the mixture.
      infinite: Probability of the mixture that is nowhere in N(0, sigma^2): an infinite loss.
    """

    sigma: float
    shifts: np.ndarray
    weights: np.ndarray
    remove: bool
    infinite: float = 0.0

    @functools.cached_property
    def _at_zero(self) -> float:
        """The weight of no example."""
        return float(self.weights[0]) if self.shifts[0] == 0 else 0.0

    @functools.cached_property
    def _some(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The other shifts, the logs of their weights, and the sum of these weights."""
        some = self.shifts > 0
        weights = self.weights[some]
        return self.shifts[some], np.log(weights), math.fsum(weights)

    def range(self, tail: float) -> tuple[float, float]:
        """The least and the largest loss, but for probabilities of `tail` on either side."""
        noise = Gaussian(self.sigma)
        plain = noise.tail(tail / 2)
        if not self.remove:
            return -self._log_ratio(plain), -self._log_ratio(-plain)
        each = [tail / 2 / len(self.shifts) / weight for weight in self.weights]
        high = [j + noise.tail(part) for j, part in zip(self.shifts, each, strict=True)]
        return self._log_ratio(-plain), self._log_ratio(max(plain, *high))

    @functools.cached_property
    def loss_error(self) -> float:
        """Error of the losses, on average over many releases and apart from 1e-13 of their sum.

        `_edges` solves for the log of the sum over j > 0. It is off by at most `_ROUNDINGS` eps
        (1 + |log|), and by a rounding of the outcome, eps j^2 / sigma^2. The error of the loss is
        at most this times 1 - (weight of 0) where the loss is negative, and more by its own share
        where it is positive. One sign's losses add up to at most the sum plus twice the other's.
        """
        low, high = map(abs, self.range(1e-44))
        likely = self.shifts[self.weights > 1e-44]
        rounding = (float(likely[-1]) / self.sigma) ** 2
        sampled = self._some[2]
        return _EPS * (
            2 * (_ROUNDINGS + rounding) * min(low, high)
            + (_ROUNDINGS + rounding) * sampled
            + rounding * max(low, high)
        )

    def masses(self, losses: np.ndarray) -> Masses:
        """Probabilities between increasing `losses`."""
        noise, edges = Gaussian(self.sigma), self._edges(losses if self.remove else -losses[::-1])
        plain, plain_error = noise.probabilities(edges, 0.0)
        mixed, mixed_error = np.zeros_like(plain), np.zeros_like(plain)
        for shift, weight in zip(self.shifts, self.weights, strict=True):
            part, error = noise.probabilities(edges, float(shift))
            mixed += weight * part
            mixed_error += weight * error
        mixed_error += (len(self.shifts) + 4) * _EPS * mixed
        if self.remove:
            mixed[-1] += self.infinite
            return Masses(mixed, plain, mixed_error, plain_error)
        return Masses(plain[::-1], mixed[::-1], plain_error[::-1], mixed_error[::-1])

    def _log_sum(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log of the part of the ratio with j > 0, and its derivative in z [outcomes]."""
        shifts, logs, _ = self._some
        exponents = logs + shifts * (z[:, np.newaxis] - shifts / 2) / self.sigma**2
        peak = exponents.max(axis=1)
        terms = np.exp(exponents - peak[:, np.newaxis])
        total = terms.sum(axis=1)
        return peak + np.log(total), terms @ shifts / total / self.sigma**2

    def _log_ratio(self, z: float) -> float:
        """Log density of the mixture over that of the noise."""
        log_sum = float(self._log_sum(np.array([z]))[0][0])
        if not self._at_zero:
            return log_sum
        return float(np.logaddexp(math.log(self._at_zero), log_sum))

    def _edges(self, log_ratios: np.ndarray) -> np.ndarray:
        """Returns the outcomes of these log ratios; -infinity below the log of the weight of 0."""
        targets = log_ratios
        if self._at_zero:
            # Ratio minus weight, without overflow, and without cancellation near log ratio 0.
            x = np.minimum(log_ratios, 1.0)
            small = np.where(x < -0.5, np.exp(x) - self._at_zero, np.expm1(x) + self._some[2])
            large = np.log1p(-self._at_zero * np.exp(-np.abs(log_ratios)))
            with np.errstate(divide="ignore"):
                targets = np.where(
                    log_ratios > 1, log_ratios + large, np.log(np.maximum(small, 0.0))
                )
        result = np.full(len(targets), -np.inf)
        finite = np.flatnonzero(targets > -np.inf)
        for part in np.array_split(finite, max(1, len(finite) // 2048)):
            result[part] = self._solved(targets[part])
        return np.maximum.accumulate(result)

    def _solved(self, targets: np.ndarray) -> np.ndarray:
        """Returns the outcomes whose `_log_sum` is finite `targets`."""
        shifts, logs, _ = self._some
        # One term alone is not above the sum, so that the solution is not above this. The sum is
        # convex: Newton's method falls to the solution.
        z = np.min((targets[:, np.newaxis] - logs) * self.sigma**2 / shifts + shifts / 2, axis=1)
        for _ in range(_MOST_ITERATIONS):
            value, slope = self._log_sum(z)
            step = (value - targets) / slope
            z = z - step
            if np.all(np.abs(value - targets) <= _ROUNDINGS / 2 * _EPS * (1 + np.abs(targets))):
                break
        return z


@functools.lru_cache(maxsize=64)
def _weights(q: float, group_size: int) -> np.ndarray:
    """Returns the probabilities of Binomial(group_size, q), each rounded once [group_size + 1]."""
    p, whole = q.as_integer_ratio()
    total = whole**group_size
    parts = [
        math.comb(group_size, j) * p**j * (whole - p) ** (group_size - j)
        for j in range(group_size + 1)
    ]
    return np.array([part / total for part in parts])


@functools.lru_cache(maxsize=64)
def pair(sigma: float, q: float, group_size: int) -> Pair:
    """Returns a pair that dominates a Gaussian mechanism on a Poisson sample, for a group.

    Args:
      sigma: Noise multiplier, for one example.
      q: Probability that an example is in the sample, in (0, 1).
      group_size: Number of examples in the group.
    """
    weights = _weights(q, group_size)
    likely = np.flatnonzero(weights > _UNLIKELY)
    first, last = likely[0], likely[-1]
    kept = weights[first : last + 1].copy()
    # More examples are told more easily than fewer.
    kept[0] += weights[:first].sum() * (1 + 1e-12)
    rest = float(weights[last + 1 :].sum()) * (1 + 1e-12)
    shifts = np.arange(first, last + 1, dtype=float)
    return Pair(
        add=GroupSample(sigma, shifts, kept, False),
        remove=GroupSample(sigma, shifts, kept, True, rest),
    )


@functools.lru_cache(maxsize=64)
def pair_below(sigma: float, q: float, group_size: int) -> Pair:
    """Returns a pair that a group attains, or that tells less: see `pair`."""
    weights = _weights(q, group_size)
    kept = np.flatnonzero(weights > _UNLIKELY)
    shifts, likely = kept.astype(float), weights[kept]
    if kept[0] > 0:
        shifts, likely = np.append(0.0, shifts), np.append(_UNLIKELY, likely)
    # The others count as no example.
    likely[0] += (group_size + 1) * _UNLIKELY
    return Pair(
        add=GroupSample(sigma, shifts, likely, False),
        remove=GroupSample(sigma, shifts, likely, True),
    )


class _SampledGroup(mechanisms.PairedMechanism):
    """Prices groups by their pairs alone."""

    def check(self, event: SampledGroupDpEvent) -> None:
        check_group_size(event.group_size)

    def rdp(
        self, event: SampledGroupDpEvent, observability: str, orders: tuple[float, ...]
    ) -> np.ndarray:
        raise dp_accounting.UnsupportedEventError("Groups are priced by PLD accounting.")

    def upper_pairs(self, event: SampledGroupDpEvent, observability: str) -> tuple[Pair, ...]:
        return (pair(event.noise_multiplier, event.sampling_probability, event.group_size),)

    def attained_pairs(self, event: SampledGroupDpEvent, observability: str) -> tuple[Pair, ...]:
        return (pair_below(event.noise_multiplier, event.sampling_probability, event.group_size),)


mechanisms.register(SampledGroupDpEvent, _SampledGroup())
