"""Public schedules of the noise multiplier over the steps of a training.

A schedule is a finite list of stages: steps in a row with the same noise multiplier. It is fixed
before training and depends on no data, so the privacy costs of its steps compose.
"""

import abc
import bisect
import dataclasses
import hashlib
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from tfdp.base.validation import (
    elements,
    error,
    is_integer,
    is_number,
    positive,
    positive_integer,
    using,
)

__all__ = ["ExponentialDecayNoise", "NoiseSchedule", "PiecewiseConstantNoise"]

# Every stage has a row in the ledger's table, and is composed by itself.
MOST_STAGES = 64
# Steps are counted in float64, where every integer below is exact.
_MOST_STEPS = 2**52
_SCALED = "a number that leaves all noise positive and finite"


class NoiseSchedule(abc.ABC):
    """Base class of the schedules: the noise multiplier as a function of the step's number.

    Give one to an optimizer as `noise_multiplier`. Step t is the one before which t steps have been
    counted under an equal schedule: by this optimizer, or in what it has taken over, such as the
    record of a checkpoint. So a resumed training continues the schedule. (With cyclic sampling,
    cycles are counted, and all steps of one have its noise multiplier.) The ledger records the
    noise multiplier that each step used. Subclasses of one's own are refused: what they compute
    could depend on the data.
    """

    @abc.abstractmethod
    def stages(self) -> "Stages":
        """Returns the stages of the schedule."""

    @abc.abstractmethod
    def scaled(self, factor: float) -> "NoiseSchedule":
        """Returns the schedule with all noise multipliers times `factor`."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this schedule again."""

    def __call__(self, step: int) -> float:
        """Returns the noise multiplier of step number `step`, from 0."""
        if not (is_integer(step) and step >= 0):
            raise error("step", "an integer of at least 0", step)
        stages = self.stages()
        return stages.values[stages.of(int(step))]


@dataclasses.dataclass(frozen=True)
class PiecewiseConstantNoise(NoiseSchedule):
    """Schedule with a constant noise multiplier between boundaries.

    The first `boundaries[0]` steps use `values[0]`, the steps from number `boundaries[i - 1]` on,
    counted from 0, use `values[i]`. (Keras's `PiecewiseConstantDecay` changes one step later.)

    Args:
      boundaries: Numbers of the steps at which the noise changes: increasing, positive integers.
      values: Noise multipliers, positive and finite: one more than boundaries, at most 64.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> schedule = PiecewiseConstantNoise([100, 300], [2.0, 1.5, 1.0])
      >>> schedule(99), schedule(100), schedule(1000)
      (2.0, 1.5, 1.0)
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        boundaries, values = _list("boundaries", self.boundaries), _list("values", self.values)
        if not all(is_integer(b) and 0 < b < _MOST_STEPS for b in boundaries) or any(
            first >= second for first, second in itertools.pairwise(boundaries)
        ):
            raise error("boundaries", "increasing, positive integers", self.boundaries)
        if not all(is_number(value) and 0 < value < math.inf for value in values):
            raise error("values", "positive, finite numbers", self.values)
        if len(values) != len(boundaries) + 1:
            raise error("values", f"one more than the {len(boundaries)} boundaries", self.values)
        if len(values) > MOST_STAGES:
            raise error("values", f"at most {MOST_STAGES} numbers", self.values)
        object.__setattr__(self, "boundaries", tuple(map(int, boundaries)))
        object.__setattr__(self, "values", tuple(map(float, values)))

    def stages(self) -> "Stages":
        """Returns the stages of the schedule."""
        return Stages(tuple(self.boundaries), tuple(self.values)).merged()

    def scaled(self, factor: float) -> "PiecewiseConstantNoise":
        """Returns the schedule with all noise multipliers times `factor`."""
        factor = positive("factor", factor)
        with using("factor", factor, _SCALED):
            return PiecewiseConstantNoise(self.boundaries, [factor * v for v in self.values])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this schedule again."""
        return {"boundaries": list(self.boundaries), "values": list(self.values)}


@dataclasses.dataclass(frozen=True)
class ExponentialDecayNoise(NoiseSchedule):
    """Schedule in which the noise multiplier falls exponentially, in stairs, down to a floor.

    Step t uses `max(least, initial * decay_rate ** (t // decay_steps))`. Without stairs and a floor
    no two steps would have the same cost, and the cost of the last ones would have no bound.

    Args:
      initial: Noise multiplier of the first `decay_steps` steps.
      decay_steps: Steps with the same noise multiplier.
      decay_rate: Factor between two stairs, in (0, 1).
      least: The floor, positive and at most `initial`, reached within 63 stairs.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> schedule = ExponentialDecayNoise(2.0, decay_steps=100, decay_rate=0.5, least=0.8)
      >>> schedule(99), schedule(100), schedule(1000)
      (2.0, 1.0, 0.8)

    References:
      - Yu et al., 2019, Differentially Private Model Publishing for Deep Learning, Section V
        (https://arxiv.org/abs/1904.02200): exponential decay, without the floor.
    """

    initial: float
    decay_steps: int
    decay_rate: float
    least: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("initial", self.initial))
        steps = positive_integer("decay_steps", self.decay_steps)
        object.__setattr__(self, "decay_steps", steps)
        if not (is_number(self.decay_rate) and 0 < self.decay_rate < 1):
            raise error("decay_rate", "in (0, 1)", self.decay_rate)
        object.__setattr__(self, "decay_rate", float(self.decay_rate))
        if not 0 < positive("least", self.least) <= self.initial:
            raise error("least", f"at most initial={self.initial}", self.least)
        object.__setattr__(self, "least", float(self.least))
        if self.initial * self.decay_rate ** (MOST_STAGES - 1) > self.least:
            raise error(
                "least",
                f"reached within {MOST_STAGES - 1} stairs (take a smaller `decay_rate`, a larger "
                "`least`, or longer `decay_steps`)",
                self.least,
            )
        if steps * MOST_STAGES >= _MOST_STEPS:
            raise error("decay_steps", "below 2^46", self.decay_steps)

    def stages(self) -> "Stages":
        """Returns the stages of the schedule."""
        # By products, which every machine rounds alike: a training may resume on another one.
        factors = itertools.chain([self.initial], [self.decay_rate] * (MOST_STAGES - 1))
        values = (max(self.least, x) for x in itertools.accumulate(factors, operator.mul))
        boundaries = tuple(self.decay_steps * i for i in range(1, MOST_STAGES))
        return Stages(boundaries, tuple(values)).merged()

    def scaled(self, factor: float) -> "ExponentialDecayNoise":
        """Returns the schedule with all noise multipliers times `factor`."""
        factor = positive("factor", factor)
        with using("factor", factor, _SCALED):
            return dataclasses.replace(
                self, initial=factor * self.initial, least=factor * self.least
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this schedule again."""
        return dataclasses.asdict(self)


NoiseMultiplier: TypeAlias = float | NoiseSchedule


@dataclasses.dataclass(frozen=True)
class Stages:
    """Stages of a noise multiplier: `values[i]` holds from step `boundaries[i - 1]` on.

    Attributes:
      boundaries: Numbers of the steps at which a stage ends and the next begins.
      values: The noise multiplier in each stage.
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def of(self, step: int) -> int:
        """Returns the stage of a step."""
        return bisect.bisect_right(self.boundaries, step)

    def groups(self, first: int, count: int) -> list[tuple[float, int]]:
        """Returns the noise multipliers of `count` steps from number `first` on, and how often."""
        ends = [*self.boundaries, math.inf]
        groups = []
        for value, start, end in zip(self.values, [0, *self.boundaries], ends, strict=True):
            steps = min(end, first + count) - max(start, first)
            if steps > 0:
                groups.append((value, int(steps)))
        return groups

    def merged(self) -> "Stages":
        """Returns the same with equal neighbors as one: a constant schedule is a number."""
        kept = [i for i, v in enumerate(self.values) if i == 0 or v != self.values[i - 1]]
        return Stages(
            tuple(self.boundaries[i - 1] for i in kept[1:]), tuple(self.values[i] for i in kept)
        )

    @property
    def fingerprint(self) -> float:
        """Number by which records tell schedules apart, below 2^52; 0 for a single stage."""
        if len(self.values) == 1:
            return 0.0
        text = repr((self.boundaries, self.values)).encode()
        return float(int.from_bytes(hashlib.sha256(text).digest()[:6], "big") + 1)


_SCHEDULES: dict[str, type[NoiseSchedule]] = {
    "PiecewiseConstantNoise": PiecewiseConstantNoise,
    "ExponentialDecayNoise": ExponentialDecayNoise,
}


def get(noise_multiplier: Any) -> NoiseMultiplier:
    """Returns a noise multiplier or a schedule, from itself or from what `serialize` returned.

    Raises:
      ValueError: It is something else, such as a function or a variable.
    """
    if isinstance(noise_multiplier, dict) and noise_multiplier.get("class_name") in _SCHEDULES:
        return _SCHEDULES[noise_multiplier["class_name"]](**noise_multiplier["config"])
    if type(noise_multiplier) in _SCHEDULES.values():
        return noise_multiplier
    if is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf:
        return noise_multiplier
    requirement = "a non-negative, finite number (0: no privacy) or a schedule of `tfdp.schedules`"
    if callable(noise_multiplier) or hasattr(noise_multiplier, "dtype"):
        requirement += (
            ": noise that a function, a variable or a subclass decides could depend on the data, "
            "and then the costs of the steps do not add up to a guarantee"
        )
    raise error("noise_multiplier", requirement, noise_multiplier)


def serialize(noise_multiplier: NoiseMultiplier) -> Any:
    """Returns plain values from which `get` makes the same noise multiplier or schedule."""
    if not isinstance(noise_multiplier, NoiseSchedule):
        return noise_multiplier
    return {
        "class_name": type(noise_multiplier).__name__,
        "config": noise_multiplier.get_config(),
    }


def stages_of(noise_multiplier: NoiseMultiplier) -> Stages:
    """Returns the stages of a schedule, or the only one of a number."""
    if isinstance(noise_multiplier, NoiseSchedule):
        return noise_multiplier.stages()
    return Stages((), (float(noise_multiplier),))


def describe(noise_multiplier: NoiseMultiplier) -> str:
    """Returns a short text."""
    if isinstance(noise_multiplier, NoiseSchedule):
        return repr(noise_multiplier)
    return f"{noise_multiplier:g}"


def _list(name: str, values: Any) -> list[Any]:
    """Returns the elements of a sequence or an array."""
    return elements(name, values, "a sequence of numbers")
