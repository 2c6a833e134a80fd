"""Label differential privacy: randomized response on labels, and a loss that corrects for it."""

import dataclasses
import decimal
import fractions
import math
import os
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.validation import (
    boolean,
    check_unmasked,
    error,
    is_integer,
    is_number,
    using,
)

_WORDS = 2**64  # Values of a random word, of which each label takes one.
_DIGITS = 40  # Decimal digits of exp(epsilon).
_EPSILONS = (1e-3, 20)
_MOST_CLASSES = 2**20
_WIDTH = 88

_NOT_COVERED = (
    "the features, and what they tell about the labels: whoever can predict a label from its "
    "features can do so without the model",
    "any other use of the original labels: training, class weights, stratified splits, metrics, "
    "stopping early, the choice of hyperparameters",
    "another randomization of the same labels: the epsilons add up. Save these labels, and use "
    "them again",
)


@dataclasses.dataclass(frozen=True, eq=False)
class RandomizedLabels:
    """Labels that were randomized, their guarantee, and the loss to train with.

    `randomized_response_labels` makes it. To use saved labels again, make it of them: randomizing
    the original labels once more would cost epsilon once more.

    Attributes:
      labels: The randomized labels, int64 `[n]`.
      num_classes: Number of classes K.
      epsilon: Epsilon of the guarantee.

    Raises:
      ValueError: An argument is not as `randomized_response_labels` describes it.

    Example:
      >>> import tfdp
      >>> released = tfdp.data.randomized_response_labels([0, 2, 1], num_classes=3, epsilon=2.0)
      >>> again = tfdp.data.RandomizedLabels(released.labels, num_classes=3, epsilon=2.0)
      >>> again.keep_probability == released.keep_probability
      True
    """

    labels: np.ndarray
    num_classes: int
    epsilon: float

    def __post_init__(self) -> None:
        checked = _checked(self.labels, self.num_classes, self.epsilon)
        for field, value in zip(dataclasses.fields(self), checked, strict=True):
            object.__setattr__(self, field.name, value)

    @property
    def keep_probability(self) -> fractions.Fraction:
        """The exact probability that a label is kept."""
        others = _words_of_another(self.num_classes, self.epsilon)
        return 1 - (self.num_classes - 1) * fractions.Fraction(others, _WORDS)

    def crossentropy(self, *, from_logits: bool) -> Callable[[Any, Any], tf.Tensor]:
        """Returns the cross entropy that corrects for the randomization (forward correction).

        If the model gives class k the probability p_k, the randomized label is k with probability
        q_k = o + (c - o) p_k, where c is the probability that a label is kept and o that of each
        other class. The loss of an example is -log(q_k) for its randomized label k. On average over
        labels, it is least where p is the distribution of the original labels, so the model's
        outputs are probabilities of those. The unbiased (backward) correction has this property,
        too, but its losses are negative for some examples and not bounded below; these are between
        0 and -log(o).

        The loss is a function of labels and outputs of a batch, for `model.compile` of Keras 2 and
        Keras 3, with any optimizer. To load a compiled model, pass it in `custom_objects=` as
        `"corrected_crossentropy"`, or load with `compile=False`.

        Args:
          from_logits: Whether the model's outputs `[batch, num_classes]` are logits, not
            probabilities.

        Returns:
          Function of randomized labels, `[batch]` or `[batch, 1]`, and outputs that returns one
          loss per example, `[batch]`. It raises a ValueError if the outputs do not have
          `num_classes` columns.

        Source: Patrini et al. 2017, [Making Deep Neural Networks Robust to Label
        Noise](https://arxiv.org/abs/1609.03683), Theorem 2. The unbiased one: Natarajan et al.
        2013, "Learning with Noisy Labels".

        Example:
          >>> released = randomized_response_labels([0, 1, 1], num_classes=2, epsilon=1.0)
          >>> loss = released.crossentropy(from_logits=True)
          >>> loss(released.labels, tf.zeros([3, 2])).numpy().round(4)
          array([0.6931, 0.6931, 0.6931], dtype=float32)
        """
        boolean("from_logits", from_logits)
        num_classes = self.num_classes
        kept = self.keep_probability
        of_another = float((1 - kept) / (num_classes - 1))
        more = float(kept) - of_another

        def corrected_crossentropy(y_true: Any, y_pred: Any) -> tf.Tensor:
            y_pred = tf.convert_to_tensor(y_pred)
            if y_pred.shape.rank != 2 or y_pred.shape[-1] != num_classes:
                raise ValueError(
                    f"The model's outputs must be [batch, {num_classes}], a column for each of the "
                    f"{num_classes} classes. Received: shape {y_pred.shape}."
                )
            if y_pred.dtype in (tf.float16, tf.bfloat16):
                y_pred = tf.cast(y_pred, tf.float32)
            y_true = tf.cast(y_true, tf.int64)
            if y_true.shape.rank == 2:
                y_true = tf.squeeze(y_true, axis=-1)
            if from_logits:
                p = tf.exp(-tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred))
            else:
                p = tf.reduce_sum(tf.one_hot(y_true, num_classes, dtype=y_pred.dtype) * y_pred, -1)
            return -tf.math.log(of_another + more * p)

        return corrected_crossentropy

    def statement(self) -> str:
        """States the guarantee of the labels, and its limits, in paragraphs of text."""
        paragraphs = (
            f"Label differential privacy: epsilon = {self.epsilon} at delta = 0.",
            "Neighboring relation: replace one label. Unit of privacy: one label. The guarantee "
            "compares data sets that differ in the label of one example; the features are not "
            "protected, nor is the number of examples. A person with k labels has k times epsilon.",
            f"Released, once: {len(self.labels)} labels of {self.num_classes} classes, by "
            "randomized response. Each label was kept with probability "
            f"{float(self.keep_probability):.6g}, and otherwise replaced by one of the other "
            "classes, all equally likely. Whatever is computed from these labels and the features, "
            "such as a model, is post-processing and has the same guarantee.",
            "This is another guarantee than that of `tfdp.privacy_statement`, whose unit is an "
            "example or a user. No ledger counts this release, and the two epsilons are not added.",
            "Not covered by this guarantee:",
        )
        text = "\n\n".join(_fill(paragraph) for paragraph in paragraphs)
        return text + "".join("\n" + _fill(item, "- ") for item in _NOT_COVERED) + "\n"


def randomized_response_labels(
    labels: Any, *, num_classes: int, epsilon: float
) -> RandomizedLabels:
    """Randomizes labels, so that they are differentially private; features are not protected.

    Each label is kept with probability c, and otherwise replaced by one of the K - 1 other classes,
    each with probability o, where c / o is exp(epsilon), rounded down. Use it where labels alone
    are private, such as clicks on public advertisements; see `docs/label_privacy.md`.

    Guarantees: the labels are (epsilon, 0)-differentially private for neighbors that differ in the
    label of one example, exactly, whatever the rounding. Each label takes one word u of 64 bits of
    the operating system's entropy. With m = ceil(2^64 / (E + K - 1)), where E is at most
    exp(epsilon), it becomes class (label + 1 + floor(u / m)) mod K if u < (K - 1) m, and is kept
    otherwise. So o = m / 2^64 and c = 1 - (K - 1) o, with these properties:

    - c <= exp(epsilon) o, because m (E + K - 1) >= 2^64 means 2^64 - (K - 1) m <= E m.
    - o <= c, because m < 2^64 / (E + K - 1) + 1 and so K m <= 2^64, as K (E + K - 1) is less than
      2^64 (E - 1) in the allowed ranges.

    The probabilities of an output under two labels are o or c, so neither is more than exp(epsilon)
    times the other. Labels are independent, and neighbors differ in one of them.

    Args:
      labels: Labels `[n]`, integers in [0, `num_classes`).
      num_classes: Number of classes K, in [2, 2^20]; a public number.
      epsilon: Epsilon of the guarantee, in [0.001, 20].

    Returns:
      The randomized labels, with `statement()` and `crossentropy()`.

    Raises:
      ValueError: An argument is not as described.

    References:
      - Warner, "Randomized Response: A Survey Technique for Eliminating Evasive Answer Bias", 1965.
      - Chaudhuri & Hsu, "Sample Complexity Bounds for Differentially Private Learning", 2011: label
        privacy.
      - Ghazi et al., [Deep Learning with Label Differential
        Privacy](https://arxiv.org/abs/2102.06062), 2021.

    Example:
      >>> import numpy as np, tfdp
      >>> y = np.arange(1000) % 10
      >>> released = tfdp.data.randomized_response_labels(y, num_classes=10, epsilon=3.0)
      >>> round(float(released.keep_probability), 4), released.labels.shape
      (0.6906, (1000,))
      >>> print(released.statement().splitlines()[0])
      Label differential privacy: epsilon = 3.0 at delta = 0.
    """
    checked, num_classes, epsilon = _checked(labels, num_classes, epsilon)
    words = np.frombuffer(os.urandom(8 * len(checked)), np.uint64)
    others = _words_of_another(num_classes, epsilon)
    return RandomizedLabels(_replaced(checked, words, others, num_classes), num_classes, epsilon)


def _words_of_another(num_classes: int, epsilon: float) -> int:
    """Returns m, the number of words of 2^64 that give one class other than the label."""
    with decimal.localcontext(decimal.Context(prec=_DIGITS)):
        # `exp` rounds to the nearest: the number before it is too small.
        at_most = decimal.Decimal(epsilon).exp().next_minus()
    return math.ceil(_WORDS / (fractions.Fraction(at_most) + num_classes - 1))


def _replaced(labels: np.ndarray, words: np.ndarray, others: int, num_classes: int) -> np.ndarray:
    """Returns the label that each word, uint64 `[n]`, makes of a label, int64 `[n]`."""
    steps = (words // np.uint64(others)).astype(np.int64) + 1
    return (labels + np.where(steps < num_classes, steps, 0)) % num_classes


def _checked(labels: Any, num_classes: Any, epsilon: Any) -> tuple[np.ndarray, int, float]:
    """Returns the arguments with their types, or raises the error that describes them."""
    if not (is_integer(num_classes) and 2 <= num_classes <= _MOST_CLASSES):
        raise error("num_classes", "an integer in [2, 2^20]", num_classes)
    if not (is_number(epsilon) and _EPSILONS[0] <= epsilon <= _EPSILONS[1]):
        raise error("epsilon", "in [0.001, 20]", epsilon)
    check_unmasked("labels", labels)
    with using("labels", labels, "an array `[n]` with one integer for each example"):
        array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            "Argument `labels` must hold one integer for each example, [n]. Received: shape "
            f"{list(array.shape)}, dtype {array.dtype}."
        )
    if array.min() < 0 or array.max() >= num_classes:
        raise ValueError(
            f"Argument `labels` must be in [0, num_classes), here [0, {num_classes}). Received: "
            f"values in [{array.min()}, {array.max()}]."
        )
    return array.astype(np.int64), int(num_classes), float(epsilon)


def _fill(text: str, bullet: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet))
