"""Compares sparse updates of embedding tables with dense noise: time, memory and accuracy.

    python -m benchmarks.sparse_embeddings --rows 100000,1000000
    python -m benchmarks.sparse_embeddings --accuracy --rows 100000 --epsilon 2

The data are generated, like ratings of MovieLens: a user and an item, both by Zipf's law, and
whether the user likes the item, by a bias of the item and an inner product. The model has a table
of each and two dense layers. Each contestant has a process of its own: plain Keras, private steps
with noise in every row, and with `tfdp.SparseEmbeddings`. Compare ratios: others may run beside.
With --accuracy, all train for the same epochs, the private ones within the same epsilon; of a grid
of learning rates, the best by test AUC is shown for each, and choosing it is not private.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import multiprocessing
import statistics
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp.keras3
from benchmarks.fine_tuning import Cost, timed
from benchmarks.report import cpu_model
from benchmarks.worker import memory

CONTESTANTS = ("plain", "dense", "sparse")
_FACTORS = 4  # Of the generated tastes.


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a recommender.

    Attributes:
      rows: Rows of each of its two tables.
      width: Length of a row.
      batch: Examples in a batch.
      examples: Examples to train with; a quarter as many are for tests.
      optimizer: "adam", "sgd" or "adagrad".
      threshold: Of the sparse updates, in standard deviations of the noise of a count.
      count_share: Of the sparse updates.
      noise: Noise multiplier where time is measured.
    """

    rows: int
    width: int = 16
    batch: int = 256
    examples: int = 200_000
    optimizer: str = "adam"
    threshold: float = 4.0
    count_share: float = 0.1
    noise: float = 1.0

    def sparse(self, noise: float) -> tfdp.SparseEmbeddings:
        """Returns the sparse updates for a noise multiplier."""
        stddev = tfdp.SparseEmbeddings(1.0, self.count_share).noise(noise)[0]
        return tfdp.SparseEmbeddings(self.threshold * stddev, self.count_share)

    def inner(self, rate: float) -> keras.optimizers.Optimizer:
        """Returns the optimizer of Keras."""
        kinds = keras.optimizers
        return {"adam": kinds.Adam, "sgd": kinds.SGD, "adagrad": kinds.Adagrad}[self.optimizer](
            rate
        )


def ratings(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns users, items and likes, of training and then of test examples."""
    rng = np.random.default_rng(0)
    count = case.examples + case.examples // 4
    ranks = 1.0 / np.arange(1, case.rows + 1)
    user, item = (
        rng.choice(case.rows, count, p=weights / weights.sum()).astype("int32")
        for weights in (ranks**0.5, ranks)
    )
    bias = rng.normal(size=case.rows)
    tastes = [rng.normal(size=[case.rows, _FACTORS]) / _FACTORS**0.5 for _ in range(2)]
    scores = bias[item] + (tastes[0][user] * tastes[1][item]).sum(axis=1)
    likes = rng.random(count) < 1 / (1 + np.exp(-2 * scores))
    return {"user": user, "item": item}, likes.astype("float32")


def network(case: Case) -> keras.Model:
    """Builds the model."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input([], dtype="int32", name=name) for name in ("user", "item")}
    found = [keras.layers.Embedding(case.rows, case.width)(i) for i in inputs.values()]
    hidden = keras.layers.Concatenate()([*found, keras.layers.Multiply()(found)])
    hidden = keras.layers.Dense(32, "relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden)[:, 0])


def measure(case: Case, contestant: str, repeats: int) -> tuple[list[Cost], float]:
    """Returns the costs of steps, and the peak of memory in MiB."""
    model, optimizer = network(case), case.inner(0.01)
    if contestant != "plain":
        sparse = case.sparse(case.noise) if contestant == "sparse" else None
        optimizer = tfdp.keras3.DPOptimizer(
            optimizer, 1.0, case.noise, case.batch, sparse_embeddings=sparse
        )
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    rng = np.random.default_rng(0)
    size = 16 * case.batch
    x = {name: rng.integers(0, case.rows, size).astype("int32") for name in ("user", "item")}
    data = tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 2, size).astype("float32")))
    batches = iter(data.batch(case.batch).cache().repeat())
    model.make_train_function()
    for _ in range(5):
        model.train_function(batches)
    return [timed(lambda: model.train_function(batches)) for _ in range(repeats)], memory()[1]


def area(scores: np.ndarray, likes: np.ndarray) -> float:
    """Returns the area under the ROC curve."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = likes > 0.5
    low = positive.sum() * (positive.sum() + 1) / 2
    return float((ranks[positive].sum() - low) / (positive.sum() * (~positive).sum()))


def train(
    case: Case, contestant: str, epochs: int, epsilon: float, rate: float
) -> tuple[float, float, float]:
    """Trains.

    Returns:
      The test AUC, the noise multiplier, and the share of rows that training has changed.
    """
    (x, y), model, n = ratings(case), network(case), case.examples
    data = ({name: values[:n] for name, values in x.items()}, y[:n])
    before = model.get_weights()
    loss, noise = keras.losses.BinaryCrossentropy(from_logits=True), 0.0
    if contestant == "plain":
        model.compile(case.inner(rate), loss)
        model.fit(*data, batch_size=case.batch, epochs=epochs, verbose=0)
    else:
        noise = tfdp.calibrate_noise_multiplier(
            target_epsilon=epsilon,
            delta=1e-6,
            dataset_size=n,
            expected_batch_size=case.batch,
            steps=epochs * (n // case.batch),
        )
        sparse: Any = case.sparse(noise) if contestant == "sparse" else None
        batches = tfdp.data.poisson_batches(
            data, expected_batch_size=case.batch, steps_per_epoch=n // case.batch
        )
        model.compile(
            tfdp.keras3.DPOptimizer(
                case.inner(rate), 1.0, noise, sampling=batches.sampling, sparse_embeddings=sparse
            ),
            loss,
        )
        model.fit(batches, epochs=epochs, verbose=0)
        assert model.optimizer.ledger.epsilon(1e-6).epsilon <= epsilon * (1 + 1e-9)
    rest = {name: values[n:] for name, values in x.items()}
    scores = model.predict(rest, batch_size=4096, verbose=0)
    moved = [
        np.mean(np.any(old != new, axis=1))
        for old, new in zip(before, model.get_weights(), strict=True)
        if new.shape == (case.rows, case.width)
    ]
    return area(np.ravel(scores), y[n:]), noise, float(np.mean(moved))


def _apart(function: Any, *arguments: Any) -> Any:
    """Calls a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _times(case: Case, contestants: Sequence[str], repeats: int) -> None:
    plain: tuple[float, float] | None = None
    for contestant in contestants:
        costs, peak = _apart(measure, case, contestant, repeats)
        ms = 1e3 * statistics.median(cost.wall for cost in costs)
        plain = plain or (ms, peak)
        ratios = f"{ms / plain[0]:.2f} | {peak:,.0f} | {peak / plain[1]:.2f}"
        print(f"| {case.rows:,} | {contestant} | {ms:.1f} | {ratios} |", flush=True)


def _accuracies(
    case: Case, contestants: Sequence[str], epochs: int, epsilon: float, rates: Sequence[float]
) -> None:
    for contestant in contestants:
        found = [(*_apart(train, case, contestant, epochs, epsilon, r), r) for r in rates]
        auc, noise, moved, rate = max(found)
        every = " ".join(f"{one[0]:.4f}" for one in found)
        cells = [f"{case.rows:,}", contestant, f"{noise:.3f}", f"{rate:g}", f"{auc:.4f}"]
        print(f"| {' | '.join(cells)} | {moved:.2%} | {every} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="100000", help="rows of each table; several with commas")
    parser.add_argument("--steps", default=",".join(CONTESTANTS), help="which contestants")
    parser.add_argument("--accuracy", action="store_true", help="train, in place of timing steps")
    for name in ("width", "batch", "examples", "optimizer", "threshold", "count_share", "noise"):
        default = getattr(Case(1), name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--rates", default="0.001,0.003,0.01", help="learning rates to choose from")
    options = vars(parser.parse_args(arguments))
    contestants = options.pop("steps").split(",")
    if unknown := set(contestants) - set(CONTESTANTS):
        parser.error(f"--steps must be of {','.join(CONTESTANTS)}. Received: {unknown}.")
    fields = {field.name for field in dataclasses.fields(Case)} - {"rows"}
    given = {name: value for name, value in options.items() if name in fields}
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, tfdp {tfdp.__version__}; {given}\n"
    )
    if options["accuracy"]:
        print(f"epsilon {options['epsilon']:g}, {options['epochs']} epochs\n")
        print("| rows | step | noise | rate | test AUC | rows changed | AUC at each rate |")
        print("|---|---|---|---|---|---|---|", flush=True)
    else:
        print("| rows | step | ms | × plain | peak MiB | × plain |")
        print("|---|---|---|---|---|---|", flush=True)
    for rows in map(int, options["rows"].split(",")):
        case = Case(rows, **given)
        if options["accuracy"]:
            rates = [float(rate) for rate in options["rates"].split(",")]
            _accuracies(case, contestants, options["epochs"], options["epsilon"], rates)
        else:
            _times(case, contestants, options["repeats"])


if __name__ == "__main__":
    main()
