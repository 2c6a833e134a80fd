"""Steps that the replicas of a distribution strategy take together.

Replicas are traced one after the other into one graph, each in a thread that waits where they
meet: in `once` and `total`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping import step_check
from tfdp.clipping.loss_graph.own_operations import pause_own_operations
from tfdp.clipping.replica_sync import index, merged, once

__all__ = ["all_if", "check", "count", "index", "once", "own_share", "several_workers", "total"]

_SUM = tf.distribute.ReduceOp.SUM
# Digits of a digest, and their bits. A float32 has 24 bits: 4,096 replicas can add a digit up.
_DIGITS, _BITS = 4, 12
_UNLIKE = (
    "All workers must resume from the same state: the record of releases, the number of steps and "
    "the clip. Those of this worker differ from the others', as after a checkpoint that was "
    "restored on some of the workers alone. The update was not made. Restore the same checkpoint "
    "on all workers, or start all of them again."
)
_SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def count() -> int:
    """Returns the number of replicas, of all workers, for which the graph is being built."""
    return devices.replicas()


def several_workers() -> bool:
    """Returns whether the graph being built is for workers that may be other processes."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy)


def check(name: str) -> None:
    """Checks that a step can be taken where the graph is being built.

    Args:
      name: Name of the optimizer's class, for messages.

    Raises:
      ValueError: The distribution strategy is not supported, or this is not in its replicas.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, _SUPPORTED):
        raise ValueError(
            f"{name} must run under a tf.distribute.MirroredStrategy or "
            "MultiWorkerMirroredStrategy, or under none: others do not take each step with all "
            f"replicas at once. Received: a {type(strategy).__name__}."
        )
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            f"{name} must be called in the replicas of the distribution strategy. Call the step "
            "with `strategy.run(step, args=(batch,))`, as `model.fit` does."
        )
    if count() > 1 and devices.compiled_by_xla():
        raise ValueError(
            f"{name} must not be compiled by XLA under a distribution strategy of several "
            "replicas. Use jit_compile=False."
        )


def all_if(condition: tf.Tensor, function: Callable[..., Any], *values: Any) -> tf.Tensor:
    """Calls a function in each replica where a condition holds, which is the same in all.

    Args:
      condition: A scalar bool tensor.
      function: Gets the replica's own values; replicas may meet in it.
      *values: Any objects.

    Returns:
      The condition, after the function was called.
    """

    def conditional(condition: tf.Tensor, call: Callable[[], Any]) -> tf.Tensor:
        def called() -> tf.Tensor:
            step_check.mark_own_loop()
            call()
            return tf.constant(True)

        with pause_own_operations():  # The step in the branch is checked as it is outside of one.
            return tf.cond(condition, called, lambda: tf.constant(False))

    if not tf.distribute.has_strategy():
        return conditional(condition, lambda: function(*values))

    def together(strategy: tf.distribute.Strategy, conditions: Any, *per_replica: Any) -> tf.Tensor:
        everywhere = tf.reduce_all(tf.stack(strategy.experimental_local_results(conditions)))
        extended = strategy.extended
        return conditional(
            everywhere, lambda: extended.call_for_each_replica(function, args=per_replica)
        )

    return merged(together, condition, *values)


def total(
    tensors: Sequence[tf.Tensor | None], digest: tf.Tensor | None = None
) -> list[tf.Tensor | None]:
    """Adds tensors up over all replicas, in one message.

    Args:
      tensors: Floating-point tensors, of the same types and shapes in each replica, or None.
      digest: Scalar int64 that must be the same in each replica, or else the step ends with an
        error; it goes with the message. None: nothing is compared.

    Returns:
      Their sums, the same in each replica.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if count() == 1 or not present:
        return list(tensors)
    digits = [] if digest is None else [_digits(digest)]
    sent = [*present, *digits]
    dtype = max((tensor.dtype for tensor in sent), key=lambda dtype: dtype.size)
    flat = tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in sent], axis=0)
    flat = merged(lambda strategy, values: strategy.extended.reduce_to(_SUM, values, values), flat)
    *sums, added = tf.split(
        flat, [*(t.shape.num_elements() for t in present), _DIGITS * len(digits)]
    )
    checks = []
    if digits:  # Integers: the sum is exact, in any order.
        alike = tf.reduce_all(added == tf.cast(digits[0] * count(), dtype))
        checks.append(tf.debugging.Assert(alike, [_UNLIKE]))
    with tf.control_dependencies(checks):
        parts = iter(sums)
        return [
            None if t is None else tf.cast(tf.reshape(next(parts), t.shape), t.dtype)
            for t in tensors
        ]


def _digits(digest: tf.Tensor) -> tf.Tensor:
    """Returns the lower bits of a digest as numbers whose sum over all replicas is exact."""
    shifts = tf.range(0, _DIGITS * _BITS, _BITS, dtype=tf.int64)
    digits = tf.bitwise.right_shift(digest, shifts) % 2**_BITS
    return tf.cast(digits, tf.float32)


def own_share(draw: Callable[[int], tf.Tensor], size: int) -> tf.Tensor:
    """Draws this replica's share of a vector of noise: one slice of it, and zeros elsewhere.

    Args:
      draw: Draws a given number of independent numbers.
      size: Length of the vector.

    Returns:
      `[size]`; the sum over all replicas has noise in each coordinate once.
    """
    if count() == 1:
        return draw(size)
    length = -(-size // count())
    start = min(index() * length, size)
    own = min(length, size - start)
    return tf.pad(draw(own), [[start, size - start - own]])
