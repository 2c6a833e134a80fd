"""Training steps of JAX and JAX-Privacy: one compiled function, called again and again."""

import contextlib
import functools
import importlib.metadata
import platform
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from benchmarks.problems import L2_NORM_CLIP, LEARNING_RATE, NOISE_MULTIPLIER, Problem
from benchmarks.settings import StepSettings, Unsupported

_MICROBATCH = {"jax_privacy": None, "jax_privacy_16": 16}


class JaxSteps:
    """Parameters, the step that updates them, and batches.

    Args:
      contestant: Name of the contestant.
      problem: The model and its data.
      settings: Settings of the steps.
    """

    def __init__(self, contestant: str, problem: Problem, settings: StepSettings):
        parameters, logits = build(problem)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(parameters))
        if contestant == "jax_sgd":
            transform = optax.sgd(LEARNING_RATE)
            gradient = jax.grad(functools.partial(mean_loss, logits))
        else:
            gradient, transform = _private(contestant, logits, settings)

        def step(parameters, state, x, y):
            updates, state = transform.update(gradient(parameters, x, y), state, parameters)
            return optax.apply_updates(parameters, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._state = jax.tree.map(jnp.copy, (parameters, transform.init(parameters)))
        x, y = problem.rows(settings.batch * settings.batches)
        shape = (settings.batches, settings.batch)
        x, y = x.reshape(*shape, *problem.input_shape), y.reshape(shape).astype(np.int32)
        self._batches = [jax.device_put(pair) for pair in zip(x, y, strict=True)]
        self._taken = 0

    def run(self, steps: int) -> None:
        """Takes so many steps."""
        for _ in range(steps):
            batch = self._batches[self._taken % len(self._batches)]
            self._taken += 1
            self._state = self._step(*self._state, *batch)
        jax.block_until_ready(self._state)

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions of what runs."""
        versions = {"Python": platform.python_version()}
        for name in ("jax", "jaxlib", "optax", "jax_privacy"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return versions


def _private(contestant: str, logits: Any, settings: StepSettings) -> tuple[Any, Any]:
    """Returns the sum of clipped gradients, and what adds the noise, divides and updates."""
    from jax_privacy import clipping, noise_addition

    microbatch = _MICROBATCH[contestant]
    if microbatch is not None and settings.batch % microbatch:
        raise Unsupported(f"the batch must be a multiple of {microbatch}")
    gradient = clipping.clipped_grad(
        functools.partial(mean_loss, logits),
        l2_clip_norm=L2_NORM_CLIP,
        normalize_by=settings.batch,
        batch_argnums=(1, 2),
        microbatch_size=microbatch,
    )
    stddev = NOISE_MULTIPLIER * gradient.sensitivity()
    noise = noise_addition.gaussian_privatizer(stddev=stddev)
    return gradient, optax.chain(noise, optax.sgd(LEARNING_RATE))


def mean_loss(logits: Any, parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy of a batch."""
    values = logits(parameters, x)
    return optax.softmax_cross_entropy_with_integer_labels(values, y).mean()


def build(problem: Problem) -> tuple[Any, Any]:
    """Initial parameters of a problem's network, and the function of them and inputs."""
    make = _Init()
    if problem.name == "mnist_cnn":
        return _mnist(make)
    if problem.name == "cifar_cnn":
        return _cifar(make)
    if problem.name == "imdb_lstm":
        return _reviews(make, problem.vocabulary)
    if problem.name == "transformer_block":
        return _transformer(make, problem.vocabulary)
    raise Unsupported(f"{problem.name} is not written in JAX")


class _Init:
    """Makes initial parameters: a weight matrix or filter, and a bias."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> dict[str, np.ndarray]:
        return {"w": self.table(*shape), "b": np.zeros(shape[-1], np.float32)}

    def table(self, *shape: int) -> np.ndarray:
        scale = 1 / np.sqrt(np.prod(shape[:-1]))
        return (self._rng.standard_normal(shape) * scale).astype(np.float32)


def _dense(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _conv(p: Any, x: jax.Array, stride: int, padding: Any) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    x = jax.lax.conv_general_dilated(x, p["w"], strides, padding, dimension_numbers=dimensions)
    return x + p["b"]


def _max_pool(x: jax.Array, stride: int) -> jax.Array:
    window, strides = (1, 2, 2, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")


def _layer_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-3) * p["scale"] + p["shift"]


def _mnist(make: _Init) -> tuple[Any, Any]:
    parameters = [make(8, 8, 1, 16), make(4, 4, 16, 32), make(512, 32), make(32, 10)]

    def logits(parameters, x):
        conv_1, conv_2, dense_1, dense_2 = parameters
        x = _max_pool(jnp.tanh(_conv(conv_1, x, 2, [(2, 2), (2, 2)])), 1)
        x = _max_pool(jnp.tanh(_conv(conv_2, x, 2, "VALID")), 1)
        x = jnp.tanh(_dense(dense_1, x.reshape(len(x), -1)))
        return _dense(dense_2, x)

    return parameters, logits


def _cifar(make: _Init) -> tuple[Any, Any]:
    channels = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    convolutions = [make(3, 3, *pair) for pair in channels]
    parameters = [*convolutions, make(2048, 128), make(128, 10)]

    def logits(parameters, x):
        *convolutions, dense_1, dense_2 = parameters
        for i, convolution in enumerate(convolutions):
            x = jnp.tanh(_conv(convolution, x, 1, "SAME"))
            x = _max_pool(x, 2) if i % 2 else x
        x = jnp.tanh(_dense(dense_1, x.reshape(len(x), -1)))
        return _dense(dense_2, x)

    return parameters, logits


def _lstm(p: Any, x: jax.Array) -> jax.Array:
    """Outputs `[batch, time, units]` of inputs `[batch, time, features]`."""
    from_inputs = _dense(p, x)

    def step(state, from_input):
        h, c = state
        i, f, g, o = jnp.split(from_input + h @ p["u"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((len(x), p["u"].shape[0]))
    _, outputs = jax.lax.scan(step, (zeros, zeros), from_inputs.swapaxes(0, 1))
    return outputs.swapaxes(0, 1)


def _reviews(make: _Init, vocabulary: int) -> tuple[Any, Any]:
    lstm = [{**make(32, 128), "u": make.table(32, 128)} for _ in range(2)]
    layers = [make(100, 32), make(64, 16), make(16, 2)]
    parameters = (make.table(vocabulary, 100), lstm, layers)

    def logits(parameters, tokens):
        embedding, (forward, backward), (dense_1, dense_2, dense_3) = parameters
        x = jnp.tanh(_dense(dense_1, embedding[tokens]))
        x = jnp.concatenate([_lstm(forward, x), _lstm(backward, x[:, ::-1])[:, ::-1]], axis=-1)
        return _dense(dense_3, jnp.tanh(_dense(dense_2, x.mean(axis=1))))

    return parameters, logits


def _transformer(make: _Init, vocabulary: int) -> tuple[Any, Any]:
    norms = [
        {"scale": np.ones(64, np.float32), "shift": np.zeros(64, np.float32)} for _ in range(2)
    ]
    attention = [make(64, 64) for _ in range(4)]
    layers = [make(64, 256), make(256, 64), make(64, 2)]
    parameters = (make.table(vocabulary, 64), norms, attention, layers)

    def logits(parameters, tokens):
        embedding, (norm_1, norm_2), (query, key, value, out), (wide, narrow, last) = parameters
        x = embedding[tokens]
        normal = _layer_norm(norm_1, x)
        heads = (*tokens.shape, 4, 16)
        q, k, v = (_dense(p, normal).reshape(heads) for p in (query, key, value))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / 4, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + _dense(out, mixed)
        x = x + _dense(narrow, jax.nn.relu(_dense(wide, _layer_norm(norm_2, x))))
        return _dense(last, x.mean(axis=1))

    return parameters, logits
