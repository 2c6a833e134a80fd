"""Trains a student on the noisy votes of teachers (PATE), beside DP-SGD at the same epsilon.

    python -m experiments.pate
    python -m experiments.pate --dataset=mnist --data_dir=...

Teachers are trained on random disjoint parts of the training set, which is private. One half of the
test set is public: its images are the queries, which teachers label by noisy votes, and on which
the student is trained. The other half measures. GNMax answers all queries; with `--test_queries`,
the default of MNIST, confident GNMax answers those on which teachers agree.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import tempfile

import numpy as np
import tensorflow as tf
from absl import flags, logging

import tfdp
from experiments import cli, datasets, networks
from experiments.output import markdown
from experiments.report import RunFolder
from experiments.settings import RefusedError, resolve
from experiments.training import Training
from tfdp.contrib import pate

_DATASETS = ("digits", "mnist")
_SPLIT_SEED = 2018  # The same public half in all runs.
_CLASSES = 10
_BATCH_SIZE = 32
_LEARNING_RATE = 0.005
_PREDICTED_AT_ONCE = 1000
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
    text = "Seed of initial weights and batches; not of noise and parts."
    flags.DEFINE_integer("seed", 0, text, flag_values=values)


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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Accuracies, answers and cost of a run.

    Attributes:
      rows: Name and accuracy of each kind of labels and each model.
      answered: Number of queries that were answered.
      queries: Number of queries.
      bound: Epsilon of the answers.
    """

    rows: list[tuple[str, float]]
    answered: int
    queries: int
    bound: tfdp.accounting.EpsilonBound

    def __str__(self) -> str:
        table = markdown(
            ["", "accuracy %"], [[name, f"{100 * accuracy:.1f}"] for name, accuracy in self.rows]
        )
        return (
            f"{table}\n\n{self.answered} of {self.queries} queries were answered. Epsilon = "
            f"{self.bound.epsilon:.3f} at delta = {self.bound.delta:g}, whatever the votes."
        )


def run(values: flags.FlagValues) -> Outcome:
    """Trains what the flags ask for.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    given = {
        name: default if values[name].value is None else values[name].value
        for name, default in _DEFAULTS[values.dataset].items()
    }
    data = datasets.load(values.dataset, data_dir=values.data_dir)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(data.eval_y))
    public, measured = np.split(order, [len(order) // 2])
    if given["queries"] > len(public):
        raise RefusedError(
            f"--queries must be at most {len(public)}, the number of public images. Received: "
            f"--queries={given['queries']}."
        )
    asked = public[: given["queries"]]
    measured_y = data.eval_y[measured]
    partition = pate.random_partition(data.size, given["teachers"])
    aggregator = _aggregator(partition, given)
    learner = Learner(values.dataset, given["epochs"], values.seed)
    votes = _votes(learner, partition, data)
    answers = aggregator.answer(votes[:, asked])
    answered = answers >= 0
    if not answered.any():
        raise RefusedError("No query was answered: lower --threshold, or train fewer --teachers.")
    student = learner.train(data.eval_x[asked][answered], answers[answered])
    plurality = pate.vote_counts(votes, _CLASSES).argmax(axis=1)
    bound = aggregator.ledger.epsilon(values.delta)
    rows = [
        ("most votes, without noise (not private)", plurality[measured] == measured_y),
        ("answers to queries", (answers == data.eval_y[asked])[answered]),
        ("student", student.predict(data.eval_x[measured]).argmax(axis=1) == measured_y),
    ]
    if values.dpsgd:
        rows.append(("DP-SGD, same epsilon", _dpsgd(values, data, measured, bound) == measured_y))
    found = [(name, float(np.mean(right))) for name, right in rows]
    return Outcome(found, int(answered.sum()), len(asked), bound)


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


def _votes(learner: Learner, partition: pate.Partition, data: datasets.Data) -> np.ndarray:
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
        print(run(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)
    cli.run(main)
