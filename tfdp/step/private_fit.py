"""`fit` of Keras with a private optimizer: what it may be given, and short errors of steps.

Keras checks little of this. TensorFlow's error of a check that fails while a step runs begins with
the traceback of the graph, and ends with the message.
"""

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.user_warnings import warn_user
from tfdp.data.draw_record import Draws
from tfdp.step.backup_order import warn_of_steps_to_forget
from tfdp.step.private_step import PrivateStep
from tfdp.step.record import lineage

# The message of a failed check of the private step, which numbers of the batch may follow.
_FAILED = re.compile(r"assertion failed: \[(.*?)\][\s\[]", re.DOTALL)
_OF_THE_STEP = re.compile(r"\{\{node [^}]*/clipped_sum/")
_STEPS = ("fit", "train_on_batch")
_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # Models.


def guard_fit(keras: Any) -> None:
    """Checks the arguments of `fit` of models with private optimizers, and shortens errors.

    Args:
      keras: The Keras whose models are meant. Those with other optimizers stay as they are, but
        are not trained on batches that were drawn for private training, and a warning says so
        where their weights come from private training.
    """
    for name in _STEPS:
        own = getattr(keras.Model, name)
        setattr(keras.Model, name, _guarded(own, keras, checks=name == "fit"))


def _guarded(own: Callable, keras: Any, checks: bool) -> Callable:
    @functools.wraps(own)
    def call(self: Any, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        if not isinstance(optimizer, PrivateStep):
            if checks and optimizer is not None:
                _check_is_not_private(self, x)
            return own(self, x, y, *args, **kwargs)
        if checks:
            _check(optimizer, x, kwargs)
            warn_of_steps_to_forget(keras, kwargs.get("callbacks"))
            if isinstance(x, Draws):
                optimizer.drop_partial_sum()  # Of a `fit` that was interrupted.
                if not args:
                    kwargs.setdefault("shuffle", False)  # Keras warns that it does not shuffle.
        try:
            return own(self, x, y, *args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            message = message_of(error)
            if message is None:
                raise
            short = tf.errors.InvalidArgumentError(None, None, message)
        raise short

    return call


def _check_is_not_private(model: Any, x: Any) -> None:
    """Raises a ValueError if `fit` would train without privacy where privacy was meant.

    `compile` replaces the optimizer: `task.compile(sampler=...)` of KerasHub does, too.
    """
    if not isinstance(x, Draws):
        _warn_of_data(model)
        return
    if x.is_private or _was_trained_privately(model):
        raise ValueError(
            "Argument `optimizer` of `compile` must be private to train on these batches: they, or "
            "the model's weights, come from private training. Received: a model compiled with "
            f"{type(model.optimizer).__name__}, which no ledger counts. Call `make_private`, or "
            "keep the optimizer when you compile again: `model.compile(optimizer=model.optimizer, "
            "...)`."
        )


def _warn_of_data(model: Any) -> None:
    """Warns once if `fit` changes weights that private training made, without privacy."""
    if hasattr(type(model.optimizer), "ledger") or not _was_trained_privately(model):
        return
    if model not in _warned:
        _warned.add(model)
        warn_user(
            "The model's weights were trained with a private optimizer, and `fit` now trains them "
            f"with {type(model.optimizer).__name__}, which is not private. The privacy statement "
            "covers the private steps alone: from now on it holds only if the data of this `fit` "
            "are public. For private data, call `make_private`, or compile the model with an "
            "optimizer of tfdp."
        )


def _was_trained_privately(model: Any) -> bool:
    """Returns whether private steps went into the values of a model's trainable variables."""
    if not lineage.is_any_known():
        return False
    try:
        variables = model.trainable_variables
    except ValueError:  # Keras 2, before the model is built: its layers may be trained.
        layers = [layer for layer in model.layers if layer.built]
        variables = [v for layer in layers for v in layer.trainable_variables]
    return any(len(one.cost()) for one in lineage.of(variables))


def message_of(error: tf.errors.InvalidArgumentError) -> str | None:
    """Returns the message of a check of the private step that failed; None of other errors."""
    found = _FAILED.search(error.message)
    ours = _OF_THE_STEP.search(error.message) is not None
    # (TensorFlow escapes quotes.)
    return found.group(1).replace("\\'", "'") if found and ours else None


def _check(optimizer: PrivateStep, x: Any, arguments: dict[str, Any]) -> None:
    if isinstance(x, Draws) and arguments.get("validation_split"):
        raise ValueError(
            "Argument `validation_split` of `fit` must be left out with Poisson batches, of which "
            "no part stands for the data. Received: "
            f"validation_split={arguments['validation_split']}. Hold examples back before: draw "
            "batches of the others, and `model.fit(batches, validation_data=(x_held, y_held))`. "
            "Epsilon does not cover what is shown of them."
        )
    if optimizer.sampling is not None and _is_arrays(x):
        raise ValueError(
            "`fit` must be given the Poisson batches, `model.fit(batches)`: those of "
            "`make_private`, or of `tfdp.data.poisson_batches`. Received arrays, of which Keras "
            "makes batches that are not sampled as the optimizer was told: epsilon would not hold."
        )


def _is_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(
        isinstance(leaf, np.ndarray) or tf.is_tensor(leaf) for leaf in leaves
    )
