"""Cases: calls of which one argument is replaced. Loads no TensorFlow."""

import dataclasses
import zlib

NAMED, ACCEPTED, OTHER = "named", "accepted", "other"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of which one argument is replaced."""

    call: str
    argument: str
    value: str

    def __str__(self):
        return f"{self.call}({self.argument}={self.value})"


def of(known):
    """Returns all cases of what `Runner.known` returned, in their order."""
    return [
        Case(call, argument, value)
        for call, arguments in known["calls"].items()
        for argument in arguments
        for value in known["values"]
    ]


def sample(known, every):
    """Returns one of `every` cases of each argument, whatever other arguments there are."""
    count = len(known["values"])
    return [
        case
        for number, case in enumerate(of(known))
        if (number % count + zlib.crc32(f"{case.call} {case.argument}".encode())) % every == 0
    ]
