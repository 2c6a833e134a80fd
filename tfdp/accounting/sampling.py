"""Size of a Poisson-sampled batch, chosen so that almost no batch is ever truncated.

The guarantee compares data sets of N places, of which all or all but one hold examples, sampled
with the same probability q = B / N (`tfdp.accounting.relation`). The charge for truncation must
hold on both data sets of a pair. Binomial(n, q) exceeds any number of rows more often for larger n:
the bounds here are those of N + 1 examples, one more than there are places. With q = 1 these fill
N + 1 rows.
"""

import dataclasses
import functools
import math

import scipy.stats

from tfdp.base import validation

# Largest probability, by default, that a padded batch has more examples than rows. The ledger
# charges it to delta, over q (or times 1 + e^epsilon, if that is less): for 100,000 steps with q
# above 1e-5, less than a thousandth of delta = 1e-5.
PADDED_TRUNCATION_PROBABILITY = 1e-18
# The same of the batches of selective release (DPSUR), and of padded ones in older records. The
# charge is times 1 + e^epsilon: below a thousandth of delta = 1e-15 for a million steps at epsilon
# 12, and of delta = 1e-5 at epsilon 36.
TRUNCATION_PROBABILITY = 1e-30
# The same of batches without padding, for which rows that are not used cost nothing: the charge is
# below a thousandth of delta = 1e-15 for 10^7 steps at any epsilon up to 125.
UNPADDED_TRUNCATION_PROBABILITY = 1e-80
# Exponents of the powers of ten that padded batches may be cut off with.
_EXPONENTS = range(6, 81)

# Sizes beyond it are not known exactly as floating-point numbers.
MOST_EXAMPLES = 2**53

# How batches are padded: not at all; to one of a few sizes; to one size.
NONE, BUCKETS, FULL = PADDINGS = ("none", "buckets", "full")
# Sizes of buckets, in standard deviations of the number of examples above its expectation.
_BUCKETS = (1.0, 3.0)
# Units of privacy: what neighboring data sets differ in.
EXAMPLE, USER = UNITS = ("example", "user")
# Likewise, of what memory is planned for.
_USUAL = 3.0


def power_of_ten(exponent: int) -> float:
    """Returns 10^-exponent, as it is written."""
    return float(f"1e-{exponent}")


@functools.cache
def padded_batch_size(
    dataset_size: int,
    expected_batch_size: int,
    truncation: float = PADDED_TRUNCATION_PROBABILITY,
) -> int:
    """Returns the least number of rows that a Poisson batch exceeds with a small probability.

    This holds for up to N + 1 examples, sampled with the probability q = B / N.

    Args:
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N.
      truncation: The probability, at most. By default 1e-18.

    Returns:
      Rows P with `truncation_probability(P, N, q)` <= `truncation`: N + 1 for q = 1.

    Example:
      >>> padded_batch_size(60000, 256)
      408
    """
    sampling_probability = expected_batch_size / dataset_size
    low, high = expected_batch_size, dataset_size + 1
    while low < high:
        middle = (low + high) // 2
        if truncation_probability(middle, dataset_size, sampling_probability) <= truncation:
            high = middle
        else:
            low = middle + 1
    return high


def truncation_probability(rows: int, dataset_size: int, sampling_probability: float) -> float:
    """Bounds the probability that a Poisson batch has more than a number of examples.

    Args:
      rows: Rows of the padded batch, P.
      dataset_size: Number of training examples, N.
      sampling_probability: Probability q that an example is in the batch.

    Returns:
      The larger of P[Binomial(N, q) > P] and P[Binomial(N + 1, q) > P].

    Example:
      >>> round(truncation_probability(11, 11, 10 / 11), 2)
      0.32
    """
    sizes = [dataset_size, dataset_size + 1]
    return float(scipy.stats.binom.sf(rows, sizes, sampling_probability).max())


@functools.cache
def padded_part_size(sampling: "PoissonSampling") -> int:
    """Returns the row limit for the batch of one part of a data set whose parts are sampled apart.

    By the union bound, the probability that any part exceeds its rows is at most the probability
    that the whole data set exceeds its own, which is what ledgers charge.
    """
    whole = dataclasses.replace(sampling, parts=1, largest_part=None)
    low, high = 1, sampling.part_size + 1
    while low < high:
        middle = (low + high) // 2
        tau = truncation_probability(middle, sampling.part_size, sampling._share)
        if sampling.parts * tau <= whole.truncation_probability:
            high = middle
        else:
            low = middle + 1
    return high


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """Poisson sampling of batches: each example is in each batch with probability q = B / N.

    (With `unit="user"` read "user" for "example".)

    With a `cycle_length` of c > 1, each example is in one of c sets, each with probability 1 / c.
    Step t samples set t mod c, with q = c B / N: cyclic Poisson sampling. An example can be in one
    of any c batches in a row. With `redraws_sets`, the sets are drawn anew for each cycle: random
    allocation (`tfdp.accounting.RandomAllocationDpEvent`).

    Attributes:
      dataset_size: Number of training examples, N. Treated as public.
      expected_batch_size: Expected number of examples in a batch, B.
      gradient_accumulation_steps: Chunks that one logical batch is delivered in.
      padding: "none": a batch has one row for each example. "buckets": it is padded to one of
        `bucket_sizes`, with rows whose weight is zero. "full": to `padded_batch_size`.
      parts: Disjoint parts of the data set, each with a batch of its own in every step; together
        they are one Poisson sample of the whole. See `tfdp.data.distributed_poisson_batches`.
      largest_part: Number of examples in the largest part; None: all.
      rows_per_example: Rows that every example has in a batch: augmented copies of it, or the
        chosen examples of a user. The gradient of their mean loss is clipped.
      unit: The unit of privacy, in one of which neighboring data sets differ: "example" or "user".
      cycle_length: Steps in which every example has one chance to be sampled, c <= N / B.
      redraws_sets: Whether each cycle of c > 1 steps has new random sets.
      max_truncation_probability: The largest probability that a padded batch has more examples than
        rows, and is cut off: a power of ten from 1e-80 to 1e-6. Batches without padding have
        `UNPADDED_TRUNCATION_PROBABILITY`.
    """

    dataset_size: int
    expected_batch_size: int
    gradient_accumulation_steps: int = 1
    padding: str = NONE
    parts: int = 1
    largest_part: int | None = None
    rows_per_example: int = 1
    unit: str = EXAMPLE
    cycle_length: int = 1
    redraws_sets: bool = False
    max_truncation_probability: float = PADDED_TRUNCATION_PROBABILITY

    def __post_init__(self) -> None:
        sizes = ("dataset_size", "expected_batch_size", "rows_per_example")
        for name in (*sizes, "gradient_accumulation_steps", "parts", "cycle_length"):
            value = validation.integer(name, getattr(self, name), 1, MOST_EXAMPLES)
            object.__setattr__(self, name, value)
        validation.integer("largest_part", self.largest_part, 1, MOST_EXAMPLES, optional=True)
        if not self.dataset_size / self.parts <= self.part_size <= self.dataset_size:
            raise validation.error(
                "largest_part",
                f"from 1/{self.parts} of dataset_size={self.dataset_size} to all of it",
                self.largest_part,
            )
        validation.one_of("padding", self.padding, PADDINGS)
        validation.one_of("unit", self.unit, UNITS)
        if self.expected_batch_size > self.dataset_size:
            raise validation.error(
                "expected_batch_size",
                f"at most dataset_size={self.dataset_size}",
                self.expected_batch_size,
            )
        if self.cycle_length * self.expected_batch_size > self.dataset_size:
            raise validation.error(
                "cycle_length",
                "at most dataset_size / expected_batch_size, "
                f"{self.dataset_size // self.expected_batch_size}",
                self.cycle_length,
            )
        if self.cycle_length > 1 and self.parts > 1:
            raise validation.error("cycle_length", "1 with several parts", self.cycle_length)
        if not isinstance(self.redraws_sets, bool):
            raise validation.error("redraws_sets", "True or False", self.redraws_sets)
        if self.redraws_sets and self.cycle_length == 1:
            raise validation.error("redraws_sets", "False with cycle_length=1", self.redraws_sets)
        most = self.max_truncation_probability
        if not (validation.is_number(most) and most in map(power_of_ten, _EXPONENTS)):
            raise validation.error(
                "max_truncation_probability",
                f"a power of ten from {power_of_ten(_EXPONENTS[-1])} to "
                f"{power_of_ten(_EXPONENTS[0])}",
                most,
            )
        object.__setattr__(self, "max_truncation_probability", float(most))

    @property
    def sampling_probability(self) -> float:
        """The probability q that an example (of the set that is sampled) is in a batch."""
        return self.cycle_length * self.expected_batch_size / self.dataset_size

    @property
    def _share(self) -> float:
        """The share of the data set that a batch is expected to have."""
        return self.expected_batch_size / self.dataset_size

    @property
    def has_padding(self) -> bool:
        """True if batches may have rows without weight, which Keras's `metrics` count, too."""
        return self.padding != NONE or (self.unit == USER and self.rows_per_example > 1)

    @property
    def part_size(self) -> int:
        """The number of examples in the largest part."""
        return self.dataset_size if self.largest_part is None else self.largest_part

    @property
    def padded_batch_size(self) -> int:
        """The row limit of a (part's) logical batch; with `padding="full"`, the rows of each batch.

        Larger samples are cut off: with padding, with a probability of at most
        `max_truncation_probability`; without, of at most `UNPADDED_TRUNCATION_PROBABILITY`.
        """
        if self.parts > 1:
            return padded_part_size(self)
        truncation = self.max_truncation_probability
        if self.padding == NONE:
            truncation = UNPADDED_TRUNCATION_PROBABILITY
        return padded_batch_size(self.dataset_size, self.expected_batch_size, truncation)

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a batch can have with `padding="buckets"`, in increasing order.

        Five of six batches have the first of three, for large data sets.
        """
        most = self.padded_batch_size
        return (*sorted({size for z in _BUCKETS if (size := self._size(z)) < most}), most)

    @property
    def usual_batch_size(self) -> int:
        """The number of rows that about 1 in 1,000 batches exceed, for large data sets."""
        if self.padding == FULL:
            return self.padded_batch_size
        return min(self._size(_USUAL), self.padded_batch_size)

    def _size(self, deviations: float) -> int:
        """Returns the rows of a (part's) batch that exceeds its expectation by `deviations`."""
        expected = self._share * self.part_size
        return math.ceil(expected + deviations * math.sqrt(expected * (1 - self._share)))

    @property
    def truncation_exponent(self) -> int:
        """The n of the largest truncation probability, 10^-n, of padded batches; else 0."""
        return 0 if self.padding == NONE else -round(math.log10(self.max_truncation_probability))

    @property
    def truncation_probability(self) -> float:
        """An upper bound on the probability that one logical batch has more examples than rows.

        It holds for up to N + 1 examples. With several sets, the number of examples in a batch is
        binomial as well: the set of an example is random.
        """
        return self.parts * truncation_probability(
            self.padded_batch_size, self.part_size, self._share
        )
