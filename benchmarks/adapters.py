"""Compares private fine-tuning of low-rank adapters with that of all weights, and with plain Keras.

    python -m benchmarks.adapters --width 256 --rank 8 --batch 64

An encoder of Keras 3, with attention and dense layers, is trained in part: its head; adapters of
the queries, values and dense kernels (`enable_lora`) and the head; or all of it. Plain and private
steps take turns in one process. Compare the ratios, medians of those of neighboring turns; CPU
time is that of all threads, and steadier on a machine that others use.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import statistics
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import tfdp.keras3
from benchmarks.fine_tuning import Cost, timed
from benchmarks.report import cpu_model

PARTS = ("head", "adapters", "whole")
TOKENS, CLASSES, LAYERS = 32, 10, 2


def network(width: int, rank: int, part: str) -> keras.Model:
    """Builds an encoder that is trained in part.

    Args:
      width: Length of the vectors, a multiple of 4.
      rank: Rank of the adapters.
      part: One of `PARTS`.
    """
    layers = keras.layers
    inputs = x = keras.Input([TOKENS, width])
    adapted = []
    for _ in range(LAYERS):
        attention = layers.MultiHeadAttention(4, width // 4)
        x = layers.LayerNormalization()(x + attention(x, x))
        dense = [layers.Dense(4 * width, "gelu"), layers.Dense(width)]
        x = layers.LayerNormalization()(x + dense[1](dense[0](x)))
        adapted += [attention._query_dense, attention._value_dense, *dense]
    encoder = keras.Model(inputs, layers.GlobalAveragePooling1D()(x))
    encoder.trainable = part == "whole"
    if part == "adapters":
        encoder.trainable = True
        for layer in encoder._flatten_layers(include_self=False):
            layer.trainable = not layer.weights or layer in adapted
        for layer in adapted:
            layer.enable_lora(rank)
    return keras.Sequential([keras.Input([TOKENS, width]), encoder, layers.Dense(CLASSES)])


class Step:
    """A training step.

    Args:
      model: The network.
      width: Length of its inputs' vectors.
      batch: Rows in a batch.
      private: Whether it is tfdp's, or plain Keras's.
    """

    def __init__(self, model: keras.Model, width: int, batch: int, private: bool):
        rng = np.random.default_rng(0)
        rows = rng.random([batch, TOKENS, width], np.float32), rng.integers(0, CLASSES, batch)
        data = tf.data.Dataset.from_tensor_slices(rows).batch(batch).cache().repeat()
        optimizer = keras.optimizers.SGD(0.01)
        if private:
            optimizer = tfdp.keras3.DPSGD(1.0, 1.0, batch, learning_rate=0.01)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.make_train_function()
        self._step, self._data = model.train_function, iter(data)
        self.trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)

    def __call__(self) -> None:
        self._step(self._data)


def measure(
    width: int, rank: int, batch: int, part: str, repeats: int
) -> tuple[int, list[tuple[Cost, Cost]]]:
    """Returns the number of trained parameters, and costs of plain and private steps by turns."""
    steps = [Step(network(width, rank, part), width, batch, private) for private in (False, True)]
    for step in steps * 2:
        step()
    return steps[0].trained, [(timed(steps[0]), timed(steps[1])) for _ in range(repeats)]


def row(part: str, trained: int, turns: Sequence[tuple[Cost, Cost]]) -> str:
    """Returns a row of the table."""
    medians = [1e3 * statistics.median(pair[i].wall for pair in turns) for i in (0, 1)]
    wall, cpu = (
        statistics.median(
            getattr(private, measure) / getattr(plain, measure) for plain, private in turns
        )
        for measure in ("wall", "cpu")
    )
    cells = part, f"{trained:,}", f"{medians[0]:.0f} / {medians[1]:.0f}", f"{wall:.2f} ({cpu:.2f})"
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 256), ("rank", 8), ("batch", 64), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if options.width % 4 or min(vars(options).values()) < 1:
        parser.error(
            "--width must be a multiple of 4, and all numbers positive. Received: "
            + ", ".join(f"--{name}={value}" for name, value in vars(options).items())
        )
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, tfdp {tfdp.__version__}; width {options.width}, rank "
        f"{options.rank}, {options.batch} rows of {TOKENS} vectors\n"
    )
    print("| trained | parameters | step ms, plain and private | ratio (CPU time) |")
    print("|---|---|---|---|", flush=True)
    for part in PARTS:
        found = measure(options.width, options.rank, options.batch, part, options.repeats)
        print(row(part, *found), flush=True)


if __name__ == "__main__":
    main()
