"""Trains a GAN privately, and a classifier on its synthetic images alone.

    python -m experiments.gan
    python -m experiments.gan --dataset=mnist --data_dir=... --output_dir=gan_mnist

The GAN is conditional: labels of real images meet the critic beside their images, those of
synthetic ones are uniform. For digits, `--vae` (the default) trains `tfdp.TermWiseVAE` at the same
epsilon as well, as `experiments.vae` does. The program writes a picture of generated images, a row
for each class, and prints the accuracy on real test images of classifiers that were trained on
synthetic images, and for comparison on real ones, which is not private.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags, logging

import tfdp
from experiments import cli, datasets
from experiments.output import markdown, save
from experiments.settings import RefusedError
from experiments.vae import figures, metrics
from experiments.vae import settings as vae_settings
from experiments.vae import training as vae_training

NUM_CLASSES = 10
_SHOWN_PER_CLASS = 8
_DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Values of flags that are not given, for a data set."""

    epochs: int
    expected_batch_size: int
    latent_dim: int
    critic_steps: int = 2
    l2_norm_clip: float = 1.0
    learning_rate: float = 0.002
    generator_learning_rate: float = 0.002


# Not tuned.
DEFAULTS = {
    "digits": Defaults(epochs=120, expected_batch_size=256, latent_dim=8),
    "mnist": Defaults(epochs=40, expected_batch_size=1024, latent_dim=32),
    "fashion_mnist": Defaults(epochs=40, expected_batch_size=1024, latent_dim=32),
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
    flags.DEFINE_enum("loss", "gradient_penalty", list(_LOSSES), text, flag_values=values)
    text = f"Epsilon, at delta = {_DELTA:g}."
    flags.DEFINE_float("target_epsilon", 3.0, text, lower_bound=1e-6, flag_values=values)
    for name in ("epochs", "expected_batch_size", "critic_steps"):
        text = "That of the data set unless given."
        flags.DEFINE_integer(name, None, text, lower_bound=1, flag_values=values)
    for name in ("l2_norm_clip", "learning_rate", "generator_learning_rate"):
        text = "That of the data set unless given."
        flags.DEFINE_float(name, None, text, lower_bound=1e-9, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Seed of the first weights.", flag_values=values)
    text = "Whether to train a TermWiseVAE at the same epsilon (digits)."
    flags.DEFINE_bool("vae", True, text, flag_values=values)
    flags.DEFINE_string("output_dir", "results/gan", "Folder of the picture.", flag_values=values)


def networks(shape: tuple[int, ...], latent_dim: int) -> tuple[tf.keras.Model, tf.keras.Model]:
    """Builds a conditional generator and critic of images: dense for 8x8, convolutional for 28x28.

    Neither has BatchNormalization: the critic must not, and the generator did not need it.
    """
    layers = tf.keras.layers
    noise, image, classes = (layers.Input(s) for s in ([latent_dim], shape, [NUM_CLASSES]))
    given = layers.Concatenate()([noise, classes])
    if shape[0] < 28:
        made = layers.Dense(128, "relu")(layers.Dense(128, "relu")(given))
        made = layers.Reshape(shape)(layers.Dense(int(np.prod(shape)), "sigmoid")(made))
        seen = layers.Flatten()(image)
    else:
        made = layers.Reshape([7, 7, 64])(layers.Dense(7 * 7 * 64, "relu")(given))
        made = layers.Conv2DTranspose(32, 4, 2, padding="same", activation="relu")(made)
        made = layers.Conv2DTranspose(1, 4, 2, padding="same", activation="sigmoid")(made)
        seen = image
        for filters in (16, 32):
            seen = layers.LeakyReLU(0.2)(layers.Conv2D(filters, 5, 2, padding="same")(seen))
        seen = layers.Flatten()(seen)
    score = layers.LeakyReLU(0.2)(layers.Dense(128)(layers.Concatenate()([seen, classes])))
    critic = tf.keras.Model([image, classes], layers.Dense(1)(score), name="critic")
    return tf.keras.Model([noise, classes], made, name="generator"), critic


def train(values: flags.FlagValues, data: datasets.Data) -> tuple[Any, str]:
    """Trains a GAN within the budget; returns it and its privacy statement.

    Raises:
      RefusedError: The budget cannot be met.
    """
    own = dataclasses.asdict(DEFAULTS[values.dataset])
    own |= {name: values[name].value for name in own if name in values and values[name].value}
    if own["expected_batch_size"] > data.size:
        raise RefusedError(f"--expected_batch_size must be at most {data.size}.")
    tf.keras.utils.set_random_seed(values.seed)  # Of the weights. The noise does not depend on it.
    steps = max(1, data.size // own["expected_batch_size"])
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y),
        expected_batch_size=own["expected_batch_size"],
        steps_per_epoch=steps,
    )
    try:
        noise = tfdp.calibrate_noise_multiplier(
            target_epsilon=values.target_epsilon,
            delta=_DELTA,
            steps=own["epochs"] * steps,
            dataset_size=data.size,
            expected_batch_size=own["expected_batch_size"],
        )
    except ValueError as refusal:
        raise RefusedError(f"--target_epsilon={values.target_epsilon:g}: {refusal}") from refusal
    model = tfdp.models.PrivateGAN(
        *networks(data.train_x.shape[1:], own["latent_dim"]),
        critic_steps=own["critic_steps"],
        num_classes=NUM_CLASSES,
        **_LOSSES[values.loss],
    )
    model.compile(
        critic_optimizer=tfdp.DPAdam(
            own["l2_norm_clip"],
            noise,
            learning_rate=own["learning_rate"],
            beta_1=0.5,
            sampling=batches.sampling,
        ),
        generator_optimizer=tf.keras.optimizers.Adam(own["generator_learning_rate"], beta_1=0.5),
    )
    model.fit(batches, epochs=own["epochs"], verbose=0)
    return model, tfdp.privacy_statement(model, _DELTA, dataset_size=data.size)


def compare(values: flags.FlagValues) -> None:
    """Trains what the flags ask for, writes the picture and prints the accuracies.

    Raises:
      RefusedError, datasets.DataError: It cannot be done; the message says why.
    """
    data = datasets.load(values.dataset, data_dir=values.data_dir)
    # As many as there are real ones, equally many of each class: no frequency is used.
    classes = np.arange(data.size) % NUM_CLASSES
    shown = np.repeat(np.arange(NUM_CLASSES), _SHOWN_PER_CLASS)
    began = time.monotonic()
    model, statement = train(values, data)
    rows = [["PrivateGAN", f"{values.target_epsilon:g}", time.monotonic() - began]]
    made = [model.generate(data.size, classes, seed=values.seed)]
    sheets = {"gan": model.generate(len(shown), shown, seed=values.seed)}
    titles = {"gan": f"PrivateGAN, ε = {values.target_epsilon:g}"}
    if values.vae and values.dataset == "digits":
        settings = vae_settings.resolve(
            {"task": "digits", "delta": _DELTA},
            "term_wise",
            values.target_epsilon,
            values.seed,
            data.size,
        )
        outcome, pictures, _ = vae_training.run(settings, data)
        rows.append(["TermWiseVAE", f"{values.target_epsilon:g}", outcome.seconds])
        made.append(outcome.accuracy)
        sheets["vae"] = pictures["generated"]
        titles["vae"] = f"TermWiseVAE, ε = {values.target_epsilon:g}"
    rows.append(["real images", "none", 0.0])
    made.append(data.train_x)
    accuracies = [
        images
        if isinstance(images, float)
        else metrics.downstream_accuracy(
            images, data.train_y if images is data.train_x else classes, data.eval_x, data.eval_y
        )
        for images in made
    ]
    sides = data.train_x.shape[1:3]
    sheets = {
        name: images.reshape(NUM_CLASSES, _SHOWN_PER_CLASS, *sides)
        for name, images in sheets.items()
    }
    save(figures.draw_generated(sheets, titles, by_class=True), f"{values.output_dir}/gan.png")
    print(f"\n{statement}\n")
    cells = [
        [name, epsilon, f"{accuracy:.3f}", f"{seconds:.0f}"]
        for (name, epsilon, seconds), accuracy in zip(rows, accuracies, strict=True)
    ]
    print(markdown(["trained on images of", "epsilon", "accuracy", "seconds"], cells))


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
