"""Networks of `benchmarks.gpu`, and the times and the profile of one training."""

import collections
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp.keras3
from benchmarks import networks, noise, report, worker
from benchmarks.problems import L2_NORM_CLIP, LEARNING_RATE, NOISE_MULTIPLIER, problem
from benchmarks.together import timed_fit
from tfdp.base import devices

LORA_RANK = 8
_DATASET_BATCHES = 4  # Size of a data set, in batches.
_PROFILED_STEPS, _OPERATIONS = 5, 25
_STEPS = {"noise": noise.chacha, "noise by TensorFlow": noise.philox}

Rows = tuple[Any, ...]


def _of_problem(name: str) -> Callable[[int, bool], tuple[Any, Rows]]:
    def build(rows: int, small: bool) -> tuple[Any, Rows]:
        del small
        one = problem(name)
        return networks.build(one, keras), one.rows(rows)

    return build


def wide_resnet(rows: int, small: bool) -> tuple[Any, Rows]:
    """Builds WRN-16-4 with GroupNormalization (De et al., 2022), or WRN-10-1 if small.

    Args:
      rows: Number of examples.
      small: Whether the network is small.

    Returns:
      The network, and random images with labels.
    """
    layers = keras.layers
    blocks, width = (1, 1) if small else (2, 4)

    def normalized(x: Any) -> Any:
        return layers.ReLU()(layers.GroupNormalization(16)(x))

    inputs = layers.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for stage in range(3):
        filters = 16 * width * 2**stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            h = normalized(x)
            skip = layers.Conv2D(filters, 1, strides)(h) if not block else x
            h = layers.Conv2D(filters, 3, strides, padding="same")(h)
            h = layers.Conv2D(filters, 3, padding="same")(normalized(h))
            x = layers.Add()([skip, h])
    x = layers.GlobalAveragePooling2D()(normalized(x))
    model = keras.Model(inputs, layers.Dense(10, dtype="float32")(x))
    return model, problem("cifar_cnn").rows(rows)


def _transformer_sizes(small: bool) -> dict[str, int]:
    """Returns the sizes of a transformer of base size, or of a small one."""
    layers, heads, width = (2, 2, 64) if small else (12, 12, 768)
    sizes = {"num_layers": layers, "num_heads": heads, "hidden_dim": width}
    return {**sizes, "intermediate_dim": 4 * width}


def _bert(lora: bool) -> Callable[[int, bool], tuple[Any, Rows]]:
    def build(rows: int, small: bool) -> tuple[Any, Rows]:
        import keras_hub

        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=30_522,
            max_sequence_length=512,
            **_transformer_sizes(small),
        )
        task = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
        if lora:
            backbone.enable_lora(LORA_RANK)
        tokens = np.random.default_rng(0).integers(0, 30_522, [rows, 128], "int32")
        x = {
            "token_ids": tokens,
            "segment_ids": np.zeros_like(tokens),
            "padding_mask": np.ones_like(tokens),
        }
        return task, (x, tokens[:, 0] % 2)

    return build


def _gpt2(rows: int, small: bool) -> tuple[Any, Rows]:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50_257,
        max_sequence_length=1024,
        **_transformer_sizes(small),
    )
    tokens = np.random.default_rng(0).integers(0, 50_257, [rows, 129], "int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones([rows, 128], "int32")}
    weights = np.ones([rows, 128], "float32")
    return keras_hub.models.GPT2CausalLM(backbone), (x, tokens[:, 1:], weights)


NETWORKS = {
    "mnist_cnn": _of_problem("mnist_cnn"),
    "cifar_cnn": _of_problem("cifar_cnn"),
    "wide_resnet": wide_resnet,
    "bert": _bert(lora=False),
    "bert_lora": _bert(lora=True),
    "gpt2": _gpt2,
}


class Training:
    """A compiled model and its batches, as `fit` is given them.

    Args:
      network: A key of `NETWORKS`.
      private: Whether tfdp trains it.
      batch: Examples of a step.
      chunk_size: Examples that a private step holds at once.
      compiled: Whether XLA compiles the step.
      half: Whether layers compute in bfloat16.
      small: Whether the network is small.
    """

    def __init__(
        self,
        network: str,
        private: bool,
        batch: int,
        chunk_size: int,
        compiled: bool,
        half: bool,
        small: bool,
    ):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("mixed_bfloat16" if half else "float32")
        self._batch = batch
        self._model, self._rows = NETWORKS[network](_DATASET_BATCHES * batch, small)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        if private:
            few_sizes = compiled or devices.has_gpu()
            # A chunk has room for the largest draw that is likely; else there would be two.
            whole = chunk_size >= batch
            self._batches = tfdp.data.poisson_batches(
                self._rows,
                expected_batch_size=batch,
                chunk_size=None if whole else chunk_size,
                padding=("buckets" if whole else "full") if few_sizes else "none",
            )
            optimizer = tfdp.keras3.DPOptimizer(
                optimizer, L2_NORM_CLIP, NOISE_MULTIPLIER, sampling=self._batches.sampling
            )
        else:
            self._batches = tf.data.Dataset.from_tensor_slices(self._rows).batch(batch).cache()
        self._calls = self._batches.sampling.gradient_accumulation_steps if private else 1
        self._model.compile(
            optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=None,
            jit_compile=compiled,
        )

    def _fit(self, steps: int, clock: Any = None) -> None:
        callbacks = [] if clock is None else [clock]
        calls = steps * self._calls
        batches = self._batches.repeat()
        self._model.fit(batches, steps_per_epoch=calls, callbacks=callbacks, verbose=0)

    def time(self, turns: int, turn_seconds: float) -> dict[str, Any]:
        """Returns the first step, later ones, and the peak of memory.

        Args:
          turns: Number of turns.
          turn_seconds: About how long a turn takes.
        """
        begin = time.perf_counter()
        self._fit(1)
        first = time.perf_counter() - begin
        few = max(3, math.ceil(3 / self._calls))
        self._fit(few)  # Further sizes of batches are compiled.
        wall = self._calls * timed_fit(lambda clock: self._fit(few, clock), keras).wall
        steps = max(3, min(200, round(turn_seconds / wall)))
        times = [
            self._calls * timed_fit(lambda clock: self._fit(steps, clock), keras).wall
            for _ in range(turns)
        ]
        return {
            "first_seconds": round(first, 3),
            "step_ms": [round(1e3 * seconds, 3) for seconds in times],
            "examples_a_second": round(self._batch / float(np.median(times)), 1),
            "peak_mib": round(peak_mib(), 1),
            "parameters": self._model.count_params(),
            **versions(),
        }

    def profile(self) -> dict[str, float]:
        """Returns where time goes: milliseconds a step of the longest kernels, or operations."""
        self._fit(3)
        with tempfile.TemporaryDirectory() as folder:
            with tf.profiler.experimental.Profile(folder):
                self._fit(_PROFILED_STEPS)
            (file,) = Path(folder).rglob("*.xplane.pb")
            return longest(file.read_bytes(), _PROFILED_STEPS * self._calls)


def longest(profile: bytes, steps: int) -> dict[str, float]:
    """Returns milliseconds a step of what took longest, on the GPU if there is one.

    Args:
      profile: A profile of TensorFlow, an `XSpace`.
      steps: Number of steps in it.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(profile)
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    total: collections.Counter[str] = collections.Counter()
    for plane in gpus or [plane for plane in space.planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                total[name] += event.duration_ps
    return {name: round(ps / 1e9 / steps, 4) for name, ps in total.most_common(_OPERATIONS)}


def peak_mib() -> float:
    """Returns the most memory so far, in MiB: of the GPU, or of the process."""
    if devices.has_gpu():
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    return worker.memory()[1]


def time_noise(size: int) -> dict[str, Any]:
    """Times the noise of so many parameters, by tfdp and by TensorFlow."""
    total = tf.Variable(tf.zeros([size]))
    found: dict[str, Any] = {"parameters": size, **versions()}
    for name, add in _STEPS.items():
        step = noise.steps(add, total)
        noise.seconds(step, 2)
        found[f"{name}, ms"] = round(1e3 * noise.seconds(step, 5), 3)
    return found


def versions() -> dict[str, str]:
    """Returns the machine and the versions."""
    text = f"{report.machine()}; TensorFlow {tf.__version__}, Keras {keras.__version__}"
    return {"machine": f"{text}, tfdp {tfdp.__version__}"}
