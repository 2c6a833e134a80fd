"""The front ends `tfdp.keras2` and `tfdp.keras3`, and which of them a name of `tfdp` is of."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tfdp.base import compat

_OF_BOTH = (
    *("DPSGD", "DPAdam", "DPAdamBC", "DPSignSGD", "DPSignAdam"),
    *("DPSURSGD", "DPSURAdam", "DPSURSignSGD", "DPSURSignAdam"),
    *("PrivacyBudget", "PrivateGAN", "SelectiveModel", "TermWiseVAE"),
)
# The same for both, and there without either.
_SHARED = {
    "TooManyAttemptsError": "tfdp.training.selective.progress",
    "divergences": "tfdp.training.term_wise.divergences",
    "likelihoods": "tfdp.training.term_wise.likelihoods",
    "priors": "tfdp.training.term_wise.priors",
}
# Functions that take the front end of the model that they are given.
_BY_MODEL = ("make_private", "replace_batch_normalization", "validate")
_OF_ONE = {"DPOptimizer": 3, "ExponentialMovingAverage": 2}
NAMES = frozenset({*_OF_BOTH, *_SHARED, *_BY_MODEL, *_OF_ONE})


def attribute(name: str) -> Any:
    """Returns a name of `NAMES`, of the front end for the Keras that `tf.keras` is.

    Raises:
      AttributeError: The front end does not have it, and the other does.
      ImportError: Of the front end.
    """
    if name in _SHARED:
        module = importlib.import_module(_SHARED[name])
        return getattr(module, name, module)
    version = compat.keras_of_tensorflow()
    other = _OF_ONE.get(name, version)
    if other != version:
        raise AttributeError(
            f"`tfdp.{name}` is for models of Keras {other}, and `tf.keras` is Keras {version}. "
            f"Use `tfdp.keras{other}.{name}` for models of Keras {other}."
        )
    if version == 2:
        compat.check_keras_2(f"tfdp.{name}")
    found = getattr(_package(version), name)
    return _by_model(found) if name in _BY_MODEL else found


def available() -> set[str]:
    """Returns the names of `NAMES` that `attribute` finds."""
    version = compat.keras_of_tensorflow()
    of_vae = compat.OF_VAE if compat.missing_for_vae() else frozenset()
    if version == 2 and compat.missing_for_keras_2():
        return {*_SHARED} - of_vae
    return {name for name in NAMES if _OF_ONE.get(name, version) == version} - of_vae


def _package(version: int) -> Any:
    return importlib.import_module(f"tfdp.keras{version}")


def _by_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, or that of the other front end for a model of the other Keras."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        version = _keras_of_model(model)
        own = function if version is None else getattr(_package(version), function.__name__)
        return own(*args, **kwargs)

    return called


def _keras_of_model(model: Any) -> int | None:
    """Returns which Keras a model is of; None if it is no model of Keras."""
    for base in type(model).__mro__:
        if base.__name__ == "Model" and base.__module__.startswith("tf_keras."):
            return 2
        if base.__name__ == "Model" and base.__module__.startswith("keras."):
            return 3
    return None
