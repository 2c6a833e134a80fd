"""Report on which rule clips the gradients of each variable of a model."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class SlowClippingWarning(UserWarning):
    """Warning that some or all gradients are clipped by the slower engine."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Entry of a report: how the gradients of one variable are clipped.

    Attributes:
      variable: Name of the variable.
      parameters: Number of its values.
      how: The rule, or why there is none.
      fast: Whether a rule is used that is fast.
      work: About how many multiplications the gradient of one example takes.
    """

    variable: str
    parameters: int
    how: str
    fast: bool
    work: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on which rule clips the gradients of each variable.

    Attributes:
      entries: One for each variable that the loss depends on.
      fallback: Why the vectorized engine handles the whole model, or None.
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
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        """Says in one sentence how many variables have a rule."""
        slow, count = len(self.slow), len(self.entries)
        if not slow:
            return f"All of the {count} variables are on the fast path."
        if slow == count:
            return f"None of the {count} variables is on the fast path."
        share = math.floor(1000 * self.fast_fraction) / 10  # Never 100% of what is not all.
        return (
            f"On the fast path: {count - slow} of {count} variables, {min(share, 99.9)}% of the "
            f"multiplications for gradients. The gradients of the other {slow} are computed for "
            "each example."
        )

    @property
    def slow(self) -> list[Entry]:
        """The variables without a rule."""
        return [entry for entry in self.entries if not entry.fast]

    @property
    def warning(self) -> str | None:
        """Says what is slow, why, and what to do; None if nothing is."""
        remedy = (
            "Steps take longer, often several times as long; the guarantee is the same. "
            "`print(optimizer.clipping.report())` lists all variables. Write such a layer with "
            "operations that have a rule, or register one (`tfdp.clipping.register_op_gradients`)."
        )
        if self.fallback:
            return f"{self.fallback} {remedy}"
        if not self.slow:
            return None
        first, others = self.slow[0], len(self.slow) - 1
        more = f" (and {others} more)" if others else ""
        rules = any(not entry.how.startswith("vectorized") for entry in self.slow)
        slowly = "by a slow rule" if rules else "by the slower vectorized engine"
        return (
            f"The gradients of {len(self.slow)} of {len(self.entries)} variables are clipped "
            f"{slowly}. Received '{first.variable}'{more}, {first.how}. {remedy}"
        )


def vectorized_report(variables: Sequence[tf.Variable], why: str) -> Report:
    """Returns the report of a model that is left to the vectorized engine."""
    sizes = [(v.name, v.shape.num_elements()) for v in variables]
    return Report(tuple(Entry(name, n, "vectorized", False, n) for name, n in sizes), why)


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


def trace_for_report(engine: Any, model: Any) -> None:
    """Traces an engine on a model, with the sum of the squared outputs as each example's loss."""
    spec, variables = _parts_of(model)
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
        result = engine.clipped_sum(tf.add_n(losses), variables, seed)
        return [g for g in result.gradients if g is not None]

    tf.function(step, autograph=False).get_concrete_function(*spec)


def _parts_of(model: Any) -> tuple[Any, list[tf.Variable]]:
    """Returns specs of the arguments of a model, None if it has none, and what it trains."""
    if hasattr(model, "save_spec"):  # Keras 2.
        spec = model.save_spec()
        return spec, [] if spec is None else model.trainable_variables
    from tfdp.base.keras_3 import takes, tf_variable

    inputs = takes(model) if model.built else None
    if inputs is None:
        return None, []
    return ((inputs,), {}), list(map(tf_variable, model.trainable_variables))
