"""Memory that a backward pass may take by default, and products that a processor is fast at."""

import os
import resource

import pytest
import tensorflow as tf

from tfdp.base import devices

GIB = 2**30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine of so much memory, with groups of processes and their limits."""

    monkeypatch.setattr(devices, "has_gpu", lambda: False)

    def make(memory, groups=None, **limits):
        def sysconf(name):
            if memory is None:
                raise ValueError("unrecognized configuration name")
            return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}[name]

        monkeypatch.setattr(os, "sysconf", sysconf)
        monkeypatch.setattr(devices, "_GROUPS", str(tmp_path / "groups"))
        monkeypatch.setattr(devices, "_LIMITS", str(tmp_path / "limits"))
        if groups is not None:
            (tmp_path / "groups").write_text(groups)
        for path, limit in limits.items():
            file = tmp_path / "limits" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{limit}\n")

    return make


def test_a_quarter_of_the_memory(machine):
    machine(64 * GIB)
    assert devices.memory_budget() == 16 * GIB


@pytest.mark.parametrize("memory", [None, 4 * GIB])
def test_not_less_than_before(memory, machine):
    machine(memory)
    assert devices.memory_budget() == 2 * GIB


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        (None, "memory.max"),  # A container that sees no groups, or is the root of them.
        ("0::/\n", "memory.max"),
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/step_0/memory.max"),
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/memory.max"),
        ("5:cpu,cpuacct:/\n4:memory:/docker/ab\n", "memory/docker/ab/memory.limit_in_bytes"),
        ("4:memory:/docker/ab\n", "memory/memory.limit_in_bytes"),
    ],
)
def test_limits_of_containers_and_jobs(groups, path, machine):
    machine(64 * GIB, groups, **{path: 12 * GIB})
    assert devices.memory_budget() == 3 * GIB
    machine(None, groups)
    assert devices.memory_budget() == 3 * GIB


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096])
def test_no_limit(limit, machine):
    machine(64 * GIB, "0::/\n", **{"memory.max": limit})
    assert devices.memory_budget() == 16 * GIB


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_the_process(kind, machine, monkeypatch):
    machine(64 * GIB)
    limits = {kind: (12 * GIB, resource.RLIM_INFINITY)}
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, no_limit))
    assert devices.memory_budget() == 3 * GIB


@pytest.mark.parametrize("groups", ["", "\n", "one\n", "4:memory\n", "0::/../..\n"])
def test_groups_that_are_not_as_expected(groups, machine):
    machine(64 * GIB, groups)
    assert devices.memory_budget() == 16 * GIB


def test_where_a_system_tells_nothing(machine, monkeypatch):
    machine(64 * GIB)
    monkeypatch.delattr(os, "sysconf")  # Windows.
    assert devices.memory_budget() == 2 * GIB


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Makes a processor of which the system tells so much; None: nothing."""
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.setattr(devices, "_PROCESSOR", str(tmp_path / "cpuinfo"))

    def make(text):
        devices._has_amx.cache_clear()
        if text is not None:
            (tmp_path / "cpuinfo").write_bytes(text)

    yield make
    devices._has_amx.cache_clear()


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        (b"flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_int8\nbugs\t\t:\n", True),
        (b"flags\t\t: fpu avx512f avx512_bf16 amx_bf16x\n", False),
        (b"\xff\xfe", False),
        (None, False),
    ],
)
def test_processors_that_multiply_bfloat16(processor, text, fast):
    processor(text)
    assert devices.multiplies_bfloat16() == fast


@pytest.mark.parametrize("off", ["0", "false", "False"])
def test_without_onednn_products_of_bfloat16_are_not_used(processor, monkeypatch, off):
    processor(b"flags : amx_bf16")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    assert devices.multiplies_bfloat16()
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", off)
    assert not devices.multiplies_bfloat16()


def test_what_xla_compiles_and_gpus_do_not_multiply_bfloat16(processor, monkeypatch):
    processor(b"flags : amx_bf16")
    asked = []

    @tf.function(jit_compile=True)
    def compiled():
        asked.append(devices.multiplies_bfloat16())
        return tf.zeros([])

    compiled()
    assert asked == [False] and devices.multiplies_bfloat16()
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert not devices.multiplies_bfloat16()
