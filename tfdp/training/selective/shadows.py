"""Copies of variables, on which a traced function runs instead of the originals."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.base.random import key_streams
from tfdp.clipping.loss_graph import batch_state

# Operations that only read the variable, or the table, that they are given.
_READING_VARIABLES = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
)
_READING_TABLES = frozenset({"LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2"})


class Shadows:
    """Copies of all variables that a traced function may change.

    The function runs with the handles of the copies in place of those that it captured. So the
    originals, which other threads may read, change only in `commit`. This holds for every variable,
    whatever owns it: weights, slots, counters, moving averages, states of random generators.
    Variables that the function only reads have no copy.

    A copy shares its memory with the original until one of the two is written. Copies are tracked
    by no model and no optimizer, and are part of no checkpoint.

    Args:
      function: The traced function: a `ConcreteFunction`.
      kept: Variables without a copy, which the function changes in place. Those of the streams of
        secret keys always are: no key may come twice.
      of: Other copies, that these are copies of where they have the variable; None: of the
        variables alone.

    Raises:
      ValueError: The function may change a resource that is not a variable.
    """

    def __init__(
        self, function: Any, kept: Sequence[tf.Variable] = (), of: "Shadows | None" = None
    ):
        self._of = of
        in_place = {id(variable.handle) for variable in (*kept, *key_streams.all_variables())}
        self._copies: dict[int, tuple[Any, tf.Variable]] = {}
        captured = function.captured_inputs
        first = len(function.inputs) - len(captured)
        for handle, inner in zip(captured, function.inputs[first:], strict=True):
            if handle.dtype != tf.resource or id(handle) in in_place:
                continue
            if self._needs_copy(handle, inner):
                self._copies[id(handle)] = handle, _copy(handle)

    def _needs_copy(self, handle: Any, inner: tf.Tensor) -> bool:
        """Returns whether the function may change the variable that `inner` is the handle of."""
        is_variable = _is_variable(handle)
        reading = _READING_VARIABLES if is_variable else _READING_TABLES
        writing = [op.type for op in inner.consumers() if op.type not in reading]
        if writing and not is_variable:
            raise ValueError(
                "The model must keep its state in tf.Variables, which stay as they are when an "
                f"update is rejected. Received a model with the operation '{writing[0]}' on a "
                "resource that is not a variable."
            )
        return bool(writing)

    def originals(self) -> list[tf.Variable]:
        """Returns the variables that have copies, as far as their handles tell."""
        found = [batch_state.variable_with(handle) for handle, _ in self._copies.values()]
        return [variable for variable in found if variable is not None]

    def handle(self, handle: Any) -> Any:
        """Returns the handle that stands for that of a variable."""
        if id(handle) in self._copies:
            return self._copies[id(handle)][1].handle
        return self._source(handle)

    def _source(self, handle: Any) -> Any:
        return handle if self._of is None else self._of.handle(handle)

    def reset(self) -> None:
        """Sets the copies to what they are copies of, in the graph being built."""
        for handle, copy in self._copies.values():
            _assign(copy.handle, self._source(handle))

    def commit(self, last: Sequence[tf.Variable] = (), without: Sequence[tf.Variable] = ()) -> None:
        """Sets the variables to their copies, in the graph being built.

        Args:
          last: Variables that are set after all others.
          without: Variables that are left as they are.
        """
        late = {id(variable.handle) for variable in last}
        left = {id(variable.handle) for variable in without}
        pairs = [pair for key, pair in self._copies.items() if key not in left]
        first = [_assign(self._source(h), c.handle) for h, c in pairs if id(h) not in late]
        with tf.control_dependencies([op for op in first if op is not None]):
            for handle, copy in pairs:
                if id(handle) in late:
                    _assign(self._source(handle), copy.handle)

    def call(self, function: Any, *args: Any) -> Any:
        """Calls a traced function on the copies, in the graph being built.

        Args:
          function: A `ConcreteFunction`: that of the copies, or one that changes no variable that
            is not among them or kept.
          *args: Tensors, or nested tuples or dicts of them.

        Returns:
          Flat list of the outputs.
        """
        function.add_to_graph()
        handles = [
            self.handle(tensor) if tensor.dtype == tf.resource else tensor
            for tensor in function.captured_inputs
        ]
        found = tf.raw_ops.StatefulPartitionedCall(
            args=[*tf.nest.flatten(args), *handles],
            Tout=[output.dtype for output in function.outputs],
            f=function,
        )
        if not function.outputs:  # It is the operation.
            return []
        for tensor, output in zip(found, function.outputs, strict=True):
            tensor.set_shape(output.shape)
        return found


def _copy(handle: Any) -> tf.Variable:
    """Returns a variable with the value of the one that a handle belongs to, on its device."""
    with tf.init_scope(), tf.device(handle.device):
        return tf.Variable(
            _read(handle), trainable=False, shape=_spec(handle).shape, validate_shape=False
        )


def _assign(handle: Any, source: Any) -> tf.Operation | None:
    return tf.raw_ops.AssignVariableOp(resource=handle, value=_read(source))


def _read(handle: Any) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=_spec(handle).dtype)


def _is_variable(handle: Any) -> bool:
    """Returns whether a resource is a variable, and nothing else."""
    data = handle._handle_data
    return data is not None and data.is_set


def _spec(handle: Any) -> tf.TensorSpec:
    """Returns the shape and type of a variable."""
    found = handle._handle_data.shape_and_type[0]
    return tf.TensorSpec(tf.TensorShape(found.shape), tf.as_dtype(found.dtype))
