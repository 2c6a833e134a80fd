"""Compares correlated noise with independent noise, with sampling and in passes over the data.

    python -m experiments.correlated_noise
    python -m experiments.correlated_noise --dataset=mnist --data_dir=... --epochs=3 \
        --expected_batch_size=512 --epsilons=1,4,16 --plot=docs/correlated_noise.png
    python -m experiments.correlated_noise --passes=1,4,10 --pass_steps=234

For each epsilon and each kind of noise, a network is trained by DP-SGD with each learning rate of a
grid, on the same number of trials; the rate with the best mean accuracy on held-out training
examples is reported, with the standard deviation over the seeds. The test set is not touched.

The kinds: Poisson batches with independent noise (DP-SGD); cyclic Poisson batches with what
`tfdp.calibrate_correlated_noise` finds best; passes over the data, without sampling, with
independent noise; and such passes with correlated noise.

With `--passes` nothing is trained: bands and buffers are compared by how far their noise moves a
weight, in passes over the data.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import statistics
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure

import tfdp
from experiments import cli, datasets, networks
from experiments.output import markdown, save
from experiments.settings import RefusedError, positive_numbers
from tfdp import correlated_noise

_KINDS = (
    "Poisson, independent",
    "cyclic Poisson, correlated",
    "passes, independent",
    "passes, correlated",
)
_CLIP = 1.0


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    names = [name for name in datasets.DATASETS if name in datasets.IMAGES]
    flags.DEFINE_enum("dataset", "digits", names, "Data set.", flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    for name, default, text in (
        ("epochs", 4, "Epochs."),
        ("expected_batch_size", 64, "Expected batch size."),
        ("seeds", 3, "Runs of each setting."),
        ("validation_examples", 400, "Training examples that are held out."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)
    text = "Momentum of DP-SGD."
    flags.DEFINE_float("momentum", 0.9, text, 0.0, 0.999, flag_values=values)
    flags.DEFINE_list("epsilons", ["1", "4", "16"], "Budgets.", flag_values=values)
    flags.DEFINE_float("delta", 1e-5, "Delta.", 1e-12, 0.1, flag_values=values)
    text = "Learning rates that are tried."
    flags.DEFINE_list("learning_rates", ["0.05", "0.1", "0.2", "0.4"], text, flag_values=values)
    flags.DEFINE_string("plot", None, "Picture to write.", flag_values=values)
    text = "Numbers of passes, to compare the errors of bands and buffers in place of trainings."
    flags.DEFINE_list("passes", [], text, flag_values=values)
    text = "Steps of a pass, with --passes."
    flags.DEFINE_integer("pass_steps", 234, text, 2, 10**4, flag_values=values)


def plan_of(kind: str, size: int, epsilon: float, values: flags.FlagValues):
    """Returns the cycle length, the noise multiplier and the correlation of a kind of noise."""
    batch, epochs = values.expected_batch_size, values.epochs
    steps = epochs * max(1, round(size / batch))
    whole = size // batch
    budget = {"target_epsilon": epsilon, "delta": values.delta}
    length = {_KINDS[0]: 1, _KINDS[1]: None}.get(kind, whole)
    if kind.endswith("independent"):
        noise = tfdp.calibrate_noise_multiplier(
            **budget,
            steps=-(-steps // length),
            sampling_probability=length * batch / size,
            truncation_probability=1e-70,
        )
        return length, noise, None
    plan = tfdp.calibrate_correlated_noise(
        **budget,
        steps=steps,
        dataset_size=size,
        expected_batch_size=batch,
        momentum=values.momentum,
        cycle_length=length,
    )
    return plan.cycle_length, plan.noise_multiplier, plan.noise_correlation


def accuracy(data: datasets.Data, plan: tuple, rate: float, seed: int, values) -> float:
    """Trains once, and returns the accuracy on held-out examples."""
    length, noise, correlation = plan
    tf.keras.utils.set_random_seed(seed)
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y),
        expected_batch_size=values.expected_batch_size,
        cycle_length=length,
    )
    model = networks.NETWORKS[values.dataset](networks.make_activation("tanh"))
    optimizer = tfdp.DPSGD(
        l2_norm_clip=_CLIP,
        noise_multiplier=noise,
        noise_correlation=correlation,
        sampling=batches.sampling,
        learning_rate=rate,
        momentum=values.momentum,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(batches, epochs=values.epochs, verbose=0)
    logits = model.predict(data.eval_x, batch_size=1000, verbose=0)
    return 100 * float(np.mean(logits.argmax(axis=-1) == data.eval_y))


def compare(values: flags.FlagValues) -> list[tuple[float, str, tuple, float, list[float]]]:
    """Trains everything; returns epsilon, kind, plan, best rate and accuracies of each row."""
    data = datasets.load(
        values.dataset,
        data_dir=values.data_dir,
        eval_split="validation",
        validation_examples=values.validation_examples,
    )
    if values.expected_batch_size > data.size:
        raise RefusedError(
            f"--expected_batch_size must be at most {data.size}, the number of examples. Received: "
            f"{values.expected_batch_size}."
        )
    rows = []
    for epsilon in positive_numbers("epsilons", values.epsilons):
        for kind in _KINDS:
            plan = plan_of(kind, data.size, epsilon, values)
            found = {
                rate: [accuracy(data, plan, rate, seed, values) for seed in range(values.seeds)]
                for rate in positive_numbers("learning_rates", values.learning_rates)
            }
            best = max(found, key=lambda rate: statistics.fmean(found[rate]))
            rows.append((epsilon, kind, plan, best, found[best]))
            logging.info("epsilon %g, %s: %s", epsilon, kind, found)
    return rows


def table(rows: Sequence[tuple]) -> str:
    """Returns the rows as a Markdown table."""
    titles = ["epsilon", "batches and noise", "cycle", "bands", "noise multiplier", "learning rate"]
    lines = []
    for epsilon, kind, (length, noise, correlation), rate, runs in rows:
        spread = statistics.stdev(runs) if len(runs) > 1 else 0.0
        size = "1" if correlation is None else f"{correlation.vectors + 1}"
        if isinstance(correlation, tfdp.BufferedNoise):
            size = f"{correlation.vectors} buffers"
        numbers = [f"{epsilon:g}", kind, str(length), size, f"{noise:.3g}", f"{rate:g}"]
        lines.append([*numbers, f"{statistics.fmean(runs):.2f} ({spread:.2f})"])
    return markdown([*titles, "held-out accuracy %"], lines)


def error_table(values: flags.FlagValues) -> str:
    """Returns a Markdown table of the errors of bands and buffers, one row for each memory."""
    length = values.pass_steps
    passes = []
    for number in values.passes:
        if not (number.isdecimal() and 1 <= int(number) * length <= 10**6):
            raise RefusedError(
                "--passes must be positive integers, of at most 10^6 steps together. Received: "
                f"{number!r}."
            )
        passes.append(int(number))
    bands = sorted({1, min(64, length), min(correlated_noise.MOST_BANDS, length)})
    rows = []
    for size in bands:
        found = [
            tfdp.BandedNoise.optimal(bands=size, steps=count * length).standard_error(
                count * length
            )
            for count in passes
        ]
        rows.append((f"{size} bands" if size > 1 else "independent", size - 1, found))
    for size in (1, 2, 3, 4, 6):
        found = [
            tfdp.BufferedNoise.optimal(
                cycle_length=length, cycles=count, buffers=size
            ).standard_error(count * length)
            for count in passes
        ]
        rows.append((f"{size} buffer{'s' * (size > 1)}", size, found))
    titles = ["noise", "vectors in memory", *(f"error in {n} pass{'es' * (n > 1)}" for n in passes)]
    return markdown(titles, [[name, str(n), *(f"{e:.3f}" for e in es)] for name, n, es in rows])


def draw(rows: Sequence[tuple], path: str) -> None:
    """Draws the accuracies against epsilon."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, style in zip(_KINDS, ("C0--", "C0-", "C1--", "C1-"), strict=True):
        own = [(row[0], row[4]) for row in rows if row[1] == kind]
        means = [statistics.fmean(runs) for _, runs in own]
        axes.plot([epsilon for epsilon, _ in own], means, style, marker=".", label=kind)
        for epsilon, runs in own:
            axes.plot([epsilon] * len(runs), runs, style[:2] + ".", alpha=0.3, markersize=3)
    axes.set(xscale="log", xlabel="epsilon", ylabel="held-out accuracy %")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("correlated_noise", argv, RefusedError, datasets.DataError):
        if flags.FLAGS.passes:
            print(error_table(flags.FLAGS))
            return
        rows = compare(flags.FLAGS)
        print(table(rows))
        if flags.FLAGS.plot:
            draw(rows, flags.FLAGS.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
