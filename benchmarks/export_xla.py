"""Writes the XLA programs of a plain and of a private training step, with their arguments.

    python -m benchmarks.export_xla --model mnist_cnn --batch 256 --output_dir DIR

They run, and can be timed, where there is XLA but no TensorFlow, for example by JAX on a GPU (with
JAX_ENABLE_X64=1: labels, the step count and the noise key are int64). One program is a whole step
on a batch of fixed size: forward, gradients, clipping, noise, update of the variables.
`<step>.stablehlo` is its text, `<step>_args.npz` holds its parameters as a0, a1, ...:
inputs, labels, then the variables. Its first result is the mean loss, the others are the
variables' new values.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when TensorFlow is imported

import numpy as np
import tensorflow as tf

from benchmarks import networks
from benchmarks.contestants import CONTESTANTS
from benchmarks.keras_steps import make_loss, make_optimizer
from benchmarks.problems import PROBLEMS, Problem

STEPS = {"plain": "keras_sgd", "private": "tfdp_one_pass"}
_NUMPY_NAMES = {"f64": "float64", "f32": "float32", "i64": "int64", "i32": "int32", "i1": "bool"}


def training_step(contestant: str, problem: Problem, batch: int) -> Any:
    """Returns the step as a function of inputs and labels, compiled by XLA."""
    model = networks.build(problem)
    networks.let_xla_compile(model)
    optimizer = make_optimizer(contestant, batch)
    loss_function = make_loss(contestant)

    # The graph has an open batch dimension, as clipping engines need it; the program has not.
    signature = [
        tf.TensorSpec([None, *problem.input_shape], tf.as_dtype(problem.dtype)),
        tf.TensorSpec([None], tf.int64),
    ]

    @tf.function(jit_compile=True, input_signature=signature)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return tf.reduce_mean(loss)

    return step


def export(step: Any, x: tf.Tensor, y: tf.Tensor) -> tuple[str, list[np.ndarray]]:
    """Returns the program of a step, and its parameters in their order.

    Raises:
      ValueError: The program has other parameters than inputs and captured variables.
    """
    step(x, y)  # makes the optimizer's variables
    function = step.get_concrete_function(x, y)
    text = step.experimental_get_compiler_ir(x, y)(stage="stablehlo")
    expected = parameters(text)
    captured = [outer for outer, _ in function.graph.captures]
    if len(expected) != 2 + len(captured):
        raise ValueError(
            f"The program has {len(expected)} parameters for two arguments and {len(captured)} "
            "captures."
        )
    values = [_read(outer, dtype) for outer, (_, dtype) in zip(captured, expected[2:], strict=True)]
    arrays = [x.numpy(), y.numpy(), *values]
    given = [(array.shape, array.dtype.name) for array in arrays]
    if given != expected:
        raise ValueError(f"The program's parameters are {expected}; the captures are {given}.")
    return text, arrays


def _read(captured: tf.Tensor, dtype: str) -> np.ndarray:
    """Returns the value of a captured variable, by its handle, or of a captured constant."""
    if captured.dtype == tf.resource:
        captured = tf.raw_ops.ReadVariableOp(resource=captured, dtype=dtype)
    return captured.numpy()


def parameters(text: str) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of the parameters of a StableHLO program."""
    main = next(line for line in text.splitlines() if "func.func" in line and "@main" in line)
    found = re.findall(r"%arg\d+: tensor<((?:\d+x)*)(\w+)>", main.split("->")[0])
    return [
        (tuple(int(size) for size in sizes.split("x")[:-1]), _NUMPY_NAMES[dtype])
        for sizes, dtype in found
    ]


def write(folder: Path, name: str, problem: Problem, batch: int, contestant: str) -> None:
    """Exports one step into two files."""
    x, y = (tf.constant(rows) for rows in problem.rows(batch))
    text, arrays = export(training_step(contestant, problem, batch), x, y)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.stablehlo").write_text(text)
    np.savez(folder / f"{name}_args.npz", **{f"a{i}": array for i, array in enumerate(arrays)})
    print(f"{name}: {len(arrays)} parameters, {len(text):,} characters")


def main(arguments: list[str] | None = None) -> None:
    """Writes the programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PROBLEMS, default="mnist_cnn")
    parser.add_argument("--batch", type=int, default=256, help="rows per step")
    keras = [name for name, one in CONTESTANTS.items() if one.framework == "keras"]
    parser.add_argument("--private", choices=keras, default=STEPS["private"])
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("results", "export_xla"),
        help="folder to write into",
    )
    options = parser.parse_args(arguments)
    for name, contestant in {**STEPS, "private": options.private}.items():
        write(options.output_dir, name, PROBLEMS[options.model], options.batch, contestant)


if __name__ == "__main__":
    main()
