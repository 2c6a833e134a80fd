"""Options of DPAGD, and the noise with which a budget lasts for all iterations."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import scipy.optimize

from tfdp.accounting.calibration import calibrate_noise_multiplier
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.privacy_filter import BoundedRangeDpEvent, RdpFilter
from tfdp.accounting.rounding import rounded_down, rounded_up
from tfdp.accounting.sampling import MOST_EXAMPLES, PoissonSampling
from tfdp.base.validation import (
    between_zero_and_one,
    error,
    integer,
    is_number,
    non_negative,
    positive,
    positive_integer,
    small_probability,
)

_MOST_ITERATIONS = 10**6  # The accountant of more takes minutes.


@dataclasses.dataclass(frozen=True)
class DescentOptions:
    """Options of an `AdaptiveGradientDescent`.

    Attributes:
      l2_norm_clip: Largest l2 norm of an example's gradient, C.
      noise_multiplier: Noise on the clipped sum in units of C, at first.
      loss_clip: Largest loss of an example that counts.
      selection_range: Range eta of report-noisy-min: the log-odds by which one example can move
        the choice between two step sizes.
      selection_batch_size: Expected number of examples in a batch that a step size is chosen
        on.
      max_step_size: Length of the longest step. Or a function that returns it, such as a
        `tf.keras.optimizers.schedules.LearningRateSchedule`, of the number of iterations made.
        Training ends where it is 0.
      candidates: Number of step sizes to choose from, besides 0.
      budget_growth: gamma: share by which the cost of a measurement grows if taking no step was
        best. The paper's 0.1 is for few iterations; in hundreds no step often wins by chance, and
        0.001 leaves more of them. Where steps do not lower the loss, such as with much momentum, it
        may repeat a measurement hundreds of times: a smaller `selection_range` takes steps all the
        same.
      step_size_window: Iterations after which the largest step size is adapted.
      momentum: Share of the last step's direction that stays, in [0, 1); the paper has 0.

    Raises:
      ValueError: An attribute is out of its range.
    """

    l2_norm_clip: float
    noise_multiplier: float
    loss_clip: float
    selection_range: float
    selection_batch_size: int
    max_step_size: float | Callable[[int], Any] = 2.0
    candidates: int = 20
    budget_growth: float = 0.1
    step_size_window: int = 10
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "max_step_size" and callable(self.max_step_size):
                positive("max_step_size(0)", self.longest_step(0))
                continue
            check = positive_integer if field.type is int else positive
            if field.name == "momentum":
                check = small_probability
            check(field.name, getattr(self, field.name))

    def longest_step(self, iterations: int) -> float:
        """Returns `max_step_size` after so many iterations.

        Raises:
          ValueError: It is a function, and what it returns is no length.
        """
        if not callable(self.max_step_size):
            return float(self.max_step_size)
        length = self.max_step_size(iterations)
        name = f"max_step_size({iterations})"
        try:
            return non_negative(name, float(length))
        except (TypeError, ValueError):
            raise error(name, "a non-negative finite number", length) from None


def calibrate_descent(
    *,
    target_epsilon: float,
    delta: float,
    dataset_size: int,
    expected_batch_size: int,
    selection_batch_size: int,
    iterations: int,
    selection_share: float = 0.3,
) -> tuple[RdpFilter, float, float]:
    """Returns a budget, and the noise with which it lasts for a number of iterations.

    Args:
      target_epsilon: Epsilon that may be spent in all.
      delta: The delta of the guarantee.
      dataset_size: Number of training examples.
      expected_batch_size: Expected number of examples in the batch of a measurement.
      selection_batch_size: Expected number of examples in the batch of a choice.
      iterations: Iterations that the budget lasts for if no measurement is repeated, 10^6 at most.
        It lasts for fewer if some are.
      selection_share: Share of the budget that is for choosing step sizes, in (0, 1).

    Returns:
      The budget, and the `noise_multiplier` and `selection_range` of `DescentOptions`.

    Raises:
      ValueError: An argument is out of its range, or no noise is enough.
    """
    between_zero_and_one("selection_share", selection_share)
    dataset_size = integer("dataset_size", dataset_size, 1, MOST_EXAMPLES)
    for name, size in (
        ("expected_batch_size", expected_batch_size),
        ("selection_batch_size", selection_batch_size),
    ):
        if not (is_number(size) and 0 < size <= dataset_size):
            raise error(name, f"a positive number of at most dataset_size={dataset_size}", size)
    iterations = integer("iterations", iterations, 1, _MOST_ITERATIONS)
    q = float(expected_batch_size / dataset_size)
    q_selection = float(selection_batch_size / dataset_size)
    noise = calibrate_noise_multiplier(
        target_epsilon=target_epsilon,
        delta=delta,
        steps=iterations,
        dataset_size=dataset_size,
        expected_batch_size=expected_batch_size,
    )
    budget = RdpFilter(target_epsilon, delta, expected_event=sampled_gaussian(q, noise))
    # A little less: the sum of the costs is rounded.
    cost = (1 - 1e-6) * budget.budget / iterations

    def root(excess: Callable[[float], float], low: float, high: float) -> float:
        """Finds where a cost falling from `low` to `high` reaches the target, on the cheap side."""
        logs = (math.log(low), math.log(high))
        ends = excess(low), excess(high)
        if not min(ends) <= 0 <= max(ends):
            raise ValueError(
                "Arguments `target_epsilon`, `selection_share`, `expected_batch_size` and "
                "`selection_batch_size` must be such that noise between 0.3 of that of private "
                "gradient descent and 1e6, and a selection range of 1e-7 to 50, meet the budget. "
                f"Received: {target_epsilon=}, {selection_share=}, {expected_batch_size=}, "
                f"{selection_batch_size=}."
            )
        found = scipy.optimize.brentq(lambda x: excess(math.exp(x)), *logs, xtol=1e-6)
        return math.exp(found + (2e-6 if low < high else -2e-6))

    measuring, choosing = (1 - selection_share) * cost, selection_share * cost
    noise = root(lambda s: budget.cost(sampled_gaussian(q, s)) - measuring, 0.3 * noise, 1e6)
    width = root(lambda r: budget.cost(_choice_event(q_selection, r)) - choosing, 50.0, 1e-7)
    return budget, rounded_up(noise), rounded_down(width)


def iteration_event(
    sampling: PoissonSampling,
    noise_multiplier: float,
    selection: PoissonSampling,
    selection_range: float,
) -> dp_accounting.DpEvent:
    """Returns the event of a measurement and a choice, each on its own Poisson batch."""
    return dp_accounting.ComposedDpEvent(
        (
            sampled_gaussian(sampling.sampling_probability, noise_multiplier),
            _choice_event(selection.sampling_probability, selection_range),
        )
    )


def _choice_event(q: float, selection_range: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(q, BoundedRangeDpEvent(selection_range))


def grown_precision(budget: RdpFilter, q: float, precision: float, growth: float) -> float:
    """Returns the precision of a measurement that costs 1 + `growth` times as much.

    Args:
      budget: Says what measurements cost.
      q: Sampling probability.
      precision: 1 / noise_multiplier^2 of a measurement.
      growth: Positive.
    """

    def cost(p: float) -> float:
        return budget.cost(sampled_gaussian(q, p**-0.5))

    target, largest = (1 + growth) * cost(precision), (1 + growth) * precision
    if cost(largest) <= target:  # Without sampling; the cost is convex.
        return largest
    return float(scipy.optimize.brentq(lambda p: cost(p) - target, precision, largest, rtol=1e-9))
