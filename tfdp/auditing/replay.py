"""Replay of training steps: the same step on other data, with the same randomness and releases.

References:
  - Cebere et al., 2026, Privacy in Theory, Bugs in Practice: Grey-Box Auditing of Differential
    Privacy Libraries (https://arxiv.org/abs/2602.17454).
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from tfdp.accounting.sampling import NONE
from tfdp.base.random import key_streams
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.validation import error
from tfdp.clipping.engine import REPLACE_ONE, ClippedSum
from tfdp.clipping.loss_graph import batch_state
from tfdp.data.draw_record import Use
from tfdp.data.elements import has_labels, parts_of
from tfdp.step import noise
from tfdp.step.private_step import PrivateStep
from tfdp.step.record import record_table
from tfdp.training.selective.training import SelectiveTraining

_RELEASES = (2, 7)  # Seed of what is released in the place of noisy sums.
_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


class Replay:
    """Training step of a model that can be run again under equal conditions, on any data.

    It is the step that `fit` takes: forward pass, clipping, what is done with the noisy sum, and
    the update. Only the noise is left out. What the step would add noise to is recorded, and random
    numbers that do not depend on the data are released in its place. So the step is a mechanism
    with known inputs, and what follows it must not depend on the data.

    Args:
      model: The compiled model.
      optimizer: The private optimizer that takes the steps.
      data: `(x, y)`, `(x, y, sample_weight)`, `x` or `(x,)`, for shapes and types.
      examples: The most examples of a logical batch.

    Attributes:
      sampling: Sampling of the batches, if the optimizer was given it.
      has_masks: Whether batches say which of their rows are examples, or have weights.
    """

    def __init__(self, model: Any, optimizer: PrivateStep, data: Any, examples: int):
        self._optimizer = optimizer
        self.sampling = optimizer.sampling
        self._chunks = optimizer.gradient_accumulation_steps
        rows = optimizer.clipping.rows_per_example
        self._rows_of_chunk = examples // self._chunks * rows  # The last one may have more.
        most_rows = examples * rows - (self._chunks - 1) * self._rows_of_chunk
        self._clip = optimizer.current_l2_norm_clip
        self._sums: list[tf.Variable] = []
        if tf.distribute.has_strategy() or isinstance(model.distribute_strategy, _STRATEGIES):
            raise ValueError(
                "Argument `model` must be made and checked outside of the scope of a distribution "
                "strategy: replicas take the same step. Received a model of a "
                f"{type(model.distribute_strategy).__name__}."
            )
        spec = tf.nest.map_structure(
            lambda a: tf.TensorSpec([None, *np.shape(a)[1:]], np.asarray(a).dtype), data
        )
        unmasked = self.sampling is not None and self.sampling.padding == NONE
        is_weighted = len(parts_of(data)) == 3
        self.has_masks = has_labels(data) and (
            not unmasked or is_weighted or isinstance(model, SelectiveTraining)
        )
        if self.has_masks:
            spec = (*spec[:2], tf.TensorSpec([None], tf.float32 if is_weighted else tf.bool))
        _build(model, spec)
        self._traced: tf.Graph | None = None
        self._is_nested = False
        with self._observed(model, most_rows), noise.replaced_by(self._release):
            self._run = self._trace(model, spec)
        if not self._sums:
            raise error("model", "trained by its private optimizer in its `train_step`", model)
        self._before = self._state_before()
        self._stays = [handle for handle in self._before if not _is_metric(handle)]

    # The graph.

    def _trace(self, model: Any, spec: Any) -> Any:
        """Returns the traced step.

        A function of the user's that takes the private step, and that `train_step` calls, would
        keep this trace of it. So it is called as a Python function, in a second attempt.
        """
        step = tf.function(self._step_of(model), autograph=not _is_of_keras_3(model))
        try:
            return step.get_concrete_function(spec)
        except Exception:
            if not self._is_nested:
                raise
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            step = tf.function(self._step_of(model), autograph=not _is_of_keras_3(model))
            return step.get_concrete_function(spec)
        finally:
            tf.config.run_functions_eagerly(before)

    def _step_of(self, model: Any) -> Callable[..., None]:
        optimizer: Any = self._optimizer

        def step(batch: Any) -> None:
            self._traced = tf.compat.v1.get_default_graph()
            self._sums = []  # A function that makes variables is traced twice.
            if isinstance(model, SelectiveTraining):  # An attempt, but for the test of its update.
                x, y, weights = batch
                loss = model._front_end.loss(model, x, y, weights, True)
                with optimizer.attempt(tf.constant(0, tf.int64)):
                    optimizer.minimize(loss, model.trainable_variables)
            else:
                model.train_step(batch)

        return step

    @contextlib.contextmanager
    def _observed(self, model: Any, most_rows: int) -> Iterator[None]:
        """Lets the optimizer take any batch for a draw, with randomness that can be replayed."""
        optimizer, engine = self._optimizer, copy.copy(self._optimizer.clipping)
        self._streams = [KeyStream(0, "replayed noise"), KeyStream(0, "replayed layers")]
        drawn, engine.streams = self._streams

        def use_of(clipped: ClippedSum, lock: Any) -> Use:
            self._is_nested = _function_of(tf.compat.v1.get_default_graph()) is not self._traced
            if self._is_nested:
                raise RuntimeError("The private step is taken in a nested function.")
            if self._chunks == 1:
                return Use.unrecorded(True)
            count = optimizer._prepared_accumulator([]).next[1]
            return Use.unrecorded(True, chunk=count)

        def scales_of(clipped: ClippedSum, stage: Any) -> Any:
            return clipped.noise_scales or engine.sensitivity()

        replaced: dict[str, Any] = {
            "_noise": drawn,
            "_clipping": engine,
            "_accumulators": {},
            "_use_of": use_of,
            "_most_rows": lambda: most_rows,
            "_warn_once": lambda message: None,
        }
        if not optimizer._has_noise:  # Distances are then in units of the sensitivity.
            replaced["_noise_stddevs"] = scales_of
        with _attributes(optimizer, replaced), _trained_by(model, optimizer):
            yield

    def _release(
        self,
        tensors: Sequence[tf.Tensor | None],
        stddevs: Sequence[float | tf.Tensor],
        dtypes: Sequence[tf.DType | None],
    ) -> list[tf.Tensor | None]:
        """Records sums in units of their noise, and returns what is released in their place."""
        if self._optimizer._adaptive is not None and not self._optimizer._has_noise:
            # The last of them counts gradients, without noise, too.
            stddevs = [self._clip * self._sensitivity()] * (len(tensors) - 1) + [np.inf]
        released: list[tf.Tensor | None] = []
        for tensor, stddev, dtype in zip(tensors, stddevs, dtypes, strict=True):
            if tensor is None or dtype is None:
                released.append(None)
                continue
            with tf.init_scope(), plain_variables():
                total = tf.Variable(tf.zeros(tensor.shape, tf.float64), trainable=False)
            total.assign(tf.cast(tensor, tf.float64) / tf.cast(stddev, tf.float64))
            self._sums.append(total)
            seed = (_RELEASES[0], _RELEASES[1] + len(self._sums))
            normal = tf.random.stateless_normal(tf.shape(tensor), seed, dtype=tf.float64)
            scale = tf.cast(stddev, tf.float64)
            scale = tf.where(tf.math.is_finite(scale), scale, tf.ones_like(scale))
            released.append(tf.cast(normal * scale, dtype))
        return released

    # Running it.

    def __call__(
        self, rows: Any, present: np.ndarray | None = None, anew: bool = True
    ) -> np.ndarray:
        """Takes a step; returns the sum that noise would be added to, float64 `[parameters]`.

        The sum is in units of the sensitivity for which the ledger counted the step: of the noise,
        divided by the noise multiplier that was counted.

        Args:
          rows: A logical batch, like the data.
          present: Mask of the rows that are examples, if there are masks; None: all are.
          anew: Whether to set all back first; otherwise the step follows the one before.
        """
        count, weights = np.shape(tf.nest.flatten(rows)[0])[0], parts_of(rows)[2:]
        mask = np.ones(count, bool) if present is None else present
        if weights:
            mask = np.where(mask, np.asarray(weights[0], np.float32), np.float32(0))
        if anew:
            self.restore()
        for total in self._sums:
            total.assign(tf.fill(tf.shape(total), tf.constant(np.nan, tf.float64)))
        for chunk in range(self._chunks):
            first, is_last = chunk * self._rows_of_chunk, chunk == self._chunks - 1
            part = slice(first, count if is_last else first + self._rows_of_chunk)
            batch = (*rows[:2], mask) if self.has_masks else rows
            batch = tf.nest.map_structure(lambda a, part=part: a[part], batch)
            self._run(tf.nest.map_structure(tf.constant, batch))
        sums = np.concatenate([np.ravel(total.numpy()) for total in self._sums])
        return sums * self.noise_counted

    @functools.cached_property
    def noise_counted(self) -> float:
        """Noise multiplier for which the ledger counted the step that was taken; 1 of no noise.

        Raises:
          RuntimeError: The ledger did not count one step.
        """
        if not self._optimizer._has_noise:
            return 1.0
        after = self._optimizer._released.rows()
        steps = slice(record_table.STEPS, record_table.SHOWN)
        known = {row[record_table.UID]: row[steps].sum() for row in self._rows_before}
        counts = [row[steps].sum() - known.get(row[record_table.UID], 0) for row in after]
        if sum(counts) != 1:
            raise RuntimeError(
                "The ledger must count each step once. Received a training step that it counted "
                f"{sum(counts):g} times. This is a bug of tfdp: see SECURITY.md."
            )
        (counted,) = (row for row, count in zip(after, counts, strict=True) if count)
        return record_table.parameters_of(counted)["noise_multiplier"]

    def _sensitivity(self, *relation: str) -> float:
        """Returns the sensitivity of sums that are clipped to 1."""
        engine = self._optimizer.clipping
        return engine.sensitivity(*relation) / engine.l2_norm_clip

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the sum, in the units of the gradient."""
        return self._clip * self._sensitivity()

    @property
    def most_replaced(self) -> float:
        """Bound on the distance of sums with one example replaced, in units of the sensitivity."""
        if self._optimizer.clipping.num_microbatches is None:
            return 2.0  # One example is taken away, and another added.
        return self._sensitivity(REPLACE_ONE) / self._sensitivity()

    # The state.

    def _state_before(self) -> dict[Any, tf.Tensor]:
        """Returns the values of all variables of the step, by their handles."""
        own = {id(v.handle) for v in self._sums}
        known = [v for stream in self._streams for v in stream.variables]
        # The keys of other streams must never be set back.
        own |= {id(v.handle) for v in key_streams.all_variables() if all(v is not k for k in known)}
        self._rows_before = self._optimizer._released.rows()
        handles = [h for h in self._run.captured_inputs if _dtype(h) and id(h) not in own]
        return {_ById(handle): _read(handle) for handle in handles}

    def restore(self) -> None:
        """Sets all variables to what they were at first."""
        for known, value in self._before.items():
            tf.raw_ops.AssignVariableOp(resource=known.handle, value=value)

    def state(self) -> dict[str, bytes]:
        """Returns the present values of all variables but those of metrics."""
        found: dict[str, bytes] = {}
        for known in self._stays:
            name = _name(known.handle)
            while name in found:
                name += "'"
            found[name] = tf.io.serialize_tensor(_read(known.handle)).numpy()
        return found


class _ById:
    """A handle as a key."""

    def __init__(self, handle: tf.Tensor):
        self.handle = handle


def _dtype(handle: tf.Tensor) -> tf.DType | None:
    """Returns the type of the variable that a captured tensor refers to; None if it is another.

    By handles, since keys are drawn, and generators advanced, by operations on these.
    """
    data = handle._handle_data if handle.dtype == tf.resource else None
    if data is None or not data.is_set:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=_dtype(handle)))


def _is_metric(known: _ById) -> bool:
    variable = batch_state.variable_with(known.handle)
    return variable is not None and batch_state.is_metric(variable)


def _name(handle: tf.Tensor) -> str:
    variable = batch_state.variable_with(handle)
    return "a variable without a name" if variable is None else variable.name


def _function_of(graph: Any) -> tf.Graph:
    """Returns the graph of the function in which a branch or the body of a loop is built."""
    while isinstance(graph, (control_flow.CondBranchFuncGraph, control_flow.WhileBodyFuncGraph)):
        graph = graph.outer_graph
    return graph


def _is_of_keras_3(model: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in type(model).__mro__)


def _build(model: Any, batch: Any) -> None:
    """Makes the variables of a model, as `fit` does, without showing it an example."""
    zeros = tf.nest.map_structure(lambda s: tf.zeros([2, *s.shape[1:]], s.dtype), batch)
    if isinstance(model, SelectiveTraining):
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec(s.shape[1:], s.dtype), batch[0])
        model._front_end.build(model, spec)
    elif _is_of_keras_3(model):
        model._symbolic_build(data_batch=zeros)
    elif not model.built:
        model(parts_of(zeros)[0])


@contextlib.contextmanager
def _attributes(instance: Any, values: dict[str, Any]) -> Iterator[None]:
    """Gives an object other attributes, without the notice of Keras, which would track them."""
    own = vars(instance)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


@contextlib.contextmanager
def _trained_by(model: Any, optimizer: Any) -> Iterator[None]:
    trained = model.optimizer
    if trained is optimizer:
        yield
        return
    model.optimizer = optimizer
    try:
        yield
    finally:
        model.optimizer = trained
