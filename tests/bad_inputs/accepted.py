"""The list of bad values that are accepted, as reviewed: `accepted.txt`."""

import collections
from pathlib import Path

_FILE = Path(__file__).with_name("accepted.txt")
_HEADER = """\
# Values that are accepted: `call argument: values`, by their names in tests/bad_inputs/evil.py.
# They are good values, or the argument may be anything. A value that a call newly accepts fails the
# test: refuse it, or add it here by `python -m tests.bad_inputs --write` and look at the change.
"""


def read():
    """Returns the accepted values by call and argument."""
    found = collections.defaultdict(set)
    for line in _FILE.read_text().splitlines() if _FILE.exists() else ():
        if line and not line.startswith("#"):
            names, _, values = line.rpartition(": ")
            call, _, argument = names.rpartition(" ")
            found[call, argument] = set(values.split())
    return found


def write(cases):
    """Adds cases to the list."""
    found = read()
    for case in cases:
        found[case.call, case.argument].add(case.value)
    lines = [
        f"{call} {argument}: {' '.join(sorted(values))}\n"
        for (call, argument), values in sorted(found.items())
    ]
    _FILE.write_text(_HEADER + "".join(lines))
