"""Places in a step where the replicas of a distribution strategy meet.

Replicas are traced one after the other into one graph, each in a thread that waits where they meet.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping.loss_graph.own_operations import own_operations, pause_own_operations


def index() -> int:
    """Returns which of the replicas of all workers the graph is being built for, from 0."""
    context = tf.distribute.get_replica_context()
    known = devices.replicas() > 1
    return int(tf.get_static_value(context.replica_id_in_sync_group)) if known else 0


def once(function: Callable[..., Any], *values: Any) -> Any:
    """Calls a function once for all replicas of this process, when each has come this far.

    Args:
      function: Gets, for each of the values, those of the replicas in a tuple. What it adds to
        the graph is marked as the library's own.
      *values: Tensors, or nested tuples and lists of them.

    Returns:
      What the function returns, to each replica.
    """
    if not tf.distribute.has_strategy():
        return function(*((value,) for value in values))

    def call(strategy: tf.distribute.Strategy, *per_replica: Any) -> Any:
        return function(*map(strategy.experimental_local_results, per_replica))

    return merged(call, *values)


def merged(function: Callable[..., Any], *values: Any) -> Any:
    """Calls a function of the strategy and of what `values` are in each replica."""

    def call(strategy: tf.distribute.Strategy, *per_replica: Any) -> Any:
        with own_operations():
            return function(strategy, *per_replica)

    with pause_own_operations():  # Other replicas continue meanwhile.
        return tf.distribute.get_replica_context().merge_call(call, args=values)
