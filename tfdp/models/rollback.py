"""Takes back everything that a function changed."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping import step_check

_READING = frozenset({"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"})


class Rollback:
    """The variables of a traced function, as they are before it runs.

    Every variable that the function reads or writes is meant, whether a layer, an optimizer or
    nobody owns it: weights, slots, counters, moving averages, states of random generators.

    Args:
      function: The traced function: a `ConcreteFunction`.
      kept: Variables that are never set back.

    Raises:
      ValueError: The function may change something that is no variable.
    """

    def __init__(self, function: Any, kept: Sequence[tf.Variable] = ()):
        _check_resources(function)
        others = {id(variable.handle) for variable in kept}
        # By handles: `graph.variables` lacks those that are written but not read, as `iterations`.
        handles = [h for h, _ in function.graph.captures if h.dtype == tf.resource]
        self._values = [
            (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=_variable_type(handle)))
            for handle in handles
            if id(handle) not in others and _variable_type(handle) is not None
        ]

    def restore(self) -> None:
        """Sets the variables back, in the graph being built."""
        for handle, value in self._values:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _check_resources(function: Any) -> None:
    for handle, inner in function.graph.captures:
        if handle.dtype != tf.resource or _variable_type(handle) is not None:
            continue
        writing = [op.type for op in inner.consumers() if op.type not in _READING]
        if writing:
            raise ValueError(
                f"The model uses '{writing[0]}' on a resource that is no variable, and that cannot "
                "be set back when an update is rejected. Keep its state in tf.Variables."
            )


def check_randomness(function: Any, compiled_by_xla: bool = False) -> None:
    """Refuses random streams that can be computed, and whose position cannot be set back.

    Attempts must have one law, whatever came before: with a stream that everybody can compute, an
    accepted update would show how many attempts went before it. Of other operations with a state,
    nothing says that it can be set back: a training step may have none.

    Args:
      function: The traced function that makes an attempt.
      compiled_by_xla: Whether it will be, where every such stream has a fixed seed.

    Raises:
      ValueError: An operation draws from such a stream, or has another state.
    """
    step_check.check_types(function.graph)
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    for node in nodes:
        if node.op not in step_check.RANDOM_STREAMS:
            continue
        if compiled_by_xla or node.attr["seed"].i or node.attr["seed2"].i:
            raise ValueError(
                f"The model draws random numbers of a fixed seed ('{node.name}'), by which an "
                "accepted update would show how many were rejected before. Give no `seed` to "
                "layers such as Dropout, call no `tf.keras.utils.set_random_seed`, and compile "
                "without XLA; or make their state one that can be taken back, with "
                "`tf.keras.backend.experimental.enable_tf_random_generator()`."
            )


def _variable_type(handle: Any) -> tf.DType | None:
    """The type of the variable that a resource is, or None if it is something else."""
    data = handle._handle_data
    return tf.as_dtype(data.shape_and_type[0].dtype) if data is not None and data.is_set else None
