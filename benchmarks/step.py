"""Times a private training step against the plain Keras step on the same model and rows.

    python -m benchmarks.step --batch 256 2048

Prints a Markdown table: median and quartiles of the time of one step, through `model.fit`, and the
ratio of the medians. The contestants take turns, so that a noisy machine disturbs all of them.
"""

import argparse
import importlib.metadata
import os
import platform
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import numpy as np
import tensorflow as tf

import tfdp
from experiments import networks

STEPS = 4
OPTIMIZERS = {
    "plain Keras SGD": None,
    "tfdp.DPSGD": tfdp.DPSGD,
    "tfdp.DPAdam": tfdp.DPAdam,
    "tfdp.DPSignSGD": tfdp.DPSignSGD,
    "tfdp.DPSignAdam": tfdp.DPSignAdam,
}


def make(optimizer_class: type | None, batch: int) -> tf.keras.Model:
    """The MNIST network of the papers, compiled."""
    model = networks.NETWORKS["mnist"](networks.make_activation("tanh"))
    private = optimizer_class is not None
    loss = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none" if private else "auto"
    )
    if private:
        optimizer = optimizer_class(
            l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch
        )
    else:
        optimizer = tf.keras.optimizers.legacy.SGD()
    model.compile(optimizer, loss=loss)
    return model


def measure(batch: int, repeats: int) -> dict[str, np.ndarray]:
    """Milliseconds per step of every contestant, `[repeats]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch * STEPS, 28, 28, 1)).astype("float32")
    y = rng.integers(0, 10, batch * STEPS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache()
    models = {name: make(cls, batch) for name, cls in OPTIMIZERS.items()}
    for model in models.values():
        model.fit(data, epochs=2, verbose=0)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            start = time.perf_counter()
            model.fit(data, verbose=0)
            times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    return {name: np.array(values) for name, values in times.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 2048], help="rows per step")
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each")
    options = parser.parse_args()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "tf-keras")]
    print(
        f"MNIST network, 26,010 parameters; {os.cpu_count()} cores, {platform.machine()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}\n"
    )
    print("| rows | optimizer | median ms | quartiles | private / plain |\n|---|---|---|---|---|")
    for batch in options.batch:
        times = measure(batch, options.repeats)
        plain = np.median(times["plain Keras SGD"])
        for name, values in times.items():
            low, median, high = np.percentile(values, [25, 50, 75])
            print(
                f"| {batch} | {name} | {median:.1f} | {low:.1f} to {high:.1f} | "
                f"{median / plain:.2f} |"
            )


if __name__ == "__main__":
    main()
