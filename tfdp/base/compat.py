"""Compatibility of TensorFlow, Keras and TensorFlow Privacy. Nothing else in tfdp handles it.

Six facts are dealt with here:

1. `tf.keras` is Keras 3, unless TF_USE_LEGACY_KERAS=1: then it is Keras 2. tfdp follows it, and
   changes nothing: the names of `tfdp` are those of `tfdp.keras3` or of `tfdp.keras2`. TensorFlow
   Privacy's optimizers subclass `tf.keras.optimizers.legacy`, which only Keras 2 has. The package
   `keras` is Keras 3 in any case.
2. TensorFlow Privacy 0.9.0 imports `tf.estimator`, which TensorFlow 2.16 removed.
3. Keras saves the state of its own new optimizers in `.keras` files and restores no slots from
   a SavedModel. A private optimizer must not forget what has been released, so its state goes
   into both.
4. AutoGraph rewrites whatever a tf.function calls, except what it knows to need no rewriting.
5. TensorFlow Probability needs Keras 2 when it is imported, 0.22, which TensorFlow Privacy asks
   for, as `tf.keras`, 0.25 as `tf_keras`: for layers of its own, which tfdp does not use.
6. TensorFlow writes lines about the machine to standard error when it is imported, from C++, and
   before its log level is read.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

from tfdp.base import private_apis

_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_2 = ("tf_keras", "tensorflow_privacy")  # The packages that its front end needs.
# Public names without a counterpart in `tfdp.keras3`.
_ONLY_IN_KERAS_2 = {"CanaryAudit", "ExponentialMovingAverage"}
# Packages that `TermWiseVAE` and its distributions need, and the public names that need them.
_VAE = ("tensorflow_probability", "tf_keras")
OF_VAE = frozenset({"TermWiseVAE", "divergences", "likelihoods", "priors"})
_FIRST_WITHOUT_KERAS_2 = (3, 12)  # The first Python that TensorFlow Privacy does not support.
_ESTIMATOR_MODULES = (
    "tensorflow_privacy.privacy.estimators.dnn",
    "tensorflow_privacy.privacy.estimators.v1.dnn",
)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drops what is written to standard error, also by C++, unless there is an exception."""
    try:
        kept = os.dup(2)
    except OSError:  # Standard error is closed: there is nothing to drop.
        yield
        return
    _flush()
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            _flush()
            os.dup2(kept, 2)
            os.close(kept)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def prepare_tensorflow() -> None:
    """Imports TensorFlow, and lets AutoGraph treat tfdp as it treats TensorFlow and Keras.

    The lines that TensorFlow writes when it starts are dropped (TF_CPP_MIN_LOG_LEVEL=0 shows them).
    tfdp is called as it is; layers and losses of the user that tfdp calls are rewritten as they
    would be without it.
    """
    asked_for = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    quiet = "tensorflow" not in sys.modules and not asked_for
    with quiet_stderr() if quiet else contextlib.nullcontext():
        importlib.import_module("tensorflow")
    _exempt_from_autograph()
    private_apis.warn_of_versions()


@functools.cache
def _exempt_from_autograph() -> None:
    private_apis.check("tensorflow")
    config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
    config.CONVERSION_RULES = (config.DoNotConvert("tfdp"), *config.CONVERSION_RULES)


def keras_of_tensorflow() -> int:
    """Returns 2 if `tf.keras` is the package `tf_keras`, or will be; otherwise 3. Loads nothing.

    (TensorFlow 2.15 has another Keras 2 otherwise, whose files tfdp does not prepare.)
    """
    asked_for = os.environ.get(_VARIABLE) in ("1", "true", "True")  # TensorFlow's words.
    name = _tf_keras_name() or ("tf_keras" if asked_for else "keras")
    return 2 if name.startswith("tf_keras") else 3


def check_keras_2(name: str = "") -> None:
    """Checks that `tf.keras` is Keras 2, and that TensorFlow Privacy is there.

    Args:
      name: The public name that needs it, such as "tfdp.make_private"; empty if it has none.

    Raises:
      ImportError: A package is missing, or `tf.keras` is Keras 3.
    """
    if missing := missing_for_keras_2():
        raise _no_keras_2(missing, name)
    if keras_of_tensorflow() == 3:
        raise ImportError(
            f"{_what(name)} needs Keras 2 of the package `tf_keras` as `tf.keras`. Received: Keras "
            f"{_version_of_keras()} of the package `keras`. {_in_keras_3(name)} "
            f"For models of Keras 2, set the environment variable {_VARIABLE}=1 before TensorFlow "
            "is imported."
        )


def missing_for_keras_2() -> list[str]:
    """Returns the packages that are missing for models of Keras 2."""
    return [name for name in _KERAS_2 if not _has(name)]


def _no_keras_2(missing: list[str], name: str = "") -> ImportError:
    version = sys.version_info[:2]
    if version < _FIRST_WITHOUT_KERAS_2:
        remedy = "`pip install 'tfdp[keras2]'`."
    else:
        remedy = "Python 3.10 or 3.11, as TensorFlow Privacy supports no newer one."
    return ModuleNotFoundError(
        f"{_what(name)} is for models of Keras 2, and needs TensorFlow Privacy and tf-keras. "
        f"Received: Python {version[0]}.{version[1]} without {' and '.join(missing)}. "
        f"{_in_keras_3(name)} For models of Keras 2: {remedy}",
        name=missing[0],
    )


def _what(name: str) -> str:
    return f"`{name}`" if name else "This part of tfdp"


def _in_keras_3(name: str) -> str:
    """Returns a sentence that says what a user of Keras 3 takes in the place of `name`."""
    last = name.rpartition(".")[2]
    if last in _ONLY_IN_KERAS_2:
        return "It does not support models of Keras 3."
    if not name:
        return (
            "For models of Keras 3 (`import keras`), use the name in `tfdp.keras3`, such as "
            "`tfdp.keras3.DPSGD` for `tfdp.keras2.DPSGD`."
        )
    return f"For models of Keras 3 (`import keras`), use `tfdp.keras3.{last}`."


def has_keras_3() -> bool:
    """Returns whether the package `keras` that is installed is Keras 3."""
    return _version_of_keras().startswith("3.")


def _version_of_keras() -> str:
    """Returns the version of the package `keras` that is installed; empty if there is none."""
    try:
        return importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_keras_3() -> None:
    """Checks that `keras` is Keras 3 on TensorFlow.

    Raises:
      ImportError: `keras` is missing, is Keras 2, or runs on another backend.
    """
    # Without importing it: Keras 2.15 takes the names by which `tf_keras` loads `.keras` files, and
    # weights would be lost without an error.
    if (version := _version_of_keras()).startswith("2."):
        raise _is_keras_2(version)
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        raise ImportError("tfdp.keras3 needs Keras 3: `pip install 'keras>=3'`.") from error
    if not keras.__version__.startswith("3."):
        raise _is_keras_2(keras.__version__)
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "tfdp.keras3 needs Keras to run on TensorFlow, whose graph it clips in. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is imported. Received: "
            f"the backend {keras.backend.backend()!r}."
        )


def _is_keras_2(version: str) -> ImportError:
    return ImportError(
        "tfdp.keras3 needs Keras 3 as `keras`: `pip install 'keras>=3'`, with TensorFlow 2.16 "
        f"or newer. Received: Keras {version}. For Keras 2, set the environment variable "
        f"{_VARIABLE}=1 before TensorFlow is imported."
    )


def import_tensorflow_probability() -> None:
    """Imports TensorFlow Probability, whatever `tf.keras` is, and leaves `tf.keras` as it was.

    Raises:
      ImportError: It is missing, or tf-keras, which it imports.
    """
    if missing := missing_for_vae():
        raise ModuleNotFoundError(
            f"{_quoted(OF_VAE)} need TensorFlow Probability and tf-keras: `pip install "
            f"'tfdp[vae]'`. Received: an environment without {' and '.join(missing)}.",
            name=missing[0],
        )
    spec = importlib.util.find_spec("tensorflow_probability")
    folder = os.path.join(os.path.dirname(str(spec and spec.origin)), "python", "internal")
    seen_by_it: Any = importlib.import_module("tensorflow.compat.v2")
    before = vars(seen_by_it)["keras"]  # Not loaded yet, perhaps.
    if os.path.exists(os.path.join(folder, "tf_keras.py")):  # Takes `tf_keras` beside Keras 3.
        seen_by_it.keras = types.SimpleNamespace(version=lambda: "3.0")
    else:
        seen_by_it.keras = importlib.import_module("tf_keras.api._v2.keras")
    try:
        importlib.import_module("tensorflow_probability.python.distributions")
    finally:
        seen_by_it.keras = before


def missing_for_vae() -> list[str]:
    """Returns the packages that are missing for the names of `OF_VAE`."""
    return [name for name in _VAE if not _has(name)]


def _quoted(names: frozenset[str]) -> str:
    *first, last = [f"`{name}`" for name in sorted(names)]
    return f"{', '.join(first)} and {last}"


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _tf_keras_name() -> str:
    """Returns a name of a module of the Keras that `tf.keras` is; empty if it is not loaded yet."""
    tensorflow = sys.modules.get("tensorflow")
    module = None if tensorflow is None else vars(tensorflow).get("keras")
    if module is None:
        return ""
    if "_tfll_initialized" in vars(module) and not vars(module)["_tfll_initialized"]:
        return ""  # TensorFlow's lazy loader.
    return str(module.Model.__module__)  # Its own name may be "tensorflow.keras".


def allow_tensorflow_privacy() -> None:
    """Makes `import tensorflow_privacy` work, for tfdp and for its users.

    Its estimators are replaced by stubs where TensorFlow has none.
    """
    import tensorflow as tf

    if hasattr(tf, "estimator"):
        return
    for name in _ESTIMATOR_MODULES:
        if name not in sys.modules:
            stub: Any = types.ModuleType(name)
            stub.DNNClassifier = None
            sys.modules[name] = stub


def let_keras_save(optimizer_class: Any) -> None:
    """Makes Keras save and restore the state of `optimizer_class` with a model.

    Args:
      optimizer_class: A class with `save_own_variables(store)`, `load_own_variables(store)` and
        `restore_from_saved_model(model, path)`.
    """

    def tracking(is_keras_trackable: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda obj: isinstance(obj, optimizer_class) or is_keras_trackable(obj)

    def loading(keras_load: Callable[..., Any]) -> Callable[..., Any]:
        def load(path: str, compile: bool = True, options: Any = None) -> Any:
            model = keras_load(path, compile, options)
            optimizer = getattr(model, "optimizer", None)
            if isinstance(optimizer, optimizer_class):
                optimizer.restore_from_saved_model(model, path)
            return model

        return load

    private_apis.replace("tf_keras.src.saving.saving_lib._is_keras_trackable", tracking)
    private_apis.replace("tf_keras.src.saving.legacy.saved_model.load.load", loading)
