"""Compares private fine-tuning with plain Keras: the first step, with tracing, and later steps.

    python -m benchmarks.fine_tuning --model mobilenet_v2,resnet50 --part head,last_block,whole

The networks are those of `tf.keras.applications` with random weights; BatchNormalization runs on
its moving statistics. Each first step has a new process; in a further one, plain and private steps
take turns. Compare the ratios: those of steps are medians of the ratios of neighboring turns. CPU
time is that of all threads; on a machine that others use, it is the steadier measure.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import importlib.metadata
import itertools
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import tfdp
from benchmarks.report import cpu_model

# Name in `tf.keras.applications`, and the first layer of the last block.
MODELS = {
    "mobilenet_v2": ("MobileNetV2", "block_16_expand"),
    "resnet50": ("ResNet50", "conv5_block3_1_conv"),
    "convnext_tiny": ("ConvNeXtTiny", "convnext_tiny_stage_3_block_2_depthwise_conv"),
    "vgg16": ("VGG16", "block5_conv1"),
}
PARTS = ("head", "last_block", "whole")
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A case to train.

    Attributes:
      model: A key of `MODELS`.
      part: One of `PARTS`.
      image_size: Height and width of the images.
      batch: Images in a batch.
      repeats: Turns of each step.
    """

    model: str
    part: str
    image_size: int = 96
    batch: int = 16
    repeats: int = 15


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a step: wall-clock seconds, and CPU seconds of all threads."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a case.

    Attributes:
      variables: Number of trained variables.
      operations: Numbers of operations in the graphs of the plain and of the private step,
        functions included.
      first: Costs of the first steps, plain and private.
      steps: Pairs of costs of neighboring turns.
    """

    variables: int
    operations: tuple[int, int]
    first: tuple[Cost, Cost]
    steps: list[tuple[Cost, Cost]]

    def ratio(self, measure: str) -> float:
        """Returns the median of the ratios of the steps, by "wall" or "cpu"."""
        return statistics.median(
            getattr(private, measure) / getattr(plain, measure) for plain, private in self.steps
        )

    def median(self, index: int) -> float:
        """Median wall-clock time of the plain (0) or the private (1) steps, in seconds."""
        return statistics.median(pair[index].wall for pair in self.steps)


def network(case: Case) -> tf.keras.Model:
    """Builds a network that is trained in part."""
    name, _ = MODELS[case.model]
    shape = (case.image_size, case.image_size, 3)
    build = getattr(tf.keras.applications, name)
    base = build(weights=None, include_top=False, input_shape=shape, pooling="avg")
    train_part(base, case.model, case.part)
    images = tf.keras.Input(shape)
    return tf.keras.Model(images, tf.keras.layers.Dense(CLASSES)(base(images, training=False)))


def train_part(base: tf.keras.Model, model: str, part: str) -> None:
    """Freezes the layers of a network without its head that are in front of a part.

    Args:
      base: The network.
      model: A key of `MODELS`.
      part: One of `PARTS`.
    """
    names = [layer.name for layer in base.layers]
    places = {"head": len(names), "last_block": names.index(MODELS[model][1]), "whole": 0}
    for place, layer in enumerate(base.layers):
        layer.trainable = place >= places[part]


def timed(action: Callable[[], object]) -> Cost:
    """Runs an action, and says what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


class Step:
    """A training step of a case.

    Args:
      case: The case.
      private: Whether it is tfdp's, or plain Keras's.
    """

    def __init__(self, case: Case, private: bool):
        rng = np.random.default_rng(0)
        images = rng.random([case.batch, case.image_size, case.image_size, 3], np.float32)
        labels = rng.integers(0, CLASSES, case.batch)
        data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(case.batch)
        self._iterator = iter(data.cache().repeat())  # The number of rows is open, as of a draw.
        tf.keras.utils.set_random_seed(0)
        model = network(case)
        optimizer = tf.keras.optimizers.legacy.SGD(0.01)
        if private:
            optimizer = tfdp.DPSGD(1.0, 1.0, case.batch, learning_rate=0.01)
        model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self._function = model.make_train_function()
        self.variables = len(model.trainable_variables)

    def __call__(self) -> None:
        self._function(self._iterator)

    def operations(self) -> int:
        """Returns number of operations of the traced graph, functions that it calls included."""
        graph = self._function.get_concrete_function(self._iterator).graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


def first_step(case: Case, private: bool) -> tuple[int, int, Cost]:
    """Measures the first step, with tracing, in a new process."""
    step = Step(case, private)
    cost = timed(step)
    return step.variables, step.operations(), cost


def turns(case: Case) -> list[tuple[Cost, Cost]]:
    """Measures plain and private steps by turns."""
    steps = [Step(case, private) for private in (False, True)]
    for step in steps * 2:
        step()
    return [(timed(steps[0]), timed(steps[1])) for _ in range(case.repeats)]


def measure(case: Case) -> Result:
    """Measures a case, in processes of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        (variables, *plain), (_, *private) = pool.starmap(
            first_step, [(case, False), (case, True)], chunksize=1
        )
        steps = pool.apply(turns, [case])
    return Result(variables, (plain[0], private[0]), (plain[1], private[1]), steps)


HEADER = (
    "| network | trained | variables | operations, plain and private | first step s, plain and "
    "private | ratio (CPU time) | step ms, plain and private | ratio (CPU time) |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(case: Case, result: Result) -> str:
    """Returns a row of a Markdown table, under `HEADER`."""
    plain, private = result.first
    cells = [
        f"`{case.model}`",
        case.part.replace("_", " "),
        str(result.variables),
        " / ".join(f"{n:,}" for n in result.operations),
        f"{plain.wall:.1f} / {private.wall:.1f}",
        f"{private.wall / plain.wall:.2f} ({private.cpu / plain.cpu:.2f})",
        f"{1e3 * result.median(0):.0f} / {1e3 * result.median(1):.0f}",
        f"**{result.ratio('wall'):.2f}** ({result.ratio('cpu'):.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def machine() -> str:
    """Returns the machine and the versions, as a Markdown list."""
    return (
        f"- Machine: {cpu_model()}, {os.cpu_count()} cores, {platform.system()}\n"
        f"- Python {platform.python_version()}, TensorFlow {tf.__version__}, "
        f"tf-keras {importlib.metadata.version('tf-keras')}, tfdp {tfdp.__version__}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenet_v2", help=f"any of {','.join(MODELS)}")
    parser.add_argument("--part", default=",".join(PARTS), help=f"any of {','.join(PARTS)}")
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each step")
    options = parser.parse_args(arguments)
    for name, known in (("model", MODELS), ("part", PARTS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name} must be of {','.join(known)}. Received: {unknown}.")
    cases = [
        Case(model, part, options.image_size, options.batch, options.repeats)
        for model, part in itertools.product(options.model.split(","), options.part.split(","))
    ]
    print(f"{machine()}\n- Images of {options.image_size} pixels, batches of {options.batch}\n")
    print(HEADER, flush=True)
    for case in cases:
        print(row(case, measure(case)), flush=True)


if __name__ == "__main__":
    main()
