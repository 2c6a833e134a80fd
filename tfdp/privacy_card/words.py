"""What both forms of a privacy card say in the same words."""

from collections.abc import Iterable, Iterator

from tfdp.accounting.statement import Statement
from tfdp.accounting.trade_off import percent

ATTACK_HEADS = ("false positive rate", "true positive rate, at most")
HASH = (
    "The hash covers type, shape and bytes of each array of `model.get_weights()`, in their order. "
    "Weights with another hash are not those that this page is about."
)


def attack_rows(statement: Statement) -> Iterator[tuple[str, str]]:
    """Yields false positive rates, and the largest true positive rate at each."""
    for rate, most in statement.trade_off.at_usual_rates.items():
        yield percent(rate), percent(most)


def points(given: Iterable[tuple[float, float]]) -> Iterator[tuple[str, str]]:
    """Yields points as text."""
    for x, epsilon in given:
        yield f"{x:g}", f"{epsilon:g}"
