"""Per-example losses, found in front of their sum or mean."""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdp.base import devices
from tfdp.clipping.loss_graph.copying import cone

SUM, MEAN = "sum", "mean"
_KEEP_FACTORS = frozenset({"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze"})
_DIVISIONS = frozenset({"DivNoNan", "RealDiv"})


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Losses that a term of a loss reduces.

    Attributes:
      losses: One value per example, `[rows]`.
      kind: `SUM` or `MEAN` over the examples; None if they are not reduced.
    """

    losses: tf.Tensor
    kind: str | None

    def of_all_replicas(self) -> tf.Tensor:
        """Returns the losses as they are without a distribution strategy.

        As the mean of several replicas is the sum of theirs, each has divided its own by how many
        there are.
        """
        replicas = devices.replicas()
        return self.losses * replicas if self.kind == MEAN and replicas > 1 else self.losses


def addends(tensor: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
    """Returns the terms of a sum, through nested additions; makes operations where needed.

    A scalar may also be a difference, or a sum that is multiplied or divided by something public.
    Keras sums the scalar that a loss function returns, and divides it by one.

    Args:
      tensor: A loss.
      depends_on_data: Whether a tensor does.
    """
    op = tensor.op
    if op.type in ("AddN", "AddV2", "Add"):
        return [addend for t in op.inputs for addend in addends(t, depends_on_data)]
    if op.type == "Identity" or (op.type in ("Mean", "Sum") and op.inputs[0].shape.rank == 0):
        return addends(op.inputs[0], depends_on_data)
    if tensor.shape.rank != 0:
        return [tensor]
    if op.type == "Sum" and op.inputs[0].op.type == "Pack" and op.inputs[0].shape.rank == 1:
        packed = op.inputs[0].op.inputs  # Keras 3 adds so.
        return [addend for t in packed for addend in addends(t, depends_on_data)]
    if op.type == "Neg":
        return [tf.negative(term) for term in addends(op.inputs[0], depends_on_data)]
    if op.type == "Sub":
        a, b = (addends(t, depends_on_data) for t in op.inputs)
        return [*a, *map(tf.negative, b)]
    if op.type == "Mul":
        private, public = _factors(op, depends_on_data)
        terms = [] if private is None else addends(private, depends_on_data)
        return [term * public for term in terms] if len(terms) > 1 else [tensor]
    if op.type in _DIVISIONS and not depends_on_data(op.inputs[1]):
        terms = addends(op.inputs[0], depends_on_data)
        return [term / op.inputs[1] for term in terms] if len(terms) > 1 else [tensor]
    return [tensor]


def of_term(term: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]) -> Reduction | None:
    """Finds what a term of a loss reduces; makes operations in the default graph where needed.

    A mean over all entries of `[rows, ...]` is the mean over the rows of means within them, as is
    their sum divided by their number. Divided by the number of rows, a sum is one within them.
    Divided by the sum of weights by which the entries were multiplied, it is a weighted mean within
    each row; where a row has one entry, its weight scales its loss.

    Args:
      term: Losses, `[rows]`, or a scalar.
      depends_on_data: Whether a tensor does.

    Returns:
      What it reduces; None if that is not known.
    """
    if term.shape.rank == 1:
        return Reduction(term, None)
    if (before := _before(term)) is not term:
        return of_term(before, depends_on_data)
    op = term.op
    if op.type == "Mul":
        return _multiplied(op, depends_on_data)
    if (entries := _summed(op)) is not None:
        return Reduction(_within(entries, tf.reduce_sum), SUM)
    if op.type == "Mean" and op.inputs[0].shape.rank:
        return Reduction(_within(op.inputs[0], tf.reduce_mean), MEAN)
    if op.type == "Neg":
        found = of_term(op.inputs[0], depends_on_data)
        return (
            None if found is None else dataclasses.replace(found, losses=tf.negative(found.losses))
        )
    if op.type in _DIVISIONS:
        losses = _divided(op.inputs[0], op.inputs[1], depends_on_data)
        if losses is not None:
            return Reduction(losses, MEAN)
        return _scaled_down(op, depends_on_data)
    return None


def _scaled_down(
    op: tf.Operation, depends_on_data: Callable[[tf.Tensor], bool]
) -> Reduction | None:
    """Finds what a term reduces that is divided by something public.

    A sum over examples that is divided by a number may have been meant as a mean: None, but for 1.
    """
    term, number = op.inputs
    found = None if depends_on_data(number) else of_term(term, depends_on_data)
    if found is None or found.kind == MEAN:
        return found and Reduction(found.losses / number, MEAN)
    if tf.get_static_value(number) != 1:
        return None
    # Keras takes the scalar for a mean, and divides it by the number of replicas.
    return Reduction(found.losses * devices.replicas(), found.kind)


def _multiplied(op: tf.Operation, depends_on_data: Callable[[tf.Tensor], bool]) -> Reduction | None:
    """Finds what a product of a term and something public reduces."""
    private, public = _factors(op, depends_on_data)
    found = None if private is None else of_term(private, depends_on_data)
    if found is None or found.kind is None:
        return None
    return Reduction(found.losses * public, found.kind)


def _factors(
    op: tf.Operation, depends_on_data: Callable[[tf.Tensor], bool]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the private and the public factor of a product; None twice if both are private."""
    a, b = op.inputs
    if depends_on_data(a) and depends_on_data(b):
        return None, None
    return (a, b) if depends_on_data(a) else (b, a)


def _divided(
    total: tf.Tensor, number: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]
) -> tf.Tensor | None:
    """Returns the losses whose mean is a sum divided by a number; None if that is not a mean."""
    total, number = _before(total), _before(number)
    if total.op.type in ("Add", "AddV2", "AddN"):
        return _divided_terms(total.op, number, depends_on_data)
    if total.op.type == "Mul":
        private, public = _factors(total.op, depends_on_data)
        losses = None if private is None else _divided(private, number, depends_on_data)
        return None if losses is None else losses * public
    entries = _summed(total.op)
    if entries is None:
        return None
    if _is_number_of_entries(number, entries):
        valid = _mean_of_valid(entries)
        return _within(entries, tf.reduce_mean) if valid is None else valid
    if _is_number_of_rows(number, entries, depends_on_data):
        return _within(entries, tf.reduce_sum)
    if number.op.type != "Sum" or number.op.inputs[0].shape.rank != entries.shape.rank:
        return None
    weights = _before(number.op.inputs[0])
    if not is_factor(weights, entries):
        return None
    if entries.shape.rank == 1:
        return entries
    return _weighted_mean(entries, number.op.inputs[0])


def _weighted_mean(entries: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns means within the rows of entries that were multiplied by weights."""
    weights = _within(tf.cast(weights, entries.dtype), tf.reduce_sum)
    return tf.math.divide_no_nan(_within(entries, tf.reduce_sum), weights)


def _mean_of_valid(entries: tf.Tensor) -> tf.Tensor | None:
    """Returns means within the rows of the entries that a mask of Keras keeps, or None.

    Keras multiplies the mask by the number of all entries, and divides it by how many it keeps, so
    that the mean of all is the mean of these: a weighted mean.
    """
    path = _path_to_mask(entries)
    if path is None:
        return None
    share = next(t for t in path[-1].inputs if _is_share(t))
    replaced, kept = share, tf.ones([], share.dtype)
    for op in reversed(path):  # The same product without the share.
        inputs = [kept if t is replaced else t for t in op.inputs]
        types = [t.dtype for t in op.outputs]
        kept = op.graph.create_op(op.type, inputs, types, attrs=dict(op.node_def.attr)).outputs[0]
        replaced = op.outputs[0]
    return _weighted_mean(kept, _before(share.op.inputs[1]).op.inputs[0])


def _path_to_mask(product: tf.Tensor) -> list[tf.Operation] | None:
    """Returns the operations from a product to where its mask is multiplied as Keras does.

    Keras 2 multiplies the mask by the share, and Keras 3 puts the share where the mask is true.
    """
    op = product.op
    if op.type == "Mul":
        for share, mask in (op.inputs, reversed(op.inputs)):
            if _is_share(share) and (kept := _kept_by(share)) is not None and is_factor(kept, mask):
                return [op] if _is_number_of_entries(_before(share.op.inputs[0]), kept) else None
    if op.type == "SelectV2" and _is_share(op.inputs[1]) and _is_zero(op.inputs[2]):
        kept = _kept_by(op.inputs[1])
        if kept is not None and _same_mask(kept, op.inputs[0]):
            total = _before(op.inputs[1].op.inputs[0])
            return [op] if _is_number_of_entries(total, kept) else None
    inputs = {t.ref(): t for t in op.inputs}  # A square has the same input twice.
    for tensor in inputs.values() if op.type == "Mul" or op.type in _KEEP_FACTORS else []:
        if (path := _path_to_mask(tensor)) is not None:
            return [op, *path]
    return None


def _is_share(tensor: tf.Tensor) -> bool:
    return tensor.op.type in _DIVISIONS and tensor.shape.rank == 0


def _kept_by(share: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask whose true entries are counted by the divisor of a share, or None."""
    valid = _before(share.op.inputs[1])
    kept = valid.op.inputs[0] if valid.op.type == "Sum" else None
    return kept if kept is not None and kept.shape.rank else None


def _same_mask(kept: tf.Tensor, condition: tf.Tensor) -> bool:
    """Returns whether a mask of numbers and one of bools are of the same entries."""
    return _before(kept).ref() == _before(condition).ref()


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(_before(tensor))
    return value is not None and not np.any(value)


def _summed(op: tf.Operation) -> tf.Tensor | None:
    """Returns the entries that a scalar is the sum of, or None if it is not a sum."""
    if op.type not in ("L2Loss", "Sum") or not op.inputs[0].shape.rank:
        return None
    return op.inputs[0] if op.type == "Sum" else tf.square(op.inputs[0]) / 2


def _divided_terms(
    op: tf.Operation, number: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]
) -> tf.Tensor | None:
    """Reads a sum of scalars as `_divided` does; Keras's activity regularizers begin with 0."""
    found = []
    for term in op.inputs:
        if term.shape.rank != 0:
            return None
        if tf.get_static_value(term) == 0:
            continue
        losses = _divided(term, number, depends_on_data) if depends_on_data(term) else None
        if losses is None:
            return None
        found.append(losses)
    return tf.add_n(found) if found else None


def _is_number_of_entries(number: tf.Tensor, entries: tf.Tensor) -> bool:
    """Returns whether a number is that of all entries of a tensor."""
    static = tf.get_static_value(number)
    if static is not None:
        return entries.shape.num_elements() == static
    op = number.op
    if op.type == "Prod":
        op = _before(op.inputs[0]).op
        if (known := tf.get_static_value(op.outputs[0])) is not None:
            return entries.shape.is_fully_defined() and list(known) == entries.shape.as_list()
        if op.type == "Pack":  # Keras 3 packs a shape of its dimensions, as far as they are known.
            sizes = enumerate(op.inputs)
            return len(op.inputs) == entries.shape.rank and all(
                _is_dimension(size, axis, entries) for axis, size in sizes
            )
    return op.type in ("Size", "Shape") and op.inputs[0].ref() == entries.ref()


def _is_dimension(number: tf.Tensor, axis: int, entries: tf.Tensor) -> bool:
    """Returns whether a number is a dimension of a tensor."""
    static = tf.get_static_value(number)
    if static is not None:
        return entries.shape[axis] == static
    measured = _measured(number, axis)
    return measured is not None and measured.ref() == entries.ref()


def _measured(number: tf.Tensor, axis: int) -> tf.Tensor | None:
    """Returns the tensor of which a number is the dimension `axis`; None if it is not that."""
    op = number.op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return None
    which = tf.get_static_value(op.inputs[1]), op.get_attr("shrink_axis_mask")
    return op.inputs[0].op.inputs[0] if which == ([axis], 1) else None


def _is_number_of_rows(
    number: tf.Tensor, entries: tf.Tensor, depends_on_data: Callable[[tf.Tensor], bool]
) -> bool:
    """Returns whether a number is the first dimension of a tensor made of the batch."""
    static = tf.get_static_value(number)
    if static is not None:
        return entries.shape[0] == static
    measured = _measured(number, 0)
    return measured is not None and depends_on_data(measured)


def _keeps_rows(op: tf.Operation) -> bool:
    """Returns whether a reduction is one within the rows."""
    axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
    return axes is not None and bool(rank) and all(axis % rank for axis in np.ravel(axes))


def _within(entries: tf.Tensor, reduce: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Reduces `[rows, ...]` within the rows."""
    if entries.shape.rank == 1:
        return entries
    return reduce(entries, axis=list(range(1, entries.shape.rank)))


def _before(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor before operations that change no value; Keras sums up scalars, too."""
    while tensor.op.type in ("Cast", "Identity") or (
        tensor.op.type in ("Mean", "Sum") and tensor.op.inputs[0].shape.rank == 0
    ):
        tensor = tensor.op.inputs[0]
    return tensor


def is_factor(factor: tf.Tensor, product: tf.Tensor) -> bool:
    """Returns whether `product` is `factor` times something, and so zero where that is."""
    if product.ref() == factor.ref():
        return True
    op = product.op
    keeps = op.type in _KEEP_FACTORS or op.type in _DIVISIONS
    if keeps or (op.type in ("Mean", "Sum") and _keeps_rows(op)):
        return is_factor(factor, op.inputs[0])
    if op.type == "Mul":
        containing = [t for t in op.inputs if cone([t], {factor.ref()})[1]]
        return len(containing) == 1 and is_factor(factor, containing[0])
    return False
