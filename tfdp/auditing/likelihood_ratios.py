"""Likelihood-ratio attack (LiRA): membership inference with shadow models."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.accounting.found_ledger import is_model
from tfdp.auditing import plots, statistics
from tfdp.auditing.black_box import Score, checked_scores, confidence_scores, number_of_rows
from tfdp.base.validation import error, function, integer, is_integer

_MOST_MODELS = 10**4


@dataclasses.dataclass(frozen=True)
class AttackResult:
    """Success of an attack: it describes what was guessed, and bounds no epsilon.

    Attributes:
      in_scores: Scores of examples that the attacked models were trained on, `[n]`.
      out_scores: Scores of others, `[m]`.
      models: Number of models that were attacked.
    """

    in_scores: np.ndarray
    out_scores: np.ndarray
    models: int

    @property
    def auc(self) -> float:
        """Area under the ROC curve: 1/2 is guessing."""
        return statistics.auc(self.in_scores, self.out_scores)

    @property
    def advantage(self) -> float:
        """Largest difference of true and false positive rate: 0 is guessing."""
        return statistics.advantage(self.in_scores, self.out_scores)

    def tpr_at_fpr(self, fpr: float) -> float:
        """Returns the true positive rate at a false positive rate of at most `fpr`."""
        return statistics.tpr_at_fpr(self.in_scores, self.out_scores, fpr)

    def __str__(self) -> str:
        return (
            f"Attack on {self.models} models, with {self.in_scores.size} members and "
            f"{self.out_scores.size} others: AUC {self.auc:.4f}, advantage {self.advantage:.4f}, "
            f"TPR {self.tpr_at_fpr(0.001):.4f} at 0.1% FPR, {self.tpr_at_fpr(0.01):.4f} at 1% FPR."
        )

    def report(self) -> str:
        """Returns the result as Markdown, with what the numbers mean."""
        return "\n".join(
            [
                "# Membership inference",
                "",
                f"{self.models} models; {self.in_scores.size} members, {self.out_scores.size} "
                "others.",
                "",
                *plots.attack_table(self.in_scores, self.out_scores),
                "",
                "This is the success of one attack, not a bound: others may do better, and the "
                "members and models of an attack are not independent.",
                "",
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the ROC curve on logarithmic axes.

        Args:
          path: The picture's file, such as "attack.png".

        Raises:
          ImportError: matplotlib is missing.
        """
        plots.draw(path, {"attack": (self.in_scores, self.out_scores)})


def lira(
    train: Callable[[Any], Any],
    data: Any,
    *,
    models: int = 16,
    score: Score | None = None,
    seed: int = 0,
) -> AttackResult:
    """Attacks models by likelihood ratios, with shadow models that the same function trains.

    Each example is in the training sets of half of the models, at random. Every model is attacked
    in turn, with others as its shadows: for each example, the scores of the shadows that had it,
    and of those that had not, are taken as two normal distributions of one common variance. The
    ratio of their densities at the attacked model's score says whether the example was in. Of the
    side that the attacked model is not on, one model is left out for each example, so that both
    have as many: the shadows themselves say nothing about membership, and guessing has an AUC of
    1/2 whatever the scores.

    Args:
      train: Function of `(x, y)`, a part of the data, that returns a trained model.
      data: `(x, y)`: arrays, or nested tuples or dicts of them.
      models: Number of models to train; even, at least 4.
      score: Function `(model, x, y)` that returns a score for each example, `[n]`, such as a
        model's log-likelihood of x. None: `confidence_scores`, of classifiers.
      seed: Chooses the training sets.

    Returns:
      The attack's success, over all models and examples.

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> import numpy as np
      >>> x = np.random.default_rng(0).normal(size=100)
      >>> result = lira(
      ...     train=lambda data: set(data[0]),  # A model that remembers all it has seen.
      ...     data=(x, x),
      ...     score=lambda model, x, y: [float(value in model) for value in x])
      >>> result.auc
      1.0

    References:
      - Carlini et al., 2022, Membership Inference Attacks From First Principles, Algorithm 1,
        with the common variance of section VI.
    """
    if not is_integer(models) or not 4 <= models <= _MOST_MODELS or models % 2:
        raise error("models", f"an even integer from 4 to {_MOST_MODELS}", models)
    if not callable(train):
        raise error("train", "a function that trains a model", train)
    function("score", score)
    seed = integer("seed", seed, 0)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise error("data", "(x, y), arrays", type(data))
    size = number_of_rows("data", data)
    ranks = np.random.default_rng(seed).random([models, size]).argsort(axis=0)
    member = ranks < models // 2
    scores = np.empty([models, size])
    for index in range(models):
        part = tf.nest.map_structure(
            lambda a, index=index: np.asarray(a)[member[index]], tuple(data)
        )
        trained = train(part)
        if score is None and not is_model(trained):
            raise error("score", "a function where `train` returns no model of Keras", score)
        scores[index] = checked_scores(score or confidence_scores, trained, *data)
    ratios = _log_ratios(scores, ranks)
    return AttackResult(ratios[member], ratios[~member], models)


def _log_ratios(scores: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Returns the log-likelihood ratio of each model and example, from the other models' scores.

    Args:
      scores: `[models, examples]`.
      ranks: The models' order for each example, from 0, `[models, examples]`: those of the first
        half were trained on it.
    """
    ratios, last = np.empty_like(scores), len(scores) - 1
    for index, own in enumerate(ranks):
        shadows = (ranks != own) & (ranks != last - own)
        distances, squares = [], []
        for kind in (shadows & (ranks <= last // 2), shadows & (ranks > last // 2)):
            mean = np.where(kind, scores, 0).sum(axis=0) / (last // 2)
            distances.append((scores[index] - mean) ** 2)
            squares.append(np.where(kind, (scores - mean) ** 2, 0).sum())
        variance = sum(squares) / max(1, scores.size - 4 * scores.shape[1]) + 1e-30
        inside, outside = distances
        ratios[index] = (outside - inside) / (2 * variance)
    return ratios
