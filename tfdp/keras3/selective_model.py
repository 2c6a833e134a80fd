"""A Keras 3 model that keeps only the updates that pass a noisy test (DPSUR)."""

from typing import Any

import keras
import tensorflow as tf

from tfdp.base.keras_3 import tf_variable
from tfdp.keras3.front_end import KERAS_3
from tfdp.training.selective.front_end import FrontEnd
from tfdp.training.selective.training import SelectiveTraining


def _build(model: keras.Model, spec: Any) -> None:
    model(tf.nest.map_structure(lambda s: keras.KerasTensor([None, *s.shape], s.dtype.name), spec))


def _loss(model: keras.Model, x: Any, y: Any, weights: Any, training: bool) -> tf.Tensor:
    predictions = model(x, training=training)
    return model.compute_loss(x, y, predictions, weights, training=training)


def _variables(model: keras.Model) -> list[tf.Variable]:
    return list(map(tf_variable, model.variables))


@keras.saving.register_keras_serializable(package="tfdp")
class SelectiveModel(SelectiveTraining, keras.Model):
    """Model that trains a Keras model by selective update and release (DPSUR).

    It does for models of Keras 3 what `tfdp.keras2.SelectiveModel` does for those of Keras 2, by
    the same code: see there for what is shown of a training, and for references.

    Args:
      base_model: The model of Keras 3 to train: functional, sequential or subclassed. It can still
        be used and saved by itself.
      non_private_diagnostics: Whether `history` and the progress show `non_private_attempts`, the
        mean number of attempts per accepted update. Epsilon does not cover it.
      **kwargs: `name` and others, as in `keras.Model`.

    Raises:
      TypeError: `base_model` is not a model of Keras 3.
      ValueError: It has a `train_step`, `test_step` or `compute_loss` of its own.

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = tfdp.keras3.SelectiveModel(keras.Sequential([keras.layers.Dense(2)]))
      >>> model.compile(
      ...     optimizer=tfdp.keras3.DPSURAdam(
      ...         l2_norm_clip=1.0,
      ...         noise_multiplier=2.0,
      ...         validation_batch_size=50,
      ...         validation_noise_multiplier=1.3,
      ...         sampling=batches.sampling,
      ...     ),
      ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=2, steps_per_epoch=3, verbose=0)
      >>> model.optimizer.ledger.steps
      6
    """

    _front_end = KERAS_3.with_parts(FrontEnd, build=_build, loss=_loss, variables=_variables)

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the values of the metrics, which `evaluate` computes; `fit` computes none."""
        metrics = self._compile_metrics
        return {} if metrics is not None and not metrics.built else super().get_metrics_result()

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the base model, which computes the same; the arguments are those of Keras."""
        self.base_model.export(*args, **kwargs)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds what evaluations need, in a distribution strategy; `fit` needs nothing of it."""
        if not tf.is_tensor(data_batch):  # The number of a step, which `fit` iterates over.
            super()._symbolic_build(iterator, data_batch)
