"""Attributes of packages that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfdp import _compat


def attributes(
    package: str,
    modules: Mapping[str, str],
    of_keras_2: Collection[str] = (),
    of_keras_3: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package with lazy attributes (PEP 562).

    Args:
      package: Name of the package.
      modules: For each attribute, the module that defines it; the attribute may be the module.
      of_keras_2: Attributes that need Keras 2 as `tf.keras`. It is chosen before they are imported,
        as TensorFlow Privacy and Probability would load `tf.keras`. Where a package for Keras 2 is
        missing, they raise an ImportError, and `dir` does not list them.
      of_keras_3: Attributes that need Keras 3, which `dir` does not list without it: `help` would
        raise their ImportError.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in of_keras_2:
            _compat.use_keras_2(f"{package}.{name}")
        module = importlib.import_module(modules[name])
        is_module = modules[name] == f"{package}.{name}"
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        left_out = {*(of_keras_2 if _compat.missing_for_keras_2() else ())}
        left_out.update(() if _compat.has_keras_3() else of_keras_3)
        return sorted({*vars(sys.modules[package]), *modules} - left_out)

    return get, listed
