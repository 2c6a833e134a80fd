"""Elementwise functions of many results in one loop."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdp.base.tf import one_loop

EMPTY, ARGUMENTS, RESULTS = 0, 1, 2


def function(values):
    x, y = values
    return [tf.cast(tf.cast(x, y.dtype) + y, x.dtype), y * y + 1]


def compute(x, y):
    return one_loop.in_one_loop(function, [x, y])


def test_results_are_those_of_the_function():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 1000, 777, np.uint32), rng.normal(0, 5, 777) ** 2
    found = tf.function(compute, jit_compile=True)(tf.constant(x), tf.constant(y))
    for result, expected in zip(found, function([tf.constant(x), tf.constant(y)]), strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-15)


def trees(leaves):
    """Yields every way to combine the leaves, in their order."""
    if len(leaves) == 1:
        yield leaves[0]
    for place in range(1, len(leaves)):
        yield from itertools.product(trees(leaves[:place]), trees(leaves[place:]))


LEAVES = {EMPTY: (0, 0.0, EMPTY), ARGUMENTS: (3, 4.0, ARGUMENTS)}


def reduced(tree, combined):
    if isinstance(tree, int):
        return [tf.constant(value) for value in LEAVES[tree]]
    return combined(function, *(reduced(part, combined) for part in tree))


def check_all_orders(combined):
    for empty in range(3):
        for order in set(itertools.permutations([ARGUMENTS] * 2 + [EMPTY] * empty)):
            for tree in trees(order):
                x, y, kind = reduced(tree, combined)
                assert (int(x), float(y), int(kind)) == (7, 17.0, RESULTS), tree


def test_any_order_of_the_reduction_gives_the_same():
    check_all_orders(one_loop.combined)


def lost(function, first, second):
    """Takes the second element where the first one holds arguments alone."""
    return second if first[-1] == ARGUMENTS else one_loop.combined(function, first, second)


def twice(function, first, second):
    """Applies the function to results, too."""
    first, second = ([*values, tf.minimum(kind, ARGUMENTS)] for *values, kind in (first, second))
    return one_loop.combined(function, first, second)


@pytest.mark.parametrize("mutant", [lost, twice])
def test_a_combination_that_depends_on_the_order_is_caught(mutant):
    with pytest.raises(AssertionError):
        check_all_orders(mutant)


@pytest.mark.parametrize(
    ("version", "kinds", "expected"),
    [
        ("2.21.0", ["CPU", "CPU"], True),
        ("2.20.0-rc1", ["CPU"], True),
        ("2.18.1", ["CPU"], False),
        ("2.21.0", ["CPU", "GPU"], False),
    ],
)
def test_where_it_pays(version, kinds, expected, monkeypatch):
    devices = [tf.config.LogicalDevice(f"{kind}:{i}", kind) for i, kind in enumerate(kinds)]
    monkeypatch.setattr(tf, "__version__", version)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices)
    assert one_loop.is_fast() == expected
