"""A Keras 2 model that keeps only the updates that pass a noisy test (DPSUR)."""

from typing import Any

import tensorflow as tf

from tfdp.keras2.front_end import KERAS_2
from tfdp.keras2.keras_2 import registered
from tfdp.training.selective.front_end import FrontEnd
from tfdp.training.selective.training import SelectiveTraining


def _build(model: tf.keras.Model, spec: Any) -> None:
    model(tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape], s.dtype), spec))


def _loss(model: tf.keras.Model, x: Any, y: Any, weights: Any, training: bool) -> tf.Tensor:
    return model.compute_loss(x, y, model(x, training=training), weights)


@registered
class SelectiveModel(SelectiveTraining, tf.keras.Model):
    """Model that trains a Keras model by selective update and release (DPSUR).

    A step of `fit` is one accepted update. Attempts are made until one is accepted, each with one
    fresh Poisson batch for the update and another for the test. All of this is one call of the
    graph, with the data on the device. `steps_per_epoch` therefore counts accepted updates, and
    `steps_per_execution` makes several of them in one call.

    A rejected attempt leaves no trace: weights, slots, iterations, and states of layers are what
    they were before, bit for bit. Attempts are made on copies, so all variables hold released
    values at any time: other threads may read, evaluate, and save the model while it trains. (A
    reader of several variables may see some of them before an update and some after it.)

    The number of attempts, their time and their losses are private: `history`, callbacks and
    printed lines do not show them. The time that training takes is private as well. With
    `selective_release="per_attempt"` in the optimizer, epsilon covers all of this: a step of `fit`
    is then one attempt, and `history` has the share that was accepted.

    Args:
      base_model: The model to train: functional, sequential or subclassed. It can still be used and
        saved by itself.
      non_private_diagnostics: Whether `history` and the progress show `non_private_attempts`, the
        mean number of attempts per accepted update. Epsilon does not cover it.
      **kwargs: `name` and others, as in `tf.keras.Model`.

    Raises:
      TypeError: `base_model` is not a Keras model.
      ValueError: It has a `train_step`, `test_step` or `compute_loss` of its own.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tfdp.SelectiveModel(tf.keras.Sequential([tf.keras.layers.Dense(2)]))
      >>> model.compile(
      ...     optimizer=tfdp.DPSURAdam(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=2.0,
      ...         validation_batch_size=50,
      ...         validation_noise_multiplier=1.3,
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=2, steps_per_epoch=3, verbose=0)
      >>> model.optimizer.ledger.steps
      6

    References:
      - Fu et al., DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using
        Selective Update and Release, Algorithm 2. (Here the old loss is computed anew on every
        validation batch, and nothing of a rejected attempt stays in the optimizer's slots.)
    """

    _front_end = KERAS_2.with_parts(
        FrontEnd, build=_build, loss=_loss, variables=lambda model: model.variables
    )

    def __init__(
        self, base_model: tf.keras.Model, non_private_diagnostics: bool = False, **kwargs: Any
    ):
        super().__init__(base_model, non_private_diagnostics, **kwargs)
        spec = base_model.save_spec(dynamic_batch=True) if base_model.built else None
        if spec is not None:  # So that it can be saved before it is called.
            self._set_save_spec(spec[0][0])
