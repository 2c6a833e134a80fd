"""Times a private training step beside plain Keras and beside other libraries.

    python -m benchmarks.step --model mnist_cnn --batch 256 2048
    python -m benchmarks.step --model mnist_cnn --batch 32 256 2048 --user
    python -m benchmarks.step --model mnist_cnn --batch 256 --user --keras 3

Prints a Markdown table. Contestants have the same network, rows and batch size, and take turns, so
that a noisy machine disturbs all of them: plain Keras and tfdp in one process, contestants of other
frameworks each in its own. Memory and the first step are measured in processes of their own. Those
that are not installed get a row that says so: with `--peer_python`, PyTorch, Opacus, JAX and
JAX-Privacy are looked for in another Python. With `--user`, `fit` on Poisson batches of expected
size B is timed beside plain `fit` at B, sampling included, in turns within one process: see
`benchmarks.user`. With `--mixed_bfloat16`, layers of both compute in bfloat16.
"""

import argparse
import sys

from benchmarks import report
from benchmarks.contestants import CONTESTANTS, DEFAULT
from benchmarks.problems import L2_NORM_CLIP, NOISE_MULTIPLIER, PROBLEMS, problem
from benchmarks.settings import StepSettings
from benchmarks.turns import Measurement, Rounds, plan

NOTES = """- Random rows, {batches}. Private steps clip to norm \
{clip:g}, noise multiplier {noise:g}.
- Keras, tfdp and TF-Privacy run through `model.fit`{jit}; PyTorch and Opacus in a training loop;
  JAX and JAX-Privacy as one compiled step.
- Medians and quartiles of {repeats} turns (of at most 3 single steps where steps are slow); the
  first step includes tracing and compilation.
- Peak: most resident memory of the process, its libraries included; before: just before the first
  step, with model and rows in memory."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=_network,
        default="mnist_cnn",
        help=f"one of {', '.join(PROBLEMS)}, or mlp_WIDTH: two hidden layers",
    )
    parser.add_argument("--batch", type=_positive, nargs="+", default=[256], help="rows per step")
    parser.add_argument("--repeats", type=_positive, default=15, help="turns of each")
    parser.add_argument(
        "--turn_seconds", type=float, default=0.5, help="about how long a turn takes"
    )
    parser.add_argument(
        "--contestants",
        default=",".join(DEFAULT),
        help=f"comma-separated, out of {', '.join(CONTESTANTS)}; by default all without "
        "Philox, Adam or signs",
    )
    parser.add_argument(
        "--peer_python", default=sys.executable, help="Python that has Opacus and JAX-Privacy"
    )
    parser.add_argument(
        "--dataset_size", type=_positive, help="draw Poisson batches out of so many rows"
    )
    parser.add_argument(
        "--user", action="store_true", help="`fit` on Poisson batches beside plain `fit`"
    )
    parser.add_argument(
        "--keras", type=int, choices=(2, 3), default=2, help="version of Keras that tfdp trains"
    )
    parser.add_argument("--jit_compile", action="store_true", help="Keras steps compiled by XLA")
    parser.add_argument(
        "--mixed_bfloat16", action="store_true", help="layers that compute in bfloat16 (--user)"
    )
    parser.add_argument(
        "--slow_batch", type=int, default=256, help="largest batch that TF-Privacy is run at"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, help="longest wait for one contestant, in seconds"
    )
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--plot", help="picture to write")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.contestants.split(",") if name not in CONTESTANTS]
    if unknown:
        parser.error(f"--contestants must be out of {', '.join(CONTESTANTS)}: {unknown}")
    if options.mixed_bfloat16 and not options.user:
        parser.error("--mixed_bfloat16 needs --user")
    return options


def _network(name: str) -> str:
    try:
        problem(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return value


def measure(options: argparse.Namespace) -> list[Measurement]:
    """Measures every contestant at every batch size."""
    rounds = Rounds(options.repeats, options.turn_seconds, options.peer_python, options.timeout)
    done: list[Measurement] = []
    for batch in options.batch:
        settings = StepSettings(
            batch,
            jit_compile=options.jit_compile,
            dataset_size=options.dataset_size,
            keras=options.keras,
        )
        measurements = plan(options.contestants.split(","), options.model, settings)
        for m in measurements:
            if CONTESTANTS[m.contestant].slow and batch > options.slow_batch:
                m.reason = f"not run: slow; --slow_batch {batch} runs it"
        rounds.measure(measurements)
        done += measurements
    return done


def _as_users(options: argparse.Namespace) -> str:
    """Measures `fit` as users call it; returns the text to print."""
    from benchmarks import user  # Imports TensorFlow, which the workers import otherwise.
    from benchmarks.keras_steps import versions
    from experiments.front_ends import front_end

    if options.mixed_bfloat16:
        front_end(options.keras).keras.mixed_precision.set_global_policy("mixed_bfloat16")
    size = options.dataset_size or 60_000
    if size < 2 * max(options.batch):
        raise SystemExit(f"--dataset_size must be two batches at least. Received: {size}")
    results = {}
    for batch in options.batch:
        arguments = (batch, options.repeats, options.turn_seconds, size, options.jit_compile)
        results[batch] = user.measure(problem(options.model), *arguments, options.keras)
    ran_with = ", ".join(f"{name} {version}" for name, version in versions(options.keras).items())
    return (
        f"Network `{options.model}`, {problem(options.model).parameters:,} parameters\n\n"
        f"{user.table(results)}\n\n{ran_with}; {report.machine()}\n- Random rows, "
        f"{size:,} examples; {options.repeats} turns of about {options.turn_seconds:g} s, each one "
        "`fit`, without its start and end; medians of ratios turn by turn, and quartiles."
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    options = parse(arguments)
    if options.user:
        print(_as_users(options), flush=True)
        return
    done = measure(options)
    parameters = problem(options.model).parameters
    notes = NOTES.format(
        batches=f"in {StepSettings.batches} batches that are taken in turn"
        if options.dataset_size is None
        else f"in Poisson batches out of {options.dataset_size:,}",
        clip=L2_NORM_CLIP,
        noise=NOISE_MULTIPLIER,
        jit=" with jit_compile=True" if options.jit_compile else "",
        repeats=options.repeats,
    )
    print(f"Network `{options.model}`, {parameters:,} parameters\n")
    print(f"{report.step_table(done)}\n\n{report.ratio_table(done)}\n")
    print(f"{report.versions(done)}\n{notes}", flush=True)
    if options.output:
        paths = ("peer_python", "output", "plot")
        chosen = {name: value for name, value in vars(options).items() if name not in paths}
        report.write_json(options.output, chosen, done)
    if options.plot:
        report.plot_steps(options.plot, done)


if __name__ == "__main__":
    main()
