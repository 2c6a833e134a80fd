"""Events that cost more if an observer sees their attempts, and what may be seen."""

from typing import Any

import attr
import dp_accounting

from tfdp.base import validation

# What an observer sees.
CONDITIONAL = "conditional"
PER_ATTEMPT = "per_attempt"
OBSERVABILITY = (CONDITIONAL, PER_ATTEMPT)

_NO_BOUND = (
    " This cost of DPSUR (its Theorem 5.6) is not an upper bound on epsilon. Replace it by "
    "'conditional', which counts accepted updates as well: what was recorded stays the same, and "
    "epsilon becomes larger."
)


class AttemptsDpEvent(dp_accounting.DpEvent):
    """An event that costs more if its attempts can be observed."""

    def releases_of_attempt(self) -> list[dp_accounting.DpEvent]:
        """Returns what one attempt releases if it is observed."""
        raise NotImplementedError


def contains_attempts(event: dp_accounting.DpEvent) -> bool:
    """Returns whether `event` is an AttemptsDpEvent or made of one."""
    if isinstance(event, AttemptsDpEvent):
        return True
    values = [getattr(event, f.name) for f in attr.fields(type(event))]
    parts = [part for v in values for part in (v if isinstance(v, list | tuple) else (v,))]
    return any(contains_attempts(p) for p in parts if isinstance(p, dp_accounting.DpEvent))


def check_observability(value: Any) -> str:
    """Returns `value` if it is in `OBSERVABILITY`, else raises a ValueError."""
    if not (isinstance(value, str) and value in OBSERVABILITY):
        refusal = validation.error(
            "selective_release", f"one of {', '.join(map(repr, OBSERVABILITY))}", value
        )
        published = isinstance(value, str) and value == "published"
        # Accepted by tfdp 0.1, whose ledgers may still be around.
        raise ValueError(f"{refusal}{_NO_BOUND}") if published else refusal
    return value
