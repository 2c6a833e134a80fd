"""Files of Keras 3, where `tfdp` is imported and `tfdp.keras3` is not.

`import tfdp` loads neither Keras 3 nor `tfdp.keras3`. A model that was saved with a private
optimizer can be loaded nevertheless: the registry of Keras gets stand-ins, which import
`tfdp.keras3` when a file names one of them. And every file says what its weights have cost, also
one that is loaded without its optimizer.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

NAMES = (
    *("DPOptimizer", "DPSGD", "DPAdam", "DPAdamBC", "DPSignSGD", "DPSignAdam"),
    *("DPSURSGD", "DPSURAdam", "DPSURSignSGD", "DPSURSignAdam"),
    *("PrivateGAN", "SelectiveModel", "TermWiseVAE"),
)


def prepare_keras_3() -> None:
    """Prepares Keras 3 for files of private models, now if it is imported, or once it is."""
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "saving"):
        _prepare(keras)
    else:
        _after_import("keras", _prepare)


def _prepare(keras: ModuleType) -> None:
    if not str(getattr(keras, "__version__", "")).startswith("3."):
        return
    saved_lineage: Any = importlib.import_module("tfdp.step.record.saved_lineage")
    modules = "keras.src.saving.saving_lib", "keras.src.legacy.saving.legacy_h5_format"
    saved_lineage.let_keras_save(*map(importlib.import_module, modules))
    registry = keras.saving.get_custom_objects()
    for name in NAMES:
        registry.setdefault(f"tfdp>{name}", _stand_in(name))


def _stand_in(name: str) -> type:
    """Returns a class in place of that of `tfdp.keras3`, which registers its own when imported."""

    class StandIn:
        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
            own: Any = getattr(importlib.import_module("tfdp.keras3"), name)
            return own.from_config(config)

    StandIn.__name__ = StandIn.__qualname__ = name
    return StandIn


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that has a function called with a module once that is imported, and then ends.

    A module may be looked for without being imported, as `importlib.util.find_spec` does.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then, self._is_asking = name, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec that other finders return, with a loader that calls the function."""
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    sys.meta_path.insert(0, _Finder(name, then))
