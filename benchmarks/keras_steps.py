"""Training steps of Keras, tfdp and TensorFlow Privacy, through `model.fit`."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import unittest.mock
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import tensorflow as tf

import tfdp
from benchmarks import networks
from benchmarks.problems import L2_NORM_CLIP, LEARNING_RATE, NOISE_MULTIPLIER, Problem
from benchmarks.settings import StepSettings, Unsupported
from experiments.front_ends import front_end
from tfdp.accounting import PoissonSampling
from tfdp.base.tf.autotuning import without_autotuning
from tfdp.data.batches import PoissonBatches

_TFDP = {
    "tfdp_one_pass": ("DPSGD", "one_pass"),
    "tfdp_secure": ("DPSGD", "one_pass"),
    "tfdp_philox": ("DPSGD", "one_pass"),
    "tfdp_vectorized": ("DPSGD", "vectorized"),
    "tfdp_adam": ("DPAdam", "one_pass"),
    "tfdp_sign_sgd": ("DPSignSGD", "one_pass"),
    "tfdp_sign_adam": ("DPSignAdam", "one_pass"),
    "tfdp_dpsur": ("DPSURSGD", "one_pass"),
}
_SELECTIVE, _SECURE, _PHILOX = "tfdp_dpsur", "tfdp_secure", "tfdp_philox"
_TF_PRIVACY = {
    "tf_privacy": ("dp_optimizer_keras", "DPKerasSGDOptimizer"),
    "tf_privacy_vectorized": ("dp_optimizer_keras_vectorized", "VectorizedDPKerasSGDOptimizer"),
}


class KerasSteps:
    """A compiled model and its batches.

    Args:
      contestant: Name of the contestant.
      problem: The model and its data.
      settings: Settings of the steps.
    """

    def __init__(self, contestant: str, problem: Problem, settings: StepSettings):
        if contestant == _SELECTIVE and settings.dataset_size is None:
            raise Unsupported("draws batches itself: needs --dataset_size")
        if settings.keras == 3 and contestant in (_SELECTIVE, *_TF_PRIVACY):
            raise Unsupported("needs Keras 2")
        if settings.dataset_size is None:
            self._data, sampling = fixed_batches(problem, settings), None
        else:
            self._data = _poisson_batches(problem, settings, contestant == _SECURE)
            sampling = self._data.sampling
        self._philox = contestant == _PHILOX
        self._keras = settings.keras
        self._model = networks.build(problem, front_end(self._keras).keras)
        if settings.jit_compile:
            networks.let_xla_compile(self._model)
        self.parameters = self._model.count_params()
        self._calls = 1 if sampling is None else sampling.gradient_accumulation_steps
        if contestant == _SELECTIVE:
            self._model = tfdp.SelectiveModel(self._model)
        elif sampling is not None:
            self._data = self._data.repeat()
        optimizer = make_optimizer(contestant, settings.batch, sampling, self._keras)
        self._model.compile(
            optimizer,
            loss=make_loss(contestant, self._keras),
            jit_compile=settings.jit_compile,
        )

    def run(self, steps: int) -> None:
        """Takes so many steps (logical ones, of Poisson batches)."""
        noise = unittest.mock.patch("tfdp.base.random.chacha.normals", _philox_normals)
        with noise if self._philox else contextlib.nullcontext():  # The first call traces the step.
            self._model.fit(self._data, steps_per_epoch=self._calls * steps, verbose=0)

    def versions(self) -> dict[str, str]:
        """Versions of what runs."""
        return versions(self._keras)


def versions(keras: int) -> dict[str, str]:
    """Versions of what runs with a version of Keras."""
    names = (*front_end(keras).packages, "numpy")
    return {
        "Python": platform.python_version(),
        "tfdp": tfdp.__version__,
        **{name: importlib.metadata.version(name) for name in names},
    }


def _philox_normals(key: tf.Tensor, size: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Draws normal numbers `[size]` by TensorFlow's generator, for comparison."""
    return tf.random.stateless_normal([size], key[-2:], dtype=dtype, alg="philox")


def make_loss(contestant: str, keras: int = 2) -> Any:
    """Cross-entropy: one value per example for private optimizers, else their mean."""
    private = not contestant.startswith("keras")
    return front_end(keras).keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none" if private else "sum_over_batch_size"
    )


def make_optimizer(
    contestant: str, batch: int, sampling: PoissonSampling | None = None, keras: int = 2
) -> Any:
    """Returns the optimizer of a contestant, for Poisson batches if their sampling is given."""
    plain = front_end(keras).keras.optimizers
    plain = plain.legacy if keras == 2 else plain
    if contestant == "keras_sgd":
        return plain.SGD(LEARNING_RATE)
    if contestant == "keras_adam":
        return plain.Adam(LEARNING_RATE)
    privacy = {"l2_norm_clip": L2_NORM_CLIP, "noise_multiplier": NOISE_MULTIPLIER}
    if contestant in _TF_PRIVACY:
        module, name = _TF_PRIVACY[contestant]
        optimizers = importlib.import_module(f"tensorflow_privacy.privacy.optimizers.{module}")
        optimizer_class = getattr(optimizers, name)
        return optimizer_class(**privacy, num_microbatches=batch, learning_rate=LEARNING_RATE)
    name, engine = _TFDP[contestant]
    optimizer_class = getattr(front_end(keras).private, name)
    batches = {"expected_batch_size": batch} if sampling is None else {"sampling": sampling}
    if contestant == _SELECTIVE:
        # Every step is one attempt, and a small test of the same kind as the paper's.
        privacy |= {"selective_release": "per_attempt", "validation_noise_multiplier": 1.3}
        privacy["validation_batch_size"] = max(1, batch // 8)
    return optimizer_class(
        **privacy,
        **batches,
        learning_rate=LEARNING_RATE,
        engine=engine,
        secure_noise=contestant == _SECURE,
    )


def fixed_batches(problem: Problem, settings: StepSettings) -> tf.data.Dataset:
    """Returns the same few batches again and again, from memory, with an open batch dimension."""
    rows = problem.rows(settings.batch * settings.batches)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(settings.batch).cache()
    for _ in data:  # fills the cache
        pass
    return without_autotuning(data.repeat())


def _poisson_batches(problem: Problem, settings: StepSettings, secure: bool) -> PoissonBatches:
    padding = "full" if secure else "none"
    if settings.jit_compile and not secure:
        padding = "buckets" if settings.chunk_size is None else "full"
    return tfdp.data.poisson_batches(
        problem.rows(settings.dataset_size),
        expected_batch_size=settings.batch,
        chunk_size=settings.chunk_size,
        padding=padding,
    )
