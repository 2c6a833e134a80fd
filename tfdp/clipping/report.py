"""Tells which rule clips the gradients of each variable of a model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Entry:
    """How the gradients of one variable are clipped.

    Attributes:
      variable: Name of the variable.
      parameters: Number of its values.
      how: The rule, or why there is none.
      fast: Whether a rule is used.
      work: About how many multiplications the gradient of one example takes.
    """

    variable: str
    parameters: int
    how: str
    fast: bool
    work: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Which rule clips the gradients of each variable.

    Attributes:
      entries: One for each variable that the loss depends on.
      fallback: Why all of the model is left to the vectorised engine, or None.
    """

    entries: tuple[Entry, ...]
    fallback: str | None = None

    @property
    def fast_fraction(self) -> float:
        """Share of the multiplications for gradients that are on the fast path."""
        total = sum(entry.work for entry in self.entries)
        return sum(entry.work for entry in self.entries if entry.fast) / max(1, total)

    def __str__(self) -> str:
        width = max([len(entry.variable) for entry in self.entries], default=0)
        lines = [
            f"{'fast' if entry.fast else 'SLOW'}  {entry.variable:{width}}  "
            f"{entry.parameters:>10,}  {entry.how}"
            for entry in self.entries
        ]
        if self.fallback:
            lines.insert(0, self.fallback)
        return "\n".join([*lines, f"On the fast path: {self.fast_fraction:.1%} of the work."])


def vectorized_report(variables: Sequence[tf.Variable], why: str) -> Report:
    """The report of a model that is left to the vectorised engine."""
    sizes = [(v.name, v.shape.num_elements()) for v in variables]
    return Report(tuple(Entry(name, n, "vectorised", False, n) for name, n in sizes), why)


def of_last_step(report: Report | None) -> Report:
    """Returns the report of the training step that was traced last.

    Raises:
      ValueError: There is none.
    """
    if report is None:
        raise ValueError(
            "Argument `model` must be given before the first training step. Received: None."
        )
    return report


def trace_for_report(engine: Any, model: tf.keras.Model) -> None:
    """Traces an engine on a model, with the sum of the squared outputs as each example's loss."""
    spec = model.save_spec()
    if spec is None:
        raise ValueError(
            "Argument `model` must have been called, or built with its input's shape, to be "
            f"reported on. Received: {model}."
        )

    def step(args: Any, kwargs: Any) -> tf.Tensor:
        outputs = tf.nest.flatten(model(*args, **{**kwargs, "training": True}))
        losses = [
            tf.reduce_sum(tf.square(tf.cast(o, tf.float32)), axis=list(range(1, o.shape.rank)))
            for o in outputs
        ]
        seed = tf.zeros([2], tf.int64)
        result = engine.clipped_sum(tf.add_n(losses), model.trainable_variables, seed)
        return [g for g in result.gradients if g is not None]

    tf.function(step, autograph=False).get_concrete_function(*spec)
