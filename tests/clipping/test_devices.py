"""How much memory a backward pass may take by default."""

import os

import pytest

from tfdp.clipping import devices

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "limit", "budget"),
    [
        (64 * GIB, None, 16 * GIB),  # A quarter.
        (4 * GIB, None, 2 * GIB),
        (64 * GIB, f"{12 * GIB}\n", 3 * GIB),  # A container's.
        (64 * GIB, "max\n", 16 * GIB),
        (64 * GIB, str(2**63 - 4096), 16 * GIB),  # No limit, as the older cgroups say it.
        (None, None, 2 * GIB),
        (None, f"{12 * GIB}\n", 3 * GIB),
    ],
)
def test_a_quarter_of_the_memory(memory, limit, budget, monkeypatch, tmp_path):
    def sysconf(name):
        if memory is None:
            raise ValueError("unrecognized configuration name")
        return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    monkeypatch.setattr(devices, "_LIMITS", (str(path),))
    assert devices.memory_budget() == budget


def test_where_a_system_tells_nothing(monkeypatch):
    monkeypatch.delattr(os, "sysconf")  # Windows.
    monkeypatch.setattr(devices, "_LIMITS", ())
    assert devices.memory_budget() == 2 * GIB
