"""The private step: clip, sum, add noise once, divide. Keras is not needed for it.

The front ends say how variables are made and updated: `base.py` for Keras 2, `tfdp.keras3` for
Keras 3.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.accounting.sampling import BUCKETS, NONE
from tfdp.base import private_apis, private_logs
from tfdp.base.validation import error
from tfdp.clipping import step_check
from tfdp.clipping.batch_loss import BatchLoss
from tfdp.clipping.engine import ClippedSum
from tfdp.clipping.loss_graph import loss_reader
from tfdp.clipping.shared_tensors import constant
from tfdp.clipping.update_error import Code
from tfdp.data import draw_record
from tfdp.step import replicas, shown_loss
from tfdp.step.accumulator import Accumulator
from tfdp.step.arguments import check_not_compiled, check_two_term_arguments, check_variables
from tfdp.step.noise import add_gaussian_noise
from tfdp.step.record import draw_use
from tfdp.step.record.release_count import check_now
from tfdp.step.secure_noise import add_secure_noise
from tfdp.step.step_warnings import StepWarnings

_NOT_FRESH = (
    "The batch of this step is no unused draw of `tfdp.data.poisson_batches`, sampled as the "
    "optimizer was told: {}. It was used before (a step needs a batch of its own: no `cache`, no "
    "second `minimize` or `train_on_batch` on the same one), or changed after it was drawn (give "
    "`poisson_batches` a `transform=`, or change it in the function that calls `minimize`), or is "
    "from elsewhere, such as arrays in `fit(x, y)` in place of `fit(batches)`. Epsilon would not "
    "hold for it."
)
# For each graph, the names of the tensors of batches that private steps in it have used.
_used: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step that is being built, in one replica.

    Attributes:
      clipped: The clipped sum of its batch.
      variables: The variables to update.
      use: Draw that its batch is of.
      lock: The accumulator's lock, for a batch that is a part of a logical batch.
      clip: The clip that moves, as it was read for the sum; None: it is constant.
      stage: Stage of the noise's schedule in which the step was counted, if there is a schedule.
      masks: Coordinates that the step trains, of each variable; None: all.
      digest: Digest of the state that all workers must have alike; None: there is one worker.
    """

    clipped: ClippedSum
    variables: list[tf.Variable]
    use: draw_record.Use
    lock: tf.Tensor | None
    clip: tf.Tensor | None
    stage: tf.Tensor | None
    masks: list[tf.Tensor] | None
    digest: tf.Tensor | None


class PrivateStep(StepWarnings):
    """Base class of private optimizers of every Keras.

    Each logical step applies an optimizer's update to

        (sum of clipped gradients + N(0, (noise_multiplier * sensitivity)^2)) / expected_batch_size

    plus the gradient of weight regularizers, which depends on no data. The private optimizers'
    docstrings describe the arguments.

    A subclass calls `_set_privacy` when it is made and `_take_step` in each step, and defines
    `_update`, `build` and what else is declared here and in `PersistentState`.
    """

    _name: str
    iterations: Any

    def build(self, var_list: Any) -> None:
        """Creates the state of these variables, and takes over what they have cost."""
        raise NotImplementedError

    def _tf_variable(self, variable: Any) -> tf.Variable:
        """Returns TensorFlow's variable of a variable of this Keras."""
        return variable

    def _update(self, gradients: list[tuple[tf.Tensor | None, tf.Variable]], name: Any) -> Any:
        """Applies the noisy mean gradients, the same in each replica, to the variables."""
        raise NotImplementedError

    def _loss_metrics(self, model: Any) -> list[Any] | None:
        """Returns Keras's metrics of the loss of a model; None if it gets something else."""
        raise NotImplementedError

    def update_code(self, variables: Sequence[tf.Variable]) -> Code:
        """Yields, for messages, the functions of users that an update may call.

        Args:
          variables: Those that the step reads or writes.
        """
        raise NotImplementedError

    def _take_step(self, loss: Any, var_list: Any, name: str | None = None) -> Any:
        """Takes a private step in the graph being built.

        Args:
          loss: One loss per example, `[rows]`, or a scalar that is provably their sum or mean; or a
            function of no arguments that returns it.
          var_list: The variables to update, or a function that returns them.
          name: Name of the operation.

        Raises:
          ValueError: The step would not be private, or is not taken in a `tf.function`.
        """
        step = self._clipped_step(loss, var_list)
        if step.clipped.mask is not None and self._sampled and self._sampled.padding != NONE:
            metrics = shown_loss.metrics_of_caller(self._loss_metrics)
            shown_loss.show_examples(metrics, step.clipped.mask)
        step_check.check_update([*step.clipped.gradients, *step.clipped.regularizer_gradients])
        with step_check.own_operations():
            if self._gradient_accumulation_steps == 1:
                return self._logical_step(step, step.clipped, name)
            return self._accumulate(step, name)

    def _check_traced(self) -> None:
        if tf.executing_eagerly():
            raise ValueError(
                f"{type(self).__name__} must run in a tf.function, whose graph shows which part "
                "of the loss belongs to which example. Use `model.compile(run_eagerly=False)`, "
                "or decorate your training step with `@tf.function`."
            )

    def _clipped_step(self, loss: Any, var_list: Any) -> _Step:
        """Clips and sums the gradients, and counts the release: not yet private."""
        self._check_traced()
        if callable(loss):
            loss = loss()
        if callable(var_list):
            var_list = var_list()
        given = list(tf.nest.flatten(var_list))
        variables = [self._tf_variable(variable) for variable in given]
        check_variables(variables)
        if self._sampled is not None and self._sampled.padding == NONE:
            check_not_compiled()
        self._check_replicas()
        self._warn_without_sampling()
        self._warn_of_gpu()
        if self._sampled is not None:
            _check_first_use(loss)
        padding = None if self._sampled is None else self._sampled.padding
        step_check.check_step(loss, rows_are_private=padding in (NONE, BUCKETS))

        def begin() -> None:
            self.build(given)
            private_logs.check_fit()
            private_apis.warn_of_missing()

        replicas.once(begin)
        self._inherit_from_graph()
        with tf.name_scope(self._name + "/clipped_sum"):
            seed = self._noise.next_key(-1 - self._position())
            with step_check.own_operations():
                lock = self._take_lock()
                clip, masks = self._read_once(variables, lock)
            rows, looked_up = self._most_rows(), None
            if isinstance(loss, BatchLoss):
                if replicas.count() > 1:  # Their groups must not hold the row of an empty batch.
                    with step_check.own_operations():
                        looked_up = self._use_of(loss.batch_alone(), lock)
                clipped = self._two_term_sum(loss, variables, seed, rows, looked_up)
            else:
                masked = {} if masks is None else {"masks": masks}
                clipped = self._clipping.clipped_sum(loss, variables, seed, clip, rows, **masked)
            with step_check.own_operations():
                use = self._use_of(clipped, lock) if looked_up is None else looked_up
                stage, digest, counted = self._count_before(clipped, use, clip)
                # Parts of the sum that need no evaluation of the model wait for the check, too.
                clipped = clipped.unless(None if looked_up else use.empty).after(counted)
        return _Step(clipped, variables, use, lock, clip, stage, masks, digest)

    def _take_lock(self) -> tf.Tensor | None:
        """Returns the lock of the logical batch, for all replicas of this process; None: whole."""
        if self._gradient_accumulation_steps == 1:
            return None
        self._prepared_accumulator([])
        return replicas.once(lambda: self._first_accumulator().lock())

    def _read_once(
        self, variables: list[tf.Variable], lock: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, list[tf.Tensor] | None]:
        """Reads the public state on which the clipped sum depends: once for a logical batch.

        Sum and noise must be of one clip. The state may change meanwhile, as by a checkpoint that
        is restored between two chunks, or by another thread: so all chunks, all replicas of this
        process and the noise use the same tensors.

        Returns:
          The clip that moves, if there is one, and which coordinates the step trains; None: all.
        """
        masked = self._compression is not None and self._compression.has_masks
        if self._adaptive is None and not masked:
            return None, None

        def read() -> tf.Tensor:
            clip = tf.constant(0.0) if self._adaptive is None else self._adaptive.value()
            now = tf.stack([tf.cast(x, tf.float64) for x in (clip, self.iterations)])
            return now if lock is None else self._first_accumulator().numbers(now)

        with tf.control_dependencies([] if lock is None else [lock]):
            clip, iteration = tf.unstack(replicas.once(read))
        step_check.mark_released([clip, iteration])
        masks = None
        if self._compressor is not None and masked:
            masks = self._compressor.masks(variables, tf.cast(iteration, tf.int64))
        return None if self._adaptive is None else tf.cast(clip, tf.float32), masks

    def _check_replicas(self) -> None:
        """Checks that a step can be taken by the replicas for which the graph is being built."""
        replicas.check(type(self).__name__)
        if self._sampled is not None and self._sampled.parts != replicas.count():
            raise ValueError(
                "Argument `sampling` must have one part for each of the replicas, each of which "
                "samples a part of the data set: `sampling=batches.sampling` of `batches = "
                "tfdp.data.distributed_poisson_batches(strategy, ...)`. Received: sampling of "
                f"{self._sampled.parts} parts, with {replicas.count()} replicas."
            )
        if len(self._stages.values) > 1 and replicas.several_workers():
            raise error(
                "noise_multiplier",
                "a number under a MultiWorkerMirroredStrategy: each worker counts steps by itself, "
                "and two that differ would add parts of different noise",
                self.noise_multiplier,
            )
        if self._clipping.num_microbatches is not None and replicas.count() > 1:
            raise error(
                "num_microbatches",
                "None under a distribution strategy of several replicas",
                self._clipping.num_microbatches,
            )

    def _count_before(
        self, clipped: ClippedSum, use: draw_record.Use, clip: tf.Tensor | None
    ) -> tuple[tf.Tensor | None, tf.Tensor | None, tf.Operation]:
        """Checks and counts the release before anything that depends on the batch can fail.

        An operation that fails on an example, and so ends the step, is a release as well.

        Args:
          clipped: The clipped sum of the batch.
          use: How the batch was drawn.
          clip: The clip that moves, if there is one.

        Returns:
          The stage of the noise's schedule, what workers compare, and the operation that counts.
        """
        data = [op for t in clipped.batch for op in t.consumers() if not draw_record.is_own(op)]
        counted, stage = replicas.once(self._count, use.fresh, use.chunk, use.source, use.sequence)
        for op in data:
            op._add_control_input(counted.op)
        digest = None
        if replicas.several_workers():
            with tf.control_dependencies([counted]):
                digest = self._released.digest(self.iterations, 0.0 if clip is None else clip)
        return stage, digest, counted.op

    def _count(
        self,
        fresh: Sequence[tf.Tensor],
        chunks: Sequence[tf.Tensor],
        sources: Sequence[tf.Tensor],
        sequences: Sequence[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Counts a step whose batches, one for each replica, have these uses.

        Returns:
          A tensor that is there when the step is counted, and the stage that it is counted in.
        """
        all_fresh = tf.reduce_all(tf.stack(fresh))
        begins = tf.reduce_any(tf.stack(chunks) == 0)
        checks = [self._released.check()]
        if self._sampled is not None:  # Counted apart, and not only asserted: XLA drops assertions.
            checks.append(check_now(all_fresh, _NOT_FRESH.format(self._sampled)))
            begins = tf.logical_or(begins, tf.logical_not(all_fresh))

        def add(
            costs: tf.Tensor | bool = True, held: tf.Tensor | None = None
        ) -> tuple[tf.Operation, tf.Tensor | None]:
            stage = self._released.stage(begins, costs, held)
            return self._released.add(all_fresh, begins, stage, costs), stage

        with tf.control_dependencies(checks):
            if self._cycles is None:
                counted, stage = add()
            else:  # On one replica.
                first = tf.logical_and(all_fresh, begins)
                counted, stage = self._cycles.count(sources[0], sequences[0], first, add)
        with tf.control_dependencies([counted]):
            return tf.identity(begins), None if stage is None else tf.identity(stage)

    def _use_of(self, clipped: ClippedSum, lock: tf.Tensor | None) -> draw_record.Use:
        """Returns the use of the batch: whether it is an unused draw, sampled as accounted for."""
        if self._gradient_accumulation_steps == 1:
            return draw_use.use_of(clipped, self._sampled, None)
        with tf.control_dependencies([] if lock is None else [lock]):
            return draw_use.use_of(clipped, self._sampled, self._prepared_accumulator([]))

    def _most_rows(self) -> int | None:
        """Returns the most rows of a batch, which follow from how it was sampled."""
        if self._sampled is None:
            return None
        most = -(-self._sampled.padded_batch_size // self._gradient_accumulation_steps)
        return most * self._sampled.rows_per_example

    def _two_term_sum(
        self,
        loss: BatchLoss,
        variables: list,
        seed: tf.Tensor,
        rows: int | None,
        looked_up: draw_record.Use | None,
    ) -> ClippedSum:
        """Returns the clipped sum of a loss with a batch-wise term."""
        check_two_term_arguments(
            self._clipping,
            self._gradient_accumulation_steps,
            None if self._memory is None else self._correlation,
            self._compression,
            self._sampled,
        )
        clipped = loss.clipped_sum(
            self._clipping,
            variables,
            seed,
            self._expected_batch_size,
            most_rows=rows,
            empty=looked_up and looked_up.empty,
        )
        if replicas.count() > 1:
            facts = repr((loss.aggregation, clipped.noise_scales))
            replicas.once(_check_alike, facts)
        scales = [s for s in clipped.noise_scales or [] if isinstance(s, float)]
        if self._has_noise and not all(map(math.isfinite, scales)):
            raise ValueError(
                "Argument `batch_clip` must be finite when there is noise: an example's influence "
                f"would not be bounded. Received: aggregation={loss.aggregation}."
            )
        return clipped

    def _prepared_accumulator(self, variables: list) -> Accumulator:
        with tf.init_scope():
            replica = replicas.index()
            if replica not in self._accumulators:
                dtype = tf.float64 if self._clipping.wide_sums else tf.float32
                self._accumulators[replica] = Accumulator(self._gradient_accumulation_steps, dtype)
            self._accumulators[replica].prepare(variables)
        return self._accumulators[replica]

    def _first_accumulator(self) -> Accumulator:
        """Returns that of this process's first replica, which has the lock for all of them."""
        return self._accumulators[min(self._accumulators)]

    def _accumulate(self, step: _Step, name: str | None) -> tf.Tensor:
        """Adds to the sum of a logical batch; the last of its batches makes the step."""
        accumulator = self._prepared_accumulator(step.variables)
        use = step.use
        if self._sampled is None:  # Any batches: no epsilon is stated.
            use = dataclasses.replace(use, fresh=tf.constant(True))
        with tf.control_dependencies([] if step.lock is None else [step.lock]):
            complete = accumulator.add(step.clipped, step.variables, use)  # Sums are read after it.

        def take(own: _Step) -> None:
            with step_check.own_operations():
                total = self._prepared_accumulator([]).take(own.clipped, own.variables)
                self._logical_step(own, total, name)

        done = replicas.all_if(complete, take, step)
        replicas.once(lambda ended: Accumulator.unlock(step.lock, ended), done)
        return done

    def _logical_step(self, step: _Step, total: ClippedSum, name: str | None) -> Any:
        """Takes the step of a logical batch: one Gaussian mechanism, and the update.

        Args:
          step: The step of its last batch.
          total: The sum over all of it.
          name: Name of the operation.
        """
        ids = None
        if self._rows is not None:
            key = self._noise.next_key(self._position())
            total, ids = self._rows.select(total, key, step.stage)
        noisy = self._add_noise(total, step)
        if self._releases_signs:  # No number leaves: not to the update, and to no variable.
            means = self._means(noisy, total, step)
            signs = [
                mean if private is None else sign_of(mean)
                for mean, private in zip(means, noisy, strict=True)
            ]
            step_check.mark_released(signs)
            with step_check.update_operations(self):
                return self._update(self._updates(signs, step), name)
        step_check.mark_released([*noisy, *(ids or [])])
        with step_check.update_operations(self):  # Replicas meet in it.
            updates = self._updates(self._means(noisy, total, step), step)
            return self._update(updates if ids is None else _of_rows(updates, ids), name)

    def _means(self, noisy: list, total: ClippedSum, step: _Step) -> list[tf.Tensor | None]:
        """Returns the mean gradients, those of regularizers included."""
        # A public constant: the size of the batch that was drawn is private.
        divisor = self._clipping.num_microbatches or self._expected_batch_size
        means: list[tf.Tensor | None] = []
        for private, public, v in zip(
            noisy, total.regularizer_gradients, step.variables, strict=True
        ):
            parts = [] if private is None else [private / constant(divisor, private.dtype)]
            if public is not None:  # As in Keras, each replica has its share.
                dtype = parts[0].dtype if parts else v.dtype
                parts.append(tf.cast(public, dtype) * constant(replicas.count(), dtype))
            means.append(None if not parts else parts[0] if len(parts) == 1 else tf.add_n(parts))
        if self._compressor is not None:
            means = self._compressor.compress(means, step.variables, step.masks)
        return means

    def _updates(
        self, means: list[tf.Tensor | None], step: _Step
    ) -> list[tuple[tf.Tensor | None, tf.Variable]]:
        """Returns what the update is made of, with the variables."""
        gradients = []
        for mean, v in zip(means, step.variables, strict=True):
            update = None if mean is None else self._transform_private_gradient(mean)
            gradients.append((None if update is None else tf.cast(update, v.dtype), v))
        return gradients

    def _add_noise(self, total: ClippedSum, step: _Step) -> list:
        """Returns the noisy sums of a logical batch."""
        key, stage, digest = self._noise.next_key(self._position()), step.stage, step.digest
        if not self._clipping.wide_sums:
            if self._adaptive is not None:
                return self._adaptive.step(
                    total.gradients, total.within_clip, step.clip, key, stage, digest
                )
            memory, stddevs = self._memory, self._noise_stddevs(total, stage)
            use, correlate = step.use, None
            if memory is not None:
                correlate = functools.partial(memory.next, source=use.source, sequence=use.sequence)
            return add_gaussian_noise(total.gradients, stddevs, key, correlate, digest)
        dtypes = [tf.float32 if v.dtype.size < 4 else v.dtype.base_dtype for v in step.variables]
        if self._adaptive is not None:
            return self._adaptive.secure_step(
                total.gradients,
                total.within_clip,
                step.clip,
                total.error,
                key,
                dtypes,
                stage,
                digest,
            )
        sensitivity, noise = self._clipping.sensitivity(), self._noise_now(stage)
        return add_secure_noise(
            total.gradients, sensitivity, noise, total.error, key, dtypes, digest
        )

    def _noise_stddevs(
        self, clipped: ClippedSum, stage: tf.Tensor | None
    ) -> float | tf.Tensor | list[float | tf.Tensor]:
        """Returns the standard deviation of the noise, or that of each variable."""
        if not self._has_noise or (clipped.noise_scales is None and stage is None):
            return self.noise_stddev
        noise = self._noise_now(stage)
        if clipped.noise_scales is None:
            return noise * self._clipping.sensitivity()
        return [
            scale * (noise if isinstance(scale, float) else tf.cast(noise, scale.dtype))
            for scale in clipped.noise_scales
        ]

    def _position(self) -> tf.Tensor:
        """Returns the number of the step and of the replica, by which `noise_seed` counts."""
        step = tf.cast(self.iterations, tf.int64)
        return step * replicas.count() + replicas.index()

    def _transform_private_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """Processes the noisy gradient before the update."""
        return gradient


def _of_rows(
    updates: list[tuple[tf.Tensor | None, tf.Variable]], ids: Sequence[tf.Tensor | None]
) -> list[tuple[tf.Tensor | tf.IndexedSlices | None, tf.Variable]]:
    """Returns updates of which those with numbers of rows are of these rows alone."""
    return [
        (
            update
            if rows is None
            else tf.IndexedSlices(update, rows, tf.constant(v.shape.as_list(), tf.int64)),
            v,
        )
        for (update, v), rows in zip(updates, ids, strict=True)
    ]


def sign_of(mean: tf.Tensor) -> tf.Tensor:
    """Returns the signs of a noisy mean, +1 or -1; +1 of zero, so that there are two outcomes.

    It is one threshold: at zero, at a regularizer's gradient, or in the middle between two points
    of a grid to which noise was rounded.
    """
    return tf.where(mean >= 0, tf.ones_like(mean), -tf.ones_like(mean))


def _check_first_use(loss: Any) -> None:
    """Raises a ValueError if a step before, in the same graph, has used the batch of a loss."""
    tensors = [t for t in tf.nest.flatten(getattr(loss, "batch", loss)) if tf.is_symbolic_tensor(t)]
    for tensor in tensors:
        batch = {data.name for data in loss_reader.data_of(tensor)[0]}
        if batch & _used.get(tensor.graph, set()):
            raise ValueError(
                "A batch must be used by one private step. Received a second one on the same "
                "batch, in one function: epsilon covers one. Add the losses of an example up, for "
                "one step on all variables; or draw a batch for each step, `next(iterator)`."
            )
    for tensor in tensors:
        names = {data.name for data in loss_reader.data_of(tensor)[0]}
        _used.setdefault(tensor.graph, set()).update(names)


def _check_alike(facts: Sequence[str]) -> None:
    """Checks that replicas, each of which adds a share of the noise, add shares of the same."""
    if len(set(facts)) > 1:
        raise ValueError(
            "All replicas must give `minimize` losses with the same aggregation, whose terms "
            "depend on the same variables. Received aggregations and noise scales that differ: "
            f"{' and '.join(facts)}."
        )
