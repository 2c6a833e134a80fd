"""Functions that are traced once, and called in many graphs."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def shared_function(
    function: Callable[..., Any], any_size: bool = False, jit_compile: bool | None = None
) -> Callable[..., Any]:
    """Makes a function that is traced once per signature, for all graphs that call it.

    A graph that calls it gets one operation instead of all that it does, which is what tracing a
    training step costs. It is traced outside of all graphs, so that nothing of the first caller,
    such as its device, gets into it, and no graph is kept alive by it.

    Args:
      function: Takes tensors, positional ones alone.
      any_size: Whether to trace it for tensors of all sizes at once; then it sees none.
      jit_compile: See `tf.function`.
    """
    traced = tf.function(function, autograph=False, jit_compile=jit_compile)

    @functools.wraps(function)
    def call(*tensors: tf.Tensor) -> Any:
        shapes = [[None] * t.shape.rank if any_size else t.shape for t in tensors]
        specs = [tf.TensorSpec(s, t.dtype) for s, t in zip(shapes, tensors, strict=True)]
        with tf.init_scope():
            concrete = traced.get_concrete_function(*specs)
        return concrete(*tensors)

    return call
