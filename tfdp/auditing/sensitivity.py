"""Check of a training step: how far single examples move its noisy sum, and what else they do."""

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import FULL
from tfdp.auditing.replay import Replay
from tfdp.base.validation import boolean, error, integer, positive_integer
from tfdp.data.elements import parts_of
from tfdp.step.private_step import PrivateStep
from tfdp.training.model_check import casts_texts


class SensitivityError(RuntimeError):
    """Error of a training step that lets out more of an example than its noise hides."""


@dataclasses.dataclass(frozen=True)
class Movement:
    """Distances by which one example moves the clipped sum, in units of the sensitivity.

    Attributes:
      example: Index of the example in the data.
      removed: Distance of the sums with and without it.
      masked: The same, where a row of zeros that is masked off stands in its place; 0 if batches
        have no masks, as those without padding.
      replaced: Distance of the sums with it and with another example in its place; at most 2.
    """

    example: int
    removed: float
    masked: float
    replaced: float


@dataclasses.dataclass(frozen=True)
class SensitivityCheck:
    """Movements of the clipped sum and what they must not exceed, and what else an example changed.

    Attributes:
      movements: One for each example.
      sensitivity: The sensitivity that the noise is made for, in the units of the gradient.
      bounds: The most that `removed`, `masked` and `replaced` may be, in units of the sensitivity,
        with what float32 may round.
      leaks: Variables that an example changed although the noisy sum was the same.
      not_replayed: Variables that differ between two equal steps, since TensorFlow draws random
        numbers for them that cannot be drawn again: they were not compared.
    """

    movements: tuple[Movement, ...]
    sensitivity: float
    bounds: tuple[float, float, float]
    leaks: tuple[str, ...] = ()
    not_replayed: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[Movement, ...]:
        """The examples that move the sum too far, or to where it is non-finite."""
        return tuple(
            m
            for m in self.movements
            if not all(
                value <= bound
                for value, bound in zip(dataclasses.astuple(m)[1:], self.bounds, strict=True)
            )
        )

    def check(self) -> None:
        """Raises a SensitivityError if the bound is broken, or something leaks."""
        if self.leaks:
            raise SensitivityError(
                "Data must leave a training step through the noisy sum alone. Received a step "
                "after which these variables depend on an example although the noisy sums were "
                f"equal: {_listed(self.leaks)}. Epsilon does not hold for this model. Look for "
                "what else the update reads (learning rate, constraints, an optimizer of your "
                "own), and for variables that the step writes; if there is nothing, this is a bug "
                "of tfdp: see SECURITY.md."
            )
        if self.broken:
            raise SensitivityError(
                "An example must move the clipped sum by at most the sensitivity, to which the "
                f"noise is scaled. Received {len(self.broken)} of {len(self.movements)} examples "
                f"that move it further:\n{self}\nEpsilon does not hold for this model. Look for "
                "gradients of your own (`tfdp.clipping.register_op_gradients`, "
                "`tf.custom_gradient`); if there are none, this is a bug of tfdp: see SECURITY.md."
            )

    def __str__(self) -> str:
        """Returns a table of the examples that move the sum furthest."""
        worst = sorted(self.movements, key=lambda m: -max(m.removed, m.masked, m.replaced / 2))
        lines = ["example   removed   masked off   replaced   (in units of the sensitivity)"]
        lines += [
            f"{m.example:>7}   {m.removed:7.4f}   {m.masked:10.4f}   {m.replaced:8.4f}"
            + ("   TOO FAR" if m in self.broken else "")
            for m in worst[:10]
        ]
        if len(worst) > 10:
            lines.append(f"... and {len(worst) - 10} that move it less.")
        allowed = "   ".join(f"{bound:.4f}" for bound in self.bounds)
        lines.append(f"allowed: {allowed}; sensitivity: {self.sensitivity:g}")
        if self.leaks:
            lines.append(f"LEAKS into: {_listed(self.leaks)}")
        if self.not_replayed:
            lines.append(f"not compared, as they are random: {_listed(self.not_replayed)}")
        return "\n".join(lines)


def check_sensitivity(
    model: Any,
    data: Any,
    optimizer: PrivateStep | None = None,
    *,
    examples: int = 64,
    seed: int = 0,
    verbose: bool = True,
) -> SensitivityCheck:
    """Measures what single examples change in a training step: the noisy sum, and nothing else.

    The model's own `train_step` runs on a batch of `examples` examples and on neighboring batches:
    for each example, one without it, one where a masked row of zeros stands in its place, and one
    with another example there. Everything else is the same in all of these: the random numbers of
    layers and clipping rules, states, the places of the other examples. The step runs about five
    times for each example. The model, its metrics and its ledger are left as they were; model and
    optimizer are built if they are not.

    Two things are checked:

    - **The sum** that noise is added to moves by at most the sensitivity: the standard deviation
      of the noise, over the noise multiplier for which the ledger counts the step.
    - **Everything else** is equal. In the place of the noisy sums, the steps release the same
      random numbers. After them, all variables must be equal, bit for bit: weights, slots, states
      of layers, the clip, the ledger. Metrics are excepted, as they are private; a second step,
      on a batch that is the same, shows whether anything reads them.

    It shows that this holds for these examples, with the present weights. It is no proof; but
    errors, such as a wrong gradient of an operation of your own, show on most examples.

    Args:
      model: A compiled model of Keras 3 or Keras 2, trained by `fit` or with a `train_step` of its
        own that calls its private optimizer.
      data: `(x, y)` or `(x, y, sample_weight)`, or `x` or `(x,)` for a training step of its own
        that takes no labels: arrays, or nested tuples or dicts of them.
      optimizer: The private optimizer that is examined. None: the model's. (An adaptive clip is
        examined at its present value; where an example or a user has several rows, these are
        copies.)
      examples: Number of examples in the batch; at least 2, at most those of `data`. If the
        optimizer takes batches in chunks, at least 2 for each chunk.
      seed: Chooses the examples.
      verbose: Whether to print the table.

    Returns:
      The movements of all examples.

    Raises:
      SensitivityError: An example moves the sum further than the sensitivity, or changes something
        else.
      ValueError: An argument is out of its range, or training would refuse the model.

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x, y = np.random.rand(100, 8).astype("float32"), np.random.randint(0, 2, 100)
      >>> model = keras.Sequential([keras.layers.Dense(2)])
      >>> model.compile(
      ...     tfdp.keras3.DPSGD(1.0, 1.1, expected_batch_size=10, learning_rate=0.1),
      ...     keras.losses.SparseCategoricalCrossentropy(from_logits=True))
      >>> found = tfdp.keras3.check_sensitivity(model, (x, y), examples=8, verbose=False)
      >>> max(movement.removed for movement in found.movements) <= found.bounds[0]
      True

    References:
      - Cebere et al., 2026, Privacy in Theory, Bugs in Practice: Grey-Box Auditing of Differential
        Privacy Libraries (https://arxiv.org/abs/2602.17454).
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if not isinstance(optimizer, PrivateStep):
        raise error("optimizer", "a private optimizer of tfdp, or None", optimizer)
    if not math.isfinite(optimizer.l2_norm_clip):
        raise error("optimizer", "one with a finite `l2_norm_clip`", optimizer)
    data = tuple(data) if isinstance(data, list) else data
    size = _size(data)
    _check_parts(model, data)
    count = positive_integer("examples", examples)
    least = 2 * optimizer.gradient_accumulation_steps
    if not least <= count <= size:
        raise error("examples", f"between {least} and the {size} examples of `data`", examples)
    boolean("verbose", verbose)
    chosen = np.random.default_rng(integer("seed", seed, 0)).choice(size, count, replace=False)
    each = optimizer.clipping.rows_per_example
    batch = tf.nest.map_structure(lambda a: np.repeat(np.asarray(a)[chosen], each, axis=0), data)
    index = np.arange(count * each).reshape(count, each)
    step = Replay(model, optimizer, data, count)
    movements, norms = [], [0.0]
    try:
        compared = _Comparison(step, batch)
        for place, example in enumerate(chosen):
            order = np.roll(index, -place - 1, axis=0).ravel()  # Its place is the last.
            rows = tf.nest.map_structure(lambda a, order=order: a[order], batch)
            other = tf.nest.map_structure(lambda a: _with_last(a, a[:each]), rows)
            zeros = tf.nest.map_structure(lambda a: _with_last(a, np.zeros_like(a[:each])), rows)
            there = np.arange(count * each) < (count - 1) * each
            whole = compared(rows)
            sums = (
                compared(tf.nest.map_structure(lambda a: a[:-each], rows), rows_differ=True),
                compared(zeros, there) if step.has_masks else whole,
                compared(other, twice=True),
            )
            found = (np.linalg.norm(whole - total) for total in sums)
            movements.append(Movement(int(example), *map(float, found)))
            norms.append(float(np.linalg.norm(whole)))
    finally:
        step.restore()
    rounding = _rounding(max(norms))
    bounds = (1 + rounding, 1 + rounding, step.most_replaced + rounding)
    leaks, random = tuple(sorted(compared.leaks)), tuple(sorted(compared.random))
    result = SensitivityCheck(tuple(movements), step.sensitivity, bounds, leaks, random)
    if verbose:
        print(result)
    result.check()
    return result


class _Comparison:
    """Comparison of the variables after steps on different batches, with the same releases.

    Args:
      step: The step.
      batch: A batch that stands for all others, and is that of each second step.
    """

    def __init__(self, step: Replay, batch: Any):
        self._step, self._batch = step, batch
        self._rows_are_public = step.sampling is None or step.sampling.padding == FULL
        self._step(batch)
        self._after = step.state()
        self._next, self._after_next = self._second_step()
        self._step(batch)
        self.random = _differ(step.state(), self._after)
        total, after = self._second_step()
        self.random |= _differ(after, self._after_next) | self._moved(total)
        self.leaks: set[str] = set()

    def __call__(
        self,
        rows: Any,
        present: np.ndarray | None = None,
        rows_differ: bool = False,
        twice: bool = False,
    ) -> np.ndarray:
        """Returns the sum of a step, after which it notes what differs from other steps.

        Args:
          rows: See `Replay`.
          present: See `Replay`.
          rows_differ: Whether the number of rows is another one.
          twice: Whether to look at the step after it, too.
        """
        total = self._step(rows, present)
        found: set[str] = set()
        if not (rows_differ and self._rows_are_public):
            found |= _differ(self._step.state(), self._after)
        if twice:
            following, after = self._second_step()
            found |= _differ(after, self._after_next) | self._moved(following)
        self.leaks |= found - self.random
        return total

    def _second_step(self) -> tuple[np.ndarray, dict[str, bytes]]:
        total = self._step(self._batch, anew=False)
        return total, self._step.state()

    def _moved(self, total: np.ndarray) -> set[str]:
        """Returns whether the sum of a second step is another one, but for rounding."""
        distance = np.linalg.norm(total - self._next)
        allowed = _rounding(float(np.linalg.norm(self._next)))
        return set() if distance <= allowed else {"the clipped sum of the next step"}


def _differ(found: dict[str, bytes], expected: dict[str, bytes]) -> set[str]:
    return {name for name, value in expected.items() if found[name] != value}


def _rounding(norm: float) -> float:
    """Returns what float32 may round in a sum of this norm, both in units of the sensitivity."""
    return 1e-5 + 2.0**-21 * norm


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _size(data: Any) -> int:
    """Returns the number of examples."""
    sizes = {np.shape(a)[0] if np.ndim(a) else None for a in tf.nest.flatten(data)}
    if not 1 <= len(parts_of(data)) <= 3 or len(sizes) != 1:
        raise error(
            "data", "(x, y), (x, y, sample_weight) or x alone, arrays of one length", type(data)
        )
    return int(sizes.pop() or 0)


def _check_parts(model: Any, data: Any) -> None:
    """Raises a ValueError for data that no model can be trained on, or not this one."""
    parts = parts_of(data)
    kinds = {np.asarray(a).dtype.kind for a in tf.nest.flatten(parts)}
    if not kinds <= set("biufOSU"):
        raise error("data", "arrays of real numbers, or texts for inputs", sorted(kinds))
    if any(np.asarray(a).dtype.kind not in "biuf" for a in tf.nest.flatten(parts[1:])):
        raise error("data", "with labels and weights that are numbers", type(data))
    if casts_texts(model, tf.nest.map_structure(_spec_of, parts[0])):
        raise error("data", "with numbers as inputs: the model makes none of texts", type(data))
    steps = (type(model).train_step, type(model).compute_loss)
    of_keras = all(one.__module__.split(".")[0] in ("keras", "tf_keras") for one in steps)
    if len(parts) == 1 and of_keras and getattr(model, "loss", None) is not None:
        raise error("data", "(x, y): the loss of the model takes labels", type(data))
    if any(np.ndim(weight) != 1 for weight in tf.nest.flatten(parts[2:])):
        raise error("data", "with one weight for each example, [examples]", type(data))


def _spec_of(array: Any) -> tf.TensorSpec:
    """Returns the spec of a batch of arrays, whose texts NumPy may hold as objects."""
    array = np.asarray(array)
    texts = array.dtype.kind not in "biuf"
    return tf.TensorSpec([None, *array.shape[1:]], tf.string if texts else array.dtype)


def _with_last(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([array[: -len(rows)], rows])
