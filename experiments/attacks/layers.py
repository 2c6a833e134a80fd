"""The per-layer attack of Leino and Fredrikson (white box): displacements from proxies.

A classifier f is cut before each layer that has weights, into f = g(h(x)). A proxy of g is trained
on other examples of the same distribution, as seen through the target's own h: internal features of
two networks mean different things, those of one network do not. What g has learned of its members,
and not of the distribution, displaces its weights from those of the proxy.

For a linear g, the evidence that an example z = h(x) of class y is a member is
(W - W')_y z + (b - b')_y, where W', b' are the proxy's. For another g, W and b are those of a local
linear approximation. With integrated gradients from zero as W and g(0) as b, W_y z + b_y is g_y(z)
(completeness), and so the evidence is the difference of the logits of class y.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from experiments.attacks import attackers
from experiments.datasets import Data

_EPOCHS = 50  # Most epochs of a proxy.
# Layers with more inputs are not cut: the proxy's training set would not fit into memory.
_MOST_NUMBERS = 10_000


def displacements(
    model: Any, shadow_model: Any, shadow: Data, data: Sequence[np.ndarray], seed: int
) -> tuple[list[str], list[np.ndarray]]:
    """Computes the evidence of each layer that examples are members of a model.

    The proxy of the whole network is the shadow model. Others have the layers of g, and are trained
    by Adam until they are best on the shadow's test set.

    Args:
      model: The target, a sequential classifier that returns logits.
      shadow_model: The same network, trained on the shadow's examples.
      shadow: The attacker's own examples.
      data: Inputs and classes by turns: `[x, y, x, y, ...]`.
      seed: Fixes the proxies' initial weights, and the order of examples.

    Returns:
      The names of the layers that the network is cut at; for each pair of inputs and classes the
      evidence, `[n, layers]`.

    References:
      - Leino and Fredrikson, 2020, Stolen Memories.
      - Sundararajan et al., 2017, Axiomatic Attribution for Deep Networks (completeness).
    """
    inputs, labels = data[::2], data[1::2]
    own = [_evidence(model, x, y) for x, y in zip(inputs, labels, strict=True)]
    names: list[str] = []
    columns: list[list[np.ndarray]] = [[] for _ in inputs]
    for index, layer in enumerate(model.layers):
        if not layer.trainable_weights:
            continue
        if names:
            if np.prod(layer.input.shape[1:]) > _MOST_NUMBERS:
                continue
            below = tf.keras.Model(model.inputs, layer.input)
            proxy = _proxy(model.layers[index:], below, shadow, seed)
        else:
            below, proxy = None, shadow_model
        names.append(layer.name)
        for column, x, y, mine in zip(columns, inputs, labels, own, strict=True):
            column.append(mine - _evidence(proxy, _seen(below, x), y))
    return names, [np.column_stack(column) for column in columns]


def _evidence(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the logit of class y, `[n]`.

    A softmax leaves a constant open, which is the same for all classes: their mean is set to zero.
    """
    logits = attackers.predicted(model, x)
    return logits[np.arange(len(y)), y] - logits.mean(axis=1)


def _seen(below: Any, x: np.ndarray) -> np.ndarray:
    return x if below is None else attackers.predicted(below, x)


def _proxy(layers: Sequence[Any], below: Any, shadow: Data, seed: int) -> Any:
    """Trains new layers like these on the shadow's examples, as the layers below see them."""
    x, others = _seen(below, shadow.train_x), _seen(below, shadow.eval_x)
    tf.keras.utils.set_random_seed(seed)
    copies = [layer.__class__.from_config(layer.get_config()) for layer in layers]
    model = tf.keras.Sequential([tf.keras.layers.Input(x.shape[1:]), *copies])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        *(x, shadow.train_y),
        validation_data=(others, shadow.eval_y),
        batch_size=128,
        epochs=_EPOCHS,
        verbose=0,
        callbacks=[tf.keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)],
    )
    return model
