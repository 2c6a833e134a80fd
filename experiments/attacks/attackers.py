"""Attackers that guess from a classifier's behavior whether it was trained on an example.

An attacker is a classifier itself: it learns from examples of which it knows the answer, and
guesses those of others. Both sets hold as many members as others, so that a constant guess has an
accuracy of 1/2, and learning a constant guess is no way to it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.ensemble import RandomForestClassifier

from experiments.datasets import Data
from tfdp import auditing

# Activations and gradients of more numbers are given by norms.
_MOST_NUMBERS = 1000
_BATCH = 1000
_EPOCHS = 50  # Most epochs of a network that attacks.
_LEAST_PROBABILITY = 1e-12


@dataclasses.dataclass(frozen=True)
class Observed:
    """Features that an attacker sees of members and of others.

    Attributes:
      inside: Features of members, `[n, features]`.
      outside: Features of others, `[m, features]`.
    """

    inside: np.ndarray
    outside: np.ndarray

    def balanced(self, seed: int) -> "Observed":
        """Returns as many members as others, chosen at random, in a random order."""
        random = np.random.default_rng(seed)
        size = min(len(self.inside), len(self.outside))
        return Observed(
            *(rows[random.permutation(len(rows))[:size]] for rows in (self.inside, self.outside))
        )

    def halves(self) -> tuple["Observed", "Observed"]:
        """Returns the first and the second half of both."""
        half = len(self.inside) // 2, len(self.outside) // 2
        return (
            Observed(self.inside[: half[0]], self.outside[: half[1]]),
            Observed(self.inside[half[0] :], self.outside[half[1] :]),
        )

    def labelled(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all features, and whether each is of a member, 0 or 1."""
        labels = np.repeat([1, 0], [len(self.inside), len(self.outside)])
        return np.concatenate([self.inside, self.outside]), labels


# What attackers see.

View = Callable[[Any, np.ndarray, np.ndarray], np.ndarray]


def posteriors(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes what an attacker sees who can only query the model (black box).

    Args:
      model: A classifier that returns logits.
      x: Inputs, `[n, ...]`.
      y: Classes, `[n]`.

    Returns:
      The logarithms of the posteriors, the largest first, and whether the largest is that of the
      right class: `[n, classes + 1]`.

    References:
      - Salem et al., 2019, ML-Leaks.
    """
    logs = _log_posteriors(predicted(model, x))
    return _sorted(logs, y).astype(np.float32)


def internals(model: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes what an attacker sees who has the model (white box).

    Args:
      model: A sequential classifier whose last layer is a `Dense` of logits.
      x: Inputs, `[n, ...]`.
      y: Classes, `[n]`.

    Returns:
      `[n, features]`: what `posteriors` has; the loss; the class; the activations that the last
      layer gets; the gradient of the loss by the bias and by the kernel of the last layer.
      Activations of more than 1000 numbers are given by their norm, such a kernel's gradient by the
      norms of its columns.

    References:
      - Nasr et al., 2019, Comprehensive Privacy Analysis of Deep Learning.
    """
    parts = tf.keras.Model(model.inputs, [model.layers[-1].input, model.outputs[0]])
    starts = range(0, len(y), _BATCH)  # Activations of all may be more than memory holds.
    return np.concatenate([_internals(parts, x[i : i + _BATCH], y[i : i + _BATCH]) for i in starts])


def _internals(parts: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    hidden, logits = parts.predict_on_batch(x)
    logs = _log_posteriors(logits)
    classes = np.eye(logs.shape[1])[y]
    by_bias = np.exp(logs) - classes
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    by_kernel = length * np.abs(by_bias)
    if hidden.shape[1] * by_bias.shape[1] <= _MOST_NUMBERS:
        by_kernel = (hidden[:, :, None] * by_bias[:, None, :]).reshape(len(y), -1)
    return np.column_stack(
        [
            *(_sorted(logs, y), -(logs * classes).sum(axis=1), classes),
            *(hidden if hidden.shape[1] <= _MOST_NUMBERS else length, by_bias, by_kernel),
        ]
    ).astype(np.float32)


def predicted(model: Any, x: np.ndarray) -> np.ndarray:
    """Returns what a model says of each input. (Keras's `predict` never frees a copy of them.)"""
    starts = range(0, len(x), _BATCH)
    return np.concatenate([model.predict_on_batch(x[i : i + _BATCH]) for i in starts])


def observe(view: View, model: Any, data: Data) -> Observed:
    """Returns what an attacker sees of the examples that a model was trained and tested on."""
    return Observed(view(model, data.train_x, data.train_y), view(model, data.eval_x, data.eval_y))


def _log_posteriors(logits: np.ndarray) -> np.ndarray:
    logs = tf.nn.log_softmax(logits.astype(np.float64)).numpy()
    return np.maximum(logs, np.log(_LEAST_PROBABILITY))


def _sorted(logs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns posteriors, the largest first, and whether the largest is that of the right class."""
    return np.column_stack([-np.sort(-logs, axis=1), logs.argmax(axis=1) == y])


# How they guess.

Attacker = Callable[[Observed, np.ndarray, int], np.ndarray]


def network(known: Observed, others: np.ndarray, seed: int) -> np.ndarray:
    """Trains a network on what is known, and guesses others.

    It is trained by Adam with a cross-entropy, as in the papers; the weights are those of the epoch
    with the least loss on a fifth of what is known.

    Args:
      known: Features of members and of others.
      others: Features of examples to guess, `[n, features]`.
      seed: Fixes the initial weights and the order of examples.

    Returns:
      The probability that each example is a member, `[n]`.
    """
    x, y = known.labelled()
    order = np.random.default_rng(seed).permutation(len(y))
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-6
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input(x.shape[1:]),
            layers.Dense(64, "relu"),
            layers.Dense(32, "relu"),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy")
    model.fit(
        *((x[order] - mean) / deviation, y[order]),
        validation_split=0.2,
        batch_size=128,
        epochs=_EPOCHS,
        verbose=0,
        callbacks=[tf.keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)],
    )
    return model.predict((others - mean) / deviation, batch_size=_BATCH, verbose=0)[:, 0]


def forest(known: Observed, others: np.ndarray, seed: int) -> np.ndarray:
    """Grows a random forest on what is known, and guesses others; see `network`."""
    trees = RandomForestClassifier(200, min_samples_leaf=10, random_state=seed)
    return grown(trees, *known.labelled()).predict_proba(others)[:, 1]


def grown(trees: RandomForestClassifier, x: np.ndarray, y: np.ndarray) -> RandomForestClassifier:
    """Grows a forest on as many threads as TensorFlow may use: the same trees as on one."""
    trees.set_params(n_jobs=tf.config.threading.get_intra_op_parallelism_threads() or None)
    trees.fit(x, y)
    # Threads would add the trees' guesses in any order, and rounding depends on it.
    return trees.set_params(n_jobs=None)


ATTACKERS: dict[str, Attacker] = {"network": network, "forest": forest}


def success(known: Observed, others: Observed, seed: int) -> dict[str, dict[str, float]]:
    """Lets each attacker learn from what is known, and guess others.

    Args:
      known: What attackers know the answers of.
      others: What they guess.
      seed: Fixes their randomness.

    Returns:
      For each attacker: `accuracy`, with a guess of "member" above a probability of 1/2; `auc`;
      `tpr`, the true positive rate at a false positive rate of 0.1%.
    """
    found = {}
    for name, attacker in ATTACKERS.items():
        rows, labels = others.labelled()
        guesses = attacker(known, rows, seed)
        inside, outside = guesses[labels == 1], guesses[labels == 0]
        found[name] = {
            "accuracy": float(((guesses > 0.5) == labels).mean()),
            "auc": auditing.auc(inside, outside),
            "tpr": auditing.tpr_at_fpr(inside, outside, 0.001),
        }
    return found
