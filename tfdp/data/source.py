"""A data set that Poisson batches are drawn from."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import FULL, NONE, PoissonSampling
from tfdp.base import devices
from tfdp.base.random import chacha
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.data.cycle import Cycle, RedrawnCycle, Sets
from tfdp.data.elements import has_labels, parts_of
from tfdp.data.stored import Examples
from tfdp.data.transforms import Transform, secrets
from tfdp.data.users import Users

# Random words for each row: of its distance to the row before, and of its place.
_OF_INDEX, _OF_PLACE = 4, 4


class Rows(NamedTuple):
    """The rows of a draw, or of a part of it.

    Attributes:
      indices: For each row the index of its example, int64 `[rows]`; the number of examples or
        more where it is padding.
      weights: Weights of the rows, which multiply those of the examples, float32; or None.
      secrets: Secrets of each row, int64 `[rows, 2, 3]`, that the random numbers of the transform
        and of the stored examples are made of; None where there are none.
    """

    indices: tf.Tensor
    weights: tf.Tensor | None = None
    secrets: tf.Tensor | None = None

    def secret_of(self, use: int) -> tf.Tensor:
        """Returns the secrets of the rows for one use, int64 `[rows, 3]`."""
        if self.secrets is None:
            raise ValueError("Rows of a source that draws random numbers must have secrets.")
        return self.secrets[:, use]


@dataclasses.dataclass(frozen=True)
class PoissonSource:
    """A data set that Poisson batches can be drawn from, also inside a graph.

    Attributes:
      data: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`: variables or tensors, or nested
        tuples or dicts of them, with one row for each example; weights are floating. None where
        examples are not in memory.
      examples: Number of examples.
      seed: Seed that was given to `poisson_batches`.
      transform: Makes of one drawn example the one that is delivered, or None.
      uses: Counts those who draw from it, so that no two of them draw the same.
      stored: Reads examples that are not in memory, or None.
      augmentations: Rows that each drawn example has.
      users: The users who are sampled in place of examples, or None.
      cycle: The sets of units that are sampled in turns, or None: every draw is of all.
    """

    data: Any
    examples: int
    seed: int | None
    transform: Transform | None = None
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    stored: Examples | None = None
    augmentations: int = 1
    users: Users | None = None
    cycle: Cycle | RedrawnCycle | None = None

    @property
    def dataset_size(self) -> int:
        """Number of units that are sampled, N: of examples, or of users."""
        return self.examples if self.users is None else self.users.number

    @property
    def rows_per_example(self) -> int:
        """Rows that each sampled unit has in a batch."""
        return self.augmentations * (1 if self.users is None else self.users.most)

    @property
    def element_spec(self) -> Any:
        """Types and shapes of the examples that are delivered, without weights of rows."""
        given = self.given_spec
        if self.transform is None:
            return given
        made = self.transform.element_spec
        if isinstance(given, tuple):
            return (*parts_of(made), *given[2:])
        return made

    @property
    def given_spec(self) -> Any:
        """Types and shapes of the examples before the transform."""
        if self.stored is None:
            return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), self.data)
        spec = self.stored.element_spec
        if not isinstance(spec, tuple):
            return spec
        return (*spec[:2], *tf.nest.map_structure(_as_weights, spec[2:]))

    def tensors(self) -> Any:
        """Returns all examples in memory, in the structure of `data`, as tensors.

        It may copy them: batches are drawn without it.
        """
        with tf.init_scope():
            return tf.nest.map_structure(tf.convert_to_tensor, self.data)

    def draw(self, key: tf.Tensor, sampling: PoissonSampling) -> Any:
        """Draws a Poisson batch, whole, as those of `poisson_batches`.

        Args:
          key: Secret of this draw, used for nothing else; see
            `tfdp.base.random.chacha.random_words`.
          sampling: The sampling and padding.

        Returns:
          See `rows`.

        Raises:
          ValueError: The data set is sampled in turns, of which only batches that are delivered
            keep count.
        """
        if self.cycle is not None:
            raise ValueError(
                "Argument `batches` must be drawn without `cycle_length` where each attempt draws "
                f"its own. Received: cycle_length={self.cycle.length}."
            )
        return self.rows(self.draw_rows(key, sampling), padded=sampling.padding != NONE)

    def draw_rows(
        self, key: tf.Tensor, sampling: PoissonSampling, sets: Sets | None = None
    ) -> Rows:
        """Draws a Poisson sample, and the rows of each unit in it.

        Args:
          key: Secret of this draw, used for nothing else; see
            `tfdp.base.random.chacha.random_words`.
          sampling: The sampling and padding.
          sets: Where each cycle has its own sets: those of this or of another one.

        Returns:
          The rows, `units * rows_per_example` of them.
        """

        def sample(size: int | tf.Tensor) -> tf.Tensor:
            return draw_indices(key, sampling, size)

        if self.cycle is None:
            indices = sample(self.dataset_size)
        elif isinstance(self.cycle, Cycle):
            indices = self.cycle.draw(key[-1], sample)
        else:
            sets = self.cycle.sets_of(key, self.cycle.no_sets if sets is None else sets)
            indices = self.cycle.draw(key, sets, sample)
        weights = None
        if self.users is not None:
            indices, weights = self.users.choose(key, indices)
        if self.augmentations > 1:
            indices = tf.repeat(indices, self.augmentations)
            weights = None if weights is None else tf.repeat(weights, self.augmentations)
        drawing = self._draws_in_rows()
        return Rows(indices, weights, secrets(key, tf.size(indices)) if drawing else None)

    def rows(self, rows: Rows, *, padded: bool) -> Any:
        """Returns examples.

        Args:
          rows: Says which.
          padded: Whether there are indices from `examples` on, of rows of zeros without weight.

        Returns:
          `x`, `(x,)` or `(x, y)`, as `element_spec` says; with padding or weights `(x, y,
          weights)`. Without weights, `weights` is a mask, bool. If there are no indices, one unit
          of zeros: some of TensorFlow's operations, convolutions among them, fail on no rows.

        Raises:
          ValueError: There would be padding, and no labels that its weights could follow.
        """
        if padded:
            return _open(self._padded(rows))
        found, each = self._weighted(rows), self.rows_per_example
        if not isinstance(self.element_spec, tuple):
            (found,) = found
        zeros = tf.nest.map_structure(lambda t: tf.zeros([each, *t.shape[1:]], t.dtype), found)
        return _open(tf.cond(tf.size(rows.indices) > 0, lambda: found, lambda: zeros))

    def _draws_in_rows(self) -> bool:
        """Returns whether random numbers are drawn for rows, of which each needs a secret."""
        transformed = self.transform is not None and self.transform.draws
        return transformed or (self.stored is not None and self.stored.draws)

    def _weighted(self, which: Rows) -> tuple:
        """Returns the parts of examples, with the weights of users' rows."""
        rows, weights = self._gathered(which), which.weights
        if weights is None or len(rows) == 1:  # Without labels users have one row, of weight 1.
            return rows
        if len(rows) == 2:
            return (*rows, weights)

        def of_output(given: tf.Tensor) -> tf.Tensor:
            return tf.reshape(weights, [-1] + [1] * (given.shape.rank - 1)) * given

        return (*rows[:2], tf.nest.map_structure(of_output, rows[2]))

    def _gathered(self, which: Rows) -> tuple:
        indices = which.indices
        if self.stored is not None:
            secret = which.secret_of(1) if self.stored.draws else None
            rows = parts_of(self.stored.gather(indices, secret))
            weights = tf.nest.map_structure(lambda w: tf.cast(w, tf.float32), rows[2:])
            rows = (*rows[:2], *weights)
        else:
            data = self.tensors() if devices.compiled_for_gpu() else self.data
            rows = parts_of(tf.nest.map_structure(lambda values: tf.gather(values, indices), data))
        if self.transform is not None:
            secret = which.secret_of(0) if self.transform.draws else None
            rows = (*parts_of(self.transform(rows[:2], secret)), *rows[2:])
        return rows

    def _padded(self, which: Rows) -> tuple:
        if not has_labels(self.element_spec):
            raise ValueError(
                "Rows of padding must have weights, which follow labels: there are none."
            )
        mask = which.indices < self.examples

        def masked(taken: tf.Tensor) -> tf.Tensor:
            keep = tf.reshape(mask, [-1] + [1] * (taken.shape.rank - 1))
            return tf.where(keep, taken, tf.zeros([], taken.dtype))

        rows = self._weighted(which._replace(indices=tf.where(mask, which.indices, 0)))
        rows = tf.nest.map_structure(masked, rows)
        return rows if len(rows) == 3 else (*rows, mask)


def draw_indices(key: tf.Tensor, sampling: PoissonSampling, size: int | tf.Tensor) -> tf.Tensor:
    """Draws a Poisson sample, with as many rows as its padding asks for.

    Args:
      key: Secret of this draw; see `tfdp.base.random.chacha.random_words`.
      sampling: The sampling and padding.
      size: Number of examples: of the data set, or of this part of it; may be a scalar int64.

    Returns:
      For each row the index of its example, int64 `[rows]`; at least `size` where it is padding.
    """
    q = sampling.sampling_probability
    most = sampling.padded_batch_size
    if sampling.padding == FULL:  # As many for each chunk.
        chunks = sampling.gradient_accumulation_steps
        return sample_places(key, size, q, -(-most // chunks) * chunks)
    indices = sample_indices(chacha.random_words(key, _OF_INDEX * most), size, q)
    examples = tf.math.count_nonzero(indices < size)
    if sampling.padding == NONE:
        return indices[:examples]
    sizes = tf.constant(sampling.bucket_sizes, tf.int64)
    return indices[: sizes[tf.searchsorted(sizes, examples[tf.newaxis])[0]]]


def sample_places(
    key: tf.Tensor, dataset_size: int | tf.Tensor, sampling_probability: float, rows: int
) -> tf.Tensor:
    """Draws a Poisson sample of `range(dataset_size)`, at uniformly random places.

    Given where the other examples stand, an example that is added to the data set and sampled
    takes one of the free places, all with the same probability, and moves no other. (The places of
    n examples are a uniformly random injection into the rows; restricted to n - 1 of them, it is
    again uniformly random.) So it changes one row, whatever a model does with a row's place, such
    as a mask of dropout from a stream that is known.

    Args:
      key: Secret of this draw; see `tfdp.base.random.chacha.random_words`.
      dataset_size: Number of examples N.
      sampling_probability: Probability of each to be sampled, in (0, 1].
      rows: Number of places.

    Returns:
      For each place the index of its example, int64 `[rows]`; at least `dataset_size` where it is
      free.
    """
    words = chacha.random_words(key, (_OF_INDEX + _OF_PLACE) * rows)
    of_index, of_place = tf.split(words, [_OF_INDEX * rows, _OF_PLACE * rows])
    indices = sample_indices(of_index, dataset_size, sampling_probability)
    return tf.gather(indices, _permutation(of_place))


def sample_indices(
    words: tf.Tensor, dataset_size: int | tf.Tensor, sampling_probability: float
) -> tf.Tensor:
    """Draws a Poisson sample of `range(dataset_size)`, in increasing order.

    The distances between successive sampled indices are independent and geometric, so that the
    work is that of a batch, not of the data set.

    Args:
      words: Random words of this draw, uint32 `[4 rows]`.
      dataset_size: Number of examples N.
      sampling_probability: Probability of each to be sampled, in (0, 1].

    Returns:
      Indices, int64 `[rows]`: those of the sample, then values of at least `dataset_size`. A
      sample of more than `rows` is cut off.
    """
    log_miss = np.log1p(-sampling_probability) if sampling_probability < 1 else -np.inf
    waiting = chacha.exponentials(tf.reshape(words, [_OF_INDEX, -1]))
    misses = tf.floor(waiting / -log_miss)
    gaps = 1 + tf.cast(tf.minimum(misses, tf.cast(dataset_size, misses.dtype)), tf.int64)
    return tf.cumsum(gaps) - 1


def _permutation(words: tf.Tensor) -> tf.Tensor:
    """Makes a uniformly random permutation of `range(n)` of uint32 `[4 n]`: the order of words."""
    numbers = tf.bitcast(tf.reshape(words, [2, -1, 2]), tf.int64)
    order = tf.argsort(numbers[0], stable=True)
    return tf.gather(order, tf.argsort(tf.gather(numbers[1], order), stable=True))


def in_variables(data: Any) -> Any:
    """Puts the tensors of a data set into variables, without a copy if nothing else holds them.

    A function that reads a variable captures a handle. For each tensor that a function captures,
    the first iteration over a dataset allocates another one of the same size, and keeps it.
    """
    with plain_variables(hold_data=True), tf.device("cpu"):
        return tf.nest.map_structure(lambda t: tf.Variable(t, trainable=False), data)


def _as_weights(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, tf.float32)


def _open(tensors: Any) -> Any:
    """Leaves the first dimension open in the graph: a model must work for any number of rows."""

    def open_one(tensor: tf.Tensor) -> tf.Tensor:
        return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])

    return tf.nest.map_structure(open_one, tensors)
