"""Compares private fine-tuning of KerasHub's tasks with plain Keras: time, first step, peak memory.

    python -m benchmarks.hub --model bert,gpt2,gemma,vit --part whole,adapters,biases,head

Models are as wide as published ones, of few layers, with random weights: nothing is downloaded, and
texts are random tokens. First steps and peaks have a process each; in a further one plain and
private steps take turns. Compare the ratios: those of steps are medians of the ratios of
neighboring turns. CPU time is that of all threads; on a machine that others use, it is the
steadier measure. Each case is a row that is printed at once, so that a long table can be measured
in parts.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import dataclasses
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdp.keras3
from benchmarks import worker
from benchmarks.fine_tuning import Cost, timed
from benchmarks.ports import engine
from benchmarks.report import cpu_model

PARTS = ("whole", "adapters", "biases", "head")
RANK, CLASSES = 4, 10
LATER_STEPS = 2  # After the first, before the peak of memory is read.
models = keras_hub.models


@dataclasses.dataclass(frozen=True)
class Model:
    """A task of KerasHub.

    Attributes:
      build: Makes it.
      batch: Examples in a batch.
      tokens: Length of a text; 0 for images.
      vocabulary: Number of tokens.
      parts: Those of `PARTS` that it has.
    """

    build: Callable[[], Any]
    batch: int
    tokens: int = 0
    vocabulary: int = 0
    parts: Sequence[str] = PARTS


def _bert() -> Any:
    """Builds BERT "small": 4 layers, 512 wide."""
    backbone = models.BertBackbone(
        vocabulary_size=30_522,
        num_layers=4,
        num_heads=8,
        hidden_dim=512,
        intermediate_dim=2048,
        max_sequence_length=512,
    )
    return models.BertTextClassifier(backbone, num_classes=CLASSES)


def _gpt2() -> Any:
    """Builds 2 of the 12 layers of GPT-2 small."""
    backbone = models.GPT2Backbone(
        vocabulary_size=50_257,
        num_layers=2,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=1024,
    )
    return models.GPT2CausalLM(backbone)


def _gemma() -> Any:
    """Builds 2 of the 18 layers of Gemma 3 270M, and an eighth of its table."""
    backbone = models.Gemma3Backbone(
        vocabulary_size=32_768,
        image_size=None,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=640,
        intermediate_dim=2048,
        head_dim=256,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=512,
        local_rope_scaling_factor=1.0,
        global_rope_scaling_factor=1.0,
    )
    return models.Gemma3CausalLM(None, backbone)


def _vit() -> Any:
    """Builds 2 of the 12 layers of ViT-B/16."""
    backbone = models.ViTBackbone(
        image_shape=(224, 224, 3),
        patch_size=16,
        num_layers=2,
        num_heads=12,
        hidden_dim=768,
        mlp_dim=3072,
    )
    return models.ViTImageClassifier(backbone, num_classes=CLASSES)


# The output layer of language models is the table of their tokens: they have no head. Gemma has no
# biases.
MODELS = {
    "bert": Model(_bert, 16, 128, 30_522),
    "gpt2": Model(_gpt2, 8, 64, 50_257, PARTS[:3]),
    "gemma": Model(_gemma, 8, 64, 32_768, PARTS[:2]),
    "vit": Model(_vit, 8),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A case to train.

    Attributes:
      model: A key of `MODELS`.
      part: One of its parts.
      repeats: Turns of each step.
    """

    model: str
    part: str
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Fresh:
    """The start of a training, in a process of its own.

    Attributes:
      first: The first step, with tracing.
      peak: Most memory of the process, in MiB.
      growth: The peak from the first step on, less what the process held before, in MiB.
    """

    first: Cost
    peak: float
    growth: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a case; pairs are of plain and private.

    Attributes:
      trained: Number of trained parameters.
      engine: How gradients are clipped.
      fresh: Starts of trainings.
      steps: Steps in neighboring turns.
    """

    trained: int
    engine: str
    fresh: tuple[Fresh, Fresh]
    steps: Sequence[tuple[Cost, Cost]]

    def ratio(self, measure: str) -> float:
        """Returns the median of the ratios of the steps, by "wall" or "cpu"."""
        return statistics.median(
            getattr(private, measure) / getattr(plain, measure) for plain, private in self.steps
        )


def network(model: str, part: str) -> Any:
    """Builds a task that is trained in part.

    Args:
      model: A key of `MODELS`.
      part: One of `PARTS`; the head is trained in each.
    """
    task = MODELS[model].build()
    if part == "adapters":
        task.backbone.enable_lora(RANK)
    elif part == "biases":
        for variable in task.backbone.trainable_variables:
            variable.trainable = variable.name in ("bias", "beta", "gamma")
    elif part == "head":
        task.backbone.trainable = False
    return task


def examples(model: str, task: Any) -> tuple:
    """Returns a batch `(x, y)`, or `(x, y, sample_weight)`, as the task's preprocessor makes it."""
    sizes, rng = MODELS[model], np.random.default_rng(0)
    if not sizes.tokens:
        return rng.random([sizes.batch, 224, 224, 3], np.float32), _labels(rng, sizes)
    tokens = rng.integers(0, sizes.vocabulary, [sizes.batch, sizes.tokens + 1], np.int32)
    inputs = {
        "token_ids": tokens[:, :-1],
        "padding_mask": np.ones([sizes.batch, sizes.tokens], "int32"),
        "segment_ids": np.zeros([sizes.batch, sizes.tokens], "int32"),
    }
    inputs = {name: inputs[name] for name in task.input}
    if isinstance(task, models.CausalLM):
        return inputs, tokens[:, 1:], np.ones(tokens[:, 1:].shape, "float32")
    return inputs, _labels(rng, sizes)


def _labels(rng: np.random.Generator, sizes: Model) -> np.ndarray:
    return rng.integers(0, CLASSES, sizes.batch)


class Step:
    """A training step of a case.

    Args:
      case: The case.
      private: Whether it is tfdp's, or plain Keras's.
    """

    def __init__(self, case: Case, private: bool):
        keras.utils.set_random_seed(0)
        self.task = network(case.model, case.part)
        rows, size = examples(case.model, self.task), MODELS[case.model].batch
        data = tf.data.Dataset.from_tensor_slices(rows).batch(size)
        self._iterator = iter(data.cache().repeat())  # The number of rows is open, as of a draw.
        optimizer = keras.optimizers.Adam(1e-4)
        if private:
            optimizer = tfdp.keras3.DPAdam(1.0, 1.0, size, learning_rate=1e-4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.task.compile(optimizer, loss=loss, weighted_metrics=None)
        self.task.make_train_function()
        self.trained = sum(int(np.prod(v.shape)) for v in self.task.trainable_variables)

    def __call__(self) -> None:
        # Waits for the losses, so that steps do not overlap.
        [np.asarray(value) for value in tf.nest.flatten(self.task.train_function(self._iterator))]


def start(case: Case, private: bool) -> Fresh:
    """Measures the start of a training, in a new process."""
    step = Step(case, private)
    peak = worker.memory()[1]
    worker.forget_peak()
    before = worker.memory()[0]
    first = timed(step)
    for _ in range(LATER_STEPS):
        step()
    highest = worker.memory()[1]
    return Fresh(first, max(peak, highest), highest - before)


def turns(case: Case) -> tuple[int, str, list[tuple[Cost, Cost]]]:
    """Measures plain and private steps by turns; also says what is trained, and how."""
    plain, private = steps = [Step(case, private) for private in (False, True)]
    for step in steps * 2:
        step()
    how = engine(private.task.optimizer.clipping.report())
    return private.trained, how, [(timed(plain), timed(private)) for _ in range(case.repeats)]


def measure(case: Case) -> Result:
    """Measures a case, in processes of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        plain, private = pool.starmap(start, [(case, False), (case, True)], chunksize=1)
        trained, how, steps = pool.apply(turns, [case])
    return Result(trained, how, (plain, private), steps)


HEADER = (
    "| task | trained | parameters | engine | step ms, plain and private | ratio (CPU time) | "
    "first step s, plain and private | ratio (CPU time) | peak MiB, plain and private | "
    "ratio (of peak − before) |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(case: Case, result: Result) -> str:
    """Returns a row of a Markdown table, under `HEADER`."""
    plain, private = result.fresh
    medians = [1e3 * statistics.median(pair[i].wall for pair in result.steps) for i in (0, 1)]
    cells = [
        f"`{case.model}`",
        case.part,
        f"{result.trained:,}",
        result.engine,
        f"{medians[0]:.0f} / {medians[1]:.0f}",
        f"**{result.ratio('wall'):.2f}** ({result.ratio('cpu'):.2f})",
        f"{plain.first.wall:.1f} / {private.first.wall:.1f}",
        f"{private.first.wall / plain.first.wall:.2f} ({private.first.cpu / plain.first.cpu:.2f})",
        f"{plain.peak:,.0f} / {private.peak:,.0f}",
        f"{private.peak / plain.peak:.2f} ({private.growth / plain.growth:.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=",".join(MODELS), help=f"any of {','.join(MODELS)}")
    parser.add_argument("--part", default=",".join(PARTS), help=f"any of {','.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each step")
    options = parser.parse_args(arguments)
    for name, known in (("model", MODELS), ("part", PARTS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name} must be of {','.join(known)}. Received: {sorted(unknown)}.")
    if options.repeats < 1:
        parser.error(f"--repeats must be positive. Received: {options.repeats}.")
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, KerasHub {keras_hub.__version__}, tfdp {tfdp.__version__}\n"
    )
    print(HEADER, flush=True)
    for model, part in itertools.product(options.model.split(","), options.part.split(",")):
        if part in MODELS[model].parts:
            case = Case(model, part, options.repeats)
            print(row(case, measure(case)), flush=True)


if __name__ == "__main__":
    main()
