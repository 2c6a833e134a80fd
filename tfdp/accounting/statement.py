"""A privacy guarantee in words and numbers."""

import dataclasses
import functools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp.accounting import bounds, group_privacy, release_text
from tfdp.accounting.bounds import EpsilonBound
from tfdp.accounting.budget import too_large
from tfdp.accounting.found_ledger import find_ledger, is_model
from tfdp.accounting.ledger import Ledgers, PrivacyLedger, as_ledgers, compose_ledgers
from tfdp.accounting.observability import CONDITIONAL, PER_ATTEMPT, contains_attempts
from tfdp.accounting.relation import stated_constants, stated_relation
from tfdp.accounting.rounding import rounded_down, rounded_up
from tfdp.accounting.sampling import MOST_EXAMPLES
from tfdp.accounting.trade_off import GaussianDP, TradeOff
from tfdp.base import validation

_WIDTH = 88
NOT_COVERED = "Not covered by this guarantee:"
# Other deltas at which epsilon is stated, over that of the guarantee.
_OTHER_DELTAS = (100, 0.01, 1e-4)
# False positive rates at which a program gets the trade-off curve.
_CURVE = (1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, *(part / 10 for part in range(1, 10)))

_NOT_COVERED = (
    "the choice of hyperparameters, architecture or stopping time by looking at the private data, "
    "unless those runs are given as `prior`",
    "metrics, losses or progress computed on the private data and shown to anyone",
    "data preprocessing that used the private data (vocabularies, normalization statistics, "
    "feature selection, deduplication)",
    "attacks on floating-point noise: it is sampled in finite precision, not from the exact "
    "Gaussian",
    "other releases about the same examples, unless they were given as `prior`: also those of an "
    "interrupted training after the backup from which it was resumed, and what averaged, rounded "
    "or otherwise changed copies of trained weights had cost",
)

_OBSERVED = {
    CONDITIONAL: "Assumed of selective release: only accepted updates are observable: rejected "
    "attempts, their number and the time they took are not released.",
    PER_ATTEMPT: "Assumed of selective release: nothing. Every attempt is counted, so that "
    "rejected attempts, their number and the time they took may be released as well.",
}

_SELECTED = (
    "Assumed of private selection: only the best run is released. The other runs, their number, "
    "and the time that they took cannot be observed; runs differ in nothing that was chosen by "
    "looking at the private data; and a run that failed was not repeated."
)
_IN_ONE_PART = (
    "Assumed of releases on separate parts of the data: no {unit} has to do with more than one of "
    "the parts, and which one it is was not chosen by looking at the private data."
)


def privacy_statement(
    ledger: Any,
    delta: float,
    *,
    dataset_size: int | None = None,
    prior: Ledgers | None = None,
    group_size: int = 1,
) -> str:
    """States the guarantee that holds for what has been released, and its limits.

    It names the neighboring relation, zero-out, and what is public: see docs/relation.md.

    Args:
      ledger: A Keras model, an optimizer with a `ledger`, or a `PrivacyLedger`. For a model, the
        statement covers everything that private optimizers of this process have released about its
        variables, and what was restored with them.
      delta: The delta of the guarantee, in (0, 1); below one over the number of examples.
      dataset_size: Number of training examples, treated as public; by default the number that the
        optimizers were given. It is used for expected batch sizes, and for a warning if `delta` is
        too large.
      prior: Other releases about the same examples, which `ledger` cannot know: a `PrivacyLedger`,
        or several. Examples are the statistics that the data were normalized with, other models, or
        the past of weights that were loaded without their optimizer.
      group_size: Number of examples that are protected together, at most: see
        `PrivacyLedger.epsilon`.

    Returns:
      Paragraphs of text. Epsilons are rounded up to six digits.

    Raises:
      TypeError: There is no ledger in `ledger`.
      ValueError: Another argument is out of its range.
      dp_accounting.UnsupportedEventError: No accountant supports what was released.

    Example:
      >>> import dp_accounting
      >>> ledger = PrivacyLedger()
      >>> ledger.record(
      ...     dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)
      >>> print(privacy_statement(ledger, delta=1e-5).splitlines()[0])
      Differential privacy: epsilon = 1.82833 at delta = 1e-05.
    """
    return str(statement_of(ledger, delta, dataset_size, prior, group_size=group_size))


@dataclasses.dataclass(frozen=True)
class Statement:
    """A privacy statement in its parts; `str` puts them together.

    Attributes:
      bound: The guarantee.
      ledger: What was released.
      paragraphs: Sentences about the guarantee, the headline first.
      not_covered: What it does not cover.
      group_size: Number of units of privacy that are protected together.
    """

    bound: EpsilonBound
    ledger: PrivacyLedger
    paragraphs: tuple[str, ...]
    not_covered: tuple[str, ...]
    group_size: int = 1

    @functools.cached_property
    def lower(self) -> float:
        """No smaller epsilon is a guarantee."""
        delta, group_size = self.bound.delta, self.group_size
        return epsilon_interval(self.ledger, delta, group_size=group_size).lower

    @functools.cached_property
    def trade_off(self) -> TradeOff:
        """Upper bounds on what any attack can reach."""
        return self.ledger.trade_off(group_size=self.group_size)

    @functools.cached_property
    def gaussian_dp(self) -> GaussianDP:
        """The same as Gaussian differential privacy, up to the delta of the guarantee."""
        return self.trade_off.gaussian_dp(self.bound.delta)

    @functools.cached_property
    def by_delta(self) -> dict[float, float]:
        """Epsilon at other deltas."""
        deltas = [factor * self.bound.delta for factor in _OTHER_DELTAS]
        deltas = [float(f"{delta:.6g}") for delta in deltas if 1e-200 < delta < 0.5]
        found = {
            delta: self.ledger.epsilon(delta, group_size=self.group_size).epsilon
            for delta in deltas
        }
        return found if math.isfinite(self.bound.epsilon) else {}

    @property
    def measures(self) -> tuple[str, ...]:
        """Sentences that state the guarantee in other terms."""
        if math.isinf(self.bound.epsilon) or not self.ledger.releases:
            return ()
        others = ", ".join(
            f"{'inf' if math.isinf(one) else _round_up(one)} at {delta!r}"
            for delta, one in self.by_delta.items()
        )
        other_deltas = (f"Epsilon at other deltas: {others}.",) if others else ()
        return (*other_deltas, str(self.trade_off), str(self.gaussian_dp))

    def __str__(self) -> str:
        parts = (*self.paragraphs, *self.measures, NOT_COVERED)
        text = "\n\n".join(_fill(part) for part in parts)
        text += "".join("\n" + _fill(item, "- ") for item in self.not_covered)
        if self.ledger.notes:
            text += "\n\nNotes:" + "".join("\n" + _fill(n, "- ") for n in self.ledger.notes)
        return text + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Returns the statement as a dict that JSON can hold.

        Epsilons are rounded as in the text, upper bounds up and lower bounds down; None stands for
        an infinite one.
        """
        curve = self.trade_off
        return {
            "epsilon": _finite(rounded_up(self.bound.epsilon)),
            "epsilon_lower_bound": _finite(rounded_down(self.lower)),
            "delta": self.bound.delta,
            "accountant": self.bound.accountant,
            "epsilon_by_accountant": {
                name: _finite(rounded_up(one)) for name, one in self.bound.by_accountant.items()
            },
            "neighboring_relation": self.ledger.relation,
            "privacy_unit": self.ledger.unit,
            "dataset_sizes": list(self.ledger.dataset_sizes),
            "steps": self.ledger.steps,
            "group_size": self.group_size,
            "epsilon_by_delta": {
                f"{delta!r}": _finite(rounded_up(one)) for delta, one in self.by_delta.items()
            },
            "attack_advantage": rounded_up(curve.advantage),
            "attack_true_positive_rates": {
                f"{rate:g}": rounded_up(curve.true_positive_rate(rate)) for rate in _CURVE
            },
            "gaussian_dp": {
                "mu": _finite(rounded_up(self.gaussian_dp.mu)),
                "delta": self.bound.delta,
                "regret": _finite(rounded_up(self.gaussian_dp.regret)),
            },
            "statement": list(self.paragraphs),
            "not_covered": list(self.not_covered),
            "notes": list(self.ledger.notes),
            "ledger": self.ledger.to_dict(),
        }


def statement_of(
    ledger: Any,
    delta: float,
    dataset_size: int | None = None,
    prior: Ledgers | None = None,
    not_covered: Sequence[str] = (),
    group_size: int = 1,
) -> Statement:
    """Returns what `privacy_statement` says, in parts.

    Args:
      ledger: As for `privacy_statement`.
      delta: The delta of the guarantee, in (0, 1).
      dataset_size: As for `privacy_statement`.
      prior: As for `privacy_statement`.
      not_covered: What else the guarantee does not cover.
      group_size: As for `privacy_statement`.

    Raises:
      TypeError: There is no ledger in `ledger`.
      ValueError: Another argument is out of its range.
      dp_accounting.UnsupportedEventError: No accountant supports what was released.
    """
    not_covered = (*_other_optimizer(ledger), *not_covered, *_NOT_COVERED)
    ledger = compose_ledgers([find_ledger(ledger), *as_ledgers(prior)])
    sizes = ledger.dataset_sizes
    if dataset_size is not None:
        dataset_size = validation.integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
        sizes = (dataset_size,)
    elif len(sizes) == 1 and prior is None:
        dataset_size = sizes[0]
    bound = ledger.epsilon(delta, group_size=group_size)
    paragraphs = [
        _headline(bound),
        stated_relation(ledger.unit, group_size),
        stated_constants(ledger.unit, sizes),
        release_text.what_was_released(ledger, dataset_size),
        _accounting(bound, ledger),
    ]
    if contains_attempts(ledger.event):
        paragraphs.insert(4, _OBSERVED[ledger.selective_release])
    events = [release.event for release in ledger.releases]
    separate = [event for event in events if release_text.is_parallel(event)]
    if separate:
        paragraphs.insert(4, _IN_ONE_PART.format(unit=ledger.unit))
    events += [part for event in separate for part in event.events]
    if any(isinstance(event, RepeatAndSelectDpEvent) for event in events):
        paragraphs.insert(4, _SELECTED)
    warning = too_large(bound.delta, sizes)
    if warning is not None:
        paragraphs.append(f"Warning: {warning}")
    return Statement(bound, ledger, tuple(paragraphs), not_covered, group_size)


def epsilon_interval(
    ledger: Any, delta: float, *, prior: Ledgers | None = None, group_size: int = 1
) -> bounds.EpsilonInterval:
    """Returns the epsilon of what has been released, and how much smaller it may be at most.

    Guarantees: (`upper`, `delta`) is the guarantee of `PrivacyLedger.epsilon`. For some data sets
    and gradients, epsilon is at least `lower`, under the same assumptions. Both bounds are
    certified: they include all errors of discretization and rounding.

    For accepted updates of selective release, `lower` is the epsilon without any selection; for
    attempts, it is that of their tests. For the best of several runs it is the epsilon of one run,
    or 0 with a "poisson" number of runs. It is 0 if only RDP accounting supports what was released.

    Args:
      ledger: A Keras model, an optimizer with a `ledger`, or a `PrivacyLedger`; as for
        `privacy_statement`.
      delta: The delta of the guarantee, in (0, 1).
      prior: Other releases about the same examples.
      group_size: Number of examples that are protected together, at most: see
        `PrivacyLedger.epsilon`.

    Raises:
      TypeError: There is no ledger in `ledger`.
      ValueError: Another argument is out of its range.
      dp_accounting.UnsupportedEventError: No accountant supports what was released.

    Source: `tfdp.accounting.composition`.

    Example:
      >>> import dp_accounting
      >>> ledger = PrivacyLedger()
      >>> ledger.record(
      ...     dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000)
      >>> interval = epsilon_interval(ledger, delta=1e-5)
      >>> round(interval.lower, 4), round(interval.upper, 4)
      (1.8282, 1.8283)
    """
    whole = compose_ledgers([find_ledger(ledger), *as_ledgers(prior)])
    delta = validation.between_zero_and_one("delta", delta)
    releases = group_privacy.group_releases(whole.releases, group_size)
    return bounds.epsilon_interval(releases, delta, whole.selective_release)


def _other_optimizer(source: Any) -> tuple[str, ...]:
    """Returns names an optimizer that is not private."""
    optimizer = getattr(source, "optimizer", None) if is_model(source) else None
    if optimizer is None or hasattr(type(optimizer), "ledger"):
        return ()
    return (
        f"what {type(optimizer).__name__} does to the model, which is compiled with it: it is "
        "not a private optimizer. If it has trained on private data, nothing above holds for the "
        "model",
    )


def _headline(bound: EpsilonBound) -> str:
    if math.isinf(bound.epsilon):
        return (
            f"No differential privacy: epsilon = inf at delta = {bound.delta!r}. What was released "
            "may reveal everything about an example."
        )
    return f"Differential privacy: epsilon = {_round_up(bound.epsilon)} at delta = {bound.delta!r}."


def _accounting(bound: EpsilonBound, ledger: PrivacyLedger) -> str:
    by_accountant = " and ".join(
        f"{_round_up(epsilon)} by {name}" for name, epsilon in bound.by_accountant.items()
    )
    text = f"Accounting: epsilon is {by_accountant} accounting; {bound.accountant}'s is reported."
    truncation = math.fsum(r.count * r.truncation_probability for r in ledger.releases)
    if truncation:
        capped = ledger.selective_release != PER_ATTEMPT and contains_attempts(ledger.event)
        text += (
            " The probability that a batch was cut to its fixed size"
            f"{', or that the cap on attempts was reached' if capped else ''}, at most "
            f"{truncation:.2g} over all steps, is part of delta."
        )
    return text


def _round_up(epsilon: float) -> str:
    """Formats `epsilon` with six significant digits, rounded up."""
    return f"{rounded_up(epsilon):.6g}"


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _fill(text: str, bullet: str = "") -> str:
    # Breaking at hyphens would cut numbers like 1e-05 in two.
    return textwrap.fill(
        text,
        width=_WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
        break_long_words=False,
    )
