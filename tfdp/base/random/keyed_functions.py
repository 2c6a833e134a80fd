"""Functions whose random numbers follow from a secret that they are called with.

A traced function may draw random numbers anywhere: in branches, loops and functions that it calls,
from streams that a seed or the state of a generator fixes. Here its definition is rewritten so that
all of them follow from one secret of 192 bits:

- Operations with a stream of their own become their stateless forms. The state of a generator
  becomes a random number wherever it is read, so that what is made of it may stay as it is.
- Each function gets the secret as an argument, and makes of it a seed for each of these operations
  and for each call (TensorFlow's Philox generator: a key of 64 bits, and where it begins to count,
  of 128).
- The body of a loop also makes the seeds of the next iteration.

Stateless operations stay as they are: they draw what their seed says, which is a constant, or
follows from the arguments or from other random numbers. So those that share a seed agree.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfdp.base.tf.function_library import Library, base, data_inputs, functions_of, is_call, kept

_SEED = "?"  # Among inputs: a seed that is not numbered yet.
GENERATOR = "RngReadAndSkip"
# What has no results that are used, and is needed all the same.
_ACTING = frozenset({"Assert", "LookupTableInsertV2"})
_NUMBERS = "StatelessRandomUniformFullIntV2"
_PHILOX = 1
# What is made of a seed: the inputs of operations with a key, or a seed of the older ones.
_KEY, _COUNTER, _ALGORITHM, _OLD = "key", "counter", "alg", "seed"
_KEYED = (_KEY, _COUNTER, _ALGORITHM)
SECRET = 3  # Numbers of 64 bits.
_INT32, _INT64 = tf.int32.as_datatype_enum, tf.int64.as_datatype_enum
_UINT64 = tf.uint64.as_datatype_enum
_STATE = 3  # Two words of a counter and one of a key.
# Attributes of functions that are of the original ones.
_OF_ORIGINAL = (
    "_input_shapes",
    "api_implements",
    "api_preferred_device",
    "backward_function_name",
    "forward_function_name",
)
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Form:
    """The stateless form of an operation that draws random numbers.

    Attributes:
      op: Its type.
      inputs: Which inputs of the operation it has, by their places; or what is made of the seed.
      attributes: Its attributes, each with the name of the operation's own.
    """

    op: str
    inputs: tuple[int | str, ...]
    attributes: dict[str, str]


SHUFFLE = "RandomShuffle"
_SAME = {"Tshape": "T", "dtype": "dtype"}
# Every operation that can be keyed. (Gamma and Poisson numbers have other shapes than their
# stateless forms.)
FORMS = {
    "Multinomial": Form(
        "StatelessMultinomial", (0, 1, _OLD), {"T": "T", "output_dtype": "output_dtype"}
    ),
    "ParameterizedTruncatedNormal": Form(
        "StatelessParameterizedTruncatedNormal",
        (0, _OLD, 1, 2, 3, 4),
        {"S": "T", "dtype": "dtype"},
    ),
    # Becomes several operations: see `_shuffle`.
    SHUFFLE: Form("GatherV2", (0,), {"Tparams": "T"}),
    "RandomStandardNormal": Form("StatelessRandomNormalV2", (0, *_KEYED), _SAME),
    "RandomUniform": Form("StatelessRandomUniformV2", (0, *_KEYED), _SAME),
    "RandomUniformInt": Form(
        "StatelessRandomUniformIntV2", (0, *_KEYED, 1, 2), {"Tshape": "T", "dtype": "Tout"}
    ),
    "SampleDistortedBoundingBoxV2": Form(
        "StatelessSampleDistortedBoundingBox",
        (0, 1, 2, _OLD),
        {
            name: name
            for name in (
                "T",
                "area_range",
                "aspect_ratio_range",
                "max_attempts",
                "use_image_if_no_bounding_boxes",
            )
        },
    ),
    "StatefulRandomBinomial": Form(
        "StatelessRandomBinomial", (2, _OLD, 3, 4), {"S": "S", "T": "T", "dtype": "dtype"}
    ),
    "TruncatedNormal": Form("StatelessTruncatedNormalV2", (0, *_KEYED), _SAME),
}


@dataclasses.dataclass(frozen=True)
class State:
    """A read of a generator's state, which becomes a random number.

    Attributes:
      dtype: Type of the number, an integer.
      shape: Its shape.
    """

    dtype: tf.DType
    shape: tuple[int, ...]


class KeyedFunction:
    """A function that is called with a secret, of which its random numbers are made.

    Args:
      concrete: The function, traced.
      states: The reads of generators' states, by the names of their function and operation; of
        `RngReadAndSkip` all are known.

    Attributes:
      draws: Whether it draws random numbers at all.
    """

    def __init__(self, concrete: Any, states: dict[tuple[str, str], State]):
        self._concrete = concrete
        self._rewriting = rewriting = Rewriting(Library(concrete), states)
        self.draws = rewriting.needs(rewriting.library.main)
        if self.draws:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in _arguments(concrete)]
            name = rewriting.rewritten(rewriting.library.main, "call", True)
            self._graph_def = rewriting.graph_def(name)
            for function in self._graph_def.library.function:
                if not context.context().has_function(function.signature.name):
                    context.context().add_function_def(function)
            keyed = tf.function(self._keyed, autograph=False)
            self._call = keyed.get_concrete_function(tf.TensorSpec([SECRET], tf.int64), *specs)

    def __call__(self, secret: tf.Tensor | None, arguments: Sequence[tf.Tensor]) -> Any:
        """Calls the function.

        Args:
          secret: int64 `[3]`, of 192 uniform bits that are used for nothing else. (None is enough
            for a function that draws nothing.)
          arguments: Its arguments, flattened.

        Returns:
          The structure of its results.

        Raises:
          ValueError: The function draws random numbers, and there is no secret.
        """
        if not self.draws:
            results = self._concrete(*arguments)
        elif secret is None:
            raise ValueError("A function that draws random numbers must be called with a secret.")
        else:
            results = self._call(secret, *arguments)
        structure = self._concrete.structured_outputs
        return tf.nest.pack_sequence_as(structure, tf.nest.flatten(results))

    def _keyed(self, secret: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        graph, concrete = tf.compat.v1.get_default_graph(), self._concrete
        captured = [graph.capture(tensor) for tensor in concrete.captured_inputs]
        secret = tf.bitcast(secret, tf.uint64)
        given = dict(zip(_names(), [*arguments, *captured, secret], strict=False))
        wanted = [f"function:{i}" for i in range(len(concrete.outputs))]
        made = tf.graph_util.import_graph_def(
            self._graph_def, input_map=given, return_elements=wanted, name="keyed"
        )
        for tensor, known in zip(made, concrete.outputs, strict=True):
            tensor.set_shape(known.shape)
        return made


class Rewriting:
    """Rewrites the functions of a library.

    Args:
      library: The functions.
      states: See `KeyedFunction`.
    """

    def __init__(self, library: Library, states: dict[tuple[str, str], State]):
        self.library, self._states = library, states
        self._made: dict[tuple[str, str, bool], Any] = {}
        self._needs: dict[str, bool] = {}
        self._number = next(_numbers)

    def needs(self, name: str) -> bool:
        """Returns whether a function, or one that it calls, draws random numbers."""
        if name not in self._needs:
            self._needs[name] = False
            nodes = self.library.functions[name].node_def
            self._needs[name] = any(
                self._source(name, node) is not None or any(map(self.needs, functions_of(node)))
                for node in nodes
            )
        return self._needs[name]

    def graph_def(self, name: str) -> tf.compat.v1.GraphDef:
        """Returns a graph with one operation, "function", that calls a rewritten function."""
        function = next(f for f in self._made.values() if f.signature.name == name)
        graph_def = tf.compat.v1.GraphDef(versions=self.library.versions)
        graph_def.library.function.extend(self._made.values())
        graph_def.library.function.extend(self._others())
        signature = function.signature
        call = graph_def.node.add(name="function", op="StatefulPartitionedCall")
        call.input.extend(f"{n}:0" for n, _ in zip(_names(True), signature.input_arg, strict=False))
        call.attr["f"].func.name = name
        call.attr["Tin"].list.type.extend(a.type for a in signature.input_arg)
        call.attr["Tout"].list.type.extend(a.type for a in signature.output_arg)
        return graph_def

    def rewritten(self, name: str, role: str, secret: bool) -> str:
        """Rewrites a function, and returns the name of the result.

        Args:
          name: Its name.
          role: "call", or "cond" or "body" of a loop. These have two secrets, one for each of them.
          secret: Whether it gets a secret.
        """
        known = self._made.get((name, role, secret))
        if known is not None:
            return known.signature.name
        function = type(self.library.functions[name])()
        function.CopyFrom(self.library.functions[name])
        self._made[name, role, secret] = function
        function.signature.name = f"{name}_keyed_{role}_{int(secret)}_{self._number}"
        for attribute in _OF_ORIGINAL:
            function.attr.pop(attribute, None)
        renamed: dict[str, str] = {}
        for node in list(function.node_def):
            source = self._source(name, node)
            if source is not None:
                renamed |= _use_seed(function, node, source)
            elif is_call(node):
                self._rewrite_call(node)
        _rename(function, renamed)
        _keep_needed(function, self._asserting(function))
        if secret:
            _add_seeds(function, role)
        return function.signature.name

    def _source(self, name: str, node: Any) -> Form | State | None:
        """Returns what becomes of an operation, if it is one where random numbers come from."""
        if node.op == GENERATOR:
            return State(tf.int64, (_STATE,))
        return self._states.get((name, node.name)) or FORMS.get(node.op)

    def _rewrite_call(self, node: Any) -> None:
        secret = any(map(self.needs, functions_of(node)))
        is_loop = node.op.endswith("While")
        for key, attribute in node.attr.items():
            role = key if is_loop and key in ("cond", "body") else "call"
            for function in (attribute.func, *attribute.list.func):
                if function.name:
                    function.name = self.rewritten(function.name, role, secret)
        if not secret:
            return
        seeds = 2 if is_loop else 1
        place = len(data_inputs(node))
        references = list(node.input)
        node.input[:] = [*references[:place], *[_SEED] * seeds, *references[place:]]
        node.attr["T" if is_loop else "Tin"].list.type.extend([_UINT64] * seeds)
        if is_loop:
            for _ in range(seeds):
                node.attr["output_shapes"].list.shape.add().dim.add(size=SECRET)
        node.attr.pop("_output_shapes", None)

    def _asserting(self, function: Any) -> list[str]:
        """Returns the operations that check something or fill a table, or call what does."""
        return [n.name for n in function.node_def if n.op in _ACTING or self._asserts(n)]

    def _asserts(self, call: Any) -> bool:
        by_name = {f.signature.name: f for f in self._made.values()}
        called = [by_name[n] for n in functions_of(call) if n in by_name]
        return any(self._asserting(function) for function in called)

    def _others(self) -> list[Any]:
        """Returns the functions that stay as they are: arguments of other operations than calls."""
        pending = [c for f in self._made.values() for n in f.node_def for c in functions_of(n)]
        found: dict[str, Any] = {}
        while pending:
            name = pending.pop()
            if name in self.library.functions and name not in found:
                found[name] = self.library.functions[name]
                pending += [c for node in found[name].node_def for c in functions_of(node)]
        return list(found.values())


def _names(of_operations: bool = False) -> Any:
    """Yields names for the arguments of the call, as `import_graph_def` maps them."""
    return (f"argument_{i}" if of_operations else f"argument_{i}:0" for i in itertools.count())


def _arguments(concrete: Any) -> list[tf.Tensor]:
    """Returns the arguments of a function, without what it captures."""
    return concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]


def _use_seed(function: Any, node: Any, source: Form | State) -> dict[str, str]:
    """Makes an operation draw by a seed; returns which of its outputs have other names now."""
    old = type(node).FromString(node.SerializeToString())
    inputs, order = data_inputs(old), [name for name in old.input if name.startswith("^")]
    made = _of_seed(function, node.name)
    node.attr.clear()
    if isinstance(source, State):
        shape = _constant(function, f"{node.name}/secret_shape", np.array(source.shape, np.int32))
        node.op = _NUMBERS
        node.input[:] = [shape, *[made[name] for name in _KEYED], *order]
        node.attr["dtype"].type, node.attr["Tshape"].type = source.dtype.as_datatype_enum, _INT32
        return {f"{node.name}:value:0": f"{node.name}:output:0"}
    if old.op == SHUFFLE:
        order = [_shuffled(function, node.name, inputs[0], old.attr["T"], made), *order]
        zero = _constant(function, f"{node.name}/secret_first", np.array(0, np.int32))
        node.op, node.input[:] = source.op, [inputs[0], order[0], zero, *order[1:]]
        node.attr["Tparams"].CopyFrom(old.attr["T"])
        node.attr["Tindices"].type = node.attr["Taxis"].type = _INT32
        return {}
    node.op = source.op
    node.input[:] = [*[made[i] if isinstance(i, str) else inputs[i] for i in source.inputs], *order]
    for new, name in source.attributes.items():
        node.attr[new].CopyFrom(old.attr[name])
    if _OLD in source.inputs:
        node.attr["Tseed"].type = _INT64
    return {}


def _shuffled(function: Any, name: str, value: str, dtype: Any, made: dict[str, str]) -> str:
    """Adds a random order of the rows of a value; returns the reference to it.

    It is the order of 64 random bits for each row.
    """

    def add(op: str, inputs: list[str], output: str, **types: Any) -> str:
        node = function.node_def.add(name=f"{name}/secret_{op.lower()}", op=op, input=inputs)
        for key, kind in types.items():
            node.attr[key].type = kind
        return f"{node.name}:{output}:0"

    shape = add("Shape", [value], "output", T=dtype.type, out_type=_INT32)
    bounds = [_constant(function, f"{name}/secret_{n}", np.array([n], np.int32)) for n in (0, 1)]
    kinds = {"T": _INT32, "Index": _INT32}
    rows = add("StridedSlice", [shape, *bounds, bounds[1]], "output", **kinds)
    drawn = [rows, *[made[key] for key in _KEYED]]
    bits = add(_NUMBERS, drawn, "output", dtype=_INT64, Tshape=_INT32)
    scalar = _constant(function, f"{name}/secret_scalar", np.zeros([0], np.int32))
    count = add("Reshape", [rows, scalar], "output", T=_INT32, Tshape=_INT32)
    return add("TopKV2", [bits, count], "indices", T=_INT64)


def _of_seed(function: Any, name: str, seed: str = _SEED) -> dict[str, str]:
    """Takes a seed apart, for the operation of this name; returns the inputs made of it."""
    sizes = _constant(function, f"{name}/secret_sizes", np.array([1, SECRET - 1], np.int32))
    axis = _constant(function, f"{name}/secret_axis", np.array(0, np.int32))
    split = function.node_def.add(name=f"{name}/secret", op="SplitV", input=[seed, sizes, axis])
    split.attr["T"].type, split.attr["Tlen"].type, split.attr["num_split"].i = _UINT64, _INT32, 2
    key, counter = (f"{name}/secret:output:{i}" for i in range(2))
    old = function.node_def.add(name=f"{name}/secret_seed", op="Bitcast", input=[counter])
    old.attr["T"].type, old.attr["type"].type = _UINT64, _INT64
    algorithm = _constant(function, f"{name}/secret_alg", np.array(_PHILOX, np.int32))
    return {
        _KEY: key,
        _COUNTER: counter,
        _ALGORITHM: algorithm,
        _OLD: f"{name}/secret_seed:output:0",
    }


def _rename(function: Any, renamed: dict[str, str]) -> None:
    for node in function.node_def:
        node.input[:] = [renamed.get(reference, reference) for reference in node.input]
    for key, reference in function.ret.items():
        function.ret[key] = renamed.get(reference, reference)


def _keep_needed(function: Any, checks: Sequence[str]) -> None:
    """Leaves out what no result depends on, such as the next states of generators."""
    needed = kept(function, checks)
    names = needed | {a.name for a in function.signature.input_arg}
    nodes = [node for node in function.node_def if node.name in needed]
    for node in nodes:
        node.input[:] = [r for r in node.input if not r.startswith("^") or base(r) in names]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del function.node_def[:]
    function.node_def.extend(copies)
    ordered = {key: name for key, name in function.control_ret.items() if name in needed}
    function.control_ret.clear()
    function.control_ret.update(ordered)
    signature = function.signature
    signature.control_output[:] = [key for key in signature.control_output if key in ordered]


def _add_seeds(function: Any, role: str) -> None:
    """Gives a function its secret, and its operations seeds made of it."""
    taken = {node.name for node in function.node_def}
    taken |= {a.name for a in function.signature.input_arg}
    prefix = "secret"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    names = {"call": [""], "cond": ["_of_cond", "_of_body"], "body": ["_of_cond", "_of_body"]}[role]
    for name in names:
        function.signature.input_arg.add(name=prefix + name, type=_UINT64)
    secret = prefix + names[-1 if role == "body" else 0]
    count = 0
    for node in function.node_def:
        for place, reference in enumerate(node.input):
            if reference == _SEED:
                node.input[place] = f"{prefix}/seeds:output:{count}"
                count += 1
    if role == "body":  # The secrets of the next iteration.
        for name in names:
            output = f"next_{prefix}{name}"
            function.signature.output_arg.add(name=output, type=_UINT64)
            function.ret[output] = f"{prefix}/seeds:output:{count}"
            count += 1
    if not count:
        return
    shape = _constant(function, f"{prefix}/shape", np.array([count, SECRET], np.int32))
    made = _of_seed(function, prefix, secret)
    numbers = function.node_def.add(name=f"{prefix}/numbers", op=_NUMBERS)
    numbers.input.extend([shape, *[made[name] for name in _KEYED]])
    numbers.attr["dtype"].type, numbers.attr["Tshape"].type = _UINT64, _INT32
    seeds = function.node_def.add(name=f"{prefix}/seeds", op="Unpack")
    seeds.input.append(f"{prefix}/numbers:output:0")
    seeds.attr["T"].type = _UINT64
    seeds.attr["num"].i, seeds.attr["axis"].i = count, 0


def _constant(function: Any, name: str, value: np.ndarray) -> str:
    """Adds a constant to a function, and returns the reference to it."""
    node = function.node_def.add(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return f"{name}:output:0"
