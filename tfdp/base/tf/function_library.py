"""Traced functions as definitions: what they call, and what their results are made of."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

_CALLS = {
    "Case": "branches",
    "If": ("then_branch", "else_branch"),
    "PartitionedCall": "f",
    "StatefulPartitionedCall": "f",
    "StatelessCase": "branches",
    "StatelessIf": ("then_branch", "else_branch"),
    "StatelessWhile": ("cond", "body"),
    "While": ("cond", "body"),
}
# Inputs by which operations are told the numbers that they draw.
_SEEDS = frozenset({"alg", "counter", "key", "seed"})


class Library:
    """The definitions of a function and of all that it calls.

    Args:
      concrete: The function.

    Attributes:
      main: Its name.
      functions: The definitions, by name.
      versions: Those of the graph.
      op_def: Returns the definition of a type of operation.
    """

    def __init__(self, concrete: Any):
        graph_def = concrete.graph.as_graph_def()
        self.versions = graph_def.versions
        main = concrete.function_def
        self.main: str = main.signature.name
        known = {f.signature.name: f for f in graph_def.library.function} | {self.main: main}
        self.functions: dict[str, Any] = {}
        pending = [self.main]
        while pending:
            name = pending.pop()
            if name in known and name not in self.functions:
                self.functions[name] = known[name]
                pending += [c for node in known[name].node_def for c in functions_of(node)]
        self.op_def = concrete.graph.op_def_for_type
        self.value_cone = functools.cache(self._value_cone)

    def nodes(self) -> Iterator[tuple[str, Any]]:
        """Yields the operations, each with the name of its function."""
        for name, function in self.functions.items():
            for node in function.node_def:
                yield name, node

    def resources(self) -> dict[tuple[str, str], set[int]]:
        """Returns for each argument that holds a resource which arguments of the main one it is.

        Arguments are pairs of a function and a name; those of the main function are numbered.
        """
        arguments = self.functions[self.main].signature.input_arg
        origins = {(self.main, a.name): {i} for i, a in enumerate(arguments)}
        changed = True
        while changed:
            changed = False
            for name, node in self.nodes():
                given = data_inputs(node)
                for callee, skipped in _callees(node):
                    names = [a.name for a in self.functions[callee].signature.input_arg]
                    for argument, reference in zip(names, given[skipped:], strict=True):
                        new = self.origins_of(origins, name, reference)
                        old = origins.setdefault((callee, argument), set())
                        changed |= not new <= old
                        old |= new
        return origins

    def origins_of(
        self, origins: dict[tuple[str, str], set[int]], name: str, reference: str
    ) -> set[int]:
        """Returns which arguments of the main function a resource may be; see `resources`."""
        return origins.get((name, _passed(self.functions[name], reference)), set())

    def _value_cone(self, name: str, loop: bool = False) -> frozenset[str]:
        """Returns the operations and arguments whose values get into the results of a function.

        Args:
          name: Name of the function.
          loop: Whether it is the body of a loop, of which results that are passed on do not count.
        """
        function = self.functions[name]
        nodes = {node.name: node for node in function.node_def}
        results = [function.ret[a.name] for a in function.signature.output_arg]
        if loop:
            names = [a.name for a in function.signature.input_arg]
            results = [
                r for r, own in zip(results, names, strict=True) if _passed(function, r) != own
            ]
        pending, seen = list(results), set()
        while pending:
            reference = pending.pop()
            if reference not in seen:
                seen.add(reference)
                if base(reference) in nodes:
                    pending += self._values(nodes[base(reference)], reference)
        return frozenset(map(base, seen))

    def _values(self, node: Any, reference: str) -> list[str]:
        """Returns the inputs whose values get into an output of an operation."""
        given = data_inputs(node)
        if node.op not in _CALLS:
            return [
                r for r, is_seed in zip(given, self._are_seeds(node), strict=True) if not is_seed
            ]
        is_loop = node.op.endswith("While")
        wanted = given[: _skipped(node)] + ([given[_place(reference)]] if is_loop else [])
        for callee, skipped in _callees(node):
            names = [a.name for a in self.functions[callee].signature.input_arg]
            is_body = is_loop and callee == node.attr["body"].func.name
            cone = self.value_cone(callee, is_body)
            wanted += [r for n, r in zip(names, given[skipped:], strict=True) if n in cone]
        return wanted

    def _are_seeds(self, node: Any) -> list[bool]:
        """Returns for each input whether it only says which random numbers are drawn."""
        given = data_inputs(node)
        drawing = node.op.startswith("Stateless") or node.op == "RandomIndexShuffle"
        names = [a.name for a in self.op_def(node.op).input_arg] if drawing else []
        if len(names) != len(given):
            return [False] * len(given)
        return [name in _SEEDS for name in names]


def is_call(node: Any) -> bool:
    """Returns whether an operation is a call, a branch or a loop."""
    return node.op in _CALLS


def functions_of(node: Any) -> list[str]:
    """Returns the names of the functions that an operation is given."""
    found = []
    for attribute in node.attr.values():
        found += [f.name for f in (attribute.func, *attribute.list.func) if f.name]
    return found


def data_inputs(node: Any) -> list[str]:
    """Returns the inputs of an operation, without those that order it behind others."""
    return [reference for reference in node.input if not reference.startswith("^")]


def base(reference: str) -> str:
    """Returns the name of the operation, or argument, that an input refers to."""
    return reference.lstrip("^").split(":")[0]


def kept(function: Any, roots: Sequence[str]) -> set[str]:
    """Returns the operations that a function's results, and some other operations, are made of."""
    nodes = {node.name: node for node in function.node_def}
    pending, seen = [*map(base, function.ret.values()), *roots], set()
    while pending:
        name = pending.pop()
        if name in nodes and name not in seen:
            seen.add(name)
            pending += map(base, data_inputs(nodes[name]))
    return seen


def _skipped(node: Any) -> int:
    """Returns how many inputs of a call are not arguments of what it calls."""
    return 1 if node.op.endswith(("If", "Case")) else 0


def _callees(node: Any) -> list[tuple[str, int]]:
    """Returns the functions that a call runs, and at which input their arguments begin."""
    return [(name, _skipped(node)) for name in functions_of(node)] if is_call(node) else []


def _place(reference: str) -> int:
    return int(reference.rsplit(":", 1)[1])


def _passed(function: Any, reference: str) -> str:
    """Returns the name of what is passed on by operations that do nothing to it."""
    nodes = {node.name: node for node in function.node_def}
    name = base(reference)
    while name in nodes and nodes[name].op == "Identity":
        name = base(data_inputs(nodes[name])[0])
    return name
