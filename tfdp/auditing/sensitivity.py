"""Check of the clipped sum: how far single examples move it, for a model and data of your own."""

import copy
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._random.key_streams import KeyStream
from tfdp._tf.plain_variables import plain_variables
from tfdp._validation import error, positive_integer
from tfdp.clipping import TwoTermLoss
from tfdp.clipping.engine import REPLACE_ONE, ZERO_OUT
from tfdp.models import SelectiveModel
from tfdp.optimizers.base import PrivateOptimizerMixin

_KEY = (2, 7)  # Random rules and partitions draw the same in all steps.


class SensitivityError(RuntimeError):
    """Error of a model whose clipped sum an example moves further than the noise hides."""


@dataclasses.dataclass(frozen=True)
class Movement:
    """Distances by which one example moves the clipped sum, in units of the sensitivity.

    Attributes:
      example: Index of the example in the data.
      removed: Distance of the sums with and without it.
      masked: The same, where a row of zeros that is masked off stands in its place.
      replaced: Distance of the sums with it and with another example in its place; at most 2.
    """

    example: int
    removed: float
    masked: float
    replaced: float


@dataclasses.dataclass(frozen=True)
class SensitivityCheck:
    """Movements of the clipped sum, and what they must not exceed.

    Attributes:
      movements: One for each example.
      sensitivity: The sensitivity that the noise is made for, in the units of the gradient.
      bounds: The most that `removed`, `masked` and `replaced` may be, in units of the sensitivity,
        with what float32 may round.
    """

    movements: tuple[Movement, ...]
    sensitivity: float
    bounds: tuple[float, float, float]

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
        """Raises a SensitivityError if the bound is broken."""
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
        return "\n".join(lines)


def check_sensitivity(
    model: tf.keras.Model,
    data: Any,
    optimizer: PrivateOptimizerMixin | None = None,
    *,
    examples: int = 64,
    seed: int = 0,
    verbose: bool = True,
) -> SensitivityCheck:
    """Measures how far single examples move the clipped sum of gradients, without noise.

    The model's own `train_step` runs on a batch of `examples` examples and on neighbouring batches:
    for each example, one without it, one where a masked row of zeros stands in its place, and one
    with another example there. Everything else is the same in all of these: the random numbers of
    layers and clipping rules, states, the places of the other examples. The step runs 3 times for
    each example. The model, its metrics and its ledger are left as they were.

    It shows that the bound holds for these examples, with the present weights. It is no proof; but
    errors, such as a wrong gradient of an operation of your own, show on most examples.

    Args:
      model: A compiled model of Keras 2, trained by `fit` or with a `train_step` of its own that
        calls `self.optimizer.minimize`.
      data: `(x, y)` or `(x, y, sample_weight)`: arrays, or nested tuples or dicts of them.
      optimizer: The private optimizer whose clip, rule and engine are examined. None: the model's.
        (An adaptive clip is examined at its present value; where an example or a user has several
        rows, these are copies.)
      examples: Number of examples in the batch; at least 2, at most those of `data`.
      seed: Chooses the examples.
      verbose: Whether to print the table.

    Returns:
      The movements of all examples.

    Raises:
      SensitivityError: An example moves the sum further than the sensitivity.
      ValueError: An argument is out of its range, or training would refuse the model.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(100, 8).astype("float32"), np.random.randint(0, 2, 100)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> model.compile(
      ...     tfdp.DPSGD(1.0, 1.1, expected_batch_size=10, learning_rate=0.1),
      ...     tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
      >>> found = tfdp.auditing.check_sensitivity(model, (x, y), examples=8, verbose=False)
      >>> max(movement.removed for movement in found.movements) <= found.bounds[0]
      True
    """
    optimizer = model.optimizer if optimizer is None else optimizer
    if not isinstance(optimizer, PrivateOptimizerMixin):
        raise error("optimizer", "a private optimizer of tfdp, or None", optimizer)
    if not math.isfinite(optimizer.l2_norm_clip):
        raise error("optimizer", "one with a finite `l2_norm_clip`", optimizer)
    size = _size(data)
    count = positive_integer("examples", examples)
    if not 2 <= count <= size:
        raise error("examples", f"between 2 and the {size} examples of `data`", examples)
    chosen = np.random.default_rng(seed).choice(size, count, replace=False)
    each = optimizer.clipping.rows_per_example
    batch = tf.nest.map_structure(lambda a: np.repeat(np.asarray(a)[chosen], each, axis=0), data)
    index = np.arange(count * each).reshape(count, each)
    step = _Step(model, optimizer, data)
    movements, norms = [], [0.0]
    try:
        for place, example in enumerate(chosen):
            order = np.roll(index, -place - 1, axis=0).ravel()  # Its place is the last.
            rows = tf.nest.map_structure(lambda a, order=order: a[order], batch)
            whole = step(rows)
            other = tf.nest.map_structure(lambda a: _with_last(a, a[:each]), rows)
            zeros = tf.nest.map_structure(lambda a: _with_last(a, np.zeros_like(a[:each])), rows)
            sums = (
                step(tf.nest.map_structure(lambda a: a[:-each], rows)),
                step(zeros, present=np.arange(count * each) < (count - 1) * each),
                step(other),
            )
            found = (np.linalg.norm(whole - total) for total in sums)
            movements.append(Movement(int(example), *map(float, found)))
            norms.append(float(np.linalg.norm(whole)))
    finally:
        step.restore()
    rounding = 1e-5 + 2.0**-21 * max(norms)
    bounds = (1 + rounding, 1 + rounding, step.most_replaced + rounding)
    result = SensitivityCheck(tuple(movements), step.sensitivity, bounds)
    if verbose:
        print(result)
    result.check()
    return result


def _size(data: Any) -> int:
    """Returns the number of examples."""
    sizes = {np.shape(a)[0] if np.ndim(a) else None for a in tf.nest.flatten(data)}
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3) or len(sizes) != 1:
        raise error("data", "(x, y) or (x, y, sample_weight), arrays of one length", type(data))
    return int(sizes.pop() or 0)


def _with_last(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([array[: -len(rows)], rows])


class _Step:
    """A model's training step up to the clipped sum, which can be run again under equal conditions.

    Args:
      model: The compiled model.
      optimizer: The optimizer whose clipping it uses.
      data: `(x, y)` or `(x, y, sample_weight)`, for shapes and types.
    """

    def __init__(self, model: Any, optimizer: PrivateOptimizerMixin, data: Any):
        if not model.built:
            model(tf.nest.map_structure(lambda a: tf.convert_to_tensor(np.asarray(a)[:1]), data[0]))
        self._recorder = _Recorder(optimizer)
        spec = tf.nest.map_structure(
            lambda a: tf.TensorSpec([None, *np.shape(a)[1:]], np.asarray(a).dtype), tuple(data[:2])
        )
        weights = tf.TensorSpec([None], tf.float32 if len(data) == 3 else tf.bool)
        step = model.train_step
        if isinstance(model, SelectiveModel):  # An attempt, but for the test of its update.
            step = functools.partial(tf.keras.Model.train_step, model)
        trained = model.optimizer
        model.optimizer = self._recorder
        try:
            self._run = tf.function(step).get_concrete_function((*spec, weights))
        finally:
            model.optimizer = trained
        if not self._recorder.sums:
            raise error("model", "trained by `self.optimizer.minimize` in its `train_step`", model)
        own = {id(v.handle) for v in self._recorder.sums}
        self._before = [
            (handle, value)
            for handle, value in map(_value, self._run.captured_inputs)
            if value is not None and id(handle) not in own
        ]

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the sum, in the units of the gradient."""
        return self._recorder.sensitivity()

    @property
    def most_replaced(self) -> float:
        """Bound on the distance of sums with one example replaced, in units of the sensitivity."""
        if self._recorder.has_terms:
            return 2.0  # One example is taken away, and another added.
        return self._recorder.sensitivity(REPLACE_ONE) / self.sensitivity

    def __call__(self, rows: Any, present: np.ndarray | None = None) -> np.ndarray:
        """Returns the clipped sum over rows, in units of the sensitivity, float64 `[parameters]`.

        Args:
          rows: `(x, y)` or `(x, y, sample_weight)`.
          present: Mask of the rows that are examples; None: all are.
        """
        x, y, *weights = rows
        count = np.shape(tf.nest.flatten(x)[0])[0]
        mask = np.ones(count, bool) if present is None else present
        if weights:
            mask = np.where(mask, np.asarray(weights[0], np.float32), np.float32(0))
        self.restore()
        self._run(tf.nest.map_structure(tf.constant, (x, y, mask)))
        return np.concatenate([np.ravel(v.numpy()) for v in self._recorder.sums])

    def restore(self) -> None:
        """Sets all variables to what they were at first."""
        for handle, value in self._before:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _value(handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns a handle and the value of its variable; None if it is not that of a variable.

    By handles, since keys are drawn, and generators advanced, by operations on these.
    """
    data = handle._handle_data if handle.dtype == tf.resource else None
    if data is None or not data.is_set:
        return handle, None
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return handle, tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))


class _Recorder:
    """Stand-in for the optimizer while a step is traced: records the clipped sum, updates nothing.

    Args:
      optimizer: The optimizer whose clipping it uses.
    """

    def __init__(self, optimizer: PrivateOptimizerMixin):
        self._engine = copy.copy(optimizer.clipping)
        self._engine.streams = KeyStream(0, "check_sensitivity")  # Known, and run again.
        self._optimizer = optimizer
        self._clip = optimizer.current_l2_norm_clip
        self.sums: list[tf.Variable] = []
        self.has_terms = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)  # Steps may read it; `apply_gradients` raises.

    def sensitivity(self, relation: str = ZERO_OUT) -> float:
        """Returns the sensitivity with the present clip."""
        return self._engine.sensitivity(relation) * (self._clip / self._engine.l2_norm_clip)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> tf.Tensor:
        """Records the clipped sum, each variable's in units of its noise at a multiplier of 1."""
        del tape
        loss = loss() if callable(loss) and not isinstance(loss, TwoTermLoss) else loss
        variables = list(tf.nest.flatten(var_list() if callable(var_list) else var_list))
        self.has_terms = isinstance(loss, TwoTermLoss)
        key = tf.constant(_KEY, tf.int64)
        if isinstance(loss, TwoTermLoss):
            size = self._optimizer.expected_batch_size
            clipped = loss.clipped_sum(self._engine, variables, key, size)
        else:
            clip = tf.constant(self._clip, tf.float32)
            clipped = self._engine.clipped_sum(loss, variables, key, clip)
        units = clipped.noise_scales or [self.sensitivity()] * len(variables)
        with tf.init_scope(), plain_variables():
            self.sums = [tf.Variable(tf.zeros(v.shape, tf.float64)) for v in variables]
        for total, gradient, unit in zip(self.sums, clipped.gradients, units, strict=True):
            if gradient is not None:
                total.assign(tf.cast(gradient, tf.float64) / tf.cast(unit, tf.float64))
        return tf.constant(0)
