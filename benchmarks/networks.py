"""The networks of `benchmarks.problems` in Keras."""

from typing import Any

import tensorflow as tf

import tfdp  # noqa: F401  # Makes `tf.keras` Keras 2.
from benchmarks.problems import Problem
from experiments import networks


def build(problem: Problem, keras: Any = tf.keras) -> Any:
    """Returns the network of a problem: logits `[batch, classes]`."""
    tanh = networks.make_activation("tanh", keras=keras)
    if problem.name == "mnist_cnn":
        return networks.mnist(tanh, centred=False, keras=keras)
    if problem.name == "imdb_lstm":
        return networks.imdb(tanh, keras)
    if problem.name == "cifar_cnn":
        return cifar(keras)
    if problem.name == "transformer_block":
        return transformer(problem.vocabulary, keras)
    width = int(problem.name.removeprefix("mlp_"))
    return mlp(problem.input_shape, width, keras)


def let_xla_compile(model: Any) -> None:
    """Makes the model's LSTM layers plain loops.

    The function that Keras would choose between a CPU's and a GPU's implementation needs the
    weights as constants under XLA: it would be compiled anew at every step. (Keras 3 has none.)
    """
    for layer in getattr(model, "submodules", ()):
        if hasattr(layer, "_could_use_gpu_kernel"):
            layer._could_use_gpu_kernel = False


def cifar(keras: Any = tf.keras) -> Any:
    """Logits `[batch, 10]` of images `[batch, 32, 32, 3]`, by 550,570 parameters.

    The network that is usual for private training on CIFAR-10 (Papernot et al., 2021,
    https://arxiv.org/abs/2007.14191, table 2).
    """
    layers = keras.layers
    model = keras.Sequential([layers.Input((32, 32, 3))], name="cifar")
    for filters in (32, 64, 128):
        for _ in range(2):
            model.add(layers.Conv2D(filters, 3, padding="same", activation="tanh"))
        model.add(layers.MaxPooling2D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="tanh"))
    model.add(layers.Dense(10))
    return model


def transformer(vocabulary: int, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 2]` of token ids `[batch, 64]`, by one pre-norm block."""
    layers = keras.layers
    tokens = layers.Input((64,), dtype="int32")
    x = layers.Embedding(vocabulary, 64)(tokens)
    normal = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(num_heads=4, key_dim=16)(normal, normal)
    normal = layers.LayerNormalization()(x)
    x = x + layers.Dense(64)(layers.Dense(256, activation="relu")(normal))
    logits = layers.Dense(2)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, logits, name="transformer_block")


def mlp(input_shape: tuple[int, ...], width: int, keras: Any = tf.keras) -> Any:
    """Logits `[batch, 10]` by two hidden layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(input_shape),
            layers.Dense(width, activation="tanh"),
            layers.Dense(width, activation="tanh"),
            layers.Dense(10),
        ],
        name="mlp",
    )
