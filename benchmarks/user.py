"""Times `fit` as users call it: on Poisson batches of expected size B, beside plain `fit` at B.

What changes between the two is the optimizer and the batches; sampling and gathering are part of
the time, the start and the end of `fit` are not (but in "the same rows"). All trainings take turns
in one process, so that a noisy machine disturbs all of them.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfdp
from benchmarks import networks
from benchmarks.keras_steps import KerasSteps, make_optimizer
from benchmarks.problems import Problem
from benchmarks.settings import StepSettings
from benchmarks.together import Turn, timed, timed_fit
from experiments.front_ends import front_end
from tfdp.base import devices

_FEW, _SHORTEST = 8, 1e-4  # Steps that tell how long one takes, and the least it can.
PLAIN, PRIVATE, SAME_ROWS = "keras_sgd", "tfdp_one_pass", "same rows"


Result = dict[str, list[Turn]]
Trainings = dict[str, Callable[[int], Turn]]


def measure(
    problem: Problem,
    batch: int,
    repeats: int,
    turn_seconds: float,
    dataset_size: int,
    jit: bool,
    keras: int = 2,
) -> Result:
    """Measures the trainings at one batch size.

    Args:
      problem: The model and its data.
      batch: Rows of a plain batch; expected examples of a private one.
      repeats: Turns of each.
      turn_seconds: About how long a turn takes: one call of `fit`.
      dataset_size: Number of examples.
      jit: Whether XLA compiles the steps.
      keras: Version of Keras, 2 or 3.

    Returns:
      The turns of each training.
    """
    trainings = _trainings(problem, batch, dataset_size, jit, keras)
    return take_turns(trainings, repeats, turn_seconds, dataset_size // batch)


def take_turns(
    trainings: Trainings, repeats: int, turn_seconds: float, steps_per_epoch: int
) -> Result:
    """Times trainings, which take turns.

    Args:
      trainings: Functions by name that time so many steps, at least two.
      repeats: Turns of each.
      turn_seconds: About how long a turn of the slowest takes, the start of `fit` apart.
      steps_per_epoch: The most steps of a turn.

    Returns:
      The turns of each training.
    """
    few = min(_FEW, steps_per_epoch)
    for train in trainings.values():
        train(few)  # The first traces, and shapes are new in the next ones.
    slowest = max(train(few).wall for train in trainings.values())
    steps = max(2, min(steps_per_epoch, round(turn_seconds / max(slowest, _SHORTEST))))
    result: Result = {name: [] for name in trainings}
    for _ in range(repeats):
        for name, train in trainings.items():
            result[name].append(train(steps))
    return result


def _trainings(problem: Problem, batch: int, dataset_size: int, jit: bool, keras: int) -> Trainings:
    x, y = problem.rows(dataset_size)
    plain = _compiled(problem, make_optimizer(PLAIN, batch, keras=keras), jit, keras)
    few_sizes = jit or devices.has_gpu()
    batches = tfdp.data.poisson_batches(
        (x, y), expected_batch_size=batch, padding="buckets" if few_sizes else "none"
    )
    optimizer = make_optimizer(PRIVATE, batch, batches.sampling, keras)
    private = _compiled(problem, optimizer, jit, keras)
    repeated = batches.repeat()
    fixed = KerasSteps(PRIVATE, problem, StepSettings(batch, jit_compile=jit, keras=keras))
    return {
        **fits(plain, private, (x, y), repeated, batch, front_end(keras).keras),
        SAME_ROWS: lambda steps: timed(fixed.run, steps),
    }


def fits(plain: Any, private: Any, data: Any, batches: Any, batch: int, keras: Any) -> Trainings:
    """Returns `fit` of two compiled models, timed.

    Args:
      plain: Is trained on rows of `data`, in batches of fixed size.
      private: Is trained on `batches`.
      data: Arrays `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
      batches: Poisson batches, repeated.
      batch: Rows of a batch of `data`.
      keras: The package of the models.
    """

    def fit(steps: int) -> Turn:
        options = {**first_rows(data, steps * batch), "batch_size": batch, "verbose": 0}
        return timed_fit(lambda clock: plain.fit(callbacks=[clock], **options), keras)

    def fit_privately(steps: int) -> Turn:
        options = {"steps_per_epoch": steps, "verbose": 0}
        return timed_fit(lambda clock: private.fit(batches, callbacks=[clock], **options), keras)

    return {PLAIN: fit, PRIVATE: fit_privately}


def first_rows(data: Sequence[Any], count: int) -> dict[str, Any]:
    """Returns the first rows of `(x,)`, `(x, y)` or `(x, y, weights)`, as arguments of `fit`."""
    some = tf.nest.map_structure(lambda array: array[:count], tuple(data))
    return dict(zip(("x", "y", "sample_weight"), some, strict=False))


def _compiled(problem: Problem, optimizer: Any, jit: bool, keras: int) -> Any:
    package = front_end(keras).keras
    model = networks.build(problem, package)
    if jit:
        networks.let_xla_compile(model)
    loss = package.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit)
    return model


def table(results: dict[int, Result]) -> str:
    """Returns a Markdown table of the medians, and of the medians of the ratios turn by turn.

    Args:
      results: Results of `measure` by batch size.
    """
    lines = [
        "| B | Keras `fit`, ms a step | tfdp `fit` on Poisson batches | ratio | "
        "ratio of CPU time | the same rows, ratio of CPU time |",
        "|---|---|---|---|---|---|",
    ]
    for batch, result in results.items():
        cells = [
            milliseconds(result, PLAIN),
            milliseconds(result, PRIVATE),
            ratio(result, PRIVATE, "wall"),
            ratio(result, PRIVATE, "cpu"),
            ratio(result, SAME_ROWS, "cpu"),
        ]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(result: Result, name: str) -> str:
    """Returns the median time of a step on the clock."""
    return f"{1e3 * statistics.median(turn.wall for turn in result[name]):.1f}"


def ratio(result: Result, name: str, clock: str) -> str:
    """Returns the median, and the quartiles, of the ratios to plain steps, turn by turn.

    Args:
      result: The turns.
      name: Name of the training.
      clock: "wall" or "cpu".
    """
    pairs: Sequence[tuple[Turn, Turn]] = list(zip(result[name], result[PLAIN], strict=True))
    ratios = [getattr(turn, clock) / getattr(plain, clock) for turn, plain in pairs]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
