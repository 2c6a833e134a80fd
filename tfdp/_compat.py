"""Compatibility of TensorFlow, Keras and TensorFlow Privacy. Nothing else in tfdp handles it.

Six facts are dealt with here:

1. TensorFlow Privacy's optimizers subclass `tf.keras.optimizers.legacy`, which only Keras 2
   (`tf-keras`) has. TensorFlow picks the Keras version when `tf.keras` is first touched, and where
   `from tensorflow.keras import ...` looks when TensorFlow is imported. So `import tfdp` chooses
   Keras 2 for `tf.keras`, unless the user chose by TF_USE_LEGACY_KERAS or has loaded Keras 3
   (through `tf.keras`, or by `import keras` before TensorFlow). `tfdp.keras3` takes this choice
   back. The package `keras` is Keras 3 in any case. Python 3.12 and newer have no TensorFlow
   Privacy: there `import tfdp` chooses nothing, and the names of Keras 2 raise an error.
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
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_2 = ("tf_keras", "tensorflow_privacy")  # The packages that its front end needs.
# Public names without a counterpart in `tfdp.keras3`.
_ONLY_IN_KERAS_2 = {"CanaryAudit"}
_chosen = False  # Whether tfdp, and not the user, has set the variable.
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


def import_tensorflow() -> None:
    """Imports TensorFlow without the lines that it writes when it starts; prefers Keras 2.

    (TF_CPP_MIN_LOG_LEVEL=0 shows them.)
    """
    asked_for = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    quiet = "tensorflow" not in sys.modules and not asked_for
    with quiet_stderr() if quiet else contextlib.nullcontext():
        if _VARIABLE not in os.environ and not missing_for_keras_2() and not _keras_3_is_loaded():
            _choose_keras_2(True)
        importlib.import_module("tensorflow")


def use_keras_2(name: str = "") -> None:
    """Makes `tf.keras` Keras 2, if no one has loaded Keras 3 through it yet.

    Args:
      name: The public name that needs it, such as "tfdp.make_private"; empty if it has none.

    Raises:
      ImportError: A package is missing, or `tf.keras` is Keras 3 already.
    """
    import tensorflow as tf

    if missing := missing_for_keras_2():
        raise _no_keras_2(missing, name)

    before = os.environ.get(_VARIABLE)
    _choose_keras_2(True)
    try:
        has_legacy_optimizers = hasattr(tf.keras.optimizers.legacy.SGD, "_compute_gradients")
    except (AttributeError, ImportError):
        has_legacy_optimizers = False
    if not has_legacy_optimizers:
        if before != "1":
            _choose_keras_2(False)
        if before is not None:  # The user's choice, by which what is loaded later follows it.
            os.environ[_VARIABLE] = before
        raise ImportError(
            f"{_what(name)} needs Keras 2 as `tf.keras`, but Keras 3 was loaded before. "
            f"{_in_keras_3(name)} For models of Keras 2, import tfdp before anything touches "
            f"`keras` or `tf.keras`, or set the environment variable {_VARIABLE}=1 before "
            "TensorFlow is imported."
        )


def missing_for_keras_2() -> list[str]:
    """Returns the packages that are missing for models of Keras 2."""
    return [name for name in _KERAS_2 if not _has(name)]


def _no_keras_2(missing: list[str], name: str = "") -> ImportError:
    version = sys.version_info[:2]
    if version < _FIRST_WITHOUT_KERAS_2:
        remedy = "`pip install tf-keras tensorflow-privacy==0.9.0`."
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
            "`tfdp.keras3.DPSGD` for `tfdp.DPSGD`."
        )
    instead = {"callbacks": "PrivacyBudget"}.get(last, last)
    return f"For models of Keras 3 (`import keras`), use `tfdp.keras3.{instead}`."


def has_keras_3() -> bool:
    """Returns whether the package `keras` that is installed is Keras 3."""
    return _version_of_keras().startswith("3.")


def _version_of_keras() -> str:
    """Returns the version of the package `keras` that is installed; empty if there is none."""
    try:
        return importlib.metadata.version("keras")
    except importlib.metadata.PackageNotFoundError:
        return ""


def use_keras_3() -> None:
    """Checks that `keras` is Keras 3 on TensorFlow; leaves `tf.keras` to TensorFlow.

    Raises:
      ImportError: `keras` is missing, is Keras 2, or runs on another backend.
    """
    global _chosen
    # Without importing it: Keras 2.15 takes the names by which `tf_keras` loads `.keras` files, and
    # weights would be lost without an error.
    if (version := _version_of_keras()).startswith("2."):
        raise _is_keras_2(version)
    if _chosen and not _has_loaded_tf_keras():  # By `import tfdp`, and no one has used it.
        _choose_keras_2(False)
    _chosen = False
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        raise ImportError("tfdp.keras3 needs Keras 3: `pip install keras`.") from error
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
        f"or newer. Received: Keras {version}. For Keras 2, use tfdp.DPSGD and the other names of "
        "tfdp."
    )


def import_tensorflow_probability() -> None:
    """Imports TensorFlow Probability, whatever `tf.keras` is, and leaves `tf.keras` as it was."""
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


def _choose_keras_2(chosen: bool) -> None:
    """Says that `tf.keras` is to be Keras 2 when it is loaded, or leaves it to TensorFlow."""
    global _chosen
    _chosen = chosen and (_chosen or _VARIABLE not in os.environ)
    if chosen:
        os.environ[_VARIABLE] = "1"
    else:
        os.environ.pop(_VARIABLE, None)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and _has("tf_keras"):
        # Where `from tensorflow.keras import ...` looks; TensorFlow sets it when it is imported.
        origin = str(importlib.util.find_spec("tf_keras").origin)  # type: ignore[union-attr]
        folder = os.path.join(os.path.dirname(origin), "api", "_v2")
        others = [path for path in tensorflow.__path__ if path != folder]
        tensorflow.__path__ = [folder, *others] if chosen else others


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _keras_3_is_loaded() -> bool:
    """Returns whether the user has loaded Keras 3: TensorFlow, too, imports `keras`."""
    loaded = [name for name in sys.modules if name.startswith(("keras.", "tensorflow."))]
    if "keras" in sys.modules and loaded[0].startswith("keras."):  # Before TensorFlow.
        return str(getattr(sys.modules["keras"], "__version__", "")).startswith("3.")
    return _tf_keras_name().startswith("keras.")


def _has_loaded_tf_keras() -> bool:
    return bool(_tf_keras_name())


def _tf_keras_name() -> str:
    """Returns the name of the module that `tf.keras` is; empty if it is not loaded yet."""
    tensorflow = sys.modules.get("tensorflow")
    module = None if tensorflow is None else vars(tensorflow).get("keras")
    if module is None:
        return ""
    if "_tfll_initialized" in vars(module) and not vars(module)["_tfll_initialized"]:
        return ""  # TensorFlow's lazy loader.
    return str(module.__name__)


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


def exempt_from_autograph() -> None:
    """Lets AutoGraph treat tfdp as it treats TensorFlow and Keras: tfdp is called as it is.

    Layers and losses of the user that tfdp calls are rewritten as they would be without it.
    """
    config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
    config.CONVERSION_RULES = (config.DoNotConvert("tfdp"), *config.CONVERSION_RULES)


def let_keras_save(optimizer_class: Any) -> None:
    """Makes Keras save and restore the state of `optimizer_class` with a model.

    Args:
      optimizer_class: A class with `save_own_variables(store)`, `load_own_variables(store)` and
        `restore_from_saved_model(model, path)`.
    """
    saving_lib: Any = importlib.import_module("tf_keras.src.saving.saving_lib")
    is_keras_trackable = saving_lib._is_keras_trackable

    def is_trackable(obj: Any) -> bool:
        return isinstance(obj, optimizer_class) or is_keras_trackable(obj)

    saving_lib._is_keras_trackable = is_trackable

    saved_model: Any = importlib.import_module("tf_keras.src.saving.legacy.saved_model.load")
    keras_load = saved_model.load

    def load(path: str, compile: bool = True, options: Any = None) -> Any:
        model = keras_load(path, compile, options)
        optimizer = getattr(model, "optimizer", None)
        if isinstance(optimizer, optimizer_class):
            optimizer.restore_from_saved_model(model, path)
        return model

    saved_model.load = load


def saving_of_keras_2() -> tuple[Any, Any]:
    """Returns the modules of Keras 2 for `.keras` and `.weights.h5` files, and for `.h5` files."""
    saving_lib: Any = importlib.import_module("tf_keras.src.saving.saving_lib")
    legacy: Any = importlib.import_module("tf_keras.src.saving.legacy.hdf5_format")
    return saving_lib, legacy
