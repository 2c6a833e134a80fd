"""Times the programs of `benchmarks.export_xla` by JAX alone: on a GPU without TensorFlow.

    python -m benchmarks.run_xla --folder results/export_xla

Prints a line of JSON for each program: the seconds of its compilation, the milliseconds of a step
(each begins when the one before has ended, and gets the same parameters), and the bytes that it
needs beside them.
"""

import os

os.environ["JAX_ENABLE_X64"] = "1"  # Labels, the step count and the noise key are int64.

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FEW = 3


def measure(folder: Path, name: str, seconds: float) -> dict[str, Any]:
    """Compiles and runs a program.

    Args:
      folder: The folder that `benchmarks.export_xla` wrote.
      name: Name of the program.
      seconds: About how long it is timed.

    Returns:
      What was measured, by its name.
    """
    import jax
    import numpy as np
    from jax._src.lib import xla_client
    from jax.extend.backend import get_backend

    backend = get_backend()
    device = backend.local_devices()[:1]
    with np.load(folder / f"{name}_args.npz") as stored:
        arrays = [stored[f"a{i}"] for i in range(len(stored.files))]
    arguments = [jax.device_put(array, device[0]) for array in arrays]
    text = (folder / f"{name}.stablehlo").read_text()
    begin = time.perf_counter()
    program = backend.compile_and_load(
        text, xla_client.DeviceList(tuple(device)), xla_client.CompileOptions()
    )
    compiled = time.perf_counter() - begin

    def step() -> float:
        for i, argument in enumerate(arguments):
            if argument.is_deleted():  # The step before wrote a variable's new value there.
                arguments[i] = jax.device_put(arrays[i], device[0])
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        losses.append(float(program.execute(arguments)[0]))
        return time.perf_counter() - start

    losses: list[float] = []
    for _ in range(FEW):
        step()
    begin, times = time.perf_counter(), [step()]
    while time.perf_counter() - begin < seconds:
        times.append(step())
    needed = program.get_compiled_memory_stats()
    return {
        "program": name,
        "loss": losses[-1],
        "compile_seconds": round(compiled, 2),
        "step_ms": round(1e3 * statistics.median(times), 3),
        "temporary_mib": round(needed.temp_size_in_bytes / 2**20, 1),
        "device": device[0].device_kind,
        "jax": jax.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Times the programs of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("results", "export_xla"))
    parser.add_argument("--seconds", type=float, default=5, help="about how long each is timed")
    options = parser.parse_args(arguments)
    for file in sorted(options.folder.glob("*.stablehlo")):
        print(json.dumps(measure(options.folder, file.stem, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
