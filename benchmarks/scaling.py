"""Growth of a step's time and memory with the batch, the model and the logical batch.

    python -m benchmarks.scaling --what batch parameters logical

Every point is measured in a process of its own; the contestants of one point take turns.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from benchmarks import report
from benchmarks.contestants import CONTESTANTS
from benchmarks.problems import mlp_parameters, mlp_width
from benchmarks.settings import StepSettings
from benchmarks.turns import Measurement, Rounds, plan

CONTESTANTS_BY_DEFAULT = ("keras_sgd", "tfdp_one_pass", "tfdp_vectorized")
BATCH, PARAMETERS, LOGICAL = "batch", "parameters", "logical"
_TITLES = {
    BATCH: ("Physical batch, network `mnist_cnn`", "rows"),
    PARAMETERS: ("Number of parameters, two hidden layers, {model_batch} rows", "parameters"),
    LOGICAL: (
        "Logical batch of {logical:,} examples expected, by Poisson sampling, in chunks; "
        "network `mnist_cnn`",
        "rows in memory at a time",
    ),
}
_PLAIN = "plain Keras SGD, a step on so many rows"
_LOGICAL_STEP = "tfdp.DPSGD, a logical step"
# Examples that Poisson batches are drawn from, in batches.
_DATASET_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement and where it stands in the table.

    Attributes:
      what: "batch", "parameters" or "logical".
      x: The number that grows.
      title: Name of the step.
      measurement: The measurement.
    """

    what: str
    x: int
    title: str
    measurement: Measurement


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=_TITLES, default=list(_TITLES))
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 256, 1024, 4096, 16_384], help="rows"
    )
    parser.add_argument(
        "--parameters", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7], help="about so many"
    )
    parser.add_argument("--model_batch", type=int, default=256, help="rows for --parameters")
    parser.add_argument("--logical", type=int, default=8192, help="examples of a logical batch")
    parser.add_argument("--chunk", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--contestants", default=",".join(CONTESTANTS_BY_DEFAULT))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--turn_seconds", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=600, help="longest wait, in seconds")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--plot", help="picture to write")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.contestants.split(",") if name not in CONTESTANTS]
    if unknown:
        parser.error(f"--contestants must be out of {', '.join(CONTESTANTS)}: {unknown}")
    return options


def plan_points(options: argparse.Namespace) -> list[list[Point]]:
    """Returns the points to measure, in groups that take turns."""
    names = options.contestants.split(",")
    groups = []
    if BATCH in options.what:
        for batch in options.batch:
            planned = plan(names, "mnist_cnn", StepSettings(batch, batches=1))
            groups.append([_point(BATCH, batch, m) for m in planned])
    if PARAMETERS in options.what:
        for parameters in options.parameters:
            width = mlp_width(round(parameters))
            planned = plan(names, f"mlp_{width}", StepSettings(options.model_batch))
            groups.append([_point(PARAMETERS, mlp_parameters(width), m) for m in planned])
    if LOGICAL in options.what:
        groups += _logical_points(options.logical, options.chunk)
    return groups


def _logical_points(logical: int, chunks: Sequence[int]) -> list[list[Point]]:
    """Logical batches in chunks, and whole; beside them plain steps on as many rows."""
    groups = []
    for chunk in chunks:
        settings = StepSettings(
            logical, dataset_size=_DATASET_BATCHES * logical, chunk_size=min(chunk, logical)
        )
        private = plan(["tfdp_one_pass"], "mnist_cnn", settings)[0]
        plain = plan(["keras_sgd"], "mnist_cnn", StepSettings(chunk, batches=1))[0]
        groups.append(
            [Point(LOGICAL, chunk, _PLAIN, plain), Point(LOGICAL, chunk, _LOGICAL_STEP, private)]
        )
    whole = StepSettings(logical, dataset_size=_DATASET_BATCHES * logical)
    plain, private = plan(["keras_sgd", "tfdp_one_pass"], "mnist_cnn", whole)
    groups.append(
        [Point(LOGICAL, logical, _PLAIN, plain), Point(LOGICAL, logical, _LOGICAL_STEP, private)]
    )
    return groups


def _point(what: str, x: int, measurement: Measurement) -> Point:
    return Point(what, x, CONTESTANTS[measurement.contestant].title, measurement)


def table(groups: Sequence[Sequence[Point]], what: str) -> str:
    """Returns a Markdown table of one kind of points."""
    plain_title = "plain, whole batch" if what == LOGICAL else "plain"
    lines = [
        f"| {_TITLES[what][1]} | step | median ms | quartiles ms | × {plain_title} | peak MiB | "
        "peak − before MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    chosen = [group for group in groups if group[0].what == what]
    for group in chosen:
        # A logical step is compared with a plain step on as many examples, which comes last.
        measured = [point.measurement for point in (chosen[-1] if what == LOGICAL else group)]
        plain = next((m for m in measured if m.contestant == "keras_sgd"), None)
        for point in group:
            cells = [f"{point.x:,}", point.title, *_cells(point.measurement, plain)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(m: Measurement, plain: Measurement | None) -> list[str]:
    if not m.seconds:
        return [m.reason or "not measured", *[report.NOTHING] * 4]
    low, median, high = (1e3 * value for value in m.quartiles)
    return [
        f"{median:.1f}",
        f"{low:.1f} to {high:.1f}",
        report.ratio(m, plain),
        f"{m.peak:.0f}",
        f"{m.growth:.0f}",
    ]


def plot(path: str, points: Sequence[Point]) -> None:
    """Draws time and memory against what grows, a row of two pictures for each."""
    from matplotlib import ticker

    kinds = [what for what in _TITLES if any(p.what == what for p in points)]
    figure, axes = report.new_figure(len(kinds), 2, 11, 3.6 * len(kinds))
    for row, what in zip(axes, kinds, strict=True):
        shown = [p for p in points if p.what == what and p.measurement.seconds]
        for title in dict.fromkeys(p.title for p in shown):
            line = [p for p in shown if p.title == title]
            x = [p.x for p in line]
            row[0].plot(x, [1e3 * p.measurement.median for p in line], "o-", label=title)
            row[1].plot(x, [p.measurement.growth for p in line], "o-", label=title)
        row[0].set_yscale("log", subs=())
        row[0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        row[0].yaxis.set_major_formatter("{x:,g}")
        row[0].set_ylabel("ms per step")
        row[0].legend(fontsize=8, frameon=False)
        row[1].set_ylim(bottom=0)
        row[1].set_ylabel("peak − before, MiB")
        for one in row:
            one.set_xscale("log")
            one.set_xticks(sorted({p.x for p in shown}))
            one.xaxis.set_major_formatter("{x:,.0f}")
            one.minorticks_off()
            one.set_xlabel(_TITLES[what][1])
            one.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    options = parse(arguments)
    rounds = Rounds(options.repeats, options.turn_seconds, timeout=options.timeout)
    groups = plan_points(options)
    for group in groups:
        rounds.measure([point.measurement for point in group])
    points = [point for group in groups for point in group]
    for what in options.what:
        title = _TITLES[what][0].format(**vars(options))
        print(f"{title}\n\n{table(groups, what)}\n", flush=True)
    print(report.versions([point.measurement for point in points]), flush=True)
    if options.output:
        chosen = {k: v for k, v in vars(options).items() if k not in ("output", "plot")}
        report.write_json(options.output, chosen, [point.measurement for point in points])
    if options.plot:
        plot(options.plot, points)


if __name__ == "__main__":
    main()
