"""Trains a student on the noisy votes of teachers (PATE), beside DP-SGD at the same epsilon.

    python -m experiments.pate
    python -m experiments.pate --dataset=mnist --data_dir=...
    python -m experiments.pate --dataset=mnist --data_dir=... --features=scattering \\
        --notest_queries --queries=800 --epsilons=0.5,1,2.04,4 --nodpsgd --plot=pate.png

Teachers are trained on random disjoint parts of the training set, which is private. One half of the
test set is public: its images are the queries, which teachers label by noisy votes, and on which
the student is trained. The other half measures. GNMax answers all queries; with `--test_queries`,
the default of MNIST, confident GNMax answers those on which teachers agree.

With `--features=scattering`, teachers are ridge regressions on scattering features of images, and
the student is one, too. A second student learns from all public images, with labels that it gives
them itself. The features of an image depend on it alone.

With `--epsilons`, the same votes are answered with noise for each epsilon, in GNMax. Each student's
epsilon counts its own answers alone.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf
from absl import flags, logging
from matplotlib.figure import Figure

import tfdp
from experiments import cli, datasets, networks, records
from experiments.output import markdown, save
from experiments.report import RunFolder
from experiments.settings import RefusedError, positive_numbers, resolve
from experiments.training import Training
from tfdp.contrib import pate

_DATASETS = ("digits", "mnist")
_SPLIT_SEED = 2018  # The same public half in all runs.
_CLASSES = 10
_BATCH_SIZE = 32
_LEARNING_RATE = 0.005
_PREDICTED_AT_ONCE = 1000
_HELD_OUT = {"digits": 287, "mnist": 10_000}  # Training examples, by --eval_split=validation.
# Chosen on held-out training examples, one run each of 1, 100, 1000, 4000 and 20000 (teachers).
_PENALTY = 100.0
_ROUNDS = 5  # Rounds of a student that labels public images itself.
# Those of digits were found on held-out training examples, a few runs; those of MNIST are the
# paper's, but for the epochs and the numbers of queries and answers.
_DEFAULTS = {
    "digits": {
        "teachers": 100,
        "queries": 150,
        "noise": 12.0,
        "threshold": 40.0,
        "threshold_noise": 20.0,
        "max_answers": 100,
        "epochs": 80,
        "test_queries": False,
    },
    "mnist": {
        "teachers": 250,
        "queries": 1000,
        "noise": 40.0,
        "threshold": 200.0,
        "threshold_noise": 150.0,
        "max_answers": 400,
        "epochs": 20,
        "test_queries": True,
    },
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_enum("dataset", "digits", _DATASETS, "Data set.", flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    of = "that of the data set unless given."
    for name, what in (
        ("teachers", "Number of teachers"),
        ("queries", "Number of public images that teachers are asked about"),
        ("max_answers", "Most queries that are answered, with a threshold"),
        ("epochs", "Epochs of each teacher, and of the student"),
    ):
        text = f"{what}; {of}"
        flags.DEFINE_integer(name, None, text, lower_bound=1, flag_values=values)
    for name, what in (
        ("noise", "Standard deviation of the noise on votes"),
        ("threshold", "Votes that the class with the most must have for an answer"),
        ("threshold_noise", "Standard deviation of the noise on that number"),
    ):
        flags.DEFINE_float(name, None, f"{what}; {of}", flag_values=values)
    text = f"Whether queries are tested, else all are answered; {of}"
    flags.DEFINE_bool("test_queries", None, text, flag_values=values)
    text = "Delta of the guarantee."
    flags.DEFINE_float("delta", 1e-5, text, 1e-15, 0.1, flag_values=values)
    text = "Whether DP-SGD is trained beside it."
    flags.DEFINE_bool("dpsgd", True, text, flag_values=values)
    text = "What models learn from: pixels (none), or scattering features."
    flags.DEFINE_enum("features", "none", datasets.FEATURES, text, flag_values=values)
    text = "Folder in which features are kept for the next run."
    flags.DEFINE_string("features_dir", None, text, flag_values=values)
    text = "What is public, and measures: the test set, or training examples that are held out."
    flags.DEFINE_enum("eval_split", "test", ["test", "validation"], text, flag_values=values)
    text = "Epsilons to answer all queries with, instead of --noise; several, by commas."
    flags.DEFINE_list("epsilons", [], text, flag_values=values)
    text = "Seed of initial weights and batches; not of noise and parts."
    flags.DEFINE_integer("seed", 0, text, flag_values=values)
    text = "Number of runs, each with parts, teachers and noise of its own."
    flags.DEFINE_integer("runs", 1, text, lower_bound=1, flag_values=values)
    flags.DEFINE_string("record", None, "File to which each student is a line.", flag_values=values)
    flags.DEFINE_string("plot", None, "Picture to write.", flag_values=values)


class Learner:
    """A network that is trained anew on each part: nothing passes from one part to the next.

    Weights, the state of the optimizer and the order of batches begin the same, so that what was
    trained is a function of the examples of its part and of public numbers. One network serves for
    all, which is traced once.

    Args:
      dataset: Name of the data set.
      epochs: Epochs of a training.
      seed: Seed of initial weights and batches.
    """

    def __init__(self, dataset: str, epochs: int, seed: int):
        self._epochs, self._seed = epochs, seed
        tf.keras.utils.set_random_seed(seed)
        self.model = networks.NETWORKS[dataset](networks.make_activation("relu"))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(tf.keras.optimizers.Adam(_LEARNING_RATE), loss)
        self.model.optimizer.build(self.model.trainable_variables)
        self._start = [variable.numpy() for variable in self._variables()]

    def _variables(self) -> list[tf.Variable]:
        return [*self.model.variables, *self.model.optimizer.variables]

    def train(self, x: np.ndarray, y: np.ndarray) -> "Learner":
        """Trains on examples, from the beginning; without examples the network is untrained."""
        for variable, value in zip(self._variables(), self._start, strict=True):
            variable.assign(value)
        if len(y):
            # All epochs as one of Keras's, whose beginning and end cost more than a few steps.
            rng = np.random.default_rng(self._seed)
            order = np.concatenate([rng.permutation(len(y)) for _ in range(self._epochs)])
            self.model.fit(x[order], y[order], _BATCH_SIZE, shuffle=False, verbose=0)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns the logits of images, `[images, classes]`."""
        return self.model.predict(x, batch_size=_PREDICTED_AT_ONCE, verbose=0)


class Ridge:
    """Ridge regression of the classes on features, `[n, height, width, channels]`.

    Args:
      weights: Weights `[features + 1, classes]`, the last those of the constant; None: untrained.
    """

    def __init__(self, weights: np.ndarray | None = None):
        self._weights = np.zeros([1, _CLASSES]) if weights is None else weights

    def train(self, x: np.ndarray, y: np.ndarray) -> "Ridge":
        """Fits the regression to examples; without examples all classes get one score."""
        rows = _rows(x)
        if len(y):
            square = rows @ rows.T  # [examples, examples], of few examples.
            factor = scipy.linalg.cho_factor(square + _penalty(square))
            self._weights = rows.T @ scipy.linalg.cho_solve(factor, _targets(y, rows.dtype))
        else:
            self._weights = np.zeros([rows.shape[1], _CLASSES], rows.dtype)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns scores, `[images, classes]`."""
        return x.reshape(len(x), -1) @ self._weights[:-1] + self._weights[-1]


def _rows(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    return np.concatenate([flat, np.ones([len(x), 1], x.dtype)], axis=1)


def _targets(y: np.ndarray, dtype: Any) -> np.ndarray:
    return 2 * np.eye(_CLASSES, dtype=dtype)[y] - 1


def self_trained(x: np.ndarray, student: Ridge) -> Ridge:
    """Returns a ridge regression of all public images, with labels that it gives them itself.

    The first labels are the student's; with each round the regression learns the last ones. It sees
    public images and answers: this is post-processing.

    Args:
      x: Features of the public images.
      student: What was trained on those that were answered.
    """
    rows, classes = _rows(x), student.predict(x).argmax(axis=1)
    square = scipy.linalg.cho_factor(rows.T @ rows + _penalty(rows))
    for _ in range(_ROUNDS):
        found = Ridge(scipy.linalg.cho_solve(square, rows.T @ _targets(classes, x.dtype)))
        classes = found.predict(x).argmax(axis=1)
    return found


def _penalty(square_of: np.ndarray) -> np.ndarray:
    return _PENALTY * np.eye(square_of.shape[1], dtype=square_of.dtype)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Accuracies, answers and cost of a student.

    Attributes:
      rows: Name and accuracy of each kind of labels and each model.
      answered: Number of queries that were answered.
      queries: Number of queries.
      bound: Epsilon of the answers.
      dependent: Data-dependent bound of GNMax, which is not private; None with a threshold.
    """

    rows: list[tuple[str, float]]
    answered: int
    queries: int
    bound: tfdp.accounting.EpsilonBound
    dependent: float | None = None

    def __str__(self) -> str:
        table = markdown(
            ["", "accuracy %"], [[name, f"{100 * accuracy:.1f}"] for name, accuracy in self.rows]
        )
        text = (
            f"{table}\n\n{self.answered} of {self.queries} queries were answered. Epsilon = "
            f"{self.bound.epsilon:.3f} at delta = {self.bound.delta:g}, whatever the votes."
        )
        if self.dependent is not None:
            text += (
                f" Not private, and no epsilon of differential privacy: for these votes, "
                f"{self.dependent:.3f} in one direction (docs/survey.md)."
            )
        return text


@dataclasses.dataclass(frozen=True)
class Votes:
    """Votes of the teachers of one run.

    Attributes:
      partition: The parts of the teachers.
      of_teachers: Votes, `[teachers, test images]`.
      public: Indices of the public test images.
      measured: Indices of those that measure.
    """

    partition: pate.Partition
    of_teachers: np.ndarray
    public: np.ndarray
    measured: np.ndarray


def run(values: flags.FlagValues) -> list[Outcome]:
    """Trains what the flags ask for; returns an outcome for each epsilon of each run.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    given = {
        name: default if values[name].value is None else values[name].value
        for name, default in _DEFAULTS[values.dataset].items()
    }
    epsilons = positive_numbers("epsilons", values.epsilons) if values.epsilons else []
    if epsilons and given["test_queries"]:
        raise RefusedError(
            "--epsilons must be given with --notest_queries: all queries are answered. Received: "
            f"--epsilons={','.join(values.epsilons)} with --test_queries."
        )
    data = datasets.load(
        values.dataset,
        data_dir=values.data_dir,
        eval_split=values.eval_split,
        validation_examples=_HELD_OUT[values.dataset],
        features=values.features,
        features_dir=values.features_dir,
    )
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(data.eval_y))
    public, measured = np.split(order, [len(order) // 2])
    if given["queries"] > len(public):
        raise RefusedError(
            f"--queries must be at most {len(public)}, the number of public images. Received: "
            f"--queries={given['queries']}."
        )
    noises = [given["noise"]]
    if epsilons:
        noises = [_noise(epsilon, values.delta, given["queries"]) for epsilon in epsilons]
    found = []
    for number in range(values.runs):
        partition = pate.random_partition(data.size, given["teachers"])
        # Before teachers are trained: what is refused is refused at once.
        aggregators = [_aggregator(partition, {**given, "noise": noise}) for noise in noises]
        learner = _learner(values, given)
        votes = Votes(partition, _votes(learner, partition, data), public, measured)
        for noise, aggregator in zip(noises, aggregators, strict=True):
            outcome = _student(values, given, data, votes, aggregator, learner)
            if not given["test_queries"]:
                outcome = dataclasses.replace(
                    outcome, dependent=_dependent(votes, given, noise, values.delta)
                )
            _keep(values, given, noise, number, outcome)
            found.append(outcome)
    return found


def _learner(values: flags.FlagValues, given: dict) -> Any:
    if values.features == "none":
        return Learner(values.dataset, given["epochs"], values.seed)
    return Ridge()


def _noise(epsilon: float, delta: float, queries: int) -> float:
    """Returns the standard deviation of GNMax with which so many answers have an epsilon."""
    multiplier = tfdp.calibrate_noise_multiplier(
        target_epsilon=epsilon, delta=delta, steps=queries, sampling_probability=1.0
    )
    return multiplier * math.sqrt(2)


def _student(
    values: flags.FlagValues,
    given: dict,
    data: datasets.Data,
    votes: Votes,
    aggregator: pate.GNMax,
    learner: Any,
) -> Outcome:
    """Has queries answered, trains a student on the answers, and measures it."""
    measured, asked = votes.measured, votes.public[: given["queries"]]
    measured_y = data.eval_y[measured]
    answers = aggregator.answer(votes.of_teachers[:, asked])
    answered = answers >= 0
    if not answered.any():
        raise RefusedError("No query was answered: lower --threshold, or train fewer --teachers.")
    plurality = pate.vote_counts(votes.of_teachers, _CLASSES).argmax(axis=1)
    bound = aggregator.ledger.epsilon(values.delta)
    student = learner.train(data.eval_x[asked][answered], answers[answered])
    rows = [
        ("most votes, without noise (not private)", plurality[measured] == measured_y),
        ("answers to queries", (answers == data.eval_y[asked])[answered]),
        ("student", student.predict(data.eval_x[measured]).argmax(axis=1) == measured_y),
    ]
    if isinstance(student, Ridge):
        student = self_trained(data.eval_x[votes.public], student)
        right = student.predict(data.eval_x[measured]).argmax(axis=1) == measured_y
        rows.append(("student of all public images", right))
    if values.dpsgd:
        rows.append(("DP-SGD, same epsilon", _dpsgd(values, data, measured, bound) == measured_y))
    found = [(name, float(np.mean(right))) for name, right in rows]
    return Outcome(found, int(answered.sum()), len(asked), bound)


def _dependent(votes: Votes, given: dict, noise: float, delta: float) -> float:
    asked = votes.public[: given["queries"]]
    return pate.nonprivate_data_dependent_epsilon(
        votes.of_teachers[:, asked], num_classes=_CLASSES, noise_stddev=noise, delta=delta
    )


def _keep(
    values: flags.FlagValues, given: dict, noise: float, number: int, outcome: Outcome
) -> None:
    """Prints an outcome, and adds it to the record."""
    print(f"{outcome}\n", flush=True)
    if not values.record:
        return
    names = ("dataset", "features", "eval_split", "delta", "seed")
    settings = {**given, "noise": noise, "run": number} | {n: values[n].value for n in names}
    line = {
        "run": settings,
        "accuracies": {name: 100 * accuracy for name, accuracy in outcome.rows},
        "answered": outcome.answered,
        "epsilon": outcome.bound.epsilon,
        "not_private_data_dependent": outcome.dependent,
    }
    records.append(values.record, line)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns a Markdown table: a line for each epsilon, with the mean over runs."""
    lines = []
    for epsilon in dict.fromkeys(round(o.bound.epsilon, 3) for o in outcomes):
        own = [o for o in outcomes if round(o.bound.epsilon, 3) == epsilon]
        cells = [f"{epsilon:.2f}"]
        for i in range(len(own[0].rows)):
            accuracies = [100 * o.rows[i][1] for o in own]
            deviation = f" ({np.std(accuracies, ddof=1):.1f})" if len(own) > 1 else ""
            cells.append(f"{np.mean(accuracies):.1f}{deviation}")
        lines.append(cells)
    return markdown(["epsilon", *(name for name, _ in outcomes[0].rows)], lines)


def draw(outcomes: Sequence[Outcome], path: str) -> None:
    """Draws accuracies against epsilon, a dot for each run."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, (name, _) in enumerate(outcomes[0].rows):
        points = sorted((o.bound.epsilon, 100 * o.rows[i][1]) for o in outcomes)
        epsilons = sorted({round(epsilon, 3) for epsilon, _ in points})
        means = [np.mean([a for e, a in points if round(e, 3) == own]) for own in epsilons]
        axes.plot(*zip(*points, strict=True), f"C{i}.", alpha=0.4)
        axes.plot(epsilons, means, f"C{i}o-", label=name)
    axes.set_xscale("log")
    ticks = sorted({round(o.bound.epsilon, 2) for o in outcomes})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="epsilon, whatever the votes", ylabel="accuracy %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def _aggregator(partition: pate.Partition, given: dict) -> pate.GNMax:
    votes = {"num_classes": _CLASSES, "noise_stddev": given["noise"]}
    try:
        if not given["test_queries"]:
            return pate.GNMax(partition, **votes)
        return pate.ConfidentGNMax(
            partition,
            **votes,
            threshold=given["threshold"],
            threshold_noise_stddev=given["threshold_noise"],
            max_answers=given["max_answers"],
        )
    except ValueError as error:
        raise RefusedError(f"{error}") from error


def _votes(learner: Any, partition: pate.Partition, data: datasets.Data) -> np.ndarray:
    """Returns the vote of each teacher on each test image, `[teachers, images]`."""
    parts = map(partition.indices, range(partition.num_teachers))
    trained = (learner.train(data.train_x[mine], data.train_y[mine]) for mine in parts)
    return pate.teacher_votes((teacher.predict(data.eval_x) for teacher in trained), _CLASSES)


def _dpsgd(
    values: flags.FlagValues,
    data: datasets.Data,
    measured: np.ndarray,
    bound: tfdp.accounting.EpsilonBound,
) -> np.ndarray:
    """Returns the classes that a model trained by DP-SGD gives the measured images."""
    settings = resolve(
        {
            "dataset": values.dataset,
            "method": "dpsgd",
            "target_epsilon": bound.epsilon,
            "delta": bound.delta,
            "seed": values.seed,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        training = Training(settings, data, RunFolder(folder), progress=False, every_epoch=False)
        training.run()
    x = data.eval_x[measured]
    return training.model.predict(x, batch_size=_PREDICTED_AT_ONCE, verbose=0).argmax(axis=1)


def main(argv: list[str]) -> None:
    """Does what the command line asks for; what cannot be done ends with a sentence."""
    with cli.refusing("pate", argv, RefusedError, datasets.DataError):
        outcomes = run(flags.FLAGS)
        if len(outcomes) > 1:
            print(table(outcomes))
        if flags.FLAGS.plot:
            draw(outcomes, flags.FLAGS.plot)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
