"""One call with one bad argument, and its outcome."""

import re
import warnings

from tests.bad_inputs import evil, valid_calls
from tests.bad_inputs.cases import ACCEPTED, NAMED, OTHER

# Errors of what was given, a function (`int` is one), a model or a sequence, which reach its author
# as they are; and the list of a model's findings, which says what does not fit.
_OWN = (
    "Exception encountered when calling ",
    "Argument `output` must have rank (ndim)",
    "int() argument must be",
    "int() takes at most",
    "int() base must be",
    "object cannot be interpreted as an integer",
    "The model cannot be trained privately as it is:",
    "The function fails.",
    "The sequence is broken.",
    "_no_arguments()",
    "_five_arguments()",
)


class TookTooLong(BaseException):
    """Raised by the alarm of a call."""


def names_it(error, argument, others=()):
    """Returns whether an error names the argument, or one beside it, and says what was received."""
    message = str(error)
    if any(own in message for own in _OWN):
        return True
    if not isinstance(error, (ValueError, TypeError)):
        return False
    named = re.search(rf"(?<![A-Za-z0-9]){re.escape(argument)}(?![A-Za-z0-9])", message)
    named = named or any(f"`{other}`" in message for other in others)
    said = re.search(r"[Rr]eceived|\b[Gg]ot\b", message)
    return bool(named and said)


def outcome(case):
    """Returns the outcome of a case, and the error or the warning it is of."""
    call = valid_calls.CALLS[case.call]()
    arguments = {**call.arguments, case.argument: evil.VALUES[case.value]()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            call.run(arguments)
        except TookTooLong:
            return OTHER, "hang"
        except BaseException as error:  # SystemExit and MemoryError, too.
            text = f"{type(error).__name__}: {error}"[:2000]
            return (NAMED if names_it(error, case.argument, call.varied) else OTHER), text
    from_inside = [w for w in seen if issubclass(w.category, (RuntimeWarning, SyntaxWarning))]
    if from_inside:
        return OTHER, f"warning {from_inside[0].category.__name__}: {from_inside[0].message}"
    return ACCEPTED, ""
