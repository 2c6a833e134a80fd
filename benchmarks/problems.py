"""Problems that every contestant trains: shapes of networks, and rows of random data.

Imports no framework, so that each can be measured in a process (and a Python) without the others.
"""

import dataclasses
import math
from typing import Any

L2_NORM_CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01

MLP_INPUTS = 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network and its data.

    Attributes:
      name: One of `PROBLEMS`, or `mlp_<width>`.
      input_shape: Shape of one example.
      classes: Number of logits.
      parameters: Number of trainable parameters, in every framework.
      largest_activation: Most values that one layer outputs for an example.
      vocabulary: Number of different tokens, or None for real numbers.
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    parameters: int
    largest_activation: int
    vocabulary: int | None = None

    @property
    def dtype(self) -> str:
        """Type of an example's values."""
        return "float32" if self.vocabulary is None else "int32"

    def rows(self, number: int, seed: int = 0) -> tuple[Any, Any]:
        """Random examples `[number, ...]`, float32 or int32, and classes `[number]`, int64."""
        import numpy as np  # here, so that a Python without numpy can say what it lacks

        rng = np.random.default_rng(seed)
        shape = (number, *self.input_shape)
        if self.vocabulary is None:
            x = rng.standard_normal(size=shape, dtype=self.dtype)
        else:
            x = rng.integers(0, self.vocabulary, shape, dtype=self.dtype)
        return x, rng.integers(0, self.classes, number)


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("mnist_cnn", (28, 28, 1), 10, 26_010, 13 * 13 * 16),
        Problem("cifar_cnn", (32, 32, 3), 10, 550_570, 32 * 32 * 32),
        Problem("imdb_lstm", (80,), 2, 2_020_946, 80 * 100, vocabulary=20_000),
        Problem("transformer_block", (64,), 2, 690_114, 64 * 256, vocabulary=10_000),
    )
}


def problem(name: str) -> Problem:
    """Returns the problem of that name."""
    if name in PROBLEMS:
        return PROBLEMS[name]
    if name.startswith("mlp_"):
        width = int(name.removeprefix("mlp_"))
        return Problem(name, (MLP_INPUTS,), 10, mlp_parameters(width), max(width, MLP_INPUTS))
    raise ValueError(f"Argument `name` must be one of {[*PROBLEMS]} or mlp_<width>: {name=}.")


def mlp_parameters(width: int) -> int:
    """Parameters of two hidden layers of `width` units and ten logits."""
    return (MLP_INPUTS + 1) * width + (width + 1) * width + (width + 1) * 10


def mlp_width(parameters: int) -> int:
    """Returns the width that gives about as many parameters."""
    linear = MLP_INPUTS + 12
    return max(1, round((math.sqrt(linear**2 + 4 * (parameters - 10)) - linear) / 2))
