"""A pytest plugin that makes Keras's own tests train with private optimizers.

    KERAS_BACKEND=tensorflow python -m pytest -p tests.keras3.private_keras FILE_OF_KERAS

`compile` gets `tfdp.keras3.DPOptimizer` around the test's optimizer, and `apply_gradients` of an
optimizer takes a private step of a loss that has the test's gradients. The clip is too large to
clip anything and there is no noise, so a test must see what it sees without privacy. Prints, for
each test, how many private steps were traced in it.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from keras.src.trainers import trainer

import tfdp.keras3
from tfdp.optimizers.private_step import PrivateStep

PRIVACY = {"l2_norm_clip": 1e9, "noise_multiplier": 0.0}
_MARKERS = ("requires_trainable_backend", "multi_device")

traced_steps = 0
_plain_compile = trainer.Trainer.compile
_plain_apply_gradients = base_optimizer.BaseOptimizer.apply_gradients
_take_step = PrivateStep._take_step


def _compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
    """Compiles a model with a private optimizer around the one that is given."""
    inner = keras.optimizers.get(optimizer)
    if not kwargs.get("run_eagerly") and isinstance(inner, keras.optimizers.Optimizer):
        optimizer = tfdp.keras3.DPOptimizer(inner, **PRIVACY, expected_batch_size=EXPECTED)
    return _plain_compile(self, optimizer, *args, **kwargs)


# Keras's tests use batches of these many rows, or do not look at what is learnt.
EXPECTED = 16


def _apply_gradients(self: Any, grads_and_vars: Any) -> Any:
    """Takes a private step whose gradients, of the one example, are those given."""
    pairs = list(grads_and_vars)
    if isinstance(self, PrivateStep) or any(not _is_dense(g) for g, _ in pairs):
        return _plain_apply_gradients(self, pairs)
    variables = [v for _, v in pairs]
    if not hasattr(self, "_private_step"):
        self.__dict__["_private_step"] = _private_step(self, variables)
    rows = [tf.cast(tf.convert_to_tensor(g), v.dtype)[tf.newaxis] for g, v in pairs]
    return self.__dict__["_private_step"](rows)


def _is_dense(gradient: Any) -> bool:
    return gradient is not None and not isinstance(gradient, tf.IndexedSlices)


def _private_step(inner: Any, variables: list) -> Any:
    optimizer = tfdp.keras3.DPOptimizer(inner, **PRIVACY, expected_batch_size=1)

    @tf.function
    def step(rows: list[tf.Tensor]) -> None:
        parts = [
            tf.reduce_sum(tf.reshape(row * tf.convert_to_tensor(v), [tf.shape(row)[0], -1]), 1)
            for row, v in zip(rows, variables, strict=True)
        ]
        optimizer.minimize(tf.add_n(parts), variables)

    return step


def _counted(self: Any, *args: Any, **kwargs: Any) -> Any:
    global traced_steps
    traced_steps += 1
    return _take_step(self, *args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    """Replaces Keras's methods."""
    if not importlib.util.find_spec("jax"):  # Imported by tests that need it for that backend only.
        sys.modules["jax"] = types.ModuleType("jax")
    for marker in _MARKERS:
        config.addinivalue_line("markers", f"{marker}: of Keras")
    trainer.Trainer.compile = functools.wraps(_plain_compile)(_compile)
    base_optimizer.BaseOptimizer.apply_gradients = _apply_gradients
    PrivateStep._take_step = _counted


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Prints the outcome and the number of private steps of a test."""
    result = yield
    global traced_steps
    if call.when == "call":
        print(f"\nKERAS {item.nodeid.split('::', 1)[1]} {result.get_result().outcome} {traced_steps}")
        traced_steps = 0
