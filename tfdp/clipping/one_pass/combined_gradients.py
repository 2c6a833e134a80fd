"""Per-example gradients of a variable that is used several times."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdp.clipping.one_pass.per_example_gradients import (
    Contribution,
    Direct,
    Lookups,
    OuterProducts,
    widen,
)


def combine(contributions: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """Combines the gradients of a variable that is used several times.

    The norms are those of the summed gradients, not sums of the norms of each use.

    Args:
      contributions: Those of every use.
      shape: Shape of the variable.
    """
    first = contributions[0]
    if len(contributions) == 1:
        return first
    if any(c.view.key != first.view.key for c in contributions):
        return _sum_of(contributions, shape)
    if all(isinstance(c, Lookups) for c in contributions):
        indices = [tf.cast(c.tensors[0], tf.int64) for c in contributions]
        values = [widen(c.tensors[1]) for c in contributions]
        combined: Contribution = Lookups(tf.concat(indices, 1), tf.concat(values, 1), first.shape)
    else:
        products = [c for c in contributions if _same_products(c, first)]
        if len(products) < len(contributions):
            return _sum_of(contributions, shape)
        combined = _joined([c for c in products if isinstance(c, OuterProducts)])
    return combined.through(first.view)


def _same_products(c: Contribution, first: Contribution) -> bool:
    return (
        isinstance(c, OuterProducts)
        and c.expand is None
        and isinstance(first, OuterProducts)
        and (c.order, c.fan_in, c.fan_out) == (first.order, first.fan_in, first.fan_out)
    )


def _joined(contributions: Sequence[OuterProducts]) -> OuterProducts:
    """Returns products of all the uses' positions, one after the other."""
    first = contributions[0]
    pairs = [c.pairs(c.tensors) for c in contributions]
    counts = [c.positions for c in contributions]
    return OuterProducts(
        tf.concat([a for a, _ in pairs], 1),
        tf.concat([g for _, g in pairs], 1),
        first.shape,
        sum(c for c in counts if c is not None) if None not in counts else None,
        first.fan_in,
        first.fan_out,
        f"{len(contributions)} uses of {first.name.split(',')[0]}",
        order=first.order,
    )


def _sum_of(contributions: Sequence[Contribution], shape: Sequence[int]) -> Contribution:
    """Adds up instantiated gradients."""
    ends = list(itertools.accumulate(len(c.tensors) for c in contributions))

    def function(*tensors: tf.Tensor) -> tf.Tensor:
        parts = []
        for c, end in zip(contributions, ends, strict=True):
            gradient = c.unflatten(c.flat(tensors[end - len(c.tensors) : end]))
            parts.append(c.view.pull_back(gradient))
        return tf.add_n(parts)

    tensors = [t for c in contributions for t in c.tensors]
    name = " + ".join(c.name.split(",")[0] for c in contributions) + ", instantiated"
    floats = sum(c.floats_per_row for c in contributions)
    found = Direct(tensors, shape, name, function, floats)
    found.slow = next((c.slow for c in contributions if c.slow is not None), None)
    return found
