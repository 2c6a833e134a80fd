"""Attributes of packages that are imported when they are first used."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfdp.base import compat


def attributes(
    package: str,
    modules: Mapping[str, str],
    of_keras_2: Collection[str] = (),
    of_keras_3: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package with lazy attributes (PEP 562).

    The modules of the package are attributes, too.

    Args:
      package: Name of the package.
      modules: For each attribute, the module that defines it; the attribute may be the module.
      of_keras_2: Attributes that need Keras 2 as `tf.keras`. Where it is Keras 3, or a package is
        missing, they raise an ImportError; in the latter case `dir` does not list them.
      of_keras_3: Attributes that need Keras 3, which `dir` does not list without it: `help` would
        raise their ImportError.
    """

    def get(name: str) -> Any:
        if name not in modules:
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in of_keras_2:
            compat.check_keras_2(f"{package}.{name}")
        module = importlib.import_module(modules[name])
        is_module = modules[name].endswith(f".{name}")
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        left_out = {*(of_keras_2 if compat.missing_for_keras_2() else ())}
        left_out.update(() if compat.has_keras_3() else of_keras_3)
        return sorted({*vars(sys.modules[package]), *modules} - left_out)

    return get, listed
