"""Facts of Keras 3 that several modules need."""

from typing import Any

import keras

from tfdp.clipping.update_error import Code, described


def check_is_model(model: Any) -> None:
    """Raises a ValueError if `model` is not a model of Keras 3."""
    if not isinstance(model, keras.Model):
        keras_2 = any(base.__module__.startswith("tf_keras.") for base in type(model).__mro__)
        raise ValueError(
            "Argument `model` must be a model of Keras 3 (`import keras`). Received: "
            f"{type(model).__name__} of {type(model).__module__}."
            + (" Models of Keras 2 have `tfdp.keras2`." if keras_2 else "")
        )


def update_code(optimizer: Any) -> Code:
    """Yields, for messages, the functions of users that an update of an optimizer may call."""
    yield from described("learning_rate", getattr(optimizer, "_learning_rate", None))
    for variable in optimizer._trainable_variables:
        yield from described("constraint", variable.constraint)
    yield from described("optimizer", type(optimizer))
    for inner in getattr(optimizer, "_inner_optimizers", ()):  # Set in a MultiOptimizer.
        yield from update_code(inner)
