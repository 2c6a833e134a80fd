"""Choice of features and label, by name, in examples that are dicts."""

import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Features = str | Sequence[str] | None


def chosen(data: Any, features: Features, label: str | None) -> Any:
    """Returns data whose examples are `(x, y)`, or `x`, of data whose examples are dicts.

    Args:
      data: A random-access source or a `tf.data.Dataset` whose examples are dicts; or a dict of
        arrays, or what has its names like one.
      features: Name of the input, or names of several, which become a dict; None with `label`
        None: data are returned as they are.
      label: Name of the target; None: examples are `x`.

    Raises:
      ValueError: A name is unknown, only `label` is given, or examples are not dicts.
    """
    if features is None and label is None:
        return data
    _check_names(features, label)
    if isinstance(data, tf.data.Dataset):
        _check_example(data.element_spec, features, label)
        return data.map(lambda *example: _picked(example[0], features, label))
    if names_of(data) is not None:
        _check_example(data, features, label)
        return _picked(data, features, label)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data)):
        raise ValueError(_no_dicts(data))
    _check_example(data[0], features, label)
    kind = ManyColumns if hasattr(data, "__getitems__") else Columns
    return kind(data, features, label)


class Columns:
    """A random-access source of `(x, y)`, or `x`, of one of dicts.

    Args:
      items: The source.
      features: See `chosen`.
      label: See `chosen`.
    """

    def __init__(self, items: Any, features: Features, label: str | None):
        self._items, self._features, self._label = items, features, label

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int, **rng: Any) -> Any:
        example = self._items.__getitem__(index, **rng) if rng else self._items[index]
        return _picked(example, self._features, self._label)

    @property
    def items(self) -> Any:
        """The source."""
        return self._items


class ManyColumns(Columns):
    """The same of a source that reads several examples at once."""

    def __getitems__(self, indices: list[int], **rngs: Any) -> list[Any]:
        """Returns the examples with these indices."""
        examples = self._items.__getitems__(indices, **rngs)
        return [_picked(example, self._features, self._label) for example in examples]


def takes_generators(items: Any) -> bool:
    """Returns whether a source reads an example with random numbers that it is given.

    Args:
      items: A random-access source, whose `__getitem__` may take `rng`, or `__getitems__` `rngs`.
    """
    if isinstance(items, Columns):
        return takes_generators(items.items)
    together = hasattr(items, "__getitems__")
    method: Any = items.__getitems__ if together else getattr(items, "__getitem__", None)
    try:
        return ("rngs" if together else "rng") in inspect.signature(method).parameters
    except (TypeError, ValueError):  # The class is not written in Python.
        return False


def names_of(value: Any) -> list[str] | None:
    """Returns the names in a dict, or in what is like one: a file of HDF5, a data frame."""
    if not hasattr(value, "__getitem__"):
        return None
    if hasattr(value, "keys"):
        return list(value.keys())
    is_frame = hasattr(value, "columns") and hasattr(value, "to_numpy")  # A Polars frame.
    return list(value.columns) if is_frame else None


def _picked(example: Any, features: Features, label: str | None) -> Any:
    x = example[features] if isinstance(features, str) else {n: example[n] for n in features or ()}
    return x if label is None else (x, example[label])


def _check_names(features: Any, label: Any) -> None:
    several = isinstance(features, (list, tuple)) and len(features) > 0
    names = list(features) if several else [features]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise ValueError(
            "Argument `features` must be the name of a feature, or a list of different names, when "
            f"`label` is given. Received: {features=}, {label=}."
        )
    if not isinstance(label, str | None):
        raise ValueError(
            "Argument `label` must be the name of the target, or None where there is none. "
            f"Received: {features=}, {label=}."
        )


def _check_example(example: Any, features: Features, label: str | None) -> None:
    known = names_of(example)
    if known is None:
        raise ValueError(_no_dicts(example))
    names = [features] if isinstance(features, str) else list(features or ())
    wanted = [("features", name) for name in names]
    for argument, name in wanted if label is None else [*wanted, ("label", label)]:
        if name not in known:
            raise ValueError(
                f"Argument `{argument}` must name what the examples have: {known}. "
                f"Received: {name!r}."
            )


def _no_dicts(received: Any) -> str:
    return (
        "Arguments `features` and `label` are for data whose examples are dicts. Received: "
        f"{type(received).__name__}. Leave them out where examples are (x, y), or x alone."
    )
