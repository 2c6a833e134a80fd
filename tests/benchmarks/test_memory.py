"""The growth of memory is that of the calls."""

from benchmarks import memory

_kept = []


def leaky(kind, x, y):
    _kept.append(bytearray(4 * 2**20) if kind == "leaky" else None)


def test_growth_is_seen_a_call(monkeypatch, capsys):
    monkeypatch.setattr(memory, "_call", leaky)
    memory.measure("leaky", 10, 0)
    memory.measure("level", 10, 0)
    lines = capsys.readouterr().out.splitlines()
    grown = {line.split(":")[0]: float(line.split()[1]) for line in lines if "a call" in line}
    assert 3.5 < grown["leaky"] < 4.5
    assert abs(grown["level"]) < 0.5
    _kept.clear()
