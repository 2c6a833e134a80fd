"""Notice of reads and writes of variables outside of graphs.

TensorFlow has no hook for it. All eager reads of a `tf.Variable`, such as `numpy()`, conversions,
Keras's `get_weights` and every way of saving, come through one method of `ResourceVariable`; values
come by creation, `assign` and what restores checkpoints. These are wrapped here; in graphs they do
what they did.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable


def notify(read: Callable[[Any, tf.Tensor], None], written: Callable[[Any], None]) -> None:
    """Has functions called at each eager read and write of a variable.

    Args:
      read: Gets the handle of the variable and its value.
      written: Gets the handle of a variable that may have got the values of another.
    """

    def and_read(read_variable: Callable) -> Callable:
        def read_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            value = read_variable(self, *args, **kwargs)
            if tf.executing_eagerly():
                read(self.handle, value)
            return value

        return read_and_tell

    def and_written(write: Callable) -> Callable:
        def write_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = write(self, *args, **kwargs)
            if tf.executing_eagerly():
                written(self.handle)
            return result

        return write_and_tell

    wrappers: dict[str, Callable[[Callable], Callable]] = {
        "_init_from_args": and_written,
        "_read_variable_op": and_read,
        "_restore_from_tensors": and_written,
        "assign": and_written,
    }
    # TensorFlow gives the second class an `assign` of its own, around that of the first.
    for owner in (BaseResourceVariable, ResourceVariable):
        for name, wrapper in wrappers.items():
            if name in vars(owner):
                method = vars(owner)[name]
                setattr(owner, name, functools.wraps(method)(wrapper(method)))
