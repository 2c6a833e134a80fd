"""Objects that arguments and configs may name: their names, and plain values of them."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from tfdp.base.validation import error

T = TypeVar("T")


class Named(Generic[T]):
    """The classes of one kind, by their names.

    Args:
      argument: Name of the argument that takes them, for errors.
      base: Their base class.
      classes: The classes by name. Others may be added later.
      requirement: Values of the argument besides names, for errors.
      by_name: Whether a name alone makes an object, of the default arguments.
      more: A module that adds classes; it is imported when a name is not known without it.
    """

    def __init__(
        self,
        argument: str,
        base: type[T],
        classes: Mapping[str, type[T]],
        requirement: str,
        by_name: bool = True,
        more: str = "",
    ):
        self._argument, self._base, self._classes = argument, base, classes
        self._requirement, self._by_name, self._more = requirement, by_name, more

    def get(self, value: Any) -> T:
        """Returns an object from its name, from what `serialize` returned, or itself.

        Raises:
          ValueError: There is no such object.
        """
        if isinstance(value, self._base):
            return value
        config = dict(value) if isinstance(value, dict) else {}
        if self._by_name and isinstance(value, str):
            config = {"name": value}
        name = str(config.pop("name", None))
        if self._more and name not in self._classes:
            importlib.import_module(self._more)
        cls = self._classes.get(name)
        if cls is None:
            names = f"one of {sorted(self._classes)}"
            if not self._by_name:
                names = f"a dict whose 'name' is {names}"
            raise error(self._argument, f"{names} or {self._requirement}", value)
        return cls(**config)

    def serialize(self, value: T) -> dict[str, Any]:
        """Returns plain values from which `get` makes the same object.

        Raises:
          ValueError: It is of none of the classes.
        """
        names = {cls: name for name, cls in self._classes.items()}
        if type(value) not in names:
            known = f"one of tfdp's, {sorted(self._classes)}, to be saved"
            raise error(self._argument, known, value)
        own: Any = value
        config = own.get_config() if hasattr(own, "get_config") else dataclasses.asdict(own)
        return {"name": names[type(value)], **config}
