"""The mechanisms that the fuzzer must miss: for each finding, how to take its mechanism out.

Each mutant is a list of `(module, attribute, replacement)`; an attribute is a dotted path in the
module. A replacement is what stands there instead.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

MUTANTS: dict[str, list[tuple[str, str, Any]]] = {}


@contextlib.contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Takes the mechanism `name` out of the library meanwhile; None: leaves it as it is.

    Raises:
      AttributeError: The library has no such attribute: the mutant must follow its code.
    """
    with contextlib.ExitStack() as undo:
        for module, path, replacement in MUTANTS[name] if name else []:
            *parents, attribute = path.split(".")
            owner = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            before = getattr(owner, attribute)
            own = vars(owner).get(attribute, before)
            setattr(owner, attribute, replacement)
            undo.callback(setattr, owner, attribute, own)
        yield
