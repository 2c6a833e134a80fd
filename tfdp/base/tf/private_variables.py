"""Variables with private values, of which every file and copy has zeros instead.

A metric of the training step holds exact statistics of the data. It is needed while training goes
on, and nothing pays for it in a file. What writes files and copies asks the variable itself:
TensorFlow for its tensors, Keras and NumPy for its `numpy()`. So the variable answers, and no class
or function of a Keras needs to be known. Operations read the true values: metrics, progress bars
and `History` show what they would show without it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_KEY = "VARIABLE_VALUE"  # Key of a variable's tensor in checkpoints.


def keep_private(variable: tf.Variable) -> None:
    """Has files and copies of a variable hold zeros, now and later; operations are not changed.

    Args:
      variable: A variable; of one that has a part for each replica, any part.
    """
    whole = variable
    if not isinstance(variable, tf.distribute.DistributedValues):
        for holder in (variable, variable.handle):  # One has it, depending on the class.
            of = getattr(holder, "_distributed_container", lambda: None)()
            whole = whole if of is None else of
    if isinstance(whole, tf.distribute.DistributedValues):
        _set_class(whole, _class_of_replicas)
        for part in whole.values:
            _set_class(part, _class_of_one)
    else:
        _set_class(whole, _class_of_one)


def is_private(variable: Any) -> bool:
    """Returns whether files and copies of a variable hold zeros."""
    return getattr(type(variable), "_has_private_values", False)


def _set_class(variable: tf.Variable, of: Callable[[Any], type]) -> None:
    own: Any = type(variable)
    if not is_private(variable):
        variable.__class__ = of(own)


@functools.cache
def _class_of_one(cls: Any) -> type:
    """Returns the class of private variables that are derived from a class of TensorFlow."""

    # Has this base alone: then Python lets a variable change its class.
    class Private(cls):
        _has_private_values = True

        def numpy(self) -> Any:
            """Returns zeros: for files of Keras, `get_weights` and pickles."""
            return _zeros(self).numpy() if tf.executing_eagerly() else super().numpy()

        def read_value_no_copy(self) -> Any:
            """Returns zeros: for files of `tf.compat.v1.train.Saver`."""
            return _zeros(self) if tf.executing_eagerly() else super().read_value_no_copy()

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            """Returns zeros: NumPy would ask one that has parts for replicas for its tensor."""
            return np.array(self.numpy(), dtype)

        def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
            """Returns zeros: for checkpoints and SavedModels."""
            return {_KEY: _zeros(self)}

        def _copy_trackable_to_cpu(self, object_map: Any) -> None:
            """Copies zeros: for checkpoints that are written in the background."""
            super()._copy_trackable_to_cpu(object_map)
            object_map[self].assign(_zeros(self))

        def __deepcopy__(self, memo: Any) -> Any:
            """Returns a copy with zeros."""
            copied = super().__deepcopy__(memo)
            copied.assign(_zeros(self))
            return copied

    for name in ("__name__", "__qualname__", "__module__"):  # It is shown as what it was.
        setattr(Private, name, getattr(cls, name))
    return Private


@functools.cache
def _class_of_replicas(cls: Any) -> type:
    """Returns that of private variables that have a part for each replica."""

    class Private(_class_of_one(cls)):  # type: ignore[misc]
        def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
            """Restores the value, as `cls` does by other means."""
            return self.assign(restored_tensors[_KEY])

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Private, name, getattr(cls, name))
    return Private


def _zeros(variable: tf.Variable) -> tf.Tensor:
    """Returns zeros of a variable's type, and of its shape as far as that is always the same."""
    shape = [] if variable.shape.rank is None else [size or 0 for size in variable.shape]
    return tf.zeros(shape, variable.dtype)
