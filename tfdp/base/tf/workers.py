"""Exchange of facts between the workers of a distribution strategy, before training."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def gathered(strategy: tf.distribute.Strategy, value: Callable[[int], Sequence[int]]) -> np.ndarray:
    """Collects integers of all replicas, outside of graphs; every worker must call it.

    Args:
      strategy: The distribution strategy.
      value: Returns the integers of a replica of this worker, given its index among all.

    Returns:
      int64 `[replicas, integers]`, in the order of the replicas.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return np.array([value(replica) for replica in range(strategy.num_replicas_in_sync)])

    def of(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        return tf.constant([value(context.replica_id_in_sync_group)], tf.int64)

    with tf.init_scope():
        values = strategy.experimental_distribute_values_from_function(of)
        return strategy.gather(values, axis=0).numpy()


def check_alike(strategy: tf.distribute.Strategy, facts: Any, what: str) -> None:
    """Checks that all workers have the same facts; every worker must call it.

    Args:
      strategy: The distribution strategy.
      facts: Anything whose `repr` shows its value.
      what: Name of the receiver of the facts, for the message.

    Raises:
      ValueError: They differ; in every worker.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    digest = np.frombuffer(hashlib.sha256(repr(facts).encode()).digest(), np.int64).tolist()
    all_digests = gathered(strategy, lambda _: digest)
    if np.any(all_digests != all_digests[0]):
        raise ValueError(
            f"All workers must give {what} the same arguments. Received arguments that differ "
            f"between workers; those of this worker: {facts}."
        )
