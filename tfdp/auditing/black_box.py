"""Audit of a trained model by canaries of your own, which are scored by their loss."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.auditing import statistics
from tfdp.auditing.audit_result import AuditResult, bound_check
from tfdp.base import validation
from tfdp.base.validation import array, between_zero_and_one, boolean, error, integer, using
from tfdp.step.private_step import PrivateStep

# Scores of one training are not independent: nothing else holds for them.
_METHODS = ("one_run", "one_run_f_dp")

Score = Callable[[Any, Any, Any], Any]


class BlackBoxAudit:
    """Audit of one training, black box: canaries are in by coins, and scored by the trained model.

    Canaries can be any examples; mislabeled ones, and ones far from all others, are learned most
    when they are in. A secret coin decides for each whether it is in. The row of one that is out
    has the sample weight 0, so that it has no gradient. The attacker sees the final model alone,
    and guesses the coins by the canaries' losses. It knows far less than that of a `CanaryAudit`,
    and its bounds are far lower; but it works for any training, with other libraries, too.

    Args:
      data: `(x, y)` or `(x, y, sample_weight)`: arrays, or nested tuples or dicts of them.
      canaries: `(x, y)`, of the same form; see `mislabelled`.
      keep_size: Whether canaries that are out keep their rows, so that the size of the data set
        does not depend on the coins. False: their rows are left out, for models that take no
        sample weights, such as a `tfdp.TermWiseVAE`.
      seed: For tests only: makes the coins reproducible.

    Attributes:
      data: The data to train on: `(x, y, sample_weight)`; `(x, y)` if `keep_size` is False and
        `data` has no weights.

    Raises:
      ValueError: An argument is of another form.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(200, 8).astype("float32"), np.random.randint(0, 2, 200)
      >>> audit = tfdp.auditing.BlackBoxAudit((x, y), tfdp.auditing.mislabelled((x, y), 100))
      >>> batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=50)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
      >>> model.compile(
      ...     tfdp.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling),
      ...     tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
      >>> _ = model.fit(batches, epochs=2, verbose=0)
      >>> result = audit.result(model, delta=1e-5, significance=1e-6)
      >>> result.lower_bound <= result.epsilon
      True

    References:
      - Steinke, Nasr, Jagielski, 2023, Privacy Auditing with One (1) Training Run, section 6.
    """

    def __init__(
        self, data: Any, canaries: Any, *, keep_size: bool = True, seed: int | None = None
    ):
        if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
            raise error("data", "(x, y) or (x, y, sample_weight), arrays", type(data))
        if not isinstance(canaries, (tuple, list)) or len(canaries) != 2:
            raise error("canaries", "(x, y), arrays", type(canaries))
        seed = integer("seed", seed, 0, optional=True)
        keep_size = boolean("keep_size", keep_size)
        size, count = number_of_rows("data", data), number_of_rows("canaries", canaries)
        entropy = int.from_bytes(os.urandom(16), "little") if seed is None else seed
        self._coins = np.random.default_rng(entropy).random(count) < 0.5
        self._canaries = tuple(canaries)
        kept = np.ones(count, bool) if keep_size else self._coins
        with using("canaries", canaries, "arrays of the form of `data`, (x, y)"):
            x, y = tf.nest.map_structure(
                lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)[kept]]),
                tuple(data[:2]),
                self._canaries,
            )
        weights = np.ones(size)
        if len(data) == 3:
            weights = array("data", data[2], "(x, y, sample_weight), with a weight for each", 1)
        weights = np.concatenate([weights, self._coins[kept]]).astype(np.float32)
        self.data = (x, y, weights) if keep_size or len(data) == 3 else (x, y)

    def result(
        self,
        model: Any,
        delta: float,
        significance: float = 0.05,
        score: Score | None = None,
    ) -> AuditResult:
        """Returns what the trained model lets an attacker know.

        Args:
          model: The model, trained on `data`.
          delta: The delta of the guarantee, in (0, 1).
          significance: Probability that a lower bound may be wrong, for each method.
          score: Function `(model, x, y)` that returns a score for each example, `[n]`, higher for
            what was learned, such as a likelihood. None: `loss_scores`.

        Raises:
          ValueError: An argument is out of its range, or the model has no loss for `loss_scores`.
        """
        between_zero_and_one("delta", delta)
        between_zero_and_one("significance", significance)
        validation.function("score", score)
        scores = checked_scores(score or loss_scores, model, *self._canaries)
        seen, unseen = scores[self._coins], scores[~self._coins]
        bounds = {
            method: statistics.epsilon_lower_bound(seen, unseen, delta, significance, method)
            for method in _METHODS
        }
        optimizer: Any = getattr(model, "optimizer", None)
        private = isinstance(optimizer, PrivateStep) and optimizer.sampling is not None
        epsilon = optimizer.ledger.epsilon(delta).epsilon if private else None
        steps = 0 if optimizer is None else int(optimizer.iterations.numpy())
        checks = () if epsilon is None else (bound_check(bounds, epsilon),)
        return AuditResult(seen, unseen, steps, delta, significance, bounds, epsilon, checks)


def number_of_rows(name: str, data: Any) -> int:
    """Returns the number of examples of `(x, y)`; a ValueError where it is not one number."""
    requirement = "(x, y), or nested tuples or dicts of arrays, with as many rows each, at least 1"
    with using(name, data, requirement):
        shapes = [np.shape(array) for array in tf.nest.flatten(data)]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
        raise error(name, requirement, data)
    return lengths.pop()


def mislabelled(data: Any, count: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Returns canaries: examples with wrong labels, which a model learns only by heart.

    Args:
      data: `(x, y)`, with labels y as integers `[n]`, of at least two classes. Best examples that
        are not trained on otherwise.
      count: Number of canaries, at most n.
      seed: Chooses examples and labels.

    Returns:
      `(x, y)` of the canaries.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import numpy as np
      >>> x, y = np.arange(6.0), np.array([0, 1, 2, 0, 1, 2])
      >>> inputs, labels = mislabelled((x, y), 3)
      >>> bool(np.any(labels == y[inputs.astype(int)]))
      False
    """
    requirement = "(x, y) with integer labels `[n]` of at least two classes"
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise error("data", requirement, data)
    number_of_rows("data", data)
    x, y = data[0], np.asarray(data[1])
    count = validation.positive_integer("count", count)
    classes = np.unique(y) if y.ndim == 1 and y.dtype.kind in "iu" else np.zeros([0])
    if classes.size < 2:
        raise error("data", requirement, data)
    if count > y.size:
        raise error("count", f"at most the {y.size} examples of `data`", count)
    random = np.random.default_rng(integer("seed", seed, 0))
    chosen = random.choice(y.size, count, replace=False)
    places = np.searchsorted(classes, y[chosen])
    wrong = (places + random.integers(1, classes.size, count)) % classes.size
    return tf.nest.map_structure(lambda a: np.asarray(a)[chosen], x), classes[wrong]


def loss_scores(model: Any, x: Any, y: Any) -> np.ndarray:
    """Returns the negative losses of examples by a compiled model, `[n]`.

    Args:
      model: A Keras model compiled with one loss.
      x: Inputs.
      y: Targets, an array `[n, ...]`.

    Raises:
      ValueError: The model was compiled without a loss, or with several.
    """
    if not callable(getattr(model, "predict", None)):
        raise error("model", "a compiled model of Keras", model)
    loss = getattr(model, "loss", None)
    if not (isinstance(loss, str) or callable(loss)):
        raise ValueError(
            "Argument `score` must be given for a model without one compiled loss: a function "
            f"`(model, x, y)` that returns a score for each example. Received: loss={loss!r}."
        )
    loss = tf.keras.losses.get(loss) if isinstance(loss, str) else loss
    function = getattr(loss, "call", loss)  # `call` of Keras losses takes no mean.
    with using("x", x, "inputs of the model"):
        outputs = model.predict(x, verbose=0)
    requirement = f"targets of the model's loss, one for each of the {len(outputs)} examples"
    with using("y", y, requirement):
        losses = np.asarray(function(tf.convert_to_tensor(y), tf.convert_to_tensor(outputs)))
    if losses.ndim < 1 or len(losses) != len(outputs):
        raise error("y", requirement, y)
    return -losses.reshape(len(losses), -1).mean(axis=1)


def confidence_scores(model: Any, x: Any, y: Any) -> np.ndarray:
    """Returns logit-scaled confidences, for models whose loss is a cross-entropy, `[n]`.

    With p the probability of the label, log(p / (1 - p)): it is about normal over trainings, as
    `lira` assumes.

    Args:
      model: A Keras model compiled with a cross-entropy.
      x: Inputs.
      y: Labels.

    Raises:
      ValueError: The model was compiled without a loss, or with several.

    References:
      - Carlini et al., 2022, Membership Inference Attacks From First Principles, section V.
    """
    losses = -loss_scores(model, x, y).astype(np.float64)
    return -np.log(np.expm1(np.clip(losses, 1e-7, 500.0)))


def checked_scores(score: Score, model: Any, x: Any, y: Any) -> np.ndarray:
    """Returns the scores of examples; an error where the function returns something else."""
    scores, count = np.asarray(score(model, x, y), np.float64), len(tf.nest.flatten(y)[0])
    if scores.shape != (count,) or np.isnan(scores).any():
        raise ValueError(
            "Argument `score` must return a number for each example. Received a result of shape "
            f"{scores.shape} for {count} examples, NaN among them: {np.isnan(scores).any()}."
        )
    return scores
