"""Cases: calls of which one argument is replaced. Loads no TensorFlow."""

import dataclasses

NAMED, ACCEPTED, OTHER = "named", "accepted", "other"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of which one argument is replaced."""

    call: str
    argument: str
    value: str

    def __str__(self):
        return f"{self.call}({self.argument}={self.value})"


def of(known, names=None):
    """Returns cases, in their order.

    Args:
      known: Result of `Runner.known`.
      names: Parts of the names of calls; None: all calls.
    """
    return [
        Case(call, argument, value)
        for call, arguments in known["calls"].items()
        if names is None or any(name in call for name in names)
        for argument in arguments
        for value in known["values"]
    ]
