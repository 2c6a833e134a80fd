"""Options of a private step whose modules are loaded where they are used."""

import importlib
from typing import Any

_MODULES = {
    "compression": "tfdp.step.compression",
    "noise_correlation": "tfdp.correlated_noise",
    "noise_memory": "tfdp.step.noise_memory",
    "sparse_embeddings": "tfdp.step.sparse_embeddings",
}


def module(option: str) -> Any:
    """Returns the module of an option."""
    return importlib.import_module(_MODULES[option])


def get(option: str, value: Any) -> Any:
    """Returns an option from itself or from its config; None if it is not used.

    Raises:
      ValueError: There is no such value of the option.
    """
    return None if value is None else module(option).get(value)
