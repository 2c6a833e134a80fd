"""Chooses the rows in which a batch is delivered, by the memory that a step takes."""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.accounting.sampling import PoissonSampling
from tfdp.base.validation import error, integer
from tfdp.data import poisson

AUTO = "auto"
# Copies of a batch: two that wait, and the one that is trained on.
_COPIES = 3


class Choice(NamedTuple):
    """The chosen size of chunks.

    Attributes:
      chunk_size: Rows that are delivered at a time at most, a power of two.
      why: The reason, in a sentence.
    """

    chunk_size: int
    why: str


def given(chunk_size: Any) -> int | None:
    """Returns the argument `chunk_size` of `poisson_batches`: None, if it is to be chosen.

    Args:
      chunk_size: The argument of `make_private`.

    Raises:
      ValueError: It is another string than "auto".
    """
    if not isinstance(chunk_size, str):
        return integer("chunk_size", chunk_size, 1, optional=True)
    if chunk_size != AUTO:
        raise error("chunk_size", f'an integer, None or "{AUTO}"', chunk_size)
    return None


def choose(
    bytes_per_row: int | None, element_spec: Any, sampling: PoissonSampling, planned: int
) -> Choice | None:
    """Returns the largest size of chunks that fit into memory; None, if whole batches fit.

    A size is a limit that hardly any chunk comes near to: what must fit is exceeded by 1 in 1,000.
    The choice depends on public numbers alone: the model, the shapes, the sampling, and the memory
    that the machine has. (What is free of it follows from how long the texts are that it holds.)

    Args:
      bytes_per_row: About how many bytes a step takes for each row; None: not known.
      element_spec: Types and shapes of the batches.
      sampling: Their sampling.
      planned: The bytes that a step may take.

    Example:
      >>> from tfdp.accounting import PoissonSampling
      >>> spec = tf.TensorSpec([None, 100], tf.float32)
      >>> choose(999_000, spec, PoissonSampling(60000, 2048), 2**30).chunk_size
      1024
    """
    if bytes_per_row is None:
        return None
    each = sampling.rows_per_example
    rows = sampling.usual_batch_size * each
    size = bytes_per_row + _COPIES * sum(map(_row_bytes, tf.nest.flatten(element_spec)))
    if rows * size <= planned:
        return None
    chunk = 2 ** (each - 1).bit_length()
    while _rows_in_chunks(sampling, 2 * chunk) * size <= planned:
        chunk *= 2
    why = (
        f"a batch of {rows} rows would take about {_gib(rows * size)}, more than the "
        f"{_gib(planned)} that a step may take here (`chunk_size=None` keeps batches whole)"
    )
    return Choice(chunk, why)


def _rows_in_chunks(sampling: PoissonSampling, chunk_size: int) -> int:
    """Returns the rows that few chunks exceed."""
    chunked = poisson.sampling_in_chunks(sampling, chunk_size)
    examples = -(-chunked.usual_batch_size // chunked.gradient_accumulation_steps)
    return examples * sampling.rows_per_example


def _row_bytes(spec: tf.TensorSpec) -> int:
    return math.prod(size or 1 for size in spec.shape[1:]) * spec.dtype.size


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
