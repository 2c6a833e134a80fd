"""Variables of the process, which do not belong to the distribution strategy in scope."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


@contextlib.contextmanager
def plain_variables() -> Iterator[None]:
    """Makes every `tf.Variable` a plain one, outside of graphs.

    In the scope of a `tf.distribute.MirroredStrategy` they would be mirrored, which data sets and
    models of other strategies cannot use.
    """

    def create(_: Any, initial_value: Any, trainable: bool | None, **kwargs: Any) -> tf.Variable:
        known = {name: kwargs.get(name) for name in ("name", "dtype", "shape")}
        return ResourceVariable(initial_value, trainable=trainable, **known)

    with tf.init_scope(), tf.variable_creator_scope(create):
        yield
