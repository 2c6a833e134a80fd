"""Plans of a training: the noise that each batch size takes, before anything is trained."""

import dataclasses
import itertools
import math
import textwrap
from typing import Any

from tfdp.accounting.budget import MOST_RELEASES, default_delta
from tfdp.accounting.calibration import calibrate_noise_multiplier
from tfdp.base import validation

_EPOCHS = 20
_ROWS = 5
# Largest batch, where none is given: an epoch has at least ten steps, as for `make_private`.
_LEAST_STEPS_PER_EPOCH = 10
_LARGEST_BATCH = 16384
# A larger batch is recommended if the noise of the run falls by at least this share.
_GAIN = 0.1
# More steps than about 1,000 gained nothing (docs/choosing.md): a row with more is passed over.
_MOST_STEPS = 1500


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """Steps and noise of a training with one batch size.

    Attributes:
      batch_size: Expected number of examples in a batch, B.
      steps: Number of steps.
      noise_multiplier: The least noise multiplier within the budget.
      noise_of_the_run: Noise of the whole run relative to the sum of its gradients,
        noise_multiplier / (batch_size * sqrt(steps)), times the number of examples.
    """

    batch_size: int
    steps: int
    noise_multiplier: float
    noise_of_the_run: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Batch sizes for a privacy budget, and the one that is recommended.

    Attributes:
      dataset_size: Number of training examples, N.
      target_epsilon: The budget.
      delta: The delta of the guarantee.
      epochs: Number of epochs.
      rows: By increasing batch size, each twice the one before.
      recommended: One of the rows.
      reason: Why that one.
    """

    dataset_size: int
    target_epsilon: float
    delta: float
    epochs: int
    rows: tuple[PlanRow, ...]
    recommended: PlanRow
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"Plan: {self.dataset_size} examples, epsilon = {self.target_epsilon:g} at delta = "
            f"{self.delta:g}, {_number(self.epochs, 'epoch')}",
            "",
            f"  {'batch':>7}  {'steps':>7}  {'noise multiplier':>16}  {'noise of the run':>16}",
        ]
        for row in self.rows:
            mark = "*" if row == self.recommended else " "
            lines.append(
                f"{mark} {row.batch_size:7}  {row.steps:7}  {row.noise_multiplier:16g}  "
                f"{row.noise_of_the_run:16.2f}"
            )
        return "\n".join(
            [*lines, "", textwrap.fill(f"* {self.reason}", 88, subsequent_indent="  ")]
        )


def plan(
    dataset_size: int,
    target_epsilon: float,
    delta: float | None = None,
    epochs: int | None = None,
    max_batch_size: int | None = None,
) -> Plan:
    """Returns the noise that each batch size takes at a privacy budget, and which size to take.

    It looks at no data and costs no privacy. The noise of the run, `dataset_size *
    noise_multiplier / (batch_size * sqrt(steps))`, falls with larger batches and more epochs. The
    recommended batch is the smallest with at most 1,500 steps whose double lowers it by less than
    10%: docs/choosing.md has the accuracies that this rule comes from.

    Args:
      dataset_size: Number of training examples, N. Treated as public.
      target_epsilon: Epsilon that may be spent in all, under zero-out.
      delta: The delta of the guarantee, in (0, 1). None: N^-1.1, rounded down to two digits.
      epochs: Number of epochs. None: 20.
      max_batch_size: The largest expected batch size, at most N. None: the largest power of two
        that is at most N / 10, and at most 16384.

    Returns:
      The plan, of up to five batch sizes; `print` shows it as a table.

    Raises:
      ValueError: An argument is out of its range, or no noise is enough.

    Example:
      >>> chosen = plan(50000, target_epsilon=4.0, delta=1e-5, epochs=20, max_batch_size=1024)
      >>> [(row.batch_size, row.steps) for row in chosen.rows]
      [(64, 15620), (128, 7820), (256, 3900), (512, 1960), (1024, 980)]
      >>> round(chosen.rows[-1].noise_multiplier, 2), round(chosen.rows[-1].noise_of_the_run, 2)
      (1.0, 1.55)
    """
    size = validation.positive_integer("dataset_size", dataset_size)
    target = validation.positive("target_epsilon", target_epsilon)
    delta = default_delta(size) if delta is None else delta
    delta = validation.between_zero_and_one("delta", delta)
    epochs = validation.positive_integer("epochs", _EPOCHS if epochs is None else epochs)
    if max_batch_size is None:
        largest = min(_LARGEST_BATCH, max(1, size // _LEAST_STEPS_PER_EPOCH))
        largest = 2 ** int(math.log2(largest))
    else:
        largest = validation.positive_integer("max_batch_size", max_batch_size)
        if largest > size:
            raise validation.error("max_batch_size", f"at most dataset_size={size}", largest)
    batches = sorted({max(1, largest // 2**halved) for halved in range(_ROWS)})
    if (most := steps_of(size, batches[0], epochs)) > MOST_RELEASES:
        raise validation.error(
            "epochs", f"so few that there are at most {MOST_RELEASES} steps, not {most}", epochs
        )
    rows = tuple(_row(size, target, delta, epochs, batch) for batch in batches)
    chosen, reason = _recommended(rows)
    return Plan(size, target, delta, epochs, rows, chosen, reason)


def steps_of(dataset_size: int, batch_size: int, epochs: int) -> int:
    """Returns the steps of some epochs, as `make_private` and `poisson_batches` count them."""
    return epochs * max(1, round(dataset_size / batch_size))


def _row(size: int, target: float, delta: float, epochs: int, batch: int) -> PlanRow:
    steps = steps_of(size, batch, epochs)
    noise = calibrate_noise_multiplier(
        target_epsilon=target,
        delta=delta,
        dataset_size=size,
        expected_batch_size=batch,
        steps=steps,
    )
    return PlanRow(batch, steps, noise, size * noise / (batch * math.sqrt(steps)))


def _recommended(rows: tuple[PlanRow, ...]) -> tuple[PlanRow, str]:
    """Returns the row to take, and why."""
    smaller: PlanRow | None = None  # Passed over because it takes many steps.
    for row, larger in itertools.pairwise(rows):
        falls = max(0.0, 1 - larger.noise_of_the_run / row.noise_of_the_run)
        if falls >= _GAIN:
            continue
        if row.steps > _MOST_STEPS:
            smaller = row
            continue
        reason = f"twice as large, they lower the noise of the run by only {falls:.0%}"
        if smaller is not None:
            reason += (
                f"; half as large, they take {smaller.steps} steps, and more than about 1000 "
                "gained nothing where it was measured"
            )
        return row, f"Take batches of {row.batch_size}: {reason}."
    row = rows[-1]
    if len(rows) == 1:
        return row, f"Take batches of {row.batch_size}: no other size was looked at."
    if smaller is not None:
        reason = "smaller ones take more steps, and more than about 1000 gained nothing where it"
        return row, f"Take batches of {row.batch_size}, the largest: {reason} was measured."
    return row, (
        f"Take batches of {row.batch_size}, the largest: each doubling up to it lowers the noise "
        f"of the run by {_GAIN:.0%} or more."
    )


def _number(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
