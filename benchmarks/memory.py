"""Memory that models leave in a process: private ones of `make_private`, beside plain ones.

python -m benchmarks.memory --calls=200

Each call makes a model, compiles it and takes one step; then come `keras.backend.clear_session` and
Python's garbage collector. Prints the resident memory after each tenth of the calls. Each kind has
a process of its own.
"""

import argparse
import collections
import ctypes
import gc
import importlib.metadata
import platform
import subprocess
import sys

_KINDS = ("plain", "private", "batches")


def resident():
    """Returns the resident memory of this process in MiB, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        kilobytes = next(line.split()[1] for line in file if line.startswith("VmRSS"))
    return int(kilobytes) / 1024


def _call(kind, x, y):
    import keras

    import tfdp

    model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if kind == "plain":
        model.compile("adam", loss)
        model.fit(x[:20], y[:20], epochs=1, verbose=0)
    elif kind == "batches":
        for _ in tfdp.data.poisson_batches((x, y), expected_batch_size=20).take(1):
            pass
    else:
        model, batches, _ = tfdp.keras3.make_private(
            model, (x, y), epochs=1, noise_multiplier=1.0, loss=loss, verbose=False
        )
        model.fit(batches, epochs=1, steps_per_epoch=1, verbose=0)
    keras.backend.clear_session()


def measure(kind, calls, types):
    """Prints the memory after each tenth of the calls, and the types of what is left."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(200, 8)).astype("float32")
    y = np.arange(200) % 2
    for _ in range(5):  # What is loaded and kept once.
        _call(kind, x, y)
    first, before = resident(), _counts()
    seen = []
    for number in range(1, calls + 1):
        _call(kind, x, y)
        if number % max(1, calls // 10) == 0:
            seen.append(resident())
    print(f"{kind}: {first:.0f} MiB, then {' '.join(f'{s - first:+.1f}' for s in seen)} MiB")
    print(f"{kind}: {(seen[-1] - first) / calls:.3f} MiB a call")
    if types:
        grown = _counts()
        grown.subtract(before)
        for name, count in grown.most_common(types):
            print(f"  {count / calls:8.2f} a call: {name}")


def _counts():
    gc.collect()
    return collections.Counter(
        f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(_KINDS))
    parser.add_argument("--types", type=int, default=0, help="types of objects to show")
    parser.add_argument("--here", action="store_true", help="in this process, one kind")
    options = parser.parse_args()
    if options.here:
        measure(options.kinds, options.calls, options.types)
        return
    names = ("tensorflow", "keras")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"Python {platform.python_version()}, {versions}, {platform.machine()}", flush=True)
    for kind in options.kinds.split(","):
        given = [f"--calls={options.calls}", f"--kinds={kind}", f"--types={options.types}"]
        command = [sys.executable, "-m", "benchmarks.memory", "--here", *given]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
