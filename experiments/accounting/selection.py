"""The epsilon of a tuned run: the best of a random number of private runs.

    python -m experiments.accounting.selection
    python -m experiments.accounting.selection --run_epsilon=2 --means=3,100
    python -m experiments.accounting.selection --held_out

Prints a Markdown table for runs of --epochs epochs over --dataset_size examples, each of
--run_epsilon at --delta: the epsilon of the selection, by tfdp's bound and by Renyi DP alone; that
of publishing as many runs as the selection makes on average; and, if the selection itself has to
meet --run_epsilon, the epsilon of each run and how much more noise that takes. Scores cost nothing
here: they are computed on public data.

With --held_out, the noise multiplier of each run with which a selection of 5 runs (geometric) meets
several epsilons: with scores of private examples that may be trained on, too, of private ones that
are held out, and of public ones.
"""

from typing import Any

import dp_accounting
from absl import flags

from experiments import cli
from experiments.output import markdown, versions
from tfdp.accounting import (
    PrivacyLedger,
    Repetitions,
    calibrate_noise_multiplier,
    calibrate_private_selection,
    event_codec,
    private_selection,
)

_DISTRIBUTIONS = (
    ("logarithmic", None),
    ("negative_binomial", 0.5),
    ("geometric", None),
    ("poisson", None),
)
# Of --held_out: ten epochs of batches of 1,000, and the noise of a score.
_HELD_OUT: dict[str, Any] = {
    "delta": 1e-5,
    "steps": 590,
    "dataset_size": 59_000,
    "expected_batch_size": 1000,
}
_FIVE = Repetitions("geometric", 5)
_SCORE = dp_accounting.GaussianDpEvent(10.0)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Epsilon of one run."
    flags.DEFINE_float("run_epsilon", 1.0, text, lower_bound=1e-2, flag_values=values)
    flags.DEFINE_float("delta", 1e-5, "Delta.", flag_values=values)
    flags.DEFINE_integer("dataset_size", 60_000, "Training examples.", flag_values=values)
    flags.DEFINE_integer("batch_size", 256, "Expected number in a batch.", flag_values=values)
    flags.DEFINE_integer("epochs", 20, "Epochs of a run.", flag_values=values)
    text = "Print what scores of held-out examples cost, instead."
    flags.DEFINE_bool("held_out", False, text, flag_values=values)
    flags.DEFINE_list("means", ["5", "10", "30"], "Mean numbers of runs.", flag_values=values)


def rows(values: flags.FlagValues) -> list[list[str]]:
    """Returns a row for each mean and distribution."""
    q = values.batch_size / values.dataset_size
    steps = round(values.epochs / q)
    budget = {
        "target_epsilon": values.run_epsilon,
        "delta": values.delta,
        "steps": steps,
        "sampling_probability": q,
    }

    def run(noise: float) -> PrivacyLedger:
        ledger = PrivacyLedger()
        ledger.record(event_codec.sampled_gaussian(q, noise), steps)
        return ledger

    noise = calibrate_noise_multiplier(**budget)
    found = []
    for mean in map(float, values.means):
        naive = PrivacyLedger()
        naive.record(event_codec.sampled_gaussian(q, noise), round(mean * steps))
        for name, shape in _DISTRIBUTIONS:
            repetitions = Repetitions(name, mean, shape)
            tuned = private_selection(run(noise), repetitions).epsilon(values.delta)
            needed = calibrate_private_selection(repetitions, **budget)
            at_least_ten = 1 - sum(repetitions.probability(k) for k in range(10))
            found.append(
                [
                    f"{mean:g}",
                    name.replace("_", " ") + (f", {shape:g}" if shape else ""),
                    f"{100 * repetitions.probability(0) + 100 * repetitions.probability(1):.1f}",
                    f"{100 * at_least_ten:.1f}",
                    f"{tuned.epsilon:.3f}",
                    f"{tuned.by_accountant['RDP']:.3f}",
                    f"{naive.epsilon(values.delta).epsilon:.3f}",
                    f"{run(needed).epsilon(values.delta).epsilon:.3f}",
                    f"{needed / noise:.2f}",
                ]
            )
    return found


def held_out_rows(epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)) -> list[list[str]]:
    """Returns a row for each epsilon: noise multipliers of a run, by the scores."""
    scores: tuple[dict[str, Any], ...] = ({"score": _SCORE}, {"held_out_score": _SCORE}, {})

    def noise(epsilon: float, score: dict[str, Any]) -> float:
        budget = {**_HELD_OUT, **score}
        return calibrate_private_selection(_FIVE, target_epsilon=epsilon, **budget)

    return [[f"{one:g}", *(f"{noise(one, score):.3f}" for score in scores)] for one in epsilons]


def table(values: flags.FlagValues) -> str:
    """Returns the Markdown table, and what it was computed with."""
    if values.held_out:
        titles = ["epsilon", "scores of any examples", "of held-out ones", "public"]
        return f"{markdown(titles, held_out_rows())}\n\n({versions()}.)"
    epsilon = f"{values.run_epsilon:g}"
    titles = [
        *("mean", "runs", "at most one, %", "ten or more, %", "epsilon", "by RDP alone"),
        *("all published", f"one run's, for {epsilon} in all", "noise for that, x"),
    ]
    return f"{markdown(titles, rows(values))}\n\n({versions()}.)"


def main(_: list[str]) -> None:
    """Prints the table."""
    print(table(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    cli.run(main)
