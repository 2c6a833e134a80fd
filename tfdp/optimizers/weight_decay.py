"""Decoupled weight decay of the private optimizers of Keras 2."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdp._validation import error, is_number


class WeightDecay:
    """Shrinks weights before each update: w = w - learning_rate * rate * w, as AdamW does.

    It reads weights, which have been released, and no data: it costs no privacy.

    Args:
      rate: Share of a weight, times the learning rate; None: no decay.

    Raises:
      ValueError: The rate is no non-negative, finite number.

    References:
      - Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization
        (https://arxiv.org/abs/1711.05101).
    """

    def __init__(self, rate: float | None):
        if rate is not None and not (is_number(rate) and 0 <= rate < math.inf):
            raise error("weight_decay", "a non-negative, finite number or None", rate)
        self.rate = None if rate is None else float(rate)
        self._keys: frozenset[str] = frozenset()
        self._names: tuple[str, ...] = ()

    def exclude(self, variables: Iterable[tf.Variable], names: Iterable[str]) -> None:
        """Leaves out these variables, and those in whose names one of `names` is found."""
        self._keys = frozenset(variable._unique_id for variable in variables)
        self._names = tuple(names)

    def exclude_as(self, optimizer: "tf.keras.optimizers.Optimizer") -> None:
        """Leaves out the variables that an optimizer of Keras leaves out."""
        self._keys = frozenset(getattr(optimizer, "_exclude_from_weight_decay", ()))
        self._names = tuple(getattr(optimizer, "_exclude_from_weight_decay_names", ()))

    def apply(
        self,
        distribution: Any,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        learning_rate: Callable[[tf.DType], tf.Tensor],
    ) -> None:
        """Shrinks the variables on all replicas, in the graph being built.

        Args:
          distribution: Strategy, in whose cross-replica context this is called.
          grads_and_vars: Gradients, which are waited for, and their variables. A step that is
            refused has no gradients, and must leave the weights as they are.
          learning_rate: Returns the step's learning rate in a dtype.
        """
        if not self.rate:
            return

        def shrink(variable: tf.Variable, gradient: tf.Tensor) -> tf.Operation:
            with tf.control_dependencies([gradient]):
                share = learning_rate(variable.dtype.base_dtype) * self.rate
                return variable.assign_sub(share * variable, read_value=False)

        for gradient, variable in grads_and_vars:
            if self._shrinks(variable):
                distribution.extended.update(variable, shrink, args=(gradient,), group=False)

    def _shrinks(self, variable: tf.Variable) -> bool:
        excluded = any(re.search(name, variable.name) for name in self._names)
        return not excluded and variable._unique_id not in self._keys
