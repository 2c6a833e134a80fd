"""The count of an optimizer's noisy steps, in variables that live in its checkpoints."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.accounting import PrivacyParametersChangedError

# Steps on batches with a boolean mask and the padded size, which are Poisson samples; and others.
COUNTS = ("privacy_steps", "privacy_steps_not_poisson")
_PARAMETERS = "privacy_parameters"


class ReleaseCount:
    """Counts steps, and keeps the privacy parameters that they were taken with.

    Args:
      parameters: The privacy parameters by the names of their arguments.
      flags: Names of facts about the training that, once true, stay so.
    """

    def __init__(self, parameters: dict[str, float], flags: tuple[str, ...] = ()):
        self.parameters = parameters
        self._names = (*COUNTS, *flags)
        self.variables: dict[str, tf.Variable] = {}
        with tf.init_scope():
            # Never restored: what was released in this process stays so, when a checkpoint takes
            # the model back to before.
            self._here = {
                name: tf.Variable(0, dtype=tf.int64, trainable=False) for name in self._names
            }

    @property
    def created(self) -> bool:
        """Whether the variables exist."""
        return bool(self.variables)

    def create(self, add_weight: Callable[..., tf.Variable]) -> list[tf.Variable]:
        """Creates the variables with the `add_weight` of an optimizer, which tracks them."""

        def add(name: str, value: Any, dtype: tf.DType) -> tf.Variable:
            constant = tf.constant(value, dtype)
            return add_weight(
                name,
                shape=constant.shape,
                dtype=dtype,
                trainable=False,
                initializer=lambda shape, dtype=None, **_: constant,
            )

        self.variables = {name: add(name, 0, tf.int64) for name in self._names}
        self.variables[_PARAMETERS] = add(_PARAMETERS, list(self.parameters.values()), tf.float64)
        return list(self.variables.values())

    def add(self, poisson: tf.Tensor, begins: tf.Tensor | bool = True) -> tf.Operation:
        """Counts one step, in the graph being built; `poisson` is a scalar bool tensor."""
        is_poisson, step = tf.cast(poisson, tf.int64), tf.cast(begins, tf.int64)
        done = []
        for name, one in zip(COUNTS, (step * is_poisson, step * (1 - is_poisson)), strict=True):
            here = self._here[name].assign_add(one)
            count = self.variables[name]
            done.append(count.assign(tf.maximum(count + one, here)).op)
        return tf.group(done)

    def total(self) -> tf.Tensor:
        """All steps so far, an int64 scalar, in the graph being built."""
        return tf.add_n([tf.maximum(self.variables[n], self._here[n]) for n in COUNTS])

    def raise_flag(self, name: str) -> None:
        """Makes a fact true."""
        self._here[name].assign(1)
        self.variables[name].assign(1)

    def flag(self, name: str) -> bool:
        """Whether a fact is true."""
        own = [self._here[name], *([self.variables[name]] if self.created else [])]
        return any(bool(variable.numpy()) for variable in own)

    @property
    def counters(self) -> list[tf.Variable]:
        """The variables that `add` changes."""
        return [of[name] for of in (self._here, self.variables) for name in COUNTS]

    def counts(self) -> tuple[int, int]:
        """Steps on Poisson batches, and on others.

        Raises:
          PrivacyParametersChangedError: The steps were taken with other privacy parameters.
        """
        if not self.created:
            return 0, 0
        self.check_parameters(self.variables[_PARAMETERS].numpy())
        steps, not_poisson = (
            max(int(self.variables[name].numpy()), int(self._here[name].numpy())) for name in COUNTS
        )
        return steps, not_poisson

    def check(self) -> tf.Operation:
        """Checks, whenever the graph being built runs, that the parameters are still the same."""
        own = tf.constant(list(self.parameters.values()), tf.float64)
        return check_now(
            tf.reduce_all(self.variables[_PARAMETERS] == own),
            "Training must go on with the privacy parameters that it began with: "
            f"{', '.join(self.parameters)}. The restored ones differ.",
        )

    def check_parameters(self, restored: Sequence[float]) -> None:
        """Checks the parameters of a saved state.

        Raises:
          PrivacyParametersChangedError: They differ; names the argument and both values.
        """
        for (name, own), other in zip(self.parameters.items(), restored, strict=True):
            if own != other:
                raise PrivacyParametersChangedError(
                    f"Argument `{name}` must stay {other:g}, with which training began. "
                    f"Received: {name}={own:g}. Start a new training to change it."
                )


def check_now(condition: tf.Tensor, message: str) -> tf.Operation:
    """Checks a condition in the graph being built, without waiting for what stands before it.

    (Automatic control dependencies would put it after all stateful operations that were made
    before, such as dropout, although it is to come before the model is evaluated.)
    """
    operation = tf.raw_ops.Assert(condition=condition, data=[message])
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)
    return operation
