"""Properties of the device and of the compiler that decide how to compute."""

import contextlib
import functools
import os
import pathlib

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

# What is in memory for norms at the same time: on a CPU, what its caches hold.
_CPU_BYTES, _GPU_BYTES = 16 * 2**20, 1024 * 2**20
# What layers' outputs and their gradients may take: on a CPU a part of its memory, but not less.
_CPU_BUDGET, _CPU_PART, _GPU_BUDGET = 2 * 2**30, 4, 8 * 2**30
# Where Linux tells the groups of a process, and the limits of memory of a group.
_GROUPS, _LIMITS = "/proc/self/cgroup", "/sys/fs/cgroup"
# Where Linux tells what the processor has.
_PROCESSOR = "/proc/cpuinfo"


def replicas() -> int:
    """Returns how many replicas of a distribution strategy take each step together."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def compiled_by_xla() -> bool:
    """Returns whether the graph being built is part of a function with `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def has_gpu() -> bool:
    """Returns whether TensorFlow runs operations on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def compiled_for_gpu() -> bool:
    """Returns whether the graph being built is compiled by XLA, and will run on a GPU."""
    return compiled_by_xla() and has_gpu()


def working_set_bytes() -> int:
    """Returns how much to have in memory at the same time where parts of a batch are worked on."""
    return _GPU_BYTES if has_gpu() else _CPU_BYTES


def memory_budget() -> int:
    """Returns how many bytes one backward pass may take by default."""
    if has_gpu():
        return _GPU_BUDGET
    return max(_CPU_BUDGET, _memory() // _CPU_PART)


def _memory() -> int:
    """Returns the bytes of memory that this process can have; 0 if unknown."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Not on Windows.
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _limits():
        with contextlib.suppress(OSError, ValueError):  # "max": no limit.
            sizes.append(int(path.read_text()))
    with contextlib.suppress(ImportError):  # Not on Windows.
        import resource

        limits = [
            resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        ]
        sizes += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(sizes, default=0)


def _limits() -> list[pathlib.Path]:
    """Returns the files that may limit the memory of this process's container, or of its job."""
    try:
        groups = pathlib.Path(_GROUPS).read_text().splitlines()
    except (OSError, ValueError):  # No Linux; no text.
        groups = []
    files = []
    for hierarchy in ("0::/", "0:memory:/", *groups):  # A container may see itself as the root.
        _, kinds, group = [*hierarchy.split(":", 2), "?", "?"][:3]
        if kinds == "":  # Version 2 of cgroups.
            root, name = pathlib.Path(_LIMITS), "memory.max"
        elif "memory" in kinds.split(","):
            root, name = pathlib.Path(_LIMITS) / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = pathlib.PurePosixPath(group.lstrip("/"))
        files += [root / one / name for one in (place, *place.parents)]
    return files


def multiplies_bfloat16() -> bool:
    """Returns whether products of bfloat16 are faster than those of float32: by AMX.

    Without AMX they are slower. GPUs were not measured, and XLA may leave out the rounding to
    bfloat16, of a product for one of its uses and not for another.
    """
    by_onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower() not in ("0", "false")
    return by_onednn and _has_amx() and not has_gpu() and not compiled_by_xla()


@functools.cache
def _has_amx() -> bool:
    """Returns whether this is a processor with instructions for matrices of bfloat16."""
    try:
        return "amx_bf16" in pathlib.Path(_PROCESSOR).read_text().split()
    except (OSError, ValueError):  # No Linux; no text.
        return False


def product_rounding() -> float:
    """Returns the relative rounding error of factors of matrix products, if above float32's.

    GPUs may cut them off after 10 bits (TF32), CPUs round them to 7 (bfloat16, by an environment
    variable). What XLA compiles for a GPU does so even where
    `tf.config.experimental.enable_tensor_float_32_execution(False)` was called: norms were too low
    by 0.17% (TensorFlow 2.21, H100). So the setting is not asked.

    Returns:
      0 if factors are not rounded.
    """
    if os.environ.get("TF_SET_ONEDNN_FPMATH_MODE", "").upper() == "BF16":
        return 2.0**-8
    return 2.0**-10 if has_gpu() else 0.0
