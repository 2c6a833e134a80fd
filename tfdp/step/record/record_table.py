"""Tables of what private optimizers have released: a counter that only grows, for each of them."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

# The privacy parameters of the steps that a row counts, zero where a kind of release has none.
PARAMETERS = (
    "l2_norm_clip",
    "noise_multiplier",
    "expected_batch_size",
    "num_microbatches",
    "dataset_size",
    "validation_batch_size",
    "validation_noise_multiplier",
    "threshold",
    "max_attempts",
    "selective_release",
    "privacy_unit",
    "noise_schedule",
    "cycle_length",
)
# Columns. The first three numbers after the uid never fall.
UID, STEPS, NOT_POISSON, SHOWN, KIND, FIXED_SEED = range(6)
COUNTS = slice(STEPS, SHOWN + 1)
_PARAMETERS_FROM = FIXED_SEED + 1
COLUMNS = _PARAMETERS_FROM + len(PARAMETERS)
NOISE_SCHEDULE = _PARAMETERS_FROM + PARAMETERS.index("noise_schedule")
# Rows of a table that is saved.
ROWS = 256
# Kinds of releases: a Gaussian mechanism on a padded batch (in the oldest files, on any), a
# selective release, what is left when a table has no room for other parameters, and a Gaussian
# mechanism on a batch without padding, which is cut off with a smaller probability; and, with and
# without padding, the signs of a Gaussian mechanism, which older versions take for one;
# likewise, an epoch of Gaussian mechanisms (or of their signs) by random allocation; a step of
# one of the runs of a private selection, on any batch; and, with and without padding, a cycle that
# counts as a Gaussian mechanism, however examples are sampled in it. Kinds of padded batches that
# are cut off with a probability of at most 10^-n have n / 128 added (`cut_off`); older rows,
# without it, are of batches for which it is 1e-30.
KINDS = range(1, 12)
GAUSSIAN, SELECTIVE, MIXED, GAUSSIAN_UNPADDED, SIGNS, SIGNS_UNPADDED = KINDS[:6]
ALLOCATED, ALLOCATED_UNPADDED, TUNED, CYCLES, CYCLES_UNPADDED = KINDS[6:]
_EXPONENTS = 128
# Every smaller integer is a float64.
LARGEST_UID = 2**52
_MIX = (-7046029254386353131, -4658895280553007687)


def cut_off(kind: int, exponent: int) -> float:
    """Returns the kind of releases on batches that are cut off with probability 10^-exponent."""
    return kind + exponent / _EXPONENTS


def exponent_of(kind: float) -> int:
    """Returns the exponent of a kind that `cut_off` returned; 0 of others."""
    return round(kind % 1 * _EXPONENTS)


def new_row(uid: float, kind: float, fixed_seed: bool, parameters: dict[str, float]) -> np.ndarray:
    """Returns a row without steps, `[COLUMNS]`."""
    row = np.zeros(COLUMNS)
    row[[UID, KIND, FIXED_SEED]] = uid, kind, fixed_seed
    for name, value in parameters.items():
        row[_PARAMETERS_FROM + PARAMETERS.index(name)] = value
    return row


def parameters_of(row: np.ndarray) -> dict[str, float]:
    """Returns the privacy parameters of a row by name."""
    return dict(zip(PARAMETERS, map(float, row[_PARAMETERS_FROM:]), strict=True))


def union(tables: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the rows of all tables, `[rows, COLUMNS]`: of those with one uid the largest counts.

    Args:
      tables: `[rows, COLUMNS]` each. Rows with uid 0 are empty.
    """
    rows: dict[float, np.ndarray] = {}
    for row in (row for table in tables for row in table[table[:, UID] > 0]):
        known = rows.setdefault(row[UID], row.copy())
        known[COUNTS] = np.maximum(known[COUNTS], row[COUNTS])
    return np.array(list(rows.values())).reshape(-1, COLUMNS)


def merge(known: tf.Tensor, incoming: tf.Tensor, own_uid: tf.Tensor) -> tf.Tensor:
    """Merges what was released elsewhere into a table, in the graph being built.

    Guarantees: the total of no kind of release falls, and what both tables know of is counted once.

    Args:
      known: A table, float64 `[rows, COLUMNS]`.
      incoming: Another, of any number of rows.
      own_uid: Rows of these uids, `[n]` or a scalar, are left out: they are counted elsewhere.

    Returns:
      A table of the shape of `known`. Where it has too few rows, those of equal parameters are
      added up in one with a uid of its own; what was added up and comes in again by itself, as
      from an older checkpoint, is then counted twice.
    """
    uids = incoming[:, UID]
    own = tf.reduce_any(uids[:, tf.newaxis] == tf.reshape(own_uid, [1, -1]), axis=1)
    uids = tf.where(own, tf.zeros_like(uids), uids)
    same = tf.logical_and(uids[:, tf.newaxis] == known[tf.newaxis, :, UID], uids[:, tf.newaxis] > 0)
    counts = tf.where(same[:, :, tf.newaxis], incoming[:, tf.newaxis, COUNTS], 0)
    counts = tf.maximum(known[:, COUNTS], tf.reduce_max(counts, axis=0))
    known = tf.concat([known[:, :STEPS], counts, known[:, KIND:]], axis=1)
    is_new = tf.logical_and(uids > 0, tf.logical_not(tf.reduce_any(same, axis=1)))
    rows = tf.concat([known, tf.where(is_new[:, tf.newaxis], incoming, 0)], axis=0)
    room = known.shape[0]
    needed = tf.math.count_nonzero(rows[:, UID])
    rows = tf.cond(needed > room, lambda: _fold(rows, room), lambda: rows)
    order = tf.argsort(tf.cast(rows[:, UID] == 0, tf.int32), stable=True)
    return tf.ensure_shape(tf.gather(rows, order[:room]), [room, COLUMNS])


def digest(table: tf.Tensor, facts: tf.Tensor) -> tf.Tensor:
    """Returns a number that tells tables and facts apart, but for 1 in about 2^60.

    Args:
      table: Float64 `[rows, COLUMNS]`. The order of the rows does not matter.
      facts: Float64 `[numbers]`.

    Returns:
      A scalar int64.
    """

    def mixed(numbers: tf.Tensor) -> tf.Tensor:
        """Mixes the last axis, of which every number has a multiplier of its own."""
        mixed = _shifted(tf.bitcast(numbers, tf.int64), 32)  # The lower bits of floats are zero.
        factors = (np.arange(numbers.shape[-1]) * 2 + 1) * np.int64(_MIX[0])
        return _shifted(tf.reduce_sum(_shifted(mixed * factors, 29) * _MIX[1], axis=-1), 32)

    rows = tf.reduce_sum(mixed(table), axis=0)
    whole = tf.concat([facts, tf.bitcast(rows[tf.newaxis], tf.float64)], axis=0)
    return mixed(whole)


def _shifted(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, np.int64(bits)))


def _fold(rows: tf.Tensor, room: int) -> tf.Tensor:
    """Adds up rows of equal parameters; those for which there is still no room become one."""
    count = rows.shape[0]
    used = rows[:, UID] > 0
    same = tf.reduce_all(rows[:, tf.newaxis, KIND:] == rows[tf.newaxis, :, KIND:], axis=2)
    same = tf.logical_and(same, tf.logical_and(used[:, tf.newaxis], used[tf.newaxis]))
    first = tf.argmax(same, axis=1, output_type=tf.int32)
    leads = tf.logical_and(used, first == tf.range(count))
    place = tf.cumsum(tf.cast(leads, tf.int32)) - 1
    segment = tf.minimum(tf.gather(place, first), room - 1)
    segment = tf.where(used, segment, room)  # Empty rows: cut off below.

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, segment, room + 1)[:room]

    sizes = total(tf.ones([count], tf.int32))
    kinds = total(tf.cast(leads, tf.int32))
    counts = total(rows[:, COUNTS])
    at = tf.where(leads, tf.minimum(place, room), room)
    facts = tf.math.unsorted_segment_max(rows[:, KIND:], at, room + 1)[:room]
    uids = tf.math.unsorted_segment_max(rows[:, UID], at, room + 1)[:room]
    # A number that follows from what is added up: done twice, it is the same row.
    whole = tf.cast(rows[:, : SHOWN + 1], tf.int64)
    mixed = (whole[:, UID] * _MIX[0] + whole[:, STEPS]) * _MIX[1] + whole[:, NOT_POISSON]
    mixed = tf.math.floormod(total(mixed * _MIX[0]), LARGEST_UID - 1) + 1
    uids = tf.where(sizes > 1, tf.cast(mixed, tf.float64), uids)[:, tf.newaxis]
    # The last row may hold several parameters: for such steps no epsilon is stated.
    several = (kinds > 1)[:, tf.newaxis]
    lost = tf.stack([tf.zeros([room], tf.float64), counts[:, 0] + counts[:, 1], counts[:, 2]], 1)
    lost_facts = tf.one_hot(tf.zeros([room], tf.int32), COLUMNS - KIND, float(MIXED), 0.0)
    folded = tf.concat(
        [
            uids,
            tf.where(several, lost, counts),
            tf.where(several, tf.cast(lost_facts, tf.float64), facts),
        ],
        axis=1,
    )
    folded = tf.where((sizes > 0)[:, tf.newaxis], folded, 0)
    return tf.pad(folded, [[0, count - room], [0, 0]])
