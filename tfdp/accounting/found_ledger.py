"""The ledger of a model: what makes models says where."""

from collections.abc import Callable
from typing import Any

from tfdp.accounting.ledger import PrivacyLedger

_finders: list[Callable[[Any], PrivacyLedger | None]] = []


def register_ledger_finder(find: Callable[[Any], PrivacyLedger | None]) -> None:
    """Has a function find the ledger of a model; None if it knows none."""
    _finders.append(find)


def find_ledger(source: Any) -> PrivacyLedger:
    """Returns a ledger from itself, from an optimizer that has one, or from a model.

    Raises:
      TypeError: It is none of these, or has no ledger.
    """
    if isinstance(source, PrivacyLedger):
        return source
    if is_model(source):
        for find in _finders:
            ledger = find(source)
            if ledger is not None:
                return ledger
    owners: tuple[Any, Any] = (source, getattr(source, "optimizer", None))
    for owner in owners:
        # An error of an optimizer's own `ledger` must come through, so no default if it has one.
        ledger = owner.ledger if hasattr(type(owner), "ledger") else getattr(owner, "ledger", None)
        if isinstance(ledger, PrivacyLedger):
            return ledger
    raise TypeError(
        "Argument `ledger` must be a PrivacyLedger, an optimizer that has one as `ledger`, or a "
        f"model that such an optimizer has trained. Received: ledger={source!r}."
    )


def is_model(source: Any) -> bool:
    """Returns whether something is a model of Keras 2 or 3."""
    # Models of Keras 2, or of Keras 3. Other objects of both have trainable variables, too.
    return hasattr(type(source), "trainable_variables") and (
        hasattr(type(source), "submodules") or hasattr(type(source), "compile_from_config")
    )
