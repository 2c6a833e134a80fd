"""Accuracy of DPSUR against its parameters, at a fixed valid epsilon.

    python -m experiments.dpsur.sweep --dataset=fashion_mnist --data_dir=... --parameter=spread
    python -m experiments.dpsur.sweep --parameter=learning_rate --values=0.05,0.15,0.5 --seeds=1,2,3

Every point is a run of experiments.classify: the noise of the update is calibrated to
--target_epsilon by the conditional bound, so that a test that costs more leaves noisier updates.
DP-SGD, tuned by the same rates, is drawn beside it. `spread` is new: the ratio B / A of the largest
to the least probability of acceptance is all of (threshold, validation_noise_multiplier) that the
bound charges for; the sweep goes over it with B = 0.99, where few attempts are wasted.

Takes the flags of experiments.classify, too. Writes sweep.csv and sweep.png to --output_dir; runs
that are found there are not repeated. Unless --eval_split=test, accuracy is that on held-out
training examples, on which parameters are to be chosen.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import csv
import dataclasses
import io
import statistics
from pathlib import Path

from absl import flags, logging
from matplotlib.figure import Figure

from experiments import classify, cli, datasets
from experiments.report import RunFolder
from experiments.settings import SELECTIVE_FLAGS, SELECTIVE_METHODS, RefusedError, Settings, resolve
from experiments.training import Training
from tfdp.accounting import parameters_for_acceptance

LARGEST_ACCEPTANCE = 0.99

# The values of the paper's figure 9, and of what follows it.
VALUES: dict[str, list[float]] = {
    "learning_rate": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
    "validation_noise_multiplier": [0.8, 1.0, 1.3, 2.0, 4.0],
    "validation_clip": [1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
    "threshold": [-2.0, -1.0, 0.0, 1.0],
    "validation_batch_size": [16, 64, 256, 1024],
    "spread": [1.2, 1.5, 2.0, 4.0],
}
# What the paper's rows have; flags replace it.
PAPER = {"validation_noise_multiplier": 1.3, "threshold": -1.0, "validation_batch_size": 256}


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
      method: Method of `experiments.classify`.
      value: Value of the swept parameter; None for a run that does not depend on it.
      settings: Settings of the run.
    """

    method: str
    value: float | None
    settings: Settings

    @property
    def name(self) -> str:
        """Name of its folder."""
        value = "" if self.value is None else f"_{self.value:g}"
        return f"{self.method}{value}_seed{self.settings.seed}"


def points(given: dict, parameter: str, values: list[float], seeds: list[int]) -> list[Point]:
    """Lists the runs of a sweep: of the selective method, and of its base method.

    Args:
      given: Flags of `experiments.classify` that were given, by name.
      parameter: One of `VALUES`.
      values: Its values.
      seeds: Seeds of weights and sampling.

    Raises:
      RefusedError: Values that do not go together.
    """
    below = {name: value for name, value in given.items() if name not in SELECTIVE_FLAGS}
    below["method"] = given["method"].replace("dpsur_", "dp")
    rates = values if parameter == "learning_rate" else [None]
    done = []
    for seed in seeds:
        for rate in rates:
            change = {} if rate is None else {"learning_rate": rate}
            settings = resolve({**below, **change, "seed": seed})
            done.append(Point(below["method"], rate, settings))
        for value in values:
            settings = resolve({**PAPER, **given, **_flags(parameter, value), "seed": seed})
            done.append(Point(given["method"], value, settings))
    return done


def _flags(parameter: str, value: float) -> dict[str, float]:
    if parameter == "validation_batch_size" and not (value >= 1 and value == int(value)):
        raise RefusedError(f"--values must be positive integers. Received: {value:g}.")
    if parameter not in ("threshold", "spread") and not 0 < value < float("inf"):
        raise RefusedError(f"--values must be positive, finite numbers. Received: {value:g}.")
    if parameter == "spread":
        if not value > 1:
            raise RefusedError(f"--values of the spread must be above 1. Received: {value:g}.")
        least = LARGEST_ACCEPTANCE / value
        noise, threshold = parameters_for_acceptance(least, LARGEST_ACCEPTANCE)
        return {"validation_noise_multiplier": noise, "threshold": threshold}
    return {parameter: int(value) if parameter == "validation_batch_size" else value}


def run(todo: list[Point], data: datasets.Data, folder: Path) -> list[dict]:
    """Makes the runs that are not in `folder` yet; returns a row for each that can be made."""
    rows = []
    for point in todo:
        place = RunFolder(folder / point.name)
        place.check(point.settings)
        try:
            result = place.result() or Training(point.settings, data, place).run()
        except RefusedError as refusal:  # A test may cost more than there is, whatever the noise.
            print(f"{point.name}: left out. {refusal}", flush=True)
            continue
        print(f"{point.name}: {result['accuracy']:.2%}", flush=True)
        rows.append(
            {
                "method": point.method,
                "value": point.value,
                "seed": point.settings.seed,
                "accuracy": result["accuracy"],
                "epsilon": result["epsilon"],
                "noise_multiplier": result["noise_multiplier"],
            }
        )
    return rows


def means(rows: list[dict]) -> dict[str, list[tuple[float | None, float, float]]]:
    """Returns, by method, value, mean and standard deviation of the accuracy in percent."""
    found: dict[str, list] = {}
    for method, value in dict.fromkeys((row["method"], row["value"]) for row in rows):
        same = [r for r in rows if (r["method"], r["value"]) == (method, value)]
        accuracies = [100 * row["accuracy"] for row in same]
        deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        found.setdefault(method, []).append((value, statistics.mean(accuracies), deviation))
    return found


def draw(rows: list[dict], parameter: str, settings: Settings) -> Figure:
    """Accuracy against the parameter, with the method without selection beside it."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    by_method = means(rows)
    for color, method in zip(("0.4", "tab:blue"), by_method, strict=False):
        series = by_method[method]
        heights, deviations = [p[1] for p in series], [p[2] for p in series]
        if series[0][0] is None:
            axes.axhspan(
                heights[0] - deviations[0], heights[0] + deviations[0], color=color, alpha=0.15
            )
            axes.axhline(heights[0], color=color, linestyle="--")
            place = (1, heights[0])
            transform = axes.get_yaxis_transform()
        else:
            xs = [p[0] for p in series]
            axes.errorbar(xs, heights, deviations, marker="o", capsize=3, color=color)
            place, transform = (xs[-1], heights[-1]), axes.transData
        axes.annotate(
            method,
            place,
            xycoords=transform,
            xytext=(-6 if series[0][0] is None else 6, 6),
            textcoords="offset points",
            ha="right" if series[0][0] is None else "left",
            color=color,
        )
    if all(row["value"] is None or row["value"] > 0 for row in rows):
        axes.set_xscale("log")
        values = sorted({row["value"] for row in rows if row["value"] is not None})
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    axes.set_xlabel("B / A: largest over least acceptance" if parameter == "spread" else parameter)
    axes.set_ylabel(f"{settings.eval_split} accuracy (%)")
    axes.set_title(
        f"{settings.dataset}, true ε = {settings.target_epsilon:g}, δ = {settings.delta:g}"
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    return figure


def table(rows: list[dict], parameter: str) -> str:
    """Returns the means as a Markdown table."""
    lines = [f"| method | {parameter} | accuracy % |", "|---|---|---|"]
    for method, series in means(rows).items():
        for value, mean, deviation in series:
            shown = "" if value is None else f"{value:g}"
            lines.append(f"| {method} | {shown} | {mean:.2f} ± {deviation:.2f} |")
    return "\n".join(lines)


def sweep(values: flags.FlagValues) -> list[dict]:
    """Does what the parsed flags ask for; returns the rows of `sweep.csv`.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    parameter = values["parameter"].value
    given = {name: values[name].value for name in Settings.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    if given["method"] not in SELECTIVE_METHODS:
        raise RefusedError(
            f"--method must be one of {', '.join(SELECTIVE_METHODS)}. Received: --method="
            f"{given['method']}."
        )
    swept = sorted(_numbers("values", values["values"].value)) or VALUES[parameter]
    seeds = [int(seed) for seed in _numbers("seeds", values["seeds"].value)]
    if not seeds or [str(seed) for seed in seeds] != values["seeds"].value:
        raise RefusedError(f"--seeds must be integers. Received: {values['seeds'].value}.")
    todo = points(given, parameter, swept, seeds)
    settings = todo[0].settings
    name = f"{settings.dataset}_{given['method']}_eps{settings.target_epsilon:g}_{parameter}"
    folder = Path(values["output_dir"].value or Path("results", "dpsur", "sweep", name))
    data = datasets.load(
        settings.dataset,
        data_dir=values["data_dir"].value,
        eval_split=settings.eval_split,
        validation_examples=settings.validation_examples or 0,
    )
    rows = run(todo, data, folder)
    if not rows:
        raise RefusedError("No run of the sweep can be made; see above.")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "sweep.csv").write_text(text.getvalue())
    draw(rows, parameter, settings).savefig(folder / "sweep.png", dpi=120)
    print(f"{table(rows, parameter)}\nsweep.csv, sweep.png: {folder}")
    return rows


def _numbers(name: str, texts: list[str] | None) -> list[float]:
    try:
        return [float(text) for text in texts or []]
    except ValueError as error:
        raise RefusedError(f"--{name} must be numbers. Received: --{name}={texts}.") from error


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the sweep and of `experiments.classify`, in `values`."""
    classify.define_flags(values)
    values.set_default("method", SELECTIVE_METHODS[0])
    values.set_default("eval_split", "validation")
    text = "What to sweep."
    flags.DEFINE_enum("parameter", "spread", list(VALUES), text, flag_values=values)
    text = "Its values, separated by commas. Default: by parameter."
    flags.DEFINE_list("values", None, text, flag_values=values)
    flags.DEFINE_list("seeds", ["1"], "Seeds of the runs at each value.", flag_values=values)


def main(argv: list[str]) -> None:
    """Runs what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("dpsur_sweep", argv, RefusedError, datasets.DataError):
        sweep(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)  # unless --verbosity: TensorFlow logs every checkpoint
    cli.run(main)
