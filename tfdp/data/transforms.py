"""Functions of one example, whose random numbers are secret and belong to the example."""

import inspect
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.random.keyed_functions import FORMS, GENERATOR, SECRET, KeyedFunction, State
from tfdp.base.tf import op_types
from tfdp.base.tf.function_library import Library, data_inputs, functions_of, is_call, kept
from tfdp.base.user_warnings import is_library
from tfdp.base.validation import error
from tfdp.clipping import function_checks
from tfdp.clipping.loss_graph import batch_state

# The use of a draw's key for what is drawn for a row; `tfdp.data.source` and `users` have others.
_OF_ROWS = 2
# Random words for each row: secrets for the transform, and for what reads the example.
_WORDS = 2 * 2 * SECRET
_READ = "ReadVariableOp"
# Stateful operations that are calls, or read what is the same for all examples, or check.
_ALLOWED = frozenset(
    {"Assert", "PartitionedCall", "ResourceGather", "ResourceGatherNd", _READ}
    | op_types.STATEFUL
    | {
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "StatelessRandomGetAlg",
        "VarIsInitializedOp",
        "VariableShape",
    }
)
# Beginnings of the names of operations that draw from the state of a generator.
_DRAWING = ("NonDeterministic", "Rng", "Stateful")
_INTEGERS = (tf.int32, tf.int64, tf.uint32, tf.uint64)
_SEED = "seed=tf.random.uniform([2], 0, 2**62, tf.int64)"
_REMEDIES = {
    "RandomGamma": f"Use `tf.random.stateless_gamma` with `{_SEED}`.",
    "RandomPoissonV2": f"Use `tf.random.stateless_poisson` with `{_SEED}`.",
}
_REMEDY = (
    "Use `tf.random.uniform`, `normal`, `truncated_normal` or `categorical`, the functions of "
    f"`tf.image`, a `tf.random.Generator`, or a stateless operation with `{_SEED}`."
)


def secrets(key: tf.Tensor, rows: tf.Tensor | int) -> tf.Tensor:
    """Draws secrets for each row of a draw.

    Args:
      key: Secret of this draw; see `tfdp.base.random.chacha.random_words`.
      rows: Number of rows.

    Returns:
      int64 `[rows, 2, 3]`: of each row one for the transform, and one for the source that it is
      read from.
    """
    words = chacha.random_words(key, _WORDS * rows, _OF_ROWS)
    return tf.bitcast(tf.reshape(words, [-1, 2, SECRET, 2]), tf.int64)


# What tokenizers of KerasHub do: they look a model of SentencePiece up, or keep what they made of a
# word, which is the same whichever text it was in. (Others could number words as they come, so that
# an example's result follows from the examples before.)
_TOKENIZING = frozenset({"LookupTableInsertV2", "SentencepieceOp", "SentencepieceTokenizeOp"})


# Python code may keep any state: it runs where that is looked at.
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


class UntraceableError(Exception):
    """A function is none of tensors, in a graph of TensorFlow."""


def keyed_rows(
    function: Any, examples: tf.data.Dataset, is_of_keras_hub: bool = False
) -> tf.data.Dataset:
    """Applies a function to each example once, with random numbers that belong to the example.

    Args:
      function: Is called with the parts of an example.
      examples: Single examples.
      is_of_keras_hub: Whether the function is KerasHub's own, whose tables may be filled.

    Returns:
      The results, in order. Each depends on its example and on secrets of its own alone.

    Raises:
      ValueError: The function draws random numbers in a way that no secret can be given to, or
        keeps a state.
      UntraceableError: The function raises an error when it is traced.
    """
    spec = examples.element_spec
    arguments = spec if isinstance(spec, tuple) else (spec,)
    traced = tf.function(function, autograph=False)
    try:
        concrete = traced.get_concrete_function(*arguments)
    except Exception as error:
        raise UntraceableError(str(error)) from error
    library = Library(concrete)
    allowed = _TOKENIZING if is_of_keras_hub else frozenset()
    if not any(_is_drawing(library, node) for _, node in library.nodes()):
        for _, node in library.nodes():
            if node.op in _PYTHON:
                raise UntraceableError(f"It calls Python: {node.op}.")
            if node.op not in allowed and _has_side_effect(library, node):
                _refuse_side_effect(concrete, node)
        return examples.map(traced, num_parallel_calls=tf.data.AUTOTUNE)
    keyed = KeyedFunction(concrete, _states(concrete, allowed))
    of_rows = tf.data.Dataset.from_generator(
        _fresh_secrets, output_signature=tf.TensorSpec([SECRET], tf.int64)
    )

    def of_row(secret: tf.Tensor, example: Any) -> Any:
        return keyed(secret, tf.nest.flatten(example))

    pairs = tf.data.Dataset.zip((of_rows, examples))
    return pairs.map(of_row, num_parallel_calls=tf.data.AUTOTUNE)


def _fresh_secrets() -> Iterator[np.ndarray]:
    while True:
        yield np.frombuffer(os.urandom(8 * SECRET), np.int64)


def _has_side_effect(library: Library, node: Any) -> bool:
    is_stateful = library.op_def(node.op).is_stateful and node.op not in _ALLOWED
    return is_stateful or node.op == "PyFuncStateless" or node.op.startswith("Assign")


def _is_drawing(library: Library, node: Any) -> bool:
    """Returns whether an operation draws random numbers."""
    if node.op in FORMS or node.op == GENERATOR:
        return True
    has_stream = any(attribute.name == "seed" for attribute in library.op_def(node.op).attr)
    return has_stream or (node.op.startswith(_DRAWING) and node.op not in _ALLOWED)


class Transform:
    """A function of one example that is applied to rows.

    It is traced once. What it returns for a row is a function of the example and of the secret of
    that row alone: whatever random numbers it draws, and whatever seeds it gives, they follow from
    this secret. It keeps no state.

    Args:
      function: Makes of an example, `(x, y)` or `x`, the one that is delivered.
      *example: Types and shapes of the inputs of an example, and of its targets if it has any.

    Attributes:
      element_spec: Types and shapes of what the function returns.

    Raises:
      ValueError: The function depends on other things than the example and constants, has side
        effects or a state, draws random numbers in a way that no secret can be given to, takes
        other arguments, or does not return tensors of fixed shapes: a pair, or `x` of `x`.
    """

    def __init__(self, function: Any, *example: Any):
        _check_is_function(function, len(example) > 1)
        concrete = function_checks.trace_alone("transform", function, example)
        states = _states(concrete)
        _check_outputs(concrete.structured_outputs, len(example) > 1)
        self._function = function  # It holds the variables that it reads.
        self._keyed = KeyedFunction(concrete, states)
        self.element_spec = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype), concrete.structured_outputs
        )

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, so that its rows need secrets."""
        return self._keyed.draws

    def __call__(self, rows: tuple, row_secrets: tf.Tensor | None) -> Any:
        """Applies the function to each row, in the graph being built.

        Args:
          rows: Inputs, and targets if there are any, nested tensors `[rows, ...]`.
          row_secrets: int64 `[rows, 3]`; None is enough if it draws no random numbers.
        """
        given = (rows,) if row_secrets is None else (rows, row_secrets)

        def of_row(row: tuple) -> Any:
            secret = row[1] if len(row) > 1 else None
            return self._keyed(secret, tf.nest.flatten(row[0]))

        return tf.map_fn(of_row, given, fn_output_signature=self.element_spec)


def _check_is_function(function: Any, has_labels: bool) -> None:
    needed = "a function of one example, (x, y) -> (x, y), or None"
    if not has_labels:
        needed = "a function of x alone, x -> x, where data have no labels, or None"
    if not callable(function):
        raise error("transform", needed, function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Not written in Python, as classes such as `int` are.
        raise error("transform", f"{needed}, whose arguments can be known", function) from None
    try:
        signature.bind(*([None] * (1 + has_labels)))
    except TypeError:
        raise ValueError(
            f"Argument `transform` must be {needed}. Received a function of {signature}."
        ) from None


def _check_outputs(outputs: Any, has_labels: bool) -> None:
    is_pair = isinstance(outputs, tuple) and len(outputs) == 2
    if has_labels and not is_pair:
        raise ValueError(
            "Argument `transform` must return a pair (x, y). Received a function that returns: "
            f"{outputs!r}."
        )
    is_one = isinstance(outputs, tuple) and len(outputs) == 1
    if isinstance(outputs, (list, tuple)) and not (is_pair or is_one):
        raise ValueError(
            "Argument `transform` must return x, or a pair (x, y), where data have no labels. "
            f"Received a function that returns: {outputs!r}. Several inputs are a dict, or a tuple "
            "in a tuple of one, `((a, b),)`."
        )
    for tensor in tf.nest.flatten(outputs):
        if not isinstance(tensor, tf.Tensor):
            raise ValueError(
                "Argument `transform` must return dense tensors. Received a function that returns: "
                f"{tensor!r}."
            )
        if not tensor.shape.is_fully_defined():
            raise ValueError(
                "Argument `transform` must return tensors of fixed shapes, which a batch can hold. "
                f"Received a function that returns a tensor of shape {tensor.shape}: fix it with "
                "`tf.ensure_shape` or `tf.image.resize`."
            )


def _states(concrete: Any, allowed: frozenset[str] = frozenset()) -> dict[tuple[str, str], State]:
    """Finds what a traced function reads of the states of generators; refuses all other states.

    Args:
      concrete: The function.
      allowed: Types of operations with side effects that it may have all the same.
    """
    library = Library(concrete)
    writes = []
    for name, node in library.nodes():
        if node.op in FORMS or node.op == GENERATOR:
            continue
        if _is_drawing(library, node):
            _refuse_drawing(concrete, node)
        if node.op.startswith("Assign"):
            writes.append((name, node))
        elif node.op in allowed:
            continue
        elif _has_side_effect(library, node):
            _refuse_side_effect(concrete, node)
    origins = library.resources()

    def resources(name: str, node: Any) -> set[int]:
        return library.origins_of(origins, name, data_inputs(node)[0])

    states: dict[tuple[str, str], State] = {}
    seeding: set[int] = set()
    written = {i for name, node in writes for i in resources(name, node)}
    for name, node in library.nodes():
        if node.op not in (_READ, GENERATOR, "ResourceGather", "ResourceGatherNd"):
            continue
        found = resources(name, node)
        if node.op == GENERATOR:
            seeding |= found
        elif found & written:
            states[name, node.name] = _state(concrete, library, name, node, found)
            if node.name in kept(library.functions[name], []):
                seeding |= found
    for name, node in writes:
        if not resources(name, node) or not resources(name, node) <= seeding:
            _refuse_side_effect(concrete, node)
    for _, node in library.nodes():
        drawing = [f for f in functions_of(node) if _draws(library, f, states)]
        if drawing and not is_call(node):
            _refuse_drawing(concrete, node)
    return states


def _state(concrete: Any, library: Library, name: str, node: Any, found: set[int]) -> State:
    """Returns the read of a state that only seeds are made of."""
    first = len(concrete.inputs) - len(concrete.captured_inputs)
    variables = [batch_state.variable_with(concrete.captured_inputs[i - first]) for i in found]
    variable, dtype = variables[0], tf.as_dtype(node.attr["dtype"].type)
    if (
        len(variables) > 1
        or variable is None
        or node.op != _READ
        or dtype not in _INTEGERS
        or not variable.shape.is_fully_defined()
        or node.name in library.value_cone(name)
    ):
        named = node.name if variable is None else variable.name
        raise ValueError(
            "Argument `transform` must keep no state, by which examples could get into each other. "
            f"Received a function that writes and reads '{named}'{_made_at(concrete, node)}. "
            "Variables may be read; only the states of random generators are written, and they are "
            "replaced by secret numbers."
        )
    return State(dtype, tuple(variable.shape))


def _draws(library: Library, name: str, states: dict[tuple[str, str], State]) -> bool:
    """Returns whether a function, or one that it calls, has an operation that must be keyed."""
    pending, seen = [name], set()
    while pending:
        one = pending.pop()
        if one in library.functions and one not in seen:
            seen.add(one)
            for node in library.functions[one].node_def:
                if node.op in FORMS or node.op == GENERATOR or (one, node.name) in states:
                    return True
                pending += functions_of(node)
    return False


def _refuse_drawing(concrete: Any, node: Any) -> NoReturn:
    raise ValueError(
        "Argument `transform` must draw random numbers in a way that tfdp can make secret, each "
        "row its own: numbers that follow from the order of the rows change when an example is "
        f"added. Received the operation '{node.name}' ({node.op})"
        f"{_made_at(concrete, node)}. {_REMEDIES.get(node.op, _REMEDY)}"
    )


def _refuse_side_effect(concrete: Any, node: Any) -> NoReturn:
    raise ValueError(
        "Argument `transform` must have no side effects, by which examples could get into each "
        f"other. Received a function with the operation '{node.name}' ({node.op})"
        f"{_made_at(concrete, node)}. Python code belongs into the `__getitem__` of a source."
    )


def _made_at(concrete: Any, node: Any) -> str:
    """Returns the user's line that made an operation, for messages."""
    for graph in _graphs(concrete.graph):
        for op in graph.get_operations():
            if op.name == node.name and op.type == node.op:
                for frame in reversed(op.traceback or ()):
                    if not is_library(frame.filename):
                        return f", made at {frame.filename}:{frame.lineno}"
    return ""


def _graphs(graph: Any) -> Iterator[Any]:
    """Yields a function's graph, and those of the functions that it calls."""
    yield graph
    for function in list(getattr(graph, "_functions", {}).values()):
        inner = getattr(function, "graph", None)
        if inner is not None:
            yield from _graphs(inner)
