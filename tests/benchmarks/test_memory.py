"""The growth of memory is that of the calls."""

import subprocess
import sys

# In a process of its own: that of the tests gives back memory of other tests at any time.
_PROGRAM = """
from benchmarks import memory

kept = []
memory._call = lambda kind, x, y: kept.append(bytearray((kind == "leaky") * 4 * 2**20))
memory.measure("leaky", 10, 0)
memory.measure("level", 10, 0)
"""


def test_growth_is_seen_a_call():
    lines = subprocess.check_output([sys.executable, "-c", _PROGRAM], text=True).splitlines()
    grown = {line.split(":")[0]: float(line.split()[1]) for line in lines if "a call" in line}
    assert 3.5 < grown["leaky"] < 4.5
    assert abs(grown["level"]) < 0.5
