"""Hooks by which files keep the cost of weights, from the moment that `tfdp` is imported.

`import tfdp` loads neither TensorFlow nor Keras. Files may be read before a front end is used, and
must not lose what their weights have cost. So TensorFlow and both Kerases are prepared once they
are imported. The registry of Keras 3 gets stand-ins, too, which import `tfdp.keras3` when a file
names one of its classes.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_LINEAGE = "tfdp.step.record.saved_lineage"
NAMES = (
    *("DPOptimizer", "DPSGD", "DPAdam", "DPAdamBC", "DPSignSGD", "DPSignAdam"),
    *("DPSURSGD", "DPSURAdam", "DPSURSignSGD", "DPSURSignAdam"),
    *("PrivateGAN", "SelectiveModel", "TermWiseVAE"),
)


def prepare() -> None:
    """Prepares TensorFlow and Keras for files of private models, now or once they are imported."""
    for name, (attribute, then) in _PREPARED.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, attribute):
            then(module)
        else:
            _after_import(name, then)


def _prepare_tensorflow(_: ModuleType) -> None:
    importlib.import_module(_LINEAGE)  # It wraps what reads and writes checkpoints.


def _prepare_keras_2(_: ModuleType) -> None:
    _let_keras_save("tf_keras.src.saving.saving_lib", "tf_keras.src.saving.legacy.hdf5_format")


def _prepare_keras_3(keras: ModuleType) -> None:
    if not str(getattr(keras, "__version__", "")).startswith("3."):
        return
    _let_keras_save("keras.src.saving.saving_lib", "keras.src.legacy.saving.legacy_h5_format")
    registry = keras.saving.get_custom_objects()
    for name in NAMES:
        registry.setdefault(f"tfdp>{name}", _stand_in(name))


def _let_keras_save(*modules: str) -> None:
    saved_lineage: Any = importlib.import_module(_LINEAGE)
    saved_lineage.let_keras_save(*modules)


# An attribute that a module has once it is imported as a whole, and what prepares it.
_PREPARED = {
    "tensorflow": ("Variable", _prepare_tensorflow),
    "tf_keras": ("saving", _prepare_keras_2),
    "keras": ("saving", _prepare_keras_3),
}


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
