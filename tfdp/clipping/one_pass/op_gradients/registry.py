"""Registry of the rules that give the per-example gradients of an operation's weights."""

from collections.abc import Callable
from typing import TypeAlias

from tfdp.base.validation import boolean, error, integer
from tfdp.clipping.one_pass.per_example_gradients import Contribution
from tfdp.clipping.one_pass.weight_uses import Use

Rule: TypeAlias = Callable[[Use], Contribution | None]

_RULES: dict[tuple[str, int], Rule] = {}
_OF_OPEN_SHAPES: set[Rule] = set()


def register_op_gradients(
    *types: str, weight: int = 1, open_shapes: bool = False
) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of `types` whose input `weight` is the weights.

    A rule is a function of a `Use` that returns the gradients of the weights for every example, or
    None where it does not apply (then the generic rule does). The row analysis has proven by then
    that the operation keeps the examples apart (`tfdp.clipping.row_analysis.transfer_functions`).

    Args:
      *types: Types of TensorFlow operations.
      weight: The input that holds the weights.
      open_shapes: Whether the rule handles weights of which a size is not static.

    Returns:
      A decorator.

    Raises:
      ValueError: An argument is not of its type, or there is a rule already.
    """
    if not all(isinstance(op_type, str) and op_type for op_type in types):
        raise error("types", "names of TensorFlow operations", types)
    integer("weight", weight, 0)
    boolean("open_shapes", open_shapes)

    def register(rule: Rule) -> Rule:
        for op_type in types:
            if (op_type, weight) in _RULES:
                raise ValueError(
                    "Arguments `types` and `weight` must name an operation that has no rule yet. "
                    f"Received: {op_type!r}, weight={weight}."
                )
            _RULES[op_type, weight] = rule
        if open_shapes:
            _OF_OPEN_SHAPES.add(rule)
        return rule

    return register


def find_op_gradients(op_type: str, weight: int, is_open: bool = False) -> Rule | None:
    """Returns the rule for an operation whose input `weight` is the weights, or None.

    Args:
      op_type: Type of the operation.
      weight: The input.
      is_open: Whether a size of the weights is not static.
    """
    rule = _RULES.get((op_type, weight))
    return None if is_open and rule not in _OF_OPEN_SHAPES else rule
