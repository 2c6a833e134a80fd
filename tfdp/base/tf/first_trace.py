"""Traces of a `tf.function` that TensorFlow discards.

A function that creates variables in its first trace is traced a second time, without them. The
second trace is the one that runs. Keras's training step creates variables so for a model that is
not built, and for metrics: what is added to its first trace is built in vain.
"""

import inspect

import tensorflow as tf

# TensorFlow's function that creates a variable in a first trace, and its list of them.
_CREATOR, _CREATED = "variable_capturing_scope", "created_variables"
_PRIORITY = 50  # Priority of the variable creators of functions.


def is_discarded() -> bool:
    """Returns whether the function that is being traced has created variables in this trace.

    Where TensorFlow does not show that, the answer is no.
    """
    return bool(_created())


def discard() -> bool:
    """Makes TensorFlow discard this trace, if it is a first one; returns whether it does."""
    if _created() is None:
        return False
    tf.Variable(0, trainable=False, name="discard_trace")
    return is_discarded()


def _created() -> list | None:
    """Returns the variables that were created in this trace; None if it may create none."""
    if tf.executing_eagerly():
        return None
    stack = tf.compat.v1.get_default_graph()._variable_creator_stack
    of_functions = [creator for priority, creator in stack if priority == _PRIORITY]
    innermost = of_functions[-1] if of_functions else None
    if innermost is None or getattr(innermost, "__name__", None) != _CREATOR:
        return None
    created = inspect.getclosurevars(innermost).nonlocals.get(_CREATED)
    return created if isinstance(created, list) else None
