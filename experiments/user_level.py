"""Compares ways to protect users who have several examples: epsilon and accuracy, on digits.

    python -m experiments.user_level
    python -m experiments.user_level --images_per_user=2,8 --target_epsilon=2

Each user has k images of the training set. Three ways, with the same number of rows in a batch:

- "users, all images": users are sampled; the mean gradient of a user's k images is clipped.
- "users, one image": users are sampled, k times as many; one image of each is used.
- "images": images are sampled and clipped by themselves, as in DP-SGD. A user then adds up to k
  gradients to a sum. Zero-out of a user is dominated by noise with and without a shift by a
  binomial number of clips, of k images with the sampling probability (Ganesh et al., 2024,
  https://arxiv.org/abs/2401.10294). Its epsilon is computed by RDP; the ledger has that of images.

First the epsilon of a user, with the noise of `--noise_multiplier`. Then the accuracy with the same
epsilon for users: a network is trained with each learning rate on a part of the training set; that
with the best accuracy on the other part is trained on the whole, with each seed, and measured on
the test set. A run that ended is a line of the record, and is not done again.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
import scipy.special
import scipy.stats
import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure

import tfdp
from experiments import cli, datasets, networks, tuned_runs
from experiments.output import markdown, save
from experiments.settings import RefusedError, positive_numbers
from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS

_DATASET = "digits"
_CLIP, _MOMENTUM = 1.0, 0.9
_ALL, _ONE, _IMAGES = KINDS = ("users, all images", "users, one image", "images")
_ORDERS = tuple(order for order in DEFAULT_RDP_ORDERS if 1.05 < order <= 64)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Images of a user."
    flags.DEFINE_list("images_per_user", ["1", "2", "4", "8"], text, flag_values=values)
    text = "Epsilon of a user, of the runs."
    flags.DEFINE_float("target_epsilon", 4.0, text, 1e-3, flag_values=values)
    text = "Noise multiplier of the epsilons that are compared."
    flags.DEFINE_float("noise_multiplier", 2.0, text, 0.1, flag_values=values)
    text = "Learning rates that are tried."
    rates = ["0.01875", "0.0375", "0.075", "0.15", "0.3"]
    flags.DEFINE_list("learning_rates", rates, text, flag_values=values)
    tuned_runs.define_flags(values, "results/user_level.jsonl", seeds=3)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One training, by all that decides it."""

    kind: str
    images_per_user: int
    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is sampled in each step.

    Attributes:
      images: Number of training images.
      users: Number of users.
      batch: Expected number of units in a batch: users, or images.
      steps: Number of steps.
      shares: Chances that a user has in a step to add a gradient.
    """

    images: int
    users: int
    batch: int
    steps: int
    shares: int

    @property
    def size(self) -> int:
        """Number of units: users, or images."""
        return self.users if self.shares == 1 else self.images


def plan_of(kind: str, per_user: int, images: int, batch: int, epochs: int) -> Plan:
    """Returns what is sampled, where a batch has the same number of rows for each kind."""
    users, steps = -(-images // per_user), epochs * max(1, round(images / batch))
    expected = {_ALL: max(1, batch // per_user), _ONE: min(batch, users), _IMAGES: batch}[kind]
    return Plan(images, users, expected, steps, per_user if kind == _IMAGES else 1)


def epsilon_of_user(plan: Plan, noise: float, delta: float) -> float:
    """Returns the epsilon of zero-out of a user, with a noise multiplier."""
    q = plan.batch / plan.size
    if plan.shares == 1:
        ledger = tfdp.accounting.PrivacyLedger()
        event = dp_accounting.GaussianDpEvent(noise)
        ledger.record(dp_accounting.PoissonSampledDpEvent(q, event), plan.steps)
        return ledger.epsilon(delta).epsilon
    divergences = renyi_divergences(noise, q, plan.shares)
    return float(dp_accounting.rdp.compute_epsilon(_ORDERS, plan.steps * divergences, delta)[0])


def renyi_divergences(noise: float, q: float, shares: int) -> np.ndarray:
    """Returns the larger divergence of P = N(Binomial(shares, q), s^2) and Q = N(0, s^2), by order.

    By numerical integration of p^a q^(1 - a), in both directions.

    Args:
      noise: The standard deviation s.
      q: Probability that an image is in a batch.
      shares: Number of images of a user.
    """
    counts = np.arange(shares + 1)
    weights = scipy.stats.binom.logpmf(counts, shares, q)
    found = []
    for order in _ORDERS:
        width = noise / 20
        x = np.arange(-20 * noise, order * shares + 20 * noise, width)
        without = -(x**2) / (2 * noise**2)
        ratio = scipy.special.logsumexp(
            (weights + (x[:, np.newaxis] * counts - counts**2 / 2) / noise**2), axis=1
        )
        constant = np.log(width) - np.log(noise * np.sqrt(2 * np.pi))
        both = [
            scipy.special.logsumexp(without + power * ratio) + constant
            for power in (order, 1 - order)
        ]
        found.append(max(0.0, *both) / (order - 1))
    return np.array(found)


@functools.cache
def noise_of(plan: Plan, epsilon: float, delta: float) -> float:
    """Returns the least noise multiplier, to a thousandth, with an epsilon for a user."""
    low, high = 0.0, 0.5
    while epsilon_of_user(plan, high, delta) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if epsilon_of_user(plan, middle, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


@functools.cache
def _data(split: str, held_out: int) -> datasets.Data:
    return datasets.load(_DATASET, eval_split=split, validation_examples=held_out)


def train(run: Run) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of a user."""
    data, per_user = _data(run.split, run.validation_examples), run.images_per_user
    run.check_size(data.size)
    plan = plan_of(run.kind, per_user, data.size, run.expected_batch_size, run.epochs)
    noise = noise_of(plan, run.epsilon, run.delta)
    of_users: dict[str, Any] = {}
    if run.kind != _IMAGES:
        of_users = {
            "privacy_unit": np.arange(data.size) // per_user,
            "examples_per_user": per_user if run.kind == _ALL else 1,
        }
    tf.keras.utils.set_random_seed(run.seed)
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y),
        expected_batch_size=plan.batch,
        steps_per_epoch=plan.steps,
        **of_users,
    )
    optimizer = tfdp.DPSGD(
        _CLIP,
        noise,
        sampling=batches.sampling,
        learning_rate=run.learning_rate,
        momentum=_MOMENTUM,
    )
    model = networks.NETWORKS[_DATASET](networks.make_activation("tanh"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.fit(batches, epochs=1, verbose=0)
    accuracy = tuned_runs.accuracy_of(model, data.eval_x, data.eval_y)
    spent = epsilon_of_user(plan, noise, run.delta)
    if of_users:  # What was done, not what was planned.
        spent = optimizer.ledger.epsilon(run.delta).epsilon
    return accuracy, spent


Found = dict[tuple[str, int], Any]


def _by_setting(values: flags.FlagValues, what: Callable[[str, int], Any]) -> Found:
    """Returns what a function finds, by kind and number of images of a user."""
    counts = positive_numbers("images_per_user", values.images_per_user)
    if any(count != int(count) for count in counts):
        raise RefusedError(f"--images_per_user must be integers. Received: {counts}.")
    return {(kind, int(count)): what(kind, int(count)) for kind in KINDS for count in counts}


def epsilons(values: flags.FlagValues) -> Found:
    """Returns the epsilon of a user with `--noise_multiplier`, by kind and images of a user."""
    size = _data(tuned_runs.TEST, values.validation_examples).size

    def of(kind: str, count: int) -> float:
        plan = plan_of(kind, count, size, values.expected_batch_size, values.epochs)
        return epsilon_of_user(plan, values.noise_multiplier, values.delta)

    return _by_setting(values, of)


def accuracies(values: flags.FlagValues) -> Found:
    """Does the runs that are left; returns a `Tuned` by kind and images of a user."""
    rates = positive_numbers("learning_rates", values.learning_rates)
    runs = tuned_runs.Runs(values.record, Run, train)
    shared = ("delta", "epochs", "expected_batch_size", "validation_examples")

    def of(kind: str, count: int) -> tuned_runs.Tuned:
        begun = functools.partial(
            Run,
            kind=_ALL if count == 1 else kind,  # All the same.
            images_per_user=count,
            epsilon=values.target_epsilon,
            **{flag: values[flag].value for flag in shared},
        )
        return runs.tuned(begun, rates, values.seeds)

    return _by_setting(values, of)


def table(values: flags.FlagValues, spent: Found, found: Found) -> str:
    """Returns a Markdown table: a line for each number of images, with the kinds beside."""
    titles = ["images of a user"]
    for kind in KINDS:
        titles += [f"{kind}: epsilon at noise {values.noise_multiplier:g}"]
    for kind in KINDS:
        titles += [f"{kind}: accuracy % at epsilon {values.target_epsilon:g}", "rate"]
    lines = []
    for count in dict.fromkeys(count for _, count in found):
        cells = [str(count), *(f"{spent[kind, count]:.2f}" for kind in KINDS)]
        for kind in KINDS:
            own = found[kind, count]
            cells += [own.text, f"{own.learning_rate:g}"]
        lines.append(cells)
    return markdown(titles, lines)


def draw(values: flags.FlagValues, spent: Found, found: Found, path: str) -> None:
    """Draws epsilons and accuracies against the number of images of a user."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({count for _, count in found})
    for i, kind in enumerate(KINDS):
        left.plot(counts, [spent[kind, count] for count in counts], f"C{i}o-", label=kind)
        for count in counts:
            one = found[kind, count]
            right.plot([count] * len(one.accuracies), one.accuracies, f"C{i}.", alpha=0.4)
        means = [found[kind, count].mean for count in counts]
        right.plot(counts, means, f"C{i}o-", label=kind)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.set(ylabel=f"epsilon of a user, noise {values.noise_multiplier:g}")
    right.set(ylabel=f"test accuracy %, epsilon {values.target_epsilon:g} for a user")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set(xlabel="images of a user")
        axes.grid(alpha=0.3)
        axes.legend()
    save(figure, path)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    with cli.refusing("user_level", argv, RefusedError, datasets.DataError):
        values = flags.FLAGS
        spent, found = epsilons(values), accuracies(values)
        print(table(values, spent, found))
        if values.plot:
            draw(values, spent, found, values.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
