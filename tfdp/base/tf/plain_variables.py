"""Variables of the process, which do not belong to the distribution strategy in scope."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

_HOLDS_DATA = "_tfdp_holds_data"  # An attribute of variables.


@contextlib.contextmanager
def plain_variables(hold_data: bool = False) -> Iterator[None]:
    """Makes every `tf.Variable` a plain one, outside of graphs.

    In the scope of a `tf.distribute.MirroredStrategy` they would be mirrored, which data sets and
    models of other strategies cannot use.

    Args:
      hold_data: Whether they hold data, sums without noise, or secrets: see `holds_data`.
    """

    def create(_: Any, initial_value: Any, trainable: bool | None, **kwargs: Any) -> tf.Variable:
        known = {name: kwargs.get(name) for name in ("name", "dtype", "shape")}
        variable = ResourceVariable(initial_value, trainable=trainable, **known)
        if hold_data:
            setattr(variable, _HOLDS_DATA, True)
        return variable

    with tf.init_scope(), tf.variable_creator_scope(create):
        yield


def holds_data(variable: tf.Variable) -> bool:
    """Returns whether a variable was made to hold what must not get into a model."""
    return getattr(variable, _HOLDS_DATA, False)
