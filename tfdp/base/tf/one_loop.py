"""Elementwise functions of many results that XLA computes in one loop."""

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# What an element of the reduction holds: nothing, arguments, or results.
_EMPTY, _ARGUMENTS, _RESULTS = range(3)


def is_fast() -> bool:
    """Returns whether `in_one_loop` pays: on CPUs, with TensorFlow 2.20 or newer."""
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return version >= (2, 20) and kinds == {"CPU"}


def in_one_loop(
    function: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]], arguments: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Computes an elementwise function of several tensors, of as many results, in one loop.

    XLA for CPUs makes a loop for each result, and computes in each what the results have in common.
    Only a reduction has several results in one loop. So each element is written twice, and the two
    are reduced: combining them applies the function. Any order of the reduction gives the same, as
    XLA demands of it.

    Works only in functions that XLA compiles.

    Args:
      function: Takes and returns scalars, as many as there are arguments and of their types.
      arguments: Tensors of one shape `[n]`.

    Returns:
      The results, of shape `[n]`.
    """
    elements = [tf.tile(argument[:, tf.newaxis], [1, 2]) for argument in arguments]
    elements.append(tf.fill(elements[0].shape, _ARGUMENTS))
    scalars = [tf.TensorSpec([], element.dtype) for element in elements]

    def reducer(*both: tf.Tensor) -> list[tf.Tensor]:
        return combined(function, both[: len(elements)], both[len(elements) :])

    traced = tf.function(reducer, autograph=False, input_signature=2 * scalars)
    *results, _ = gen_xla_ops.xla_variadic_reduce_v2(
        inputs=elements,
        init_values=[tf.zeros([], element.dtype) for element in elements],
        dimensions_to_reduce=[1],
        reducer=traced.get_concrete_function(),
    )
    return results


def combined(
    function: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
    first: Sequence[tf.Tensor],
    second: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Combines two elements of the reduction, values and a kind.

    Two that hold the same arguments give their results, in any order and with any number of empty
    elements among them. The function is computed once, of the second element.
    """
    *values, kind = first
    *others, other_kind = second

    def choose(condition: tf.Tensor, some: Sequence, rest: Sequence) -> list[tf.Tensor]:
        return [tf.where(condition, x, y) for x, y in zip(some, rest, strict=True)]

    results = choose(other_kind == _EMPTY, values, others)
    results = choose(other_kind == _ARGUMENTS, function(others), results)
    results = choose(kind == _RESULTS, values, results)
    done = tf.logical_or(kind == _RESULTS, other_kind == _ARGUMENTS)
    return [*results, tf.where(done, _RESULTS, tf.maximum(kind, other_kind))]
