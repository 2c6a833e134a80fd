"""Compatibility of TensorFlow, Keras 2 and TensorFlow Privacy. Nothing else in tfdp handles it.

Five facts are dealt with here:

1. TensorFlow Privacy's optimizers subclass `tf.keras.optimizers.legacy`, which only Keras 2
   (`tf-keras`) has. TensorFlow picks the Keras version when `tf.keras` is first touched.
2. TensorFlow Privacy 0.9.0 imports `tf.estimator`, which TensorFlow 2.16 removed.
3. Keras saves the state of its own new optimizers in `.keras` files and restores no slots from
   a SavedModel. A private optimizer must not forget what has been released, so its state goes
   into both.
4. AutoGraph rewrites whatever a tf.function calls, except what it knows to need no rewriting.
5. TensorFlow writes lines about the machine to standard error when it is imported, from C++, and
   before its log level is read.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

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
    """Imports TensorFlow and Keras 2 without the lines that TensorFlow writes when it starts.

    (TF_CPP_MIN_LOG_LEVEL=0 shows them.)

    Raises:
      ImportError: `tf.keras` is Keras 3 already, or a package is missing.
    """
    asked_for = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    quiet = "tensorflow" not in sys.modules and not asked_for
    with quiet_stderr() if quiet else contextlib.nullcontext():
        use_keras_2()


def use_keras_2() -> None:
    """Makes `tf.keras` Keras 2, if no one has loaded Keras 3 through it yet.

    Raises:
      ImportError: `tf.keras` is Keras 3 already, or `tf-keras` is missing.
    """
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    try:
        has_legacy_optimizers = hasattr(tf.keras.optimizers.legacy.SGD, "_compute_gradients")
    except (AttributeError, ImportError):
        has_legacy_optimizers = False
    if not has_legacy_optimizers:
        raise ImportError(
            "tfdp needs Keras 2 as `tf.keras`, but Keras 3 was loaded before tfdp was imported. "
            "Import tfdp before anything touches `tf.keras`, or set the environment variable "
            "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported (`pip install tf-keras` if it "
            "is missing)."
        )


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
