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
from tfdp.accounting import PoissonSampling
from tfdp.data.batches import PoissonBatches

_TFDP = {
    "tfdp_one_pass": (tfdp.DPSGD, "one_pass"),
    "tfdp_secure": (tfdp.DPSGD, "one_pass"),
    "tfdp_philox": (tfdp.DPSGD, "one_pass"),
    "tfdp_vectorized": (tfdp.DPSGD, "vectorized"),
    "tfdp_adam": (tfdp.DPAdam, "one_pass"),
    "tfdp_sign_sgd": (tfdp.DPSignSGD, "one_pass"),
    "tfdp_sign_adam": (tfdp.DPSignAdam, "one_pass"),
    "tfdp_dpsur": (tfdp.DPSURSGD, "one_pass"),
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
        if settings.dataset_size is None:
            self._data, sampling = fixed_batches(problem, settings), None
        else:
            self._data = _poisson_batches(problem, settings, contestant == _SECURE)
            sampling = self._data.sampling
        self._philox = contestant == _PHILOX
        self._model = networks.build(problem)
        if settings.jit_compile:
            networks.let_xla_compile(self._model)
        self.parameters = self._model.count_params()
        self._calls = 1 if sampling is None else sampling.gradient_accumulation_steps
        if contestant == _SELECTIVE:
            self._model = tfdp.SelectiveModel(self._model)
        elif sampling is not None:
            self._data = self._data.repeat()
        optimizer = make_optimizer(contestant, settings.batch, sampling)
        self._model.compile(
            optimizer, loss=make_loss(contestant), jit_compile=settings.jit_compile or None
        )

    def run(self, steps: int) -> None:
        """Takes so many steps (logical ones, of Poisson batches)."""
        noise = unittest.mock.patch("tfdp._random.chacha.normals", _philox_normals)
        with noise if self._philox else contextlib.nullcontext():  # The first call traces the step.
            self._model.fit(self._data, steps_per_epoch=self._calls * steps, verbose=0)

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions of what runs."""
        names = ("tensorflow", "tf-keras", "tensorflow-privacy", "numpy")
        return {
            "Python": platform.python_version(),
            "tfdp": tfdp.__version__,
            **{name: importlib.metadata.version(name) for name in names},
        }


def _philox_normals(key: tf.Tensor, size: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Draws normal numbers `[size]` by TensorFlow's generator, for comparison."""
    return tf.random.stateless_normal([size], key[-2:], dtype=dtype, alg="philox")


def make_loss(contestant: str) -> tf.keras.losses.Loss:
    """Cross-entropy: one value per example for private optimizers, else their mean."""
    private = not contestant.startswith("keras")
    return tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none" if private else "sum_over_batch_size"
    )


def make_optimizer(contestant: str, batch: int, sampling: PoissonSampling | None = None) -> Any:
    """Returns the optimizer of a contestant, for Poisson batches if their sampling is given."""
    legacy = tf.keras.optimizers.legacy
    if contestant == "keras_sgd":
        return legacy.SGD(LEARNING_RATE)
    if contestant == "keras_adam":
        return legacy.Adam(LEARNING_RATE)
    privacy = {"l2_norm_clip": L2_NORM_CLIP, "noise_multiplier": NOISE_MULTIPLIER}
    if contestant in _TF_PRIVACY:
        module, name = _TF_PRIVACY[contestant]
        optimizers = importlib.import_module(f"tensorflow_privacy.privacy.optimizers.{module}")
        optimizer_class = getattr(optimizers, name)
        return optimizer_class(**privacy, num_microbatches=batch, learning_rate=LEARNING_RATE)
    optimizer_class, engine = _TFDP[contestant]
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
    return data.repeat()


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
