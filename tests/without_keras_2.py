"""Leaves out what needs Keras 2 where TensorFlow Privacy is missing, as on Python 3.12 and newer.

There, `tfdp.DPSGD` and the other names of Keras 2 are stand-ins in the tests. A test that calls
one, or looks for an attribute of it, is skipped; so is one that imports a module of Keras 2, in the
place of tfdp's error. pytest lists the modules and how many of their tests were left out. Where
code of tfdp itself needs Keras 2, on behalf of a test of something else, the error stays one.
Models of `tf.keras`, which tests of clipping give to the engines, are of Keras 2 all the same.

What users see without TensorFlow Privacy: `tests/test_packaging.py`.
"""

import importlib.util
import os
import sys

import pytest

_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
_PASSED_ON = ("tfdp", "tfdp.base.lazy", "tfdp.base.front_ends", "tfdp.base.compat", __name__)
_KERAS_2 = ("tfdp.keras2",)  # Packages; lazy in them is what needs Keras 2.

_OF_BOTH = ("TooManyAttemptsError", "divergences", "likelihoods", "priors")  # And in keras3.

_IS_MISSING = importlib.util.find_spec("tensorflow_privacy") is None

# For tests that use Keras 2 in a process of their own.
needs_keras_2 = pytest.mark.skipif(
    _IS_MISSING, reason="needs Keras 2, and tensorflow_privacy is missing"
)


def leave_out():
    """Puts the stand-ins in place, if TensorFlow Privacy is missing; call it before TensorFlow.

    `tf.keras` is Keras 2 in the tests, and the package `keras` Keras 3.
    """
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if not _IS_MISSING:
        return
    compat = importlib.import_module("tfdp.base.compat")
    missing = compat.missing_for_keras_2()
    error = compat._no_keras_2

    def skip_or_error(missing, name=""):
        frames = list(_callers(sys._getframe(1)))
        if _is_of_a_test(frames):
            why = f"{_module_of(frames)} needs Keras 2, and {' and '.join(missing)} is missing"
            pytest.skip(why, allow_module_level=True)
        return error(missing, name)

    compat._no_keras_2 = skip_or_error
    _StandIn.use = staticmethod(lambda: skip_or_error(missing))
    root = importlib.import_module("tfdp")
    keras_3 = importlib.import_module("tfdp.keras3")
    for package in map(importlib.import_module, _KERAS_2):
        for name in package.__all__:
            if name in _OF_BOTH:
                setattr(package, name, getattr(keras_3, name))
                continue
            stand_in = _StandIn(name, (), {"__doc__": "Stands in for a class of Keras 2."})
            setattr(package, name, stand_in)
            if name in root.__all__:
                setattr(root, name, stand_in)


class _StandIn(type):
    """The class of stand-ins, which may be listed, compared and subclassed."""

    use = None

    def __call__(cls, *args, **kwargs):
        raise _StandIn.use()

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise _StandIn.use()

    def __instancecheck__(cls, instance):
        raise _StandIn.use()

    def __subclasscheck__(cls, subclass):
        raise _StandIn.use()


def _callers(frame):
    while frame is not None:
        yield frame.f_globals.get("__name__") or "", frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _is_of_a_test(frames):
    """Returns whether a test needs Keras 2, and not a function of tfdp; imports pass a need on."""
    for name, _, function in frames:
        package = name.split(".")[0]
        is_imported = package == "tfdp" and function == "<module>"
        if not (package in _IMPORTING or name in _PASSED_ON or is_imported):
            return package != "tfdp"
    return False


def _module_of(frames):
    """Returns the path of the test module, from `tests` on."""
    for _, path, _ in frames:
        if os.path.basename(path).startswith("test_"):
            return "tests" + path.rpartition(f"{os.sep}tests")[2]
    return "the test"
