"""Compares private steps of a tied embedding with plain Keras: time and peak memory.

    python -m benchmarks.tied_embeddings --vocabulary 50257 --width 768 --tokens 64 --batch 8

A table of Keras 3 (`ReversibleEmbedding`) looks tokens up and makes the outputs; between is one
dense layer. Each contestant has a process of its own: plain Keras, private steps as they are, the
same without noise, and private steps that instantiate each example's gradient of the table. Their
turns are one after the other: compare the ratios of CPU time, which is that of all threads.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import multiprocessing
import statistics
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import tfdp.keras3
from benchmarks.fine_tuning import Cost, timed
from benchmarks.report import cpu_model
from benchmarks.worker import memory
from tfdp.clipping.one_pass import tied_tables

CONTESTANTS = ("plain", "private", "without noise", "instantiated")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a language model.

    Attributes:
      vocabulary: Rows of the table.
      width: Length of a row.
      tokens: Length of a text.
      batch: Texts in a batch.
      repeats: Steps that are measured.
    """

    vocabulary: int
    width: int
    tokens: int
    batch: int
    repeats: int


def network(case: Case) -> keras.Model:
    """Builds a model that predicts a token at each position."""
    table = keras.layers.ReversibleEmbedding(case.vocabulary, case.width)
    inputs = keras.Input([case.tokens], dtype="int32")
    hidden = keras.layers.Dense(case.width, "gelu")(table(inputs))
    return keras.Model(inputs, table(hidden, reverse=True))


def measure(case: Case, contestant: str) -> tuple[list[Cost], float, str]:
    """Returns the costs of steps, the peak of memory in MiB, and the rule of the table."""
    if contestant == "instantiated":
        tied_tables.is_cheaper = lambda lookups, products: False
    model = network(case)
    optimizer = keras.optimizers.SGD(0.01)
    if contestant != "plain":
        noise = 0.0 if contestant == "without noise" else 1.0
        optimizer = tfdp.keras3.DPSGD(1.0, noise, case.batch, learning_rate=0.01)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, case.vocabulary, [case.batch, case.tokens + 1]).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))
    batches = iter(data.batch(case.batch).cache().repeat())
    model.make_train_function()
    for _ in range(2):
        model.train_function(batches)
    costs = [timed(lambda: model.train_function(batches)) for _ in range(case.repeats)]
    report = None if contestant == "plain" else optimizer.clipping.report()
    return costs, memory()[1], "" if report is None else report.entries[0].how


def row(contestant: str, costs: Sequence[Cost], peak: float, how: str, plain: tuple) -> str:
    """Returns a row of the table; `plain` has the costs and the peak of plain Keras."""
    wall, cpu = ([getattr(cost, kind) for cost in costs] for kind in ("wall", "cpu"))
    ratios = [
        statistics.median(own) / statistics.median(getattr(cost, kind) for cost in plain[0])
        for own, kind in ((wall, "wall"), (cpu, "cpu"))
    ]
    cells = [
        contestant,
        how.rpartition(", ")[2],
        f"{1e3 * statistics.median(wall):.0f}",
        f"{ratios[0]:.2f} ({ratios[1]:.2f})",
        f"{peak:,.0f}",
        f"{peak / plain[1]:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"vocabulary": 50_257, "width": 768, "tokens": 64, "batch": 8, "repeats": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    names = ",".join(CONTESTANTS[1:])
    parser.add_argument("--step", default=names, help=f"beside plain: any of {names}")
    options = vars(parser.parse_args(arguments))
    contestants = options.pop("step").split(",")
    if unknown := set(contestants) - set(CONTESTANTS[1:]):
        parser.error(f"--step must be of {names}. Received: {unknown}.")
    if min(options.values()) < 1:
        parser.error(f"All numbers must be positive. Received: {options}.")
    case = Case(**options)
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, tfdp {tfdp.__version__}; {case}\n"
    )
    print("| step | gradients of the table | ms | × plain (CPU time) | peak MiB | × plain |")
    print("|---|---|---|---|---|---|", flush=True)
    plain: tuple = ()
    for contestant in (CONTESTANTS[0], *contestants):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            costs, peak, how = pool.apply(measure, [case, contestant])
        plain = plain or (costs, peak)
        print(row(contestant, costs, peak, how, plain), flush=True)


if __name__ == "__main__":
    main()
