"""Trains small Keras 3 programs privately with `tfdp.keras3` and with JAX-Privacy's `keras_api`.

`python -m benchmarks.keras_apis --peer_python peers/bin/python` prints a table of what each does:
"trains" (two epochs, finite losses, changed weights), or the first line of its error. Each program
runs in a process of its own. Of JAX-Privacy, whose backend of Keras is JAX, `fit` samples Poisson
batches (`poisson_sampling_in_fit=True`).
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LIBRARIES = {"tfdp": "tensorflow", "jax_privacy": "jax"}
EXAMPLES, BATCH, EPOCHS = 96, 16, 2
IMAGES, TOKENS, CLASSES = (8, 8, 3), (12,), 3


class Program:
    """A program, with the defaults of most of them."""

    compile: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, keras: Any):
        self.keras, self.layers = keras, keras.layers

    def data(self) -> tuple[Any, Any]:
        """Returns all inputs and targets."""
        random = np.random.default_rng(0)
        x = random.normal(size=(EXAMPLES, *IMAGES)).astype("float32")
        return x, random.integers(0, CLASSES, EXAMPLES)

    def body(self) -> list[Any]:
        """Returns the layers between the input and the logits."""
        return [self.layers.Flatten()]

    def model(self) -> Any:
        """Returns the model."""
        x, _ = self.data()
        inputs = self.layers.Input(x.shape[1:], dtype=str(x.dtype))
        return self.keras.Sequential([inputs, *self.body(), self.layers.Dense(CLASSES)])

    def optimizer(self) -> Any:
        """Returns the optimizer, without privacy."""
        return self.keras.optimizers.Adam(1e-3)

    def loss(self) -> Any:
        """Returns the loss."""
        return self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def weights(self) -> Any:
        """Returns the weights of the examples, or None."""


class Convolutions(Program):
    """Conv2D, GroupNormalization, pooling."""

    def body(self) -> list[Any]:
        layers = self.layers
        normal = layers.GroupNormalization(2)
        return [layers.Conv2D(4, 3), normal, layers.MaxPooling2D(), layers.Flatten()]


class OnTokens(Program):
    """A program whose inputs are tokens."""

    def data(self) -> tuple[Any, Any]:
        random = np.random.default_rng(0)
        x = random.integers(1, 20, (EXAMPLES, *TOKENS)).astype("int32")
        return x, random.integers(0, CLASSES, EXAMPLES)


class Recurrent(OnTokens):
    """Embedding with a mask, Bidirectional LSTM."""

    def body(self) -> list[Any]:
        layers = self.layers
        return [layers.Embedding(20, 6, mask_zero=True), layers.Bidirectional(layers.LSTM(4))]


class Attention(OnTokens):
    """Embedding, MultiHeadAttention, LayerNormalization."""

    def model(self) -> Any:
        layers = self.layers
        tokens = layers.Input(TOKENS, dtype="int32")
        x = layers.Embedding(20, 6)(tokens)
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 3)(normal, normal)
        return self.keras.Model(tokens, layers.Dense(CLASSES)(x[:, 0]))


class Dropout(Program):
    """Dropout."""

    def body(self) -> list[Any]:
        return [self.layers.Flatten(), self.layers.Dense(8), self.layers.Dropout(0.5)]


class Augmentation(Program):
    """RandomFlip and RandomTranslation in the model."""

    def body(self) -> list[Any]:
        layers = self.layers
        flip, move = layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)
        return [flip, move, layers.Flatten()]


class BatchStatistics(Program):
    """BatchNormalization that is trained (it mixes examples)."""

    def body(self) -> list[Any]:
        return [self.layers.Flatten(), self.layers.BatchNormalization()]


class FrozenStatistics(Program):
    """BatchNormalization that is frozen."""

    def body(self) -> list[Any]:
        return [self.layers.Flatten(), self.layers.BatchNormalization(trainable=False)]


class SeveralOutputs(Program):
    """Two outputs with weights of their losses."""

    compile = types.MappingProxyType({"loss_weights": [1.0, 0.5]})

    def data(self) -> tuple[Any, Any]:
        x, y = super().data()
        return x, (y, x.mean(axis=(1, 2, 3))[:, np.newaxis])

    def model(self) -> Any:
        image = self.layers.Input(IMAGES)
        flat = self.layers.Flatten()(image)
        return self.keras.Model(
            image, [self.layers.Dense(CLASSES)(flat), self.layers.Dense(1)(flat)]
        )

    def loss(self) -> Any:
        return [super().loss(), "mse"]


class SeveralInputs(Program):
    """A dict of inputs."""

    def data(self) -> tuple[Any, Any]:
        x, y = super().data()
        return {"image": x, "mean": x.mean(axis=(1, 2, 3))[:, np.newaxis]}, y

    def model(self) -> Any:
        layers = self.layers
        image, mean = layers.Input(IMAGES, name="image"), layers.Input((1,), name="mean")
        x = layers.Concatenate()([layers.Flatten()(image), mean])
        return self.keras.Model({"image": image, "mean": mean}, layers.Dense(CLASSES)(x))


class SampleWeights(Program):
    """Sample weights."""

    def weights(self) -> Any:
        return np.linspace(0.5, 1.5, EXAMPLES).astype("float32")


class LossByName(Program):
    """A loss by its name, on one-hot targets."""

    def data(self) -> tuple[Any, Any]:
        x, y = super().data()
        return x, np.eye(CLASSES, dtype="float32")[y]

    def loss(self) -> Any:
        return "mse"


class LossFunction(LossByName):
    """A function as the loss."""

    def loss(self) -> Any:
        return lambda y, prediction: self.keras.ops.mean((y - prediction) ** 2, axis=-1)


class AddedLoss(Program):
    """A layer that adds a loss of each example's activity."""

    def body(self) -> list[Any]:
        return [self.layers.Flatten(), self.layers.Dense(8, activity_regularizer="l2")]


class Regularized(Program):
    """Weights with an L2 regularizer."""

    def body(self) -> list[Any]:
        return [self.layers.Flatten(), self.layers.Dense(8, kernel_regularizer="l2")]


class OwnStep(Program):
    """A subclass with a `train_step` of its own, as Keras documents it for the backend."""

    def model(self) -> Any:
        keras = self.keras
        if keras.config.backend() == "jax":

            class Model(keras.Model):  # type: ignore[misc,name-defined]
                def train_step(self, state: Any, data: Any) -> Any:
                    logs, state = super().train_step(state, data)
                    return {**logs, "own": keras.ops.ones(())}, state
        else:

            class Model(keras.Model):  # type: ignore[misc,name-defined,no-redef]
                def train_step(self, data: Any) -> Any:
                    return {**super().train_step(data), "own": keras.ops.ones(())}

        image = self.layers.Input(IMAGES)
        return Model(image, self.layers.Dense(CLASSES)(self.layers.Flatten()(image)))


class Metrics(Program):
    """Metrics."""

    compile = types.MappingProxyType({"metrics": ["accuracy"]})


class SeveralSteps(Program):
    """`steps_per_execution`."""

    compile = types.MappingProxyType({"steps_per_execution": 2})


class Compiled(Program):
    """`jit_compile=True`."""

    compile = types.MappingProxyType({"jit_compile": True})


class HalfPrecision(Program):
    """`mixed_bfloat16`."""

    def model(self) -> Any:
        self.keras.config.set_dtype_policy("mixed_bfloat16")
        return super().model()


class Lion(Program):
    """Lion with weight decay and a schedule."""

    def optimizer(self) -> Any:
        schedule = self.keras.optimizers.schedules.CosineDecay(1e-3, 100)
        return self.keras.optimizers.Lion(schedule, weight_decay=1e-3)


class Averaged(Program):
    """`use_ema=True`."""

    def optimizer(self) -> Any:
        return self.keras.optimizers.SGD(0.1, use_ema=True)


PROGRAMS: tuple[type[Program], ...] = (
    *(Program, Convolutions, Recurrent, Attention, Dropout, Augmentation, BatchStatistics),
    *(FrozenStatistics, SeveralOutputs, SeveralInputs, SampleWeights, LossByName, LossFunction),
    *(AddedLoss, Regularized, OwnStep, Metrics, SeveralSteps, Compiled, HalfPrecision, Lion),
    Averaged,
)
TITLES = {Program: "Dense."}


def with_tfdp(program: Program) -> Any:
    """Trains with `tfdp.keras3`; returns the model and its logs."""
    import tfdp

    x, y = program.data()
    weights = program.weights()
    data = (x, y) if weights is None else (x, y, weights)
    compiled = bool(program.compile.get("jit_compile"))
    padding = "buckets" if compiled else "none"
    batches = tfdp.data.poisson_batches(data, expected_batch_size=BATCH, padding=padding)
    optimizer = tfdp.keras3.DPOptimizer(
        program.optimizer(), l2_norm_clip=1.0, noise_multiplier=1.0, sampling=batches.sampling
    )
    model = program.model()
    before = model.get_weights()
    model.compile(optimizer, program.loss(), **{"jit_compile": False, **program.compile})
    history = model.fit(batches, epochs=EPOCHS, verbose=0)
    return model, before, history


def with_jax_privacy(program: Program) -> Any:
    """Trains with JAX-Privacy; returns the model and its logs."""
    from jax_privacy import keras_api

    x, y = program.data()
    config = keras_api.DPKerasConfig(
        epsilon=1e3,
        delta=1e-5,
        clipping_norm=1.0,
        batch_size=BATCH,
        gradient_accumulation_steps=1,
        train_steps=EPOCHS * (EXAMPLES // BATCH),
        train_size=EXAMPLES,
        noise_multiplier=1.0,
        poisson_sampling_in_fit=True,
        seed=0,  # Its own are negative every other time, which NumPy refuses.
    )
    model = keras_api.make_private(program.model(), config)
    before = model.get_weights()
    model.compile(program.optimizer(), program.loss(), **program.compile)
    arguments = {"epochs": EPOCHS, "batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, sample_weight=program.weights(), **arguments)
    return model, before, history


TRAIN: dict[str, Callable[[Program], Any]] = {"tfdp": with_tfdp, "jax_privacy": with_jax_privacy}


def outcome(library: str, name: str) -> str:
    """Runs a program in this process, and says what became of it."""
    import keras

    program = next(p for p in PROGRAMS if p.__name__ == name)(keras)
    try:
        model, before, history = TRAIN[library](program)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {(lines or ['no message'])[0].strip()}"
    if not np.all(np.isfinite(history.history["loss"])):
        return "the loss is not finite"
    if isinstance(program, OwnStep) and "own" not in history.history:
        return "trains, but `train_step` is not called"
    after = model.get_weights()
    changed = any(np.any(a != b) for a, b in zip(before, after, strict=True))
    return "trains" if changed else "the weights do not change"


def in_a_process(python: str, library: str, name: str, timeout: float) -> str:
    """Runs a program in a process of a Python that has the library."""
    command = [python, "-m", "benchmarks.keras_apis", "--library", library, "--program", name]
    environment = {
        **os.environ,
        "KERAS_BACKEND": LIBRARIES[library],
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.getcwd(),
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"no result within {timeout:g} s"
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else "the process died"


def versions(python: str, names: tuple[str, ...]) -> str:
    """Returns the versions of packages of a Python."""
    code = f"import importlib.metadata as m; print(*[f'{{n}} {{m.version(n)}}' for n in {names}])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--peer_python", help="a Python with jax_privacy and keras; none: tfdp alone"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds a program may take")
    parser.add_argument("--only", nargs="*", help="programs to run; all by default")
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    options = parse(arguments)
    if options.program:
        print(json.dumps(outcome(options.library, options.program)))
        return
    pythons = {"tfdp": sys.executable}
    if options.peer_python:
        pythons["jax_privacy"] = options.peer_python
    print(f"| program | {' | '.join(pythons)} |\n|---|{'---|' * len(pythons)}", flush=True)
    for program in PROGRAMS:
        if options.only and program.__name__ not in options.only:
            continue
        title = TITLES.get(program) or (program.__doc__ or "").strip()
        found = [
            in_a_process(p, name, program.__name__, options.timeout) for name, p in pythons.items()
        ]
        print(f"| {title.removesuffix('.')} | {' | '.join(found)} |", flush=True)
    print(f"\ntfdp with keras {importlib.metadata.version('keras')}", end="")
    print(f", tensorflow {importlib.metadata.version('tensorflow')}", end="")
    if options.peer_python:
        print(f"; {versions(options.peer_python, ('jax_privacy', 'keras', 'jax'))}", end="")
    print(".")


if __name__ == "__main__":
    main()
