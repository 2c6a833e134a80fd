"""Updates of some rows of tables by optimizers of Keras 3: other rows and their moments stay.

Keras's own updates by `tf.IndexedSlices` decay the moments of all rows, and so read and write whole
tables. These are lazy: the moments of a row move in the steps that update it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.base.keras_3 import tf_variable
from tfdp.base.validation import error

# Arguments with which an update depends on all rows, or changes them.
_OF_ALL_ROWS = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema")
_REQUIREMENT = (
    "a `keras.optimizers.SGD`, `Adam` without `amsgrad`, or `Adagrad` for `sparse_embeddings`"
)


def check_inner(optimizer: Any) -> None:
    """Raises a ValueError unless an optimizer of Keras has an update of rows alone."""
    if type(optimizer) not in _UPDATES or getattr(optimizer, "amsgrad", False):
        raise error("inner_optimizer", _REQUIREMENT, optimizer)
    for name in _OF_ALL_ROWS:
        if given := getattr(optimizer, name, None):
            raise ValueError(
                f"Argument `{name}` must not be given with `sparse_embeddings`: it reads or "
                f"changes all rows of a table. Received: {name}={given!r}."
            )


def apply(optimizer: Any, gradients: Sequence[tuple[tf.IndexedSlices, Any]]) -> None:
    """Updates rows of variables, each of which occurs at most once.

    Args:
      optimizer: An optimizer that is built, and that `check_inner` accepts.
      gradients: Gradients of rows, with their variables of Keras.

    Raises:
      ValueError: A variable has a constraint, which would change all rows.
    """
    for gradient, variable in gradients:
        if variable.constraint is not None:
            raise ValueError(
                "Argument `embeddings_constraint` must be None with `sparse_embeddings`: it "
                f"changes all rows of a table. Received one of the variable '{variable.path}'."
            )
        index = optimizer._get_variable_index(variable)
        table = tf_variable(variable)
        rate = tf.cast(optimizer.learning_rate, table.dtype)
        _UPDATES[type(optimizer)](optimizer, table, index, gradient, rate)
        # A variable whose rows were written is copied whenever it is read, which Keras's Embedding
        # does. Without this, rows are written in place, and copied only while somebody reads them.
        tf.raw_ops.DisableCopyOnRead(resource=table.handle)


def _sgd(optimizer: Any, table: tf.Variable, index: int, g: tf.IndexedSlices, rate: Any) -> None:
    step = -rate * g.values
    if optimizer.momentum != 0:
        momentum = tf.cast(optimizer.momentum, table.dtype)
        slot = tf_variable(optimizer.momentums[index])
        velocity = momentum * tf.gather(slot, g.indices) + step
        slot.scatter_update(tf.IndexedSlices(velocity, g.indices))
        step = momentum * velocity + step if optimizer.nesterov else velocity
    table.scatter_add(tf.IndexedSlices(step, g.indices))


def _adam(optimizer: Any, table: tf.Variable, index: int, g: tf.IndexedSlices, rate: Any) -> None:
    beta_1, beta_2 = (tf.cast(b, table.dtype) for b in (optimizer.beta_1, optimizer.beta_2))
    number = tf.cast(tf_variable(optimizer.iterations) + 1, table.dtype)
    rate *= tf.sqrt(1 - tf.pow(beta_2, number)) / (1 - tf.pow(beta_1, number))
    m, v = (tf_variable(s[index]) for s in (optimizer._momentums, optimizer._velocities))
    first, second = tf.gather(m, g.indices), tf.gather(v, g.indices)
    first += (g.values - first) * (1 - beta_1)
    second += (tf.square(g.values) - second) * (1 - beta_2)
    m.scatter_update(tf.IndexedSlices(first, g.indices))
    v.scatter_update(tf.IndexedSlices(second, g.indices))
    step = rate * first / (tf.sqrt(second) + optimizer.epsilon)
    table.scatter_sub(tf.IndexedSlices(step, g.indices))


def _adagrad(
    optimizer: Any, table: tf.Variable, index: int, g: tf.IndexedSlices, rate: Any
) -> None:
    slot = tf_variable(optimizer._accumulators[index])
    total = tf.gather(slot, g.indices) + tf.square(g.values)
    slot.scatter_update(tf.IndexedSlices(total, g.indices))
    step = rate * g.values / tf.sqrt(total + optimizer.epsilon)
    table.scatter_sub(tf.IndexedSlices(step, g.indices))


_UPDATES: dict[type, Callable[[Any, tf.Variable, int, tf.IndexedSlices, Any], None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.Adagrad: _adagrad,
}
