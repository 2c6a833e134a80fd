"""GNMax and confident GNMax: answers by the noisy votes of teachers."""

import math
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import dp_accounting
import numpy as np

from tfdp.accounting.ledger import PrivacyLedger
from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.validation import error, is_number, positive_integer
from tfdp.contrib.pate.partition import Partition
from tfdp.contrib.pate.votes import (
    NONE,
    checked_classes,
    checked_stddev,
    teacher_votes,
    vote_counts,
)

# If one teacher changes, a vote moves from one class to another.
COUNTS_SENSITIVITY = math.sqrt(2)
LARGEST_COUNT_SENSITIVITY = 1.0

_RELEASED = (
    "PATE: what is released is the answers to queries, and what is computed from them and public "
    "data, such as a student. The teachers, their votes and their accuracy are not covered. "
    "Assumed: each teacher was trained on its part of the data alone, and the queries are public."
)


class GNMax:
    """Aggregator of votes whose answer is the class with the largest noisy count.

    To each count of each query, Gaussian noise of standard deviation `noise_stddev` is added, and
    the class of the largest is released. By zero-out of one example (one user), one teacher
    changes, so one vote of a query moves: the counts change by at most sqrt(2) in l2 norm. An
    answer is post-processing of a Gaussian mechanism with noise multiplier `noise_stddev` /
    sqrt(2), and that is what the ledger has for each query. The bound does not depend on the votes.

    Guarantees: the answers are private with the epsilon of `ledger`, under zero-out of one unit of
    the partition, if the following holds, which is in your hands:

    - A teacher is a function of its part of the data, public data, and random numbers of its own.
      Nothing passes from one teacher to the next: weights, the state of an optimizer, statistics of
      the whole data set, a choice of hyperparameters by their joint accuracy.
    - Queries are public; later ones may depend on earlier answers. The number of teachers, the
      noise and the number of queries were fixed beforehand.
    - Only answers leave: no teachers, votes, or accuracies, on whatever data.

    A query that is asked twice is answered, and counted, twice. Copies and pickles are refused:
    each would count its own answers only. In another process, give the ledger of this one as
    `prior` to `tfdp.privacy_statement`.

    Args:
      partition: The parts that the teachers were trained on; it has the unit of privacy.
      num_classes: Number of classes, in [2, 2^20].
      noise_stddev: Standard deviation of the noise on a count of votes, positive.

    Raises:
      ValueError: An argument is not as described.

    References:
      - Papernot et al., 2018, Scalable Private Learning with PATE
        (https://arxiv.org/abs/1802.08908), section 4.1 and proposition 8.

    Example:
      >>> import numpy as np, tfdp
      >>> from tfdp.contrib import pate
      >>> partition = pate.random_partition(1000, num_teachers=100)
      >>> aggregator = pate.GNMax(partition, num_classes=3, noise_stddev=5.0)
      >>> labels_of_teachers = np.tile([2, 0], [100, 1])  # All teachers agree on both.
      >>> aggregator.answer(labels_of_teachers)
      array([2, 0])
      >>> print(tfdp.privacy_statement(aggregator, delta=1e-4).splitlines()[0])
      Differential privacy: epsilon = 1.31641 at delta = 0.0001.
    """

    def __init__(self, partition: Partition, *, num_classes: int, noise_stddev: float):
        if not isinstance(partition, Partition):
            raise error("partition", "a Partition, such as `random_partition` returns", partition)
        self._num_teachers = partition.num_teachers
        self._num_classes = checked_classes(num_classes)
        self._noise_stddev = checked_stddev("noise_stddev", noise_stddev)
        self._vote = dp_accounting.GaussianDpEvent(self._noise_stddev / COUNTS_SENSITIVITY)
        self._ledger = PrivacyLedger([_RELEASED], unit=partition.unit)
        self._sizes = (partition.num_units,)
        self._noise = KeyStream(domain="pate")
        self._lock = threading.Lock()

    def answer(self, outputs: Iterable[Any]) -> np.ndarray:
        """Answers queries.

        The answers are counted before they are made: an error on the way costs what they would have
        cost.

        Args:
          outputs: Of each teacher its outputs for the queries, or its votes: see `teacher_votes`.
            Teacher i must have been trained on part i.

        Returns:
          The class of each query, int64 `[queries]`; -1 where there is no answer.

        Raises:
          ValueError: The outputs are not of that form, or not one for each teacher. Nothing was
            released.
        """
        votes = teacher_votes(outputs, self._num_classes)
        if len(votes) != self._num_teachers:
            raise ValueError(
                f"Argument `outputs` must hold outputs of each of the {self._num_teachers} "
                f"teachers. Received: outputs of {len(votes)}."
            )
        counts = vote_counts(votes, self._num_classes)
        if not len(counts):
            return np.zeros([0], np.int64)
        with self._lock:
            self._record(len(counts))
            return self._release(counts)

    @property
    def ledger(self) -> PrivacyLedger:
        """Record of what was released so far, which cannot be changed."""
        with self._lock:
            return self._ledger.read_only(self._sizes)

    def _record(self, queries: int) -> None:
        """Counts the releases of new queries."""
        self._ledger.record(self._vote, queries)

    def _release(self, counts: np.ndarray) -> np.ndarray:
        """Returns the answers, of the counts `[queries, num_classes]`."""
        return np.argmax(counts + self._gaussian(counts.shape, self._noise_stddev), axis=1)

    def _gaussian(self, shape: tuple[int, ...], stddev: float) -> np.ndarray:
        """Draws secret noise, float64."""
        numbers = chacha.normals(self._noise.next_key(), math.prod(shape))
        return stddev * numbers.numpy().reshape(shape)

    def __copy__(self) -> NoReturn:
        self._refuse_copies()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copies()

    def __reduce__(self) -> NoReturn:
        self._refuse_copies()

    def _refuse_copies(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} must not be copied or pickled: each copy would count its own "
            "answers only. Keep its answers and `ledger.to_dict()`, and give "
            "`PrivacyLedger.from_dict` of that as `prior` to `tfdp.privacy_statement`."
        )


class ConfidentGNMax(GNMax):
    """Aggregator of votes that answers the queries on which teachers agree.

    Each query is tested first: the largest count of votes, plus Gaussian noise of standard
    deviation `threshold_noise_stddev`, must reach `threshold`. The largest count changes by at most
    1 if one teacher changes, so a test is a Gaussian mechanism with noise multiplier
    `threshold_noise_stddev`. Queries that pass are answered by `GNMax`, the first `max_answers` of
    them; others get -1.

    Accounting: the ledger has a test for each query, and a vote for each query until there are
    `max_answers` of them, whether or not it was answered. It does not have the number of answers
    that were given. Whoever sees the answers knows that number, but it is random and follows from
    the votes: differential privacy is a bound that holds for all outcomes, and so is computed from
    what was fixed before. For the same reason, queries after the last answer are counted as tested.
    A good `max_answers` is the number that is expected to pass.

    Guarantees: those of `GNMax`, under its conditions. It may be published which queries were
    answered.

    Args:
      partition: See `GNMax`.
      num_classes: See `GNMax`.
      noise_stddev: See `GNMax`; of answers.
      threshold: The threshold of the test, in votes.
      threshold_noise_stddev: Standard deviation of the noise of the test, positive.
      max_answers: How many queries are answered at most, in all calls together; a public number
        that is chosen beforehand.

    Raises:
      ValueError: An argument is not as described.

    References:
      - Papernot et al., 2018, Scalable Private Learning with PATE
        (https://arxiv.org/abs/1802.08908), algorithm 1. Its accounting is by the number of answers.
      - Smith and Thakurta, 2022, Fully Adaptive Composition for Gaussian Differential Privacy
        (https://arxiv.org/abs/2210.17520): the order of tests and votes follows from what was
        released, and the sum of their costs is bounded beforehand.

    Example:
      >>> import numpy as np
      >>> from tfdp.contrib import pate
      >>> partition = pate.random_partition(1000, num_teachers=100)
      >>> aggregator = pate.ConfidentGNMax(
      ...     partition, num_classes=3, noise_stddev=5.0, threshold=70.0,
      ...     threshold_noise_stddev=5.0, max_answers=2,
      ... )
      >>> agreed, split = np.full([100], 2), np.arange(100) % 2
      >>> aggregator.answer(np.stack([agreed, split, agreed, agreed], axis=1))
      array([ 2, -1,  2, -1])
      >>> tests, votes = aggregator.ledger.releases
      >>> tests.count, votes.count
      (4, 2)
    """

    def __init__(
        self,
        partition: Partition,
        *,
        num_classes: int,
        noise_stddev: float,
        threshold: float,
        threshold_noise_stddev: float,
        max_answers: int,
    ):
        super().__init__(partition, num_classes=num_classes, noise_stddev=noise_stddev)
        if not (is_number(threshold) and math.isfinite(threshold)):
            raise error("threshold", "a finite number", threshold)
        self._threshold = float(threshold)
        self._threshold_stddev = checked_stddev("threshold_noise_stddev", threshold_noise_stddev)
        self._max_answers = positive_integer("max_answers", max_answers)
        self._test = dp_accounting.GaussianDpEvent(
            self._threshold_stddev / LARGEST_COUNT_SENSITIVITY
        )
        self._answered = 0
        self._counted = 0  # Votes that are in the ledger.

    def _record(self, queries: int) -> None:
        self._ledger.record(self._test, queries)
        votes = min(queries, self._max_answers - self._counted)
        if votes:
            self._ledger.record(self._vote, votes)
            self._counted += votes

    def _release(self, counts: np.ndarray) -> np.ndarray:
        noise = self._gaussian((len(counts),), self._threshold_stddev)
        passes = counts.max(axis=1) + noise >= self._threshold
        passes &= self._answered + np.cumsum(passes) <= self._max_answers
        self._answered += int(passes.sum())
        return np.where(passes, super()._release(counts), NONE)
