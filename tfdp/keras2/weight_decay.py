"""Decoupled weight decay of the private optimizers of Keras 2."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdp.base.validation import error, is_number


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
        self._variables: dict[str, str] = {}  # Names of variables, by what no other has.
        self._names: tuple[str, ...] = ()

    def exclude(self, variables: Iterable[tf.Variable], names: Iterable[str]) -> None:
        """Leaves out these variables, and those in whose names one of `names` is found."""
        self._variables = {variable._unique_id: variable.name for variable in variables}
        self._names = tuple(names)

    def excluded_names(self) -> list[str]:
        """Returns the regular expressions that leave out the same in a model with these names."""
        exact = (f"^{re.escape(name)}$" for name in self._variables.values())
        return list(dict.fromkeys([*self._names, *exact]))

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
            if self.shrinks(variable):
                distribution.extended.update(variable, shrink, args=(gradient,), group=False)

    def shrinks(self, variable: tf.Variable) -> bool:
        """Returns whether the variable is not left out."""
        excluded = any(re.search(name, variable.name) for name in self._names)
        return not excluded and variable._unique_id not in self._variables
