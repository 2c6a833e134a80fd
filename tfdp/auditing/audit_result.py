"""Results of audits: what they show, at which confidence, in a table and a picture."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp.accounting.bounds import tightest_epsilon
from tfdp.accounting.ledger import PrivacyLedger
from tfdp.auditing import plots, statistics
from tfdp.auditing.recording import (
    Recording,
    deviation_of_updates,
    noise_p_value,
    repetition_p_value,
)

# Below it, what was seen is no chance: an audit that finds nothing wrong says so that rarely.
_ALARM = 1e-6
_LARGEST_DEVIATION = 0.05
_POINTS = 6


class AuditError(RuntimeError):
    """Error of a training that leaks more than its ledger says."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that must hold for epsilon to hold.

    Attributes:
      name: What must hold.
      passed: Whether it did.
      seen: What was seen.
    """

    name: str
    passed: bool
    seen: str


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Result of an audit: lower bounds on the epsilon of a training, beside the ledger's.

    Attributes:
      in_scores: Scores of the canaries that were in, `[n]`.
      out_scores: Scores of those that were out, `[m]`.
      steps: Number of steps.
      delta: The delta of all epsilons.
      significance: Probability that a lower bound is wrong, for each method by itself.
      lower_bounds: By method of `epsilon_lower_bound`; what they assume is written there.
      epsilon: The epsilon of the ledger, an upper bound; None if the optimizer was given no
        `sampling`, so that it has none.
      checks: What must hold, and whether it did.
      history: Numbers of steps, and the bound "gaussian" after the first so many; empty where only
        the end was seen.
      ledger: The ledger of the training; None if there is none.
    """

    in_scores: np.ndarray
    out_scores: np.ndarray
    steps: int
    delta: float
    significance: float
    lower_bounds: dict[str, float]
    epsilon: float | None
    checks: tuple[Check, ...]
    history: tuple[tuple[int, float], ...] = ()
    ledger: PrivacyLedger | None = dataclasses.field(default=None, repr=False)

    @property
    def lower_bound(self) -> float:
        """The lower bound by the method "gaussian"; without independent scores, by "one_run"."""
        return self.lower_bounds.get("gaussian", self.lower_bounds.get("one_run", 0.0))

    @property
    def passed(self) -> bool:
        """True if nothing contradicts the ledger's epsilon."""
        return all(check.passed for check in self.checks)

    def check(self) -> None:
        """Raises an AuditError if something contradicts the ledger's epsilon.

        Raises:
          AuditError: With all that was seen. A lower bound is above a valid epsilon with
            probability `significance`, for each method; other checks fail with one of 1e-6.
        """
        failed = [check for check in self.checks if not check.passed]
        if failed:
            reasons = "".join(f"\n- {check.name}: {check.seen}" for check in failed)
            raise AuditError(
                "The training must leak no more than its ledger says. Received what contradicts "
                f"it:{reasons}\n{self}"
            )

    def __str__(self) -> str:
        confidence = f"{100 * (1 - self.significance):.6g}% confidence"
        upper = "none: no sampling" if self.epsilon is None else f"{self.epsilon:.4g}"
        lines = [
            f"Audit of {self.steps} steps by {self.in_scores.size} canaries that were in and "
            f"{self.out_scores.size} that were out, at delta = {self.delta:g}.",
            f"epsilon of the ledger (upper bound): {upper}",
            f"lower bounds on epsilon, each at {confidence}:",
            *(f"  {method:16} {bound:.4g}" for method, bound in self.lower_bounds.items()),
            *(f"{'ok' if c.passed else 'FAILED'}: {c.name}: {c.seen}" for c in self.checks),
        ]
        return "\n".join(lines)

    def report(self) -> str:
        """Returns the result as Markdown, with what the numbers mean."""
        upper = "none" if self.epsilon is None else f"{self.epsilon:.4g}"
        confidence = f"{100 * (1 - self.significance):.6g}%"
        return "\n".join(
            [
                "# Audit",
                "",
                f"{self.steps} steps; {self.in_scores.size} canaries in, {self.out_scores.size} "
                f"out; delta = {self.delta:g}.",
                "",
                "| epsilon | value | statement |",
                "|---|---|---|",
                f"| ledger | {upper} | upper bound, proven |",
                *(
                    f"| {method} | {bound:.4g} | lower bound at {confidence} confidence |"
                    for method, bound in self.lower_bounds.items()
                ),
                "",
                "| check | passed | seen |",
                "|---|---|---|",
                *(f"| {c.name} | {'yes' if c.passed else 'NO'} | {c.seen} |" for c in self.checks),
                "",
                *plots.attack_table(self.in_scores, self.out_scores),
                "",
                "A lower bound below the ledger's epsilon is no proof of the latter: it says what "
                "this attack can show with so many canaries.",
                "",
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the ROC curve on logarithmic axes, and both bounds on epsilon against steps.

        Args:
          path: The picture's file, such as "audit.png".

        Raises:
          ImportError: matplotlib is missing.
        """
        upper = [(steps, self._upper(steps)) for steps, _ in self.history]
        plots.draw(
            path,
            {"canaries": (self.in_scores, self.out_scores)},
            lower=self.history,
            upper=[(steps, value) for steps, value in upper if value is not None],
            confidence=1 - self.significance,
        )

    def _upper(self, steps: int) -> float | None:
        """Returns the epsilon of the first steps; None where the ledger is not of one training."""
        if self.ledger is None or len(self.ledger.releases) != 1:
            return None
        release = dataclasses.replace(self.ledger.releases[0], count=steps)
        return tightest_epsilon([release], self.delta, self.ledger.selective_release).epsilon


def result_of(
    recording: Recording, coins: np.ndarray, optimizer: Any, delta: float, significance: float
) -> AuditResult:
    """Returns the result of a training that was recorded; see `CanaryAudit.result`.

    Args:
      recording: What the audit saw.
      coins: Whether each canary was in, bool `[canaries]`.
      optimizer: The optimizer.
      delta: The delta of all epsilons.
      significance: Probability that a lower bound is wrong.
    """
    sampling, size = optimizer.sampling, optimizer.expected_batch_size
    q = size / max(coins.size, size) if sampling is None else sampling.sampling_probability

    def bound(steps: int, method: str) -> float:
        scores = recording.scores(q, steps)
        return statistics.epsilon_lower_bound(
            scores[coins], scores[~coins], delta, significance, method
        )

    steps, scores = len(recording.sums), recording.scores(q)
    bounds = {method: bound(steps, method) for method in statistics.METHODS}
    ledger = None if sampling is None else optimizer.ledger
    epsilon = None if ledger is None else ledger.epsilon(delta).epsilon
    points = sorted({max(1, steps * i // _POINTS) for i in range(1, _POINTS + 1)})
    return AuditResult(
        scores[coins],
        scores[~coins],
        steps,
        delta,
        significance,
        bounds,
        epsilon,
        tuple(_checks(recording, coins, optimizer, bounds, epsilon)),
        tuple((count, bound(count, "gaussian")) for count in points),
        ledger,
    )


def bound_check(bounds: dict[str, float], epsilon: float) -> Check:
    """Returns whether the lower bounds, by method, are below an upper bound."""
    largest = max(bounds, key=lambda method: bounds[method])
    seen = f"{bounds[largest]:.4g} ({largest}) beside {epsilon:.4g}"
    return Check("lower bounds do not exceed epsilon", bounds[largest] <= epsilon, seen)


def _checks(
    recording: Recording,
    coins: np.ndarray,
    optimizer: Any,
    bounds: dict[str, float],
    epsilon: float | None,
) -> Iterator[Check]:
    if epsilon is not None:
        yield bound_check(bounds, epsilon)
    if optimizer.noise_stddev > 0:
        noise = recording.noise_units()[:, ~coins]
        p_value, size = noise_p_value(noise), np.sqrt(np.mean(noise**2))
        yield Check(
            "noise is as large as stated, in every step",
            p_value >= _ALARM,
            f"{size:.4f} of the stated standard deviation in all, p = {p_value:.2g}",
        )
        largest_correlation, p_value = repetition_p_value(noise)
        yield Check(
            "noise of different steps is independent",
            p_value >= _ALARM,
            f"largest correlation {largest_correlation:.3f}, p = {p_value:.2g}",
        )
    deviation = deviation_of_updates(recording, optimizer)
    yield Check(
        "updates follow from the noisy sums",
        deviation <= _LARGEST_DEVIATION,
        f"they differ by {deviation:.2g} of their size",
    )
