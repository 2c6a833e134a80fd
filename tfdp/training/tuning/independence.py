"""Runs that tell nothing of each other, neither by seeds nor by names."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base import private_apis


@contextlib.contextmanager
def independent() -> Iterator[None]:
    """Has Python, NumPy and TensorFlow draw by fresh seeds, and leaves no trace of it.

    Afterwards their generators, and the counters by which Keras numbers the names of layers, are
    what they were. If they went on, weights that are never trained, seeds of layers or names such
    as `dense_9` would tell how many runs were made before: with `keras.utils.set_random_seed`,
    exactly. And the runs of a private selection must be independent.
    """
    of_python = [(one, one.getstate()) for one in _generators_of_python()]
    numpy_state = np.random.get_state()
    seed, _ = tf.compat.v1.get_seed(None)
    names = [(numbers, dict(numbers)) for numbers in _numbers_of_names()]
    for generator, _ in of_python:
        generator.seed(os.urandom(32))
    np.random.seed(np.frombuffer(os.urandom(32), np.uint32))
    if seed is not None:
        tf.random.set_seed(int.from_bytes(os.urandom(7), "little"))
    try:
        yield
    finally:
        for generator, state in of_python:
            generator.setstate(state)
        np.random.set_state(numpy_state)
        if seed is not None:
            tf.random.set_seed(seed)
        known = {id(numbers): before for numbers, before in names}
        for numbers in _numbers_of_names():
            numbers.clear()
            numbers.update(known.get(id(numbers), {}))


def _generators_of_python() -> list[Any]:
    """Returns that of the process, and that of Keras 2 if a seed was set."""
    found: list[Any] = [random]
    with contextlib.suppress(AttributeError, ImportError):
        found.append(private_apis.find("tf_keras.src.backend._SEED_GENERATOR.generator"))
    return [generator for generator in found if generator is not None]


def _numbers_of_names() -> list[Any]:
    """Returns the dicts in which each Keras counts names."""
    found = []
    with contextlib.suppress(AttributeError, ImportError):
        state = private_apis.find("keras.src.backend.common.global_state.get_global_attribute")
        found += [state("object_name_uids")]
    with contextlib.suppress(AttributeError, ImportError):
        found += private_apis.find("tf_keras.src.backend.PER_GRAPH_OBJECT_NAME_UIDS").values()
    return [numbers for numbers in found if numbers is not None]
