"""Record of the Poisson batches that were drawn in this process and not yet used.

The accounting holds for a step only if its batch is a fresh Poisson sample. A mask and a number of
rows do not show that: a batch that was cached, drawn once and used fifty times, or changed after it
was drawn, has both. So every draw is entered here with a fingerprint of each of its tensors, and an
optimizer removes the draw when it uses it. A batch with a changed tensor, or one that was used
before, is not found.

Found by this: batches that are reused (`cache`, `repeat` after `take`, `train_on_batch` in a loop),
changed after sampling (`map`, code around the training step), composed of several draws, or made
by hand; also in compiled (XLA) functions and loops.

Not found: a change of tensors of more than 8,192 entries that leaves alone every entry of the
fixed subset that is looked at; what the training step itself does with the batch, which the
clipping engines analyze; and draws that are chosen by looking at them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdp.accounting.sampling import PADDINGS, UNITS, PoissonSampling
from tfdp.base.tf.plain_variables import plain_variables
from tfdp.base.tf.process_local import ProcessLocal
from tfdp.base.tf.shared_function import shared_function

# Draws that may wait for their use at the same time. Older ones are forgotten.
_SLOTS = 1024
# Entries of a tensor that its fingerprint looks at, at most; and how finely a place is chosen in
# the block of each.
_ENTRY_BITS, _PLACE_BITS = 13, 15
_ENTRIES = 2**_ENTRY_BITS
# Columns of what is known of a draw.
_FACTS = 11
_SAMPLING = slice(0, _FACTS)
_DRAW, _CHUNK, _ENTRY, _SOURCE, _ROWS, _SEQUENCE = range(_FACTS, _FACTS + 6)
# Column of the chunks per draw in what is known of the sampling.
_STEPS = 2
_NOTHING = -1
# Uses of one entry, and chunks of one draw, that are told apart.
_USES = _CHUNKS = 2**20
_SCOPE = "draw_record"
# The multipliers of the splitmix64 generator.
_GAMMA, _MIX = -7046029254386353131, -4658895280553007687


def _spread(count: int) -> np.ndarray:
    """Returns numbers that look random, int64 `[count]`: the first outputs of that generator."""
    numbers = np.arange(count) * np.int64(_GAMMA)
    numbers = (numbers ^ (numbers >> 29)) * np.int64(_MIX)
    return numbers ^ (numbers >> 32)


_SPREAD = _spread(_ENTRIES)
# Place of each entry in a tensor, in units of 2^-28 of its size (below 2^28, so in the tensor).
_PLACES = (np.arange(_ENTRIES) << _PLACE_BITS) + (_SPREAD & (2**_PLACE_BITS - 1))


class Draws:
    """Base class of data sets whose elements are draws that are entered here.

    Attributes:
      is_private: Whether they were drawn for private training alone, as those of `make_private`.
    """

    is_private = False


@dataclasses.dataclass(frozen=True)
class Use:
    """Facts about a batch that an optimizer is given.

    Attributes:
      fresh: Whether it is an unused draw, sampled as the optimizer says; a scalar bool.
      draw: Number of the draw, a scalar int64.
      chunk: Index among the chunks of that draw, from 0, a scalar int64.
      empty: Whether nothing was drawn, so that its only row is not an example, a scalar bool;
        None if that cannot be.
      source: Number of the object that drew it, a scalar int64.
      sequence: Number of the draw among those of this source, a scalar int64.
    """

    fresh: tf.Tensor
    draw: tf.Tensor
    chunk: tf.Tensor
    empty: tf.Tensor | None
    source: tf.Tensor
    sequence: tf.Tensor

    @classmethod
    def unrecorded(cls, fresh: tf.Tensor | bool = False, chunk: tf.Tensor | None = None) -> "Use":
        """Returns the use of a batch that is no entry of the record."""
        zero = tf.constant(0, tf.int64)
        chunk = zero if chunk is None else chunk
        return cls(tf.convert_to_tensor(fresh), zero, chunk, None, zero, zero)


class DrawRecord(ProcessLocal):
    """The draws of all Poisson sources of this process; there is one, `RECORD`.

    A process that is forked knows no draw of the one before, which may use it itself; a copy or a
    pickle is a record without draws.
    """

    def __init__(self) -> None:
        self._variables: tuple[tf.Variable, ...] = ()
        self._marks: tf.Variable | None = None
        self._shared_look_up = shared_function(self._look_up)

    def prepare(self, tensors: int) -> None:
        """Makes room for draws of a number of tensors each; call it outside of graphs."""
        with plain_variables(hold_data=True), tf.device("cpu"):
            if not self._variables:
                self._variables = (
                    tf.Variable(
                        tf.fill([_SLOTS, tensors], tf.constant(_NOTHING, tf.int64)),
                        trainable=False,
                        shape=[_SLOTS, None],
                    ),
                    tf.Variable(
                        tf.fill([_SLOTS, _SEQUENCE + 1], tf.constant(_NOTHING, tf.int64)),
                        trainable=False,
                    ),
                    *(tf.Variable(tf.zeros([3], tf.int64), trainable=False) for _ in range(2)),
                    tf.Variable(tf.zeros([_SLOTS], tf.int64), trainable=False),
                    tf.Variable(tf.constant(0, tf.int64), trainable=False),
                )
            prints = self._variables[0]
            missing = tensors - int(tf.shape(prints)[1])
            if missing > 0:
                prints.assign(tf.pad(prints, [[0, 0], [0, missing]], constant_values=_NOTHING))

    def begin_iteration(self) -> None:
        """Notes that another iterator's batches are used from now on; call it outside of graphs.

        A dropped iterator leaves draws that were made ahead. Small chunks may equal theirs: those
        without rows do.
        """
        if self._variables:
            self._variables[5].assign(self._entered())

    def number(self) -> tf.Tensor:
        """Returns a number for a draw, larger than all before, in the graph being built."""
        return _next_number(self._made()[3])

    def enter(
        self,
        sampling: PoissonSampling,
        source: int,
        draw: tf.Tensor,
        chunk: tf.Tensor | int,
        mask: tf.Tensor | None,
        tensors: Sequence[tf.Tensor],
        rows: tf.Tensor | int = 1,
        part: int = 0,
        sequence: tf.Tensor | int = 0,
    ) -> tf.Operation:
        """Enters a draw, in the graph being built.

        Args:
          sampling: Its sampling.
          source: Number of the object that draws; later ones have larger numbers.
          draw: Result of `number` for it.
          chunk: Index among its chunks.
          mask: Weights by which rows of padding are left out, `[rows]`; None without padding.
          tensors: The tensors of the batch, `[rows, ...]` each.
          rows: Number of rows that were drawn; 0 if the only row stands for none.
          part: Index of the part of the data set.
          sequence: Number of the draw among those of its source.
        """
        prints, known, counter, *_ = self._made()
        entry = _next_number(counter)
        own = _all_fingerprints([*([] if mask is None else [mask]), *tensors])
        own = own if mask is not None else tf.pad(own, [[1, 0]], constant_values=_NOTHING)
        width = tf.shape(prints.read_value())[1]
        own = tf.pad(own, [[0, width - len(tensors) - 1]], constant_values=_NOTHING)
        facts = [*_facts(sampling, part), draw, chunk, entry + 1, source, rows, sequence]
        facts = tf.stack([tf.cast(fact, tf.int64) for fact in facts])
        where = tf.reshape(entry % _SLOTS, [1, 1])
        with tf.control_dependencies([prints.scatter_nd_update(where, own[tf.newaxis])]):
            return known.scatter_nd_update(where, facts[tf.newaxis]).op

    def take(
        self,
        sampling: PoissonSampling,
        mask: tf.Tensor | None,
        tensors: Sequence[tf.Tensor],
        following: tuple[tf.Tensor, tf.Tensor] | None = None,
        part: int = 0,
    ) -> Use:
        """Looks a batch up and marks it as used, each time that the graph being built runs.

        Args:
          sampling: The sampling that it should have.
          mask: Its mask, `[rows]`; None if it is one of `tensors`, or has none.
          tensors: Those of its tensors that are used, in any order.
          following: For draws with equal contents, the number of that which was begun, and how many
            of its chunks were used; scalars.
          part: Index of the part of the data set that it should be of.
        """
        self.prepare(len(tensors) + 1)
        with tf.name_scope(_SCOPE):
            return self._take(sampling, mask, tensors, following, part)

    def take_drawn(
        self, sampling: PoissonSampling, following: tuple[tf.Tensor, tf.Tensor] | None
    ) -> tuple[Use, tf.Tensor] | None:
        """Looks up what the graph being built read last from a data set.

        Args:
          sampling: See `take`.
          following: See `take`.

        Returns:
          The use, and the fingerprints of all tensors; None if the graph reads no data set.
        """
        operations = tf.compat.v1.get_default_graph().get_operations()
        elements = [op for op in operations if op.type == "IteratorGetNext"]
        if not elements:
            return None
        drawn = list(elements[-1].outputs)
        use = self.take(sampling, None, drawn, following)
        with tf.name_scope(_SCOPE):
            return use, _all_fingerprints(drawn)

    def compare(self, use: Use, prints: tf.Tensor, tensors: Sequence[tf.Tensor]) -> Use:
        """Returns the use of a draw, and marks it as used where the graph being built runs.

        It is not fresh if a tensor is not one of those drawn, or if it was marked before: what was
        looked up in an enclosing graph may be passed to several calls.

        Args:
          use: Result of `take_drawn`, in an enclosing graph.
          prints: Likewise.
          tensors: The tensors of the batch that are used here.
        """
        marks = self._marks_on_device()
        with tf.name_scope(_SCOPE):
            same = [tf.reduce_any(prints == fingerprint(tensor)) for tensor in tensors]
            number = use.draw * _CHUNKS + use.chunk
            slot = (use.draw + use.chunk) % _SLOTS
            before = tf.gather(marks.read_value(), slot)
            fresh = tf.reduce_all([use.fresh, before != number, *same])
            with tf.control_dependencies([before]):
                mark = tf.IndexedSlices(tf.where(fresh, number, before), slot)
                marks.scatter_update(mark)
            return dataclasses.replace(use, fresh=fresh)

    def begin_anew(self) -> None:
        """Marks all draws as used."""
        if self._variables:
            self._variables[4].assign(np.full(_SLOTS, self._entered() * _USES, np.int64))

    def _entered(self) -> int:
        """Returns the number of draws entered so far; theirs are the entries 1 to this."""
        return int(self._variables[2].numpy()[0]) // 256

    def _arguments(self) -> tuple:
        return ()

    def _marks_on_device(self) -> tf.Variable:
        """Returns numbers of the draws that were used, where compiled functions can write them."""
        if self._marks is None:
            with plain_variables():
                nothing = tf.fill([_SLOTS], tf.constant(_NOTHING, tf.int64))
                self._marks = tf.Variable(nothing, trainable=False)
        return self._marks

    def _take(
        self,
        sampling: PoissonSampling,
        mask: tf.Tensor | None,
        tensors: Sequence[tf.Tensor],
        following: tuple[tf.Tensor, tf.Tensor] | None,
        part: int,
    ) -> Use:
        self._made()
        own = _all_fingerprints(tensors)
        of_mask = _all_fingerprints([] if mask is None else [mask])
        wanted = tf.constant(_facts(sampling, part), tf.int64)
        none = tf.constant(_NOTHING - 1, tf.int64)  # No chunk has this number.
        draw, chunk = (none, none) if following is None else following
        following = tf.stack([tf.cast(draw, tf.int64), tf.cast(chunk, tf.int64)])
        return Use(*self._shared_look_up(wanted, of_mask, own, following))

    def _look_up(
        self, wanted: tf.Tensor, of_mask: tf.Tensor, own: tf.Tensor, following: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Looks fingerprints up, of the mask `[0 or 1]`, and marks what is found as used."""
        prints, known, _, _, uses, begun = self._made()
        with tf.control_dependencies([of_mask, own]):  # Once the batch is there, so is its entry.
            facts, all_prints, used = known.read_value(), prints.read_value(), uses.read_value()
        found = tf.reduce_all(facts[:, _SAMPLING] == wanted, axis=1)
        found = tf.logical_and(found, used < facts[:, _ENTRY] * _USES)
        found = tf.logical_and(found, tf.reduce_all(all_prints[:, :1] == of_mask, axis=1))
        same = all_prints[:, of_mask.shape[0] :, tf.newaxis] == own
        found = tf.logical_and(found, tf.reduce_all(tf.reduce_any(same, axis=1), axis=1))
        # Chooses among equal draws the one that follows, or else the oldest of the newest source:
        # of those since the last iteration began, or else of all. (An older source with the same
        # seed may have left some.)
        draws, chunks = facts[:, _DRAW], facts[:, _CHUNK]
        ages = draws * wanted[_STEPS] + chunks - facts[:, _SOURCE] * 2**40
        ages = tf.where(facts[:, _ENTRY] > begun.read_value(), ages - 2**60, ages)
        draw, chunk = following[0], following[1]
        follows = tf.logical_or(chunk == 0, draws == draw)
        ages = tf.where(tf.logical_and(follows, chunks == chunk), ages - 2**62, ages)
        slot = tf.argmin(tf.where(found, ages, ages.dtype.max))
        facts = tf.gather(facts, slot)  # (A slice would have XLA compile anew for each slot.)
        # Counts first and reads afterwards: if two threads have one batch, none finds it unused.
        # (The pipeline never writes `uses`: compiled functions lock what they write.)
        unused = tf.where(tf.reduce_any(found), facts[_ENTRY] * _USES, 0)
        counted = uses.scatter_max(tf.IndexedSlices(unused, slot))
        with tf.control_dependencies([counted]):
            counted = uses.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), slot))
        with tf.control_dependencies([counted]):
            after = tf.gather(uses.read_value(), slot)
        is_known = tf.reduce_any(found)
        fresh = tf.logical_and(is_known, after == unused + 1)
        empty = tf.logical_and(is_known, facts[_ROWS] == 0)
        return fresh, facts[_DRAW], facts[_CHUNK], empty, facts[_SOURCE], facts[_SEQUENCE]

    def _made(self) -> tuple[tf.Variable, ...]:
        if not self._variables:
            raise RuntimeError("`prepare` must be called before a draw is entered.")
        return self._variables


def _facts(sampling: PoissonSampling, part: int) -> tuple[int, ...]:
    """Returns the numbers by which samplings are told apart, and parts of the data set."""
    sizes = sampling.dataset_size, sampling.expected_batch_size
    steps, padding = sampling.gradient_accumulation_steps, PADDINGS.index(sampling.padding)
    unit = sampling.rows_per_example, UNITS.index(sampling.unit)
    cycle = sampling.cycle_length, int(sampling.redraws_sets)
    truncation = sampling.truncation_exponent
    return *sizes, steps, padding, sampling.parts, part, *unit, *cycle, truncation


def _all_fingerprints(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the fingerprints of any number of tensors, int64 `[tensors]`."""
    return tf.stack(list(map(fingerprint, tensors))) if tensors else tf.zeros([0], tf.int64)


def fingerprint(tensor: tf.Tensor) -> tf.Tensor:
    """Computes a number that tells tensors of other contents apart, but for 1 in about 2^63.

    Of large tensors, one entry of each of 8,192 blocks is looked at, always the same. (In few
    operations: TensorFlow prepares each of them whenever an iteration over batches begins.)

    Args:
      tensor: Tensor of any type and shape.

    Returns:
      A scalar int64, never negative.
    """
    return _shared_of_flat(tf.reshape(tensor, [-1]))


def _of_flat(flat: tf.Tensor) -> tf.Tensor:
    count = tf.size(flat, out_type=tf.int64)
    entries = tf.minimum(count, _ENTRIES)
    # All entries; or one anywhere in each block, so that rows and columns of any length are seen.
    places = tf.constant(_PLACES)[:entries] * tf.maximum(count, _ENTRIES)
    places = tf.bitwise.right_shift(places, tf.constant(_ENTRY_BITS + _PLACE_BITS, tf.int64))
    bits = _bits(tf.gather(flat, places))
    total = tf.reduce_sum(_mix(bits + tf.constant(_SPREAD)[:entries])) + count * _GAMMA
    return tf.bitwise.bitwise_and(total, tf.int64.max)


_shared_of_flat = shared_function(_of_flat, any_size=True)


def _bits(flat: tf.Tensor) -> tf.Tensor:
    """Returns the entries as int64, equal only where they are the same bit for bit."""
    if flat.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(flat, 2**62)
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.int64)
    if flat.dtype.is_complex:
        return _mix(_bits(tf.math.real(flat))) + _bits(tf.math.imag(flat))
    if flat.dtype.is_floating:
        whole = {2: tf.uint16, 4: tf.int32, 8: tf.int64}[flat.dtype.size]
        flat = tf.bitcast(flat, whole)
    return tf.cast(flat, tf.int64)


def _mix(numbers: tf.Tensor) -> tf.Tensor:
    """Spreads every bit over all bits."""
    shifted = tf.bitwise.right_shift(numbers, tf.constant(29, tf.int64))
    numbers = tf.bitwise.bitwise_xor(numbers, shifted) * _MIX
    shifted = tf.bitwise.right_shift(numbers, tf.constant(32, tf.int64))
    return tf.bitwise.bitwise_xor(numbers, shifted)


def _next_number(counter: tf.Variable) -> tf.Tensor:
    before = tf.raw_ops.RngReadAndSkip(
        resource=counter.handle, alg=tf.constant(1), delta=tf.constant(1, tf.uint64)
    )
    return before[0] // 256


def is_own(operation: tf.Operation) -> bool:
    """Returns whether an operation is one by which a batch is looked up."""
    return f"/{_SCOPE}" in f"/{operation.name}"


RECORD = DrawRecord()
