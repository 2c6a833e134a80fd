"""MultiOptimizer of Keras 3, which leaves each variable to one of several optimizers.

Keras chooses by the paths of variables, which change when a model is loaded from a file
("sequential/head/kernel" becomes "head/kernel"), and makes one optimizer that several patterns
share into several. So a config holds what was chosen.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras

# Not of all versions of Keras.
_MULTI_OPTIMIZER: Any = getattr(keras.optimizers, "MultiOptimizer", ())
_OPTIMIZER_MAP: Any = getattr(keras.optimizers, "OptimizerMap", ())


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Choice of an optimizer for each variable.

    Attributes:
      entries: For the entries of the map, and last the default, the index of their optimizer;
        empty if a function chooses.
      variables: For each variable its path, and the index of its optimizer.
    """

    entries: tuple[int, ...]
    variables: tuple[tuple[str, int], ...]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Assignment":
        """Returns the assignment that `get_config` described."""
        variables = tuple((str(path), int(index)) for path, index in config["variables"])
        return cls(tuple(map(int, config["entries"])), variables)

    def get_config(self) -> dict[str, Any]:
        """Returns it as plain values."""
        return {"entries": list(self.entries), "variables": [list(v) for v in self.variables]}

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Returns whether variables are those of the assignment, in its order.

        A path of a model's variable begins with names of models around it, or without them.
        """
        if len(variables) != len(self.variables):
            return False
        return all(
            f"/{path}".endswith(f"/{v.path}") or f"/{v.path}".endswith(f"/{path}")
            for v, (path, _) in zip(variables, self.variables, strict=True)
        )


def parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers that make the updates: several of a MultiOptimizer, or itself.

    Those that a function returns are known when the MultiOptimizer is built.
    """
    if isinstance(optimizer, _MULTI_OPTIMIZER):
        return list(optimizer.optimizers)
    return [optimizer]


def is_multi(optimizer: Any) -> bool:
    """Returns whether an optimizer leaves variables to several."""
    return isinstance(optimizer, _MULTI_OPTIMIZER)


def assignment_of(optimizer: Any) -> Assignment | None:
    """Returns what a MultiOptimizer has chosen; None of one that is not built, and of others."""
    if not (is_multi(optimizer) and optimizer.built):
        return None
    index = {
        id(variable): i
        for i, part in enumerate(optimizer.optimizers)
        for variable in (part._trainable_variables if part.built else ())
    }
    places = {id(part): i for i, part in enumerate(optimizer.optimizers)}
    return Assignment(
        tuple(places[id(entry)] for entry in _entries(optimizer._optimizer_map)),
        tuple((v.path, index[id(v)]) for v in optimizer._trainable_variables),
    )


def joined(optimizer: Any, assignment: Assignment) -> Any:
    """Returns a MultiOptimizer made from a config whose entries share optimizers as before."""
    chosen = optimizer._optimizer_map
    entries = _entries(chosen)
    if len(set(assignment.entries)) == len(entries) or len(entries) != len(assignment.entries):
        return optimizer
    first: dict[int, Any] = {}
    shared = [first.setdefault(i, e) for i, e in zip(assignment.entries, entries, strict=True)]
    mapped = dict(zip(chosen, shared[:-1], strict=True))
    return type(optimizer)(_OPTIMIZER_MAP(shared[-1], mapped), name=optimizer.name)


@contextlib.contextmanager
def choosing(
    optimizer: Any, assignment: Assignment | None, variables: Sequence[Any]
) -> Iterator[None]:
    """Has a MultiOptimizer choose as before while it is built, if the variables are the same."""
    known = assignment is not None and assignment.entries and assignment.is_of(variables)
    if not known or not is_multi(optimizer):
        yield
        return
    own, available = optimizer._optimizer_map, parts(optimizer)
    indices = [index for _, index in assignment.variables]  # type: ignore[union-attr]
    by_id = {id(v): available[i] for v, i in zip(variables, indices, strict=True)}
    optimizer._optimizer_map = lambda variable: by_id[id(variable)]
    try:
        yield
    finally:
        optimizer._optimizer_map = own


def fresh(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns an optimizer with the same settings, without what one has seen of data.

    Args:
      optimizer: An optimizer of Keras 3.
      variables: The variables that may be excluded from its weight decay, which configs forget.
    """
    new = type(optimizer).from_config(optimizer.get_config())
    if is_multi(optimizer):
        entries = _entries(optimizer._optimizer_map)
        places = {id(part): i for i, part in enumerate(optimizer.optimizers)}
        new = joined(new, Assignment(tuple(places[id(entry)] for entry in entries), ()))
        if not entries:  # A function makes or returns them.
            return new
    for old, part in zip(parts(optimizer), parts(new), strict=True):
        excluded = [v for v in variables if not old._use_weight_decay(v)]
        pattern = getattr(old, "_exclude_from_weight_decay_pattern", None)
        part.exclude_from_weight_decay(excluded, [pattern.pattern] if pattern else None)
    return new


def _entries(chosen: Any) -> list[Any]:
    """Returns the optimizers of a map, the default last; none of a function."""
    if not isinstance(chosen, _OPTIMIZER_MAP):
        return []
    return [*chosen.values(), chosen.default_optimizer]
