"""Attributes of packages that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attributes(
    package: str, modules: Mapping[str, str], before: Callable[[], None] = lambda: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package with lazy attributes (PEP 562).

    Args:
      package: Name of the package.
      modules: For each attribute, the module that defines it; the attribute may be the module.
      before: Called before an attribute is imported.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        before()
        module = importlib.import_module(modules[name])
        is_module = modules[name] == f"{package}.{name}"
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, listed
