"""Runs Keras's own tests with private optimizers: what Keras's tests see must not change.

    python -m tests.keras3.private_keras
    python -m tests.keras3.private_keras optimizers/adam_test.py

They are the tests that the installed Keras 3 contains. `compile` gets `tfdp.keras3.DPOptimizer`
around the test's optimizer, and `apply_gradients` of an optimizer takes a private step of a loss
that has the test's gradients. The clip is too large to clip anything and there is no noise. Prints
how many tests passed, in how many of them private steps were traced, and those that cannot pass,
with the reason; ends with status 1 if others failed, or if one passed that cannot.

It is a pytest plugin as well: the command runs pytest with it.
"""

import argparse
import collections
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.optimizers import base_optimizer
from keras.src.trainers import trainer

import tfdp.keras3
from tfdp.step.private_step import PrivateStep

FILES = (
    "optimizers",
    "trainers/trainer_test.py",
    "callbacks/backup_and_restore_test.py",
    "callbacks/early_stopping_test.py",
    "callbacks/learning_rate_scheduler_test.py",
    "callbacks/model_checkpoint_test.py",
    "callbacks/reduce_lr_on_plateau_test.py",
    "callbacks/swap_ema_weights_test.py",  # The last: it resets the context of TensorFlow.
)
# Tests that cannot pass, by what their names contain.
CANNOT_PASS = {
    "gradient_accumulation": "accumulation belongs to the private optimizer: each part of a "
    "logical batch would get noise",
    "test_static_loss_scaling": "`loss_scale_factor` is refused: gradients are clipped as they are",
    "test_adds_loss_scaling_optimizer": "mixed_float16 is refused",
    "test_loss_scaling_prevents_underflow": "mixed_float16 is refused",
    "with_loss_scale_optimizer": "losses that are scaled are refused",
    "with_tf_distribute": "it looks for averages on the model's optimizer",
    "test_overwrite_with_gradient": "a variable that its gradient replaces is refused",
    "AdamTest::test_ema": "looks for a private attribute on the model's optimizer: it is the "
    "inner optimizer's",
    "test_learning_rate_scheduler_with_multi_optimizer": "a MultiOptimizer has no learning rate: "
    "callbacks know it by its class, which is the inner optimizer's",
    "test_reduce_lr_on_plateau_with_multi_optimizer": "as above",
    "test_tf_checkpointing": "the test gives a checkpoint the optimizer under a name that the "
    "private step has taken",
    "ScheduleFreeAdamWTest::test_with_model": "the optimizer reads weights that are not there "
    "before the first step: an error says so",
    "test_fit_sparse_tf_graph": "sparse tensors have no rows that examples can be told by",
    "test_fit_sparse_scipy_graph": "as above",
    "sparse_jax": "needs JAX",
    "torch_dataloader": "needs PyTorch",
    "grain": "needs grain",
}
# Rows of a batch of tests that look at what is learned; those of others.
_ROWS = {"fit_flow": 20, "loss_weights": 20, "nested_inputs": 3, "on_batch_methods": 100}
_OTHER_ROWS = 16

PRIVACY = {"l2_norm_clip": 1e9, "noise_multiplier": 0.0}
_MARKERS = ("requires_trainable_backend", "multi_device")

_LINE = "Test of Keras:"
traced_steps = 0
_plain_compile = trainer.Trainer.compile
_plain_apply_gradients = base_optimizer.BaseOptimizer.apply_gradients
_take_step = PrivateStep._take_step


def _compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
    """Compiles a model with a private optimizer around the one that is given."""
    inner = keras.optimizers.get(optimizer)
    if not isinstance(inner, PrivateStep) and not kwargs.get("run_eagerly"):
        optimizer = tfdp.keras3.DPOptimizer(inner, **PRIVACY, expected_batch_size=_rows())
    return _plain_compile(self, optimizer, *args, **kwargs)


def _rows() -> int:
    test = os.environ["PYTEST_CURRENT_TEST"]
    return next((rows for part, rows in _ROWS.items() if part in test), _OTHER_ROWS)


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
    """Prints the outcome of a test, and the number of private steps that were traced in it."""
    result = yield
    global traced_steps
    if call.when == "call":
        name, outcome = item.nodeid.split("::", 1)[1], result.get_result().outcome
        print(f"\n{_LINE} {name} {outcome} {traced_steps}")
        traced_steps = 0


def run(files: list[str]) -> tuple[list[tuple[str, str, int]], str]:
    """Runs tests of Keras; returns name, outcome and private steps of each, and all the output."""
    source = Path(keras.__file__).parent / "src"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", __spec__.name, "--tb=short"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib"]
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [*command, f"--rootdir={folder}", *(str(source / file) for file in files)],
            cwd=folder,
            env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    found = re.findall(rf"^{_LINE} (.+) (\w+) (\d+)$", finished.stdout, re.MULTILINE)
    return [(name, outcome, int(steps)) for name, outcome, steps in found], finished.stdout


def reason_of(name: str) -> str | None:
    """Returns why a test cannot pass, or None if it can."""
    return next((reason for part, reason in CANNOT_PASS.items() if part in name), None)


def main() -> None:
    """Runs the tests and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=FILES, help="in keras/src of the package")
    results, output = run(parser.parse_args().files)
    passed = [steps for _, outcome, steps in results if outcome == "passed"]
    private = sum(steps > 0 for steps in passed)
    print(f"Keras {keras.__version__}: {len(passed)} tests passed, {private} with private steps")
    reasons = collections.Counter(
        reason_of(name) for name, outcome, _ in results if outcome == "failed"
    )
    unexpected = reasons.pop(None, 0)
    for reason, count in reasons.items():
        print(f"{count} cannot pass: {reason}")
    if unexpected or not passed:
        print(output)
        print(f"{unexpected} others failed:")
        for name, outcome, _ in results:
            if outcome == "failed" and reason_of(name) is None:
                print(f"  {name}")
        sys.exit(1)


if __name__ == "__main__":
    main()
