"""Evaluation of trained models, in numbers and pictures. It reads data and is not private."""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp.base import validation
from tfdp.base.validation import between_zero_and_one, error

__all__ = ["Subgroup", "SubgroupReport", "subgroup_report"]

_RESAMPLES = 1000
_NOT_PRIVATE = (
    "The numbers are computed from the data without noise: publishing them is not covered by the "
    "model's guarantee."
)


@dataclasses.dataclass(frozen=True)
class Subgroup:
    """Result of one group of examples.

    Attributes:
      name: Name of the group.
      count: Number of its examples.
      value: Mean of the metric over them.
      lower: Lower end of the confidence interval of `value`.
      upper: Upper end.
    """

    name: str
    count: int
    value: float
    lower: float
    upper: float


@dataclasses.dataclass(frozen=True)
class SubgroupReport:
    """Results of a model by groups of examples, for `print` and `plot`.

    Attributes:
      metric: Name of the metric.
      whole: Result of all examples together.
      subgroups: Results of the groups, in the order of their names.
      confidence: Confidence of each interval by itself.
      higher_is_better: Whether larger values of the metric are better.
    """

    metric: str
    whole: Subgroup
    subgroups: tuple[Subgroup, ...]
    confidence: float
    higher_is_better: bool = True

    @property
    def worst(self) -> Subgroup:
        """The group with the worst value."""
        choose = min if self.higher_is_better else max
        return choose(self.subgroups, key=lambda group: group.value)

    @property
    def gap(self) -> float:
        """Difference of the worst group to the mean of all examples, at least 0."""
        return abs(self.whole.value - self.worst.value)

    def __str__(self) -> str:
        rows = [self.whole, *self.subgroups]
        width = max(len("group"), *(len(row.name) for row in rows))
        value = max(len(self.metric), 8)
        lines = [f"{'group':{width}}  {'count':>8}  {self.metric:>{value}}  interval"]
        lines += [
            f"{row.name:{width}}  {row.count:>8}  {row.value:>{value}.4f}  "
            f"{row.lower:.4f} to {row.upper:.4f}"
            for row in rows
        ]
        return "\n".join(
            [
                *lines,
                f"The worst group is {self.worst.name!r}, {self.gap:.4f} worse than the mean of "
                "all examples.",
                f"Intervals: {100 * self.confidence:g}%, for each group by itself. {_NOT_PRIVATE}",
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the value and the interval of each group, and the mean of all examples.

        Args:
          path: The picture's file, such as "subgroups.png".

        Raises:
          ImportError: matplotlib is missing.
        """
        validation.path("path", path)
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError("Pictures need matplotlib: `pip install matplotlib`.") from missing

        figure = Figure(figsize=(6, 1.2 + 0.3 * len(self.subgroups)), layout="constrained")
        axes: Any = figure.subplots()
        values = np.array([group.value for group in self.subgroups])
        ends = np.array([(group.lower, group.upper) for group in self.subgroups]).T
        places = np.arange(len(values))
        axes.errorbar(values, places, xerr=np.abs(ends - values), fmt="o", capsize=3)
        axes.axvline(self.whole.value, color="gray", linestyle="--", label="all examples")
        axes.set_yticks(places, [f"{g.name} ({g.count})" for g in self.subgroups])
        axes.invert_yaxis()
        axes.set(xlabel=f"{self.metric}, {100 * self.confidence:g}% intervals")
        axes.legend()
        figure.savefig(path, dpi=120)


def subgroup_report(
    model: Any,
    x: Any,
    y: Any,
    groups: Any,
    metric: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    higher_is_better: bool = True,
    confidence: float = 0.95,
    batch_size: int | None = None,
    seed: int = 0,
) -> SubgroupReport:
    """Evaluates a model on each group of examples, with confidence intervals.

    Private training often costs small or hard groups the most accuracy. The report reads the data
    and adds no noise: it is not private itself, whatever data it is given. The gap of the worst of
    many groups is too large by chance if groups are small: look at the intervals.

    Args:
      model: A model of Keras 2 or Keras 3; only its `predict` is used.
      x: Inputs of the model, as `predict` takes them, in a fixed order.
      y: Labels, `[examples]` or one-hot `[examples, classes]`; what `metric` takes, if it is given.
      groups: For each example the name of its group, integers or strings, `[examples]`.
      metric: Function of `y` and the model's outputs that returns one number for each example; a
        group's value is the mean of them. None: accuracy, of outputs `[examples, classes]`.
      higher_is_better: Whether larger values of the metric are better.
      confidence: Confidence of each interval, in (0, 1). Wilson's score interval where the metric
        is 0 or 1 for each example. Else the interval between quantiles of 1,000 bootstrap means,
        which is too narrow for groups of a few examples.
      batch_size: Batch size of `predict`.
      seed: Seed of the bootstrap.

    Raises:
      ValueError: An argument is out of its range, or they are of different lengths.

    Example:
      >>> import numpy as np
      >>> class Constant:
      ...     def predict(self, x, **kwargs):
      ...         return np.tile([[0.0, 1.0]], [len(x), 1])
      >>> report = subgroup_report(
      ...     Constant(), np.zeros([40, 3]), np.arange(40) % 4 > 0, ["a", "b"] * 20)
      >>> print(str(report).split("The worst")[0].rstrip())
      group     count  accuracy  interval
      all          40    0.7500  0.5981 to 0.8581
      a            20    0.5000  0.2993 to 0.7007
      b            20    1.0000  0.8389 to 1.0000
      >>> report.worst.name, report.gap
      ('a', 0.25)

    References:
      - Bagdasaryan et al., 2019, Differential Privacy Has Disparate Impact on Model Accuracy
        (https://arxiv.org/abs/1905.12101).
      - Wilson, 1927, Probable Inference, the Law of Succession, and Statistical Inference.
    """
    confidence = between_zero_and_one("confidence", confidence)
    validation.function("metric", metric)
    validation.boolean("higher_is_better", higher_is_better)
    validation.integer("batch_size", batch_size, 1, optional=True)
    seed = validation.integer("seed", seed, 0)
    if not callable(getattr(model, "predict", None)):
        raise error("model", "a model with `predict`", model)
    requirement = "an array with the label of each example"
    with validation.using("y", y, requirement):
        labels = np.asarray(y)
    odd = bool(labels.dtype.names) or (metric is None and labels.dtype.kind in "cmM")
    if not labels.ndim or odd:
        raise error("y", requirement, y)
    names = _names(groups)
    with validation.using("x", x, "inputs of the model"):
        outputs = np.asarray(model.predict(x, batch_size=batch_size, verbose=0))
    if not len(labels) == len(names) == len(outputs) > 0:
        raise ValueError(
            "Arguments `x`, `y` and `groups` must be of the same number of examples, at least one. "
            f"Received: {len(outputs)} predictions, {len(labels)} labels, {len(names)} groups."
        )
    values = _accuracies(labels, outputs) if metric is None else _values(metric, labels, outputs)
    if values.shape != labels.shape[:1] or not np.all(np.isfinite(values.astype(np.float64))):
        raise error("metric", f"one finite number for each of {len(labels)} examples", values)
    values = values.astype(np.float64)
    is_share = bool(np.all((values == 0) | (values == 1)))
    random = np.random.default_rng(seed)

    def result(name: str, members: np.ndarray) -> Subgroup:
        chosen = values[members]
        mean, count = float(chosen.mean()), len(chosen)
        if is_share:
            ends = _wilson(mean, count, confidence)
        else:
            ends = _bootstrap(chosen, confidence, random)
        return Subgroup(name, count, mean, *ends)

    return SubgroupReport(
        "accuracy" if metric is None else getattr(metric, "__name__", "metric"),
        result("all", np.full(len(values), True)),
        tuple(result(str(name), names == name) for name in np.unique(names)),
        confidence,
        higher_is_better,
    )


def _names(groups: Any) -> np.ndarray:
    with validation.using("groups", groups, "one integer or string for each example"):
        names = np.asarray(groups)
    if names.dtype == object and all(isinstance(name, str) for name in names.flat):
        names = names.astype(str)  # As pandas has them.
    if names.ndim != 1 or names.dtype.kind not in "biuU":
        raise error("groups", "one integer or string for each example", groups)
    return names


def _values(metric: Callable, labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    try:
        return np.asarray(metric(labels, outputs))
    except TypeError as problem:
        raise error("metric", "a function of `y` and the model's outputs", metric) from problem


def _accuracies(labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Returns for each example whether the largest output is that of its label."""
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "Argument `metric` must be given for outputs of another shape than [examples, "
            f"classes], with two classes or more. Received outputs of shape {outputs.shape}. For "
            "one logit: `metric=lambda y, outputs: (outputs[:, 0] > 0) == y`."
        )
    if labels.shape == outputs.shape:
        labels = labels.argmax(axis=-1)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1:
        raise error("y", f"of shape [examples] or {list(outputs.shape)}", labels.shape)
    return outputs.argmax(axis=-1) == labels


def _wilson(share: float, count: int, confidence: float) -> tuple[float, float]:
    """Returns Wilson's score interval of a share of `count` examples."""
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count)
    half *= math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # A share of 0 or 1 is an end itself, but for rounding.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _bootstrap(
    values: np.ndarray, confidence: float, random: np.random.Generator
) -> tuple[float, float]:
    """Returns the quantiles of means over samples that are drawn from the values themselves."""
    count = len(values)
    means = [values[random.integers(count, size=count)].mean() for _ in range(_RESAMPLES)]
    lower, upper = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(lower), float(upper)
