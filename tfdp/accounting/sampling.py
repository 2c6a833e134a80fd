"""The size of a Poisson-sampled batch, padded so that almost nothing is ever cut off."""

import dataclasses
import functools

import scipy.stats

# Largest probability that one batch has more examples than rows. It is charged to delta by the
# ledger; at 1e-16 the charge is below a thousandth of delta = 1e-5 for 10,000 steps at epsilon 8.
TRUNCATION_PROBABILITY = 1e-16


@functools.cache
def padded_batch_size(dataset_size: int, expected_batch_size: int) -> int:
    """The smallest number of rows that a Poisson batch exceeds with probability at most 1e-16.

    Args:
      dataset_size: Number of training examples, N.
      expected_batch_size: Expected number of examples in a batch, B <= N.

    Returns:
      Rows P with P[Binomial(N, B / N) > P] <= `TRUNCATION_PROBABILITY`.

    Example:
      >>> padded_batch_size(60000, 256)
      398
    """
    sampling_probability = expected_batch_size / dataset_size
    low, high = expected_batch_size, dataset_size
    while low < high:
        middle = (low + high) // 2
        if truncation_probability(middle, dataset_size, sampling_probability) <= (
            TRUNCATION_PROBABILITY
        ):
            high = middle
        else:
            low = middle + 1
    return high


def truncation_probability(rows: int, dataset_size: int, sampling_probability: float) -> float:
    """P[Binomial(`dataset_size`, `sampling_probability`) > `rows`]."""
    return float(scipy.stats.binom.sf(rows, dataset_size, sampling_probability))


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """How batches are sampled: each example is in each batch with probability q = B / N.

    Attributes:
      dataset_size: Number of training examples, N. Treated as public.
      expected_batch_size: Expected number of examples in a batch, B.
      gradient_accumulation_steps: Chunks that one logical batch is delivered in.
    """

    dataset_size: int
    expected_batch_size: int
    gradient_accumulation_steps: int = 1

    @property
    def sampling_probability(self) -> float:
        """The probability q that an example is in a batch."""
        return self.expected_batch_size / self.dataset_size

    @property
    def padded_batch_size(self) -> int:
        """Rows that a logical batch is padded to."""
        return padded_batch_size(self.dataset_size, self.expected_batch_size)

    @property
    def truncation_probability(self) -> float:
        """The probability that one logical batch has more examples than rows."""
        return truncation_probability(
            self.padded_batch_size, self.dataset_size, self.sampling_probability
        )
