"""One attempt of selective update: a private step, the test, and commit or rollback."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp._streams import KeyStream
from tfdp.clipping.loss_graph import read_loss
from tfdp.data.poisson import PoissonSource
from tfdp.models.rollback import Rollback, check_randomness
from tfdp.optimizers.validation import ValidationLoss


class Attempts:
    """Attempts to improve a compiled model, on a data set that is held on the device.

    Not a Keras object, so that what it holds is part of no saved model.

    Args:
      model: A model with one of the DPSUR optimizers.
      data: The training set.
    """

    def __init__(self, model: tf.keras.Model, data: PoissonSource):
        self._model = model
        self.data = data
        x, y = tf.nest.map_structure(tf.identity, (data.x, data.y))
        self._on_device = dataclasses.replace(data, x=x, y=y)
        use = next(data.uses)
        self._learning = KeyStream(data.seed, f"attempts {use}: learning")
        self._testing = KeyStream(data.seed, f"attempts {use}: testing")
        if not model.built:  # On zeros: a layer must not see an example when it is made.
            model(tf.nest.map_structure(lambda values: tf.zeros_like(values[:1]), x))
        batch = (*tf.nest.map_structure(_open_spec, (x, y)), tf.TensorSpec([None], tf.bool))
        number = tf.TensorSpec([], tf.int64)
        self._update = tf.function(self._make_update, input_signature=(*batch, number))
        self._validate = tf.function(self._validation_loss, input_signature=batch)

    def make(self, position: tf.Tensor) -> tf.Tensor:
        """Makes an update, and keeps it if it passes the test, in the graph being built.

        Args:
          position: Number of the attempt, int64, by which fixed seeds count.

        Returns:
          Whether the update was accepted, a scalar bool tensor.
        """
        optimizer = self._model.optimizer
        key = self._learning.next_key(position)
        train = self._on_device.draw(key, optimizer.expected_batch_size)
        key = self._testing.next_key(position)
        validation = self._on_device.draw(key, optimizer.validation_batch_size)
        update = self._update.get_concrete_function()
        check_randomness(update, self._model.jit_compile)
        before = Rollback(update, optimizer.kept_variables())
        old = self._loss_on(validation)
        self._update(*train, position)
        new = self._loss_on(validation)
        accepted = optimizer.accepts(old, new, validation[-1], position)
        tf.cond(accepted, lambda: None, before.restore)
        return accepted

    def _make_update(self, x: Any, y: Any, mask: tf.Tensor, position: tf.Tensor) -> None:
        model = self._model
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), mask)
        with model.optimizer.attempt(position):
            model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    def _loss_on(self, batch: tuple) -> ValidationLoss:
        """The loss on a batch; whatever else computing it does is undone."""
        validate = self._validate.get_concrete_function()
        check_randomness(validate, self._model.jit_compile)
        before = Rollback(validate)
        loss = ValidationLoss(*self._validate(*batch))
        before.restore()
        return loss

    def _validation_loss(self, x: Any, y: Any, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The losses of the rows, without dropout, and the regulariser."""
        model = self._model
        loss = read_loss(model.compute_loss(x, y, model(x, training=False), mask))
        regularizer = tf.zeros([]) if loss.regularizer is None else loss.regularizer
        return tf.add_n(loss.vectors), regularizer


def _open_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
