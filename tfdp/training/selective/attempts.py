"""One attempt of selective update: a private step on copies, the test, and the commit."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp.accounting.sampling import BUCKETS, NONE, TRUNCATION_PROBABILITY, PoissonSampling
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping import step_check
from tfdp.clipping.loss_graph import batch_state
from tfdp.clipping.loss_graph.loss_reader import read_loss
from tfdp.data.source import PoissonSource
from tfdp.step.noisy_acceptance import ValidationLoss
from tfdp.training.selective.front_end import FrontEnd
from tfdp.training.selective.rollback import check_randomness
from tfdp.training.selective.shadows import Shadows


class Attempts:
    """Attempts to improve a compiled model, on a data set that is held on the device.

    Not a Keras object, so that what it holds is part of no saved model.

    Args:
      front_end: That of the Keras of the model.
      model: A model with one of the DPSUR optimizers.
      data: The training set.
      padding: Padding of the batches; see `PoissonSampling`.
    """

    def __init__(self, front_end: FrontEnd, model: Any, data: PoissonSource, padding: str):
        self._front_end, self._model = front_end, model
        self.data = data
        if any(map(tf.nest.is_nested, data.element_spec[2:])):
            raise ValueError(
                "Poisson batches for a SelectiveModel must have one weight for each example. "
                f"Received weights for each output, {data.element_spec[2]}: use `loss_weights` in "
                "`compile`."
            )
        # With weights, by which a batch of no examples is told; and no random places are needed.
        padding = BUCKETS if padding == NONE else padding
        self._sampling = PoissonSampling(
            data.dataset_size,
            1,
            padding=padding,
            max_truncation_probability=TRUNCATION_PROBABILITY,
        )
        self._on_device = data
        if data.stored is None:
            on_device = tf.nest.map_structure(tf.identity, data.data)
            self._on_device = dataclasses.replace(data, data=on_device)
        use = next(data.uses)
        self._learning = KeyStream(data.seed, f"attempts {use}: learning")
        self._testing = KeyStream(data.seed, f"attempts {use}: testing")
        if not model.built:
            front_end.build(model, data.element_spec[0])
        batch = tf.nest.map_structure(_open_spec, data.element_spec)
        if len(batch) == 2:
            batch = (*batch, tf.TensorSpec([None], tf.bool))
        self.traced_step: Any = None  # The model's training step, for `run_eagerly`.
        self._prepared: tuple[Any, Any, Shadows, Shadows] | None = None
        number = tf.TensorSpec([], tf.int64)
        compiled = {"jit_compile": True if model.jit_compile else None}
        self._update = tf.function(self._make_update, input_signature=(*batch, number), **compiled)
        self._validate = tf.function(self._validation_loss, input_signature=batch, **compiled)

    def make(self, position: tf.Tensor) -> tf.Tensor:
        """Makes an update, and keeps it if it passes the test, in the graph being built.

        Args:
          position: Number of the attempt, int64, by which fixed seeds count.

        Returns:
          Whether the update was accepted, a scalar bool tensor.
        """
        step_check.mark_own_loop()
        step_check.watch(tf.compat.v1.get_default_graph())
        optimizer = self._model.optimizer
        key = self._learning.next_key(position)
        train = self._draw(key, optimizer.expected_batch_size)
        key = self._testing.next_key(position)
        validation = self._draw(key, optimizer.validation_batch_size)
        step_check.mark_data(tf.nest.flatten((train, validation)))
        update, validate, candidate, scratch = self.prepare()
        with step_check.own_operations():
            candidate.reset()
            old = _loss_on(validation, validate, scratch)
            candidate.call(update, *train, position)
            new = _loss_on(validation, validate, scratch)
            accepted = optimizer.accepts(old, new, tf.cast(validation[-1], tf.bool), position)
            # A rejected update is kept nowhere.
            tf.cond(accepted, lambda: self._commit(candidate), candidate.reset)
            scratch.reset()
        return accepted

    def _draw(self, key: tf.Tensor, expected_batch_size: int) -> tuple:
        sampling = dataclasses.replace(self._sampling, expected_batch_size=expected_batch_size)
        return self._on_device.draw(key, sampling)

    def prepare(self) -> tuple[Any, Any, Shadows, Shadows]:
        """Traces and checks what attempts are made of; best outside of graphs, and only once.

        Returns:
          The update, the losses for the test, the copies of the update, and of those for the test.
        """
        if self._prepared is None:
            update, validate = (f.get_concrete_function() for f in (self._update, self._validate))
            for function in (update, validate):
                check_randomness(function, self._model.jit_compile)
                step_check.check_graph(function.graph)
            candidate = Shadows(update, self._model.optimizer.kept_variables())
            self._prepared = update, validate, candidate, Shadows(validate, of=candidate)
        return self._prepared

    def _commit(self, candidate: Shadows) -> None:
        """Releases the candidate: what it is of the metrics, means of private losses, never."""
        metrics = [v for v in candidate.originals() if batch_state.is_metric(v)]
        # Who sees the new weights sees that they are counted.
        candidate.commit(last=self._front_end.variables(self._model), without=metrics)

    def _make_update(self, x: Any, y: Any, weights: Any, position: tf.Tensor) -> None:
        model = self._model
        loss = self._front_end.loss(model, x, y, weights, True)
        with model.optimizer.attempt(position):
            model.optimizer.minimize(loss, model.trainable_variables)

    def _validation_loss(self, x: Any, y: Any, weights: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the losses of the rows, without dropout, and the regularizer."""
        loss = read_loss(self._front_end.loss(self._model, x, y, weights, False))
        regularizer = tf.zeros([]) if loss.regularizer is None else loss.regularizer
        return tf.add_n(loss.vectors), regularizer


def _loss_on(batch: tuple, validate: Any, scratch: Shadows) -> ValidationLoss:
    """Returns the candidate's loss on a batch; whatever else computing it changes is forgotten."""
    scratch.reset()
    return ValidationLoss(*scratch.call(validate, *batch))


def _open_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape], spec.dtype)
