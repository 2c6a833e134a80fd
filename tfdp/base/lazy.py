"""Attributes of packages that are imported when they are first used."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def attributes(
    package: str,
    modules: Mapping[str, str],
    check: Callable[[str], None] = lambda name: None,
    unlisted: Callable[[], Collection[str]] = tuple,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package with lazy attributes (PEP 562).

    The modules of the package are attributes, too.

    Args:
      package: Name of the package.
      modules: For each attribute, the module that defines it; the attribute may be the module.
      check: Gets the name of an attribute before it is imported, and may raise an ImportError.
      unlisted: Returns the attributes that `dir` leaves out: `help` would raise their ImportError.
    """

    def get(name: str) -> Any:
        if name not in modules:
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check(name)
        module = importlib.import_module(modules[name])
        is_module = modules[name].endswith(f".{name}")
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules} - {*unlisted()})

    return get, listed
