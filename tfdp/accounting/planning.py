"""Plans of a training: the noise that each batch size takes, before anything is trained."""

import dataclasses
import math
import textwrap
from typing import Any

from tfdp.accounting.budget import MOST_RELEASES, default_delta
from tfdp.accounting.calibration import calibrate_noise_multiplier
from tfdp.accounting.sampling import MOST_EXAMPLES
from tfdp.base import validation

_EPOCHS = 20
_ROWS_BESIDE = 2  # Rows of a plan with smaller batches than the recommended, and with larger ones.
# Accuracy hardly changed between some 500 and 1,500 steps (docs/choosing.md), and noise falls with
# the batch: the largest batch is recommended that leaves so many steps, within limits.
_LEAST_STEPS = 500
_SMALLEST_BATCH, _LARGEST_BATCH = 8, 16384
_LEAST_STEPS_PER_EPOCH = 10


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
    recommended batch is the largest power of two that leaves 500 steps and, where N allows it, at
    least 8: docs/choosing.md has the accuracies that this rule comes from. `make_private` takes
    the same batch where none is given.

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
      [(256, 3900), (512, 1960), (1024, 980)]
      >>> row = chosen.recommended
      >>> round(row.noise_multiplier, 2), round(row.noise_of_the_run, 2)
      (1.0, 1.55)
    """
    size = validation.integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
    target = validation.positive("target_epsilon", target_epsilon)
    delta = default_delta(size) if delta is None else delta
    delta = validation.between_zero_and_one("delta", delta)
    epochs = validation.positive_integer("epochs", _EPOCHS if epochs is None else epochs)
    if max_batch_size is None:
        largest = _largest_batch(size)
    else:
        largest = validation.positive_integer("max_batch_size", max_batch_size)
        if largest > size:
            raise validation.error("max_batch_size", f"at most dataset_size={size}", largest)
    chosen = planned_batch_size(size, epochs, largest)
    powers = range(-_ROWS_BESIDE, _ROWS_BESIDE + 1)
    batches = sorted({min(largest, max(1, int(chosen * 2.0**power))) for power in powers})
    check_steps(steps_of(size, batches[0], epochs), epochs)
    rows = tuple(_row(size, target, delta, epochs, batch) for batch in batches)
    recommended = rows[batches.index(chosen)]
    return Plan(size, target, delta, epochs, rows, recommended, _reason(recommended, largest))


def planned_batch_size(dataset_size: int, epochs: int, max_batch_size: int | None = None) -> int:
    """Returns the batch size that `plan` recommends, and `make_private` takes.

    Args:
      dataset_size: Number of training examples, N.
      epochs: Number of epochs.
      max_batch_size: See `plan`.

    Example:
      >>> [planned_batch_size(60000, epochs) for epochs in (1, 5, 20)]
      [64, 512, 2048]
    """
    largest = _largest_batch(dataset_size) if max_batch_size is None else max_batch_size
    batch = min(_SMALLEST_BATCH, largest)
    while batch < largest:
        larger = min(2 * batch, largest)
        if steps_of(dataset_size, larger, epochs) < _LEAST_STEPS:
            break
        batch = larger
    return batch


def steps_of(dataset_size: int, batch_size: int, epochs: int) -> int:
    """Returns the steps of some epochs, as `make_private` and `poisson_batches` count them."""
    return epochs * max(1, round(dataset_size / batch_size))


def check_steps(steps: int, epochs: int) -> None:
    """Raises a ValueError that names `epochs` if they have too many steps to be priced."""
    if steps > MOST_RELEASES:
        requirement = f"so few that there are at most {MOST_RELEASES} steps, not {steps}"
        raise validation.error("epochs", requirement, epochs)


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


def _largest_batch(size: int) -> int:
    largest = min(_LARGEST_BATCH, max(1, size // _LEAST_STEPS_PER_EPOCH))
    return 2 ** int(math.log2(largest))


def _reason(row: PlanRow, largest: int) -> str:
    steps = f"{row.steps} steps"
    if row.steps < _LEAST_STEPS:
        why = f"smaller ones have much more noise, and {steps} are few: train more epochs"
    elif row.batch_size < largest:
        why = f"the largest that leave {_LEAST_STEPS} steps ({steps})"
    else:
        why = f"the largest ({steps})"
    return f"Take batches of {row.batch_size}: {why}."


def _number(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
