"""Fine-tunes a network privately that was trained on other images, which are taken as public.

    python -m experiments.fine_tuning --data_dir=...
    python -m experiments.fine_tuning --data_dir=... --epsilons=0.5 --parts=adapters,head --rank=8

A network of Keras 3 is trained on --public without privacy, gets a new last layer, and is trained
on --dataset with DP-SGD: its head alone; the head and low-rank adapters (`enable_lora`) of the
other kernels; or all of it. Beside it, the same network from new weights. For each way and epsilon,
each learning rate is tried on a part of the training set; the best on the other part is then used
on all of it, with each seed, and measured on the test set.

A run that ended is a line of the record, and is not done again.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags, logging

import tfdp
from experiments import cli, datasets, networks, tuned_runs
from experiments.front_ends import front_end
from experiments.output import markdown
from experiments.settings import RefusedError, positive_numbers

NEW, WHOLE, ADAPTERS, HEAD = PARTS = ("new weights", "whole", "adapters", "head")
_CLIP, _MOMENTUM = 0.1, 0.9
_PUBLIC_EPOCHS, _PUBLIC_BATCH, _PUBLIC_RATE = 5, 128, 0.001


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    images = list(datasets.IMAGES)
    text = "Images that the network was trained on."
    flags.DEFINE_enum("public", "fashion_mnist", images, text, flag_values=values)
    text = "Private images, of the same size."
    flags.DEFINE_enum("dataset", "mnist", images, text, flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "What is trained privately."
    flags.DEFINE_list("parts", list(PARTS), text, flag_values=values)
    flags.DEFINE_integer("rank", 4, "Rank of the adapters.", lower_bound=1, flag_values=values)
    flags.DEFINE_list("epsilons", ["1"], "Budgets.", flag_values=values)
    text = "Learning rates that are tried."
    flags.DEFINE_list("learning_rates", ["1", "2", "4", "8"], text, flag_values=values)
    tuned_runs.define_flags(values, "results/fine_tuning.jsonl", seeds=3)
    values.set_default("epochs", 5)
    values.set_default("expected_batch_size", 1024)
    values.set_default("validation_examples", 10_000)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One private training, by all that decides it."""

    public: str
    dataset: str
    part: str
    rank: int
    epsilon: float
    delta: float


@functools.cache
def _data(dataset: str, data_dir: str | None, split: str, held_out: int) -> datasets.Data:
    return datasets.load(dataset, data_dir=data_dir, eval_split=split, validation_examples=held_out)


def network(dataset: str, keras: Any) -> Any:
    """Returns the network of a data set, with new weights."""
    return networks.NETWORKS[dataset](networks.make_activation("tanh", keras=keras), keras=keras)


@functools.cache
def _public_weights(public: str, data_dir: str | None, seed: int) -> list[np.ndarray]:
    """Returns weights that were trained on other images, without privacy."""
    keras, data = front_end(3).keras, _data(public, data_dir, tuned_runs.TEST, 0)
    keras.utils.set_random_seed(seed)
    model = network(public, keras)
    model.compile(
        keras.optimizers.Adam(_PUBLIC_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(data.train_x, data.train_y, _PUBLIC_BATCH, epochs=_PUBLIC_EPOCHS, verbose=0)
    return model.get_weights()


def prepared(run: Run, data_dir: str | None, keras: Any) -> Any:
    """Returns the network before it is trained privately."""
    model = network(run.dataset, keras)
    if run.part == NEW:
        return model
    *below, head = model.layers
    size = len(head.weights)
    learnt = _public_weights(run.public, data_dir, run.seed)[:-size]
    model.set_weights([*learnt, *model.get_weights()[-size:]])
    for layer in below:
        if run.part == ADAPTERS and layer.weights:
            layer.enable_lora(run.rank)
        elif run.part == HEAD:
            layer.trainable = False
    return model


def train(run: Run, data_dir: str | None) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of the ledger."""
    keras = front_end(3).keras
    data = _data(run.dataset, data_dir, run.split, run.validation_examples)
    run.check_size(data.size)
    keras.utils.set_random_seed(run.seed)
    return train_privately(prepared(run, data_dir, keras), run, data, _CLIP)


def train_privately(
    model: Any,
    run: Any,
    data: datasets.Data,
    clip: float,
    adam: bool = False,
    chunk_size: int | None = None,
) -> tuple[float, float]:
    """Trains a model of Keras 3 by DP-SGD with momentum, or DP-Adam.

    Args:
      model: A classifier, whose outputs are logits.
      run: Decides the training; `tuned_runs.Run` with an `epsilon` and a `delta`.
      data: What it is trained and evaluated on.
      clip: The largest norm of an example's gradient.
      adam: Whether it is DP-Adam.
      chunk_size: Rows that are in memory at a time; None: a batch.

    Returns:
      The accuracy in percent, and the epsilon of the ledger.
    """
    keras, private = (getattr(front_end(3), name) for name in ("keras", "private"))
    steps = run.epochs * max(1, round(data.size / run.expected_batch_size))
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y),
        expected_batch_size=run.expected_batch_size,
        steps_per_epoch=steps,
        chunk_size=chunk_size,
    )
    noise = tfdp.calibrate_noise_multiplier(
        target_epsilon=run.epsilon,
        delta=run.delta,
        dataset_size=data.size,
        expected_batch_size=run.expected_batch_size,
        steps=steps,
    )
    options = {"sampling": batches.sampling, "learning_rate": run.learning_rate}
    if adam:
        optimizer = private.DPAdam(clip, noise, **options)
    else:
        optimizer = private.DPSGD(clip, noise, momentum=_MOMENTUM, **options)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(batches, epochs=1, verbose=0)
    spent = optimizer.ledger.epsilon(run.delta).epsilon
    if spent > run.epsilon:
        raise RuntimeError(f"A run has an epsilon of {spent}: {run}.")
    return tuned_runs.accuracy_of(model, data.eval_x, data.eval_y), spent


def compare(values: flags.FlagValues) -> dict[tuple[str, float], tuned_runs.Tuned]:
    """Does the runs that are left; returns what was found, by part and epsilon."""
    for part in values.parts:
        if part not in PARTS:
            raise RefusedError(f"--parts must be among {list(PARTS)}. Received: {part}.")
    if datasets.IMAGES[values.public] != datasets.IMAGES[values.dataset]:
        raise RefusedError(
            "--public and --dataset must have images of one size. Received: "
            f"--public={values.public}, --dataset={values.dataset}."
        )
    epsilons = positive_numbers("epsilons", values.epsilons)
    rates = positive_numbers("learning_rates", values.learning_rates)
    runs = tuned_runs.Runs(values.record, Run, lambda run: train(run, values.data_dir))
    names = ("public", "dataset", "rank", "delta", "epochs", "expected_batch_size")
    given = {name: values[name].value for name in (*names, "validation_examples")}
    return {
        (part, epsilon): runs.tuned(
            functools.partial(Run, part=part, epsilon=epsilon, **given), rates, values.seeds
        )
        for part in values.parts
        for epsilon in epsilons
    }


def table(found: dict[tuple[str, float], tuned_runs.Tuned]) -> str:
    """Returns a Markdown table: a line for each part."""
    epsilons = list(dict.fromkeys(epsilon for _, epsilon in found))
    lines = []
    for part in dict.fromkeys(part for part, _ in found):
        cells = [part]
        for epsilon in epsilons:
            own = found[part, epsilon]
            cells += [own.text, f"{own.learning_rate:g}"]
        lines.append(cells)
    titles = ["trained"]
    for epsilon in epsilons:
        titles += [f"accuracy % at epsilon {epsilon:g}", "rate"]
    return markdown(titles, lines)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("fine_tuning", argv, RefusedError, datasets.DataError):
        print(table(compare(flags.FLAGS)))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
