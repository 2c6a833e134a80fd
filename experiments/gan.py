"""Trains a GAN privately, and a classifier on its synthetic images alone.

    python -m experiments.gan
    python -m experiments.gan --dataset=mnist --data_dir=... --output_dir=gan_mnist

The GAN is conditional: labels of real images meet the critic beside their images, those of
synthetic ones are uniform. With `--vae` (the default), `tfdp.TermWiseVAE` is trained at the same
epsilon as well, as `experiments.vae` does, and with `--control` (the default) the same GAN without
noise and with a clip that no gradient reaches. The program writes a picture of generated images, a
row for each class, and prints the accuracy on real test images of classifiers that were trained on
synthetic images, and for comparison on real ones, which is not private. The classifier is a
logistic regression for digits, and the network of `experiments.classify` for larger images, of at
most 10,000 images.

A run that ended is a line of the record, and is not done again. Choose rates on held-out training
examples (`--eval_split=validation`), never on the test set; what that choice costs in privacy is
not part of epsilon.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
import gc
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging

import tfdp
from experiments import cli, datasets, records
from experiments.networks import NETWORKS, make_activation
from experiments.output import markdown, save
from experiments.settings import RefusedError
from experiments.vae import figures, metrics
from experiments.vae import settings as vae_settings
from experiments.vae import training as vae_training

NUM_CLASSES = 10
_SHOWN_PER_CLASS = 8
_DELTA = 1e-5
_CLASSIFIER_EPOCHS = 5
_MOST_GENERATED = 10_000  # Images that a classifier learns from.
_NO_CLIP = 1e6  # A norm that no gradient reaches.
_GAN, _VAE, _CONTROL = "PrivateGAN", "TermWiseVAE", "PrivateGAN, no privacy"


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Values of flags that are not given, for a data set.

    Attributes:
      loss: One of `_LOSSES`.
      validation_examples: Training examples that are held out by `--eval_split=validation`.
    """

    epochs: int
    expected_batch_size: int
    latent_dim: int
    loss: str = "gradient_penalty"
    critic_steps: int = 2
    l2_norm_clip: float = 1.0
    learning_rate: float = 0.002
    generator_learning_rate: float = 0.002
    validation_examples: int = 10_000


DEFAULTS = {
    "digits": Defaults(epochs=120, expected_batch_size=256, latent_dim=8, validation_examples=287),
    "mnist": Defaults(epochs=20, expected_batch_size=1024, latent_dim=32),
    "fashion_mnist": Defaults(epochs=20, expected_batch_size=1024, latent_dim=32),
}
_LOSSES = {
    "gradient_penalty": {"loss": "wasserstein", "gradient_penalty": 10.0},
    "weight_clip": {"loss": "wasserstein", "weight_clip": 0.05},
    "non_saturating": {"loss": "non_saturating"},
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_enum("dataset", "digits", list(DEFAULTS), "Data set.", flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Loss: Wasserstein with a gradient penalty or clipped weights, or the non-saturating."
    text += " That of the data set unless given."
    flags.DEFINE_enum("loss", None, list(_LOSSES), text, flag_values=values)
    text = f"Epsilon, at delta = {_DELTA:g}."
    flags.DEFINE_float("target_epsilon", 4.0, text, lower_bound=1e-6, flag_values=values)
    for name in ("epochs", "expected_batch_size", "critic_steps"):
        text = "That of the data set unless given."
        flags.DEFINE_integer(name, None, text, lower_bound=1, flag_values=values)
    for name in ("l2_norm_clip", "learning_rate", "generator_learning_rate"):
        text = "That of the data set unless given."
        flags.DEFINE_float(name, None, text, lower_bound=1e-9, flag_values=values)
    text = "Runs of each model, of seeds 0, 1, ...: of the first weights."
    flags.DEFINE_integer("seeds", 1, text, lower_bound=1, flag_values=values)
    text = "Whether to train a TermWiseVAE at the same epsilon (digits and mnist)."
    flags.DEFINE_bool("vae", True, text, flag_values=values)
    text = "Whether to train the GAN without privacy as well."
    flags.DEFINE_bool("control", True, text, flag_values=values)
    text = "What is measured on: the test set, or training examples that are held out."
    flags.DEFINE_enum("eval_split", "test", ["test", "validation"], text, flag_values=values)
    flags.DEFINE_string("output_dir", "results/gan", "Folder of the picture.", flag_values=values)
    text = "File of the runs; gan.jsonl in --output_dir unless given."
    flags.DEFINE_string("record", None, text, flag_values=values)


def networks(shape: tuple[int, ...], latent_dim: int) -> tuple[tf.keras.Model, tf.keras.Model]:
    """Builds a conditional generator and critic of images, of dense layers.

    Neither has BatchNormalization: the critic must not, and the generator did not need it.
    """
    layers = tf.keras.layers
    noise, image, classes = (layers.Input(s) for s in ([latent_dim], shape, [NUM_CLASSES]))
    units = 128 if shape[0] < 28 else 256
    made = layers.Dense(units, "relu")(layers.Concatenate()([noise, classes]))
    made = layers.Dense(units, "relu")(made)
    made = layers.Reshape(shape)(layers.Dense(int(np.prod(shape)), "sigmoid")(made))
    seen = layers.Concatenate()([layers.Flatten()(image), classes])
    score = layers.LeakyReLU(0.2)(layers.Dense(128)(seen))
    critic = tf.keras.Model([image, classes], layers.Dense(1)(score), name="critic")
    return tf.keras.Model([noise, classes], made, name="generator"), critic


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a GAN, by all that decides it; `target_epsilon` is None without privacy."""

    model: str
    dataset: str
    split: str
    seed: int
    target_epsilon: float | None
    loss: str
    epochs: int
    expected_batch_size: int
    latent_dim: int
    critic_steps: int
    l2_norm_clip: float
    learning_rate: float
    generator_learning_rate: float


@dataclasses.dataclass(frozen=True)
class Made:
    """Result of a training.

    Attributes:
      generate: Makes images for classes `[n]`, as `[n, height, width, 1]`.
      epsilon: Epsilon that the ledger states; None without privacy.
      seconds: Time of training.
      statement: Privacy statement.
    """

    generate: Any
    epsilon: float | None
    seconds: float
    statement: str


def train(run: Run, data: datasets.Data) -> Made:
    """Trains a GAN within the budget.

    Raises:
      RefusedError: The budget cannot be met.
    """
    batch = run.expected_batch_size
    if batch > data.size:
        raise RefusedError(f"--expected_batch_size must be at most {data.size}. Received: {batch}.")
    tf.keras.utils.set_random_seed(run.seed)  # Seeds the weights, not the noise.
    steps = max(1, data.size // batch)
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y), expected_batch_size=batch, steps_per_epoch=steps
    )
    noise, clip = 0.0, _NO_CLIP
    if run.target_epsilon is not None:
        noise, clip = _noise(run, run.epochs * steps, data.size), run.l2_norm_clip
    model = tfdp.PrivateGAN(
        *networks(data.train_x.shape[1:], run.latent_dim),
        critic_steps=run.critic_steps,
        num_classes=NUM_CLASSES,
        **_LOSSES[run.loss],
    )
    model.compile(
        critic_optimizer=tfdp.DPAdam(
            clip,
            noise,
            learning_rate=run.learning_rate,
            beta_1=0.5,
            sampling=batches.sampling,
        ),
        generator_optimizer=tf.keras.optimizers.Adam(run.generator_learning_rate, beta_1=0.5),
    )
    began = time.monotonic()
    model.fit(batches, epochs=run.epochs, verbose=0)
    seconds, spent, statement = time.monotonic() - began, None, "No differential privacy."
    if run.target_epsilon is not None:
        spent = model.optimizer.ledger.epsilon(_DELTA).epsilon
        statement = tfdp.privacy_statement(model, _DELTA, dataset_size=data.size)

    def generate(classes: np.ndarray) -> np.ndarray:
        return model.generate(len(classes), classes, seed=run.seed)

    return Made(generate, spent, seconds, statement)


@functools.cache
def _calibrated(epsilon: float, steps: int, size: int, batch: int) -> float:
    return tfdp.calibrate_noise_multiplier(
        target_epsilon=epsilon,
        delta=_DELTA,
        steps=steps,
        dataset_size=size,
        expected_batch_size=batch,
    )


def _noise(run: Run, steps: int, size: int) -> float:
    try:
        return _calibrated(run.target_epsilon, steps, size, run.expected_batch_size)
    except ValueError as refusal:
        raise RefusedError(f"--target_epsilon={run.target_epsilon:g}: {refusal}") from refusal


def train_vae(settings: vae_settings.VaeSettings, data: datasets.Data) -> Made:
    """Trains a `tfdp.TermWiseVAE` as `experiments.vae` does, within the budget."""
    trained = vae_training.train(settings, data)

    def generate(classes: np.ndarray) -> np.ndarray:
        return vae_training.generate(trained.model, classes, settings.seed)

    return Made(generate, trained.epsilon, trained.seconds, trained.statement)


def accuracy_of(
    train_x: np.ndarray, train_y: np.ndarray, data: datasets.Data, dataset: str, seed: int
) -> float:
    """Returns the accuracy in percent, on real images, of a classifier of the given images."""
    if dataset == "digits":
        found = metrics.downstream_accuracy(train_x, train_y, data.eval_x, data.eval_y)
        return 100 * found
    tf.keras.utils.set_random_seed(seed)
    model = NETWORKS[dataset](make_activation("relu"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.001), loss)
    model.fit(train_x, train_y, batch_size=128, epochs=_CLASSIFIER_EPOCHS, verbose=0)
    logits = model.predict(data.eval_x, batch_size=1000, verbose=0)
    return 100 * float(np.mean(logits.argmax(axis=1) == data.eval_y))


def runs_of(values: flags.FlagValues, data: datasets.Data) -> dict[str, list[Any]]:
    """Returns the runs that the flags ask for, by what is trained: one for each seed."""
    own = dataclasses.asdict(DEFAULTS[values.dataset])
    own |= {name: values[name].value for name in own if name in values and values[name].value}
    del own["validation_examples"]
    given = {**own, "dataset": values.dataset, "split": values.eval_split}
    epsilons = {_GAN: values.target_epsilon} | ({_CONTROL: None} if values.control else {})
    found: dict[str, list[Any]] = {
        model: [
            Run(model=model, seed=seed, target_epsilon=epsilon, **given)
            for seed in range(values.seeds)
        ]
        for model, epsilon in epsilons.items()
    }
    if values.vae and values.dataset in vae_training.CONDITIONAL:
        task = {"task": values.dataset, "delta": _DELTA, "eval_split": values.eval_split}
        found[_VAE] = [
            vae_settings.resolve(task, "term_wise", values.target_epsilon, seed, data.size)
            for seed in range(values.seeds)
        ]
    return found


class Runs:
    """Runs that ended: lines of the record, and a sheet of images of each, in a folder.

    Args:
      record: File of the runs.
      folder: Folder of the sheets.
      data: What is trained and measured on.
      dataset: Its name.
    """

    def __init__(self, record: str, folder: str, data: datasets.Data, dataset: str):
        self._record, self._folder = record, Path(folder)
        self._data, self._dataset = data, dataset
        self._lines = {_key(line["run"]): line for line in records.read(record)}

    def line(self, run: Any) -> dict[str, Any]:
        """Returns the line of a run, which is done now unless it was before."""
        key = _key(_settings(run))
        if key not in self._lines:
            self._do(run)
        return self._lines[key]

    def sheet(self, run: Any) -> np.ndarray:
        """Returns images of a run, `[classes, images, height, width]`; done again if missing."""
        path = self._path(run)
        if not path.exists():
            self._do(run)
        return np.load(path)

    def accuracy_of_real(self) -> float:
        """Returns the accuracy in percent of a classifier of the real images: not private."""
        data = self._data
        x, y = data.train_x[:_MOST_GENERATED], data.train_y[:_MOST_GENERATED]
        return accuracy_of(x, y, data, self._dataset, 0)

    def _path(self, run: Any) -> Path:
        mark = hashlib.blake2b(_key(_settings(run)).encode(), digest_size=6).hexdigest()
        return self._folder / "sheets" / f"{mark}.npy"

    def _do(self, run: Any) -> None:
        made = (train if isinstance(run, Run) else train_vae)(run, self._data)
        # Equally many of each class: no frequency of the real ones is used.
        classes = np.arange(min(self._data.size, _MOST_GENERATED)) % NUM_CLASSES
        images = made.generate(classes)
        accuracy = accuracy_of(images, classes, self._data, self._dataset, run.seed)
        shown = made.generate(np.repeat(np.arange(NUM_CLASSES), _SHOWN_PER_CLASS))
        path = self._path(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, shown.reshape(NUM_CLASSES, _SHOWN_PER_CLASS, *shown.shape[1:3]))
        line = {
            "run": _settings(run),
            "accuracy": accuracy,
            "epsilon": made.epsilon,
            "seconds": round(made.seconds, 1),
        }
        records.append(self._record, line)
        self._lines[_key(line["run"])] = line
        print(f"{line}\n{made.statement}\n", flush=True)
        tf.keras.backend.clear_session()
        gc.collect()


def _settings(run: Any) -> dict[str, Any]:
    if isinstance(run, Run):
        return dataclasses.asdict(run)
    return {"model": _VAE, **dataclasses.asdict(run)}


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def compare(values: flags.FlagValues) -> None:
    """Trains what the flags ask for, writes the picture and prints the accuracies.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    data = datasets.load(
        values.dataset,
        data_dir=values.data_dir,
        eval_split=values.eval_split,
        validation_examples=DEFAULTS[values.dataset].validation_examples,
    )
    runs = Runs(
        values.record or f"{values.output_dir}/gan.jsonl", values.output_dir, data, values.dataset
    )
    rows, sheets, titles = [], {}, {}
    for name, own in runs_of(values, data).items():
        lines = [runs.line(run) for run in own]
        accuracies = [line["accuracy"] for line in lines]
        spread = f" ({statistics.stdev(accuracies):.1f})" if len(lines) > 1 else ""
        private = lines[0]["epsilon"] is not None
        rows.append(
            [
                name,
                f"{values.target_epsilon:g}" if private else "none",
                f"{statistics.fmean(accuracies):.1f}{spread}",
                f"{statistics.fmean(line['seconds'] for line in lines):.0f}",
            ]
        )
        sheets[name] = runs.sheet(own[0])
        titles[name] = f"{name}, ε = {values.target_epsilon:g}" if private else name
    rows.append(["real images", "none", f"{runs.accuracy_of_real():.1f}", ""])
    save(figures.draw_generated(sheets, titles, by_class=True), f"{values.output_dir}/gan.png")
    print(f"\n{markdown(['trained on images of', 'epsilon', 'accuracy %', 'seconds'], rows)}")


def main(arguments: list[str]) -> None:
    """Runs the program.

    Args:
      arguments: The program's name, and those of the command line that are no flags.
    """
    with cli.refusing("gan", arguments, RefusedError, datasets.DataError):
        compare(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.WARNING)  # unless --verbosity
    cli.run(main)
