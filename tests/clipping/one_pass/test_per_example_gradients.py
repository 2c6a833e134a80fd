import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping.one_pass.combined_gradients import combine
from tfdp.clipping.one_pass.per_example_gradients import Direct, Lookups, OuterProducts
from tfdp.clipping.one_pass.tied_tables import TiedTable

RNG = np.random.default_rng(0)
N = 5


def normal(*shape):
    return tf.constant(RNG.normal(size=(N, *shape)), tf.float32)


def products(positions, fan_in=4, fan_out=3, **kwargs):
    return OuterProducts(
        normal(positions, fan_in),
        normal(positions, fan_out),
        kwargs.pop("shape", [fan_in, fan_out]),
        positions,
        fan_in,
        fan_out,
        "products",
        **kwargs,
    )


def lookups():
    indices = tf.constant(RNG.integers(0, 4, (N, 6)), tf.int64)
    return Lookups(indices, normal(6, 3), [7, 3])


CONTRIBUTIONS = {
    "one position": products(1),
    "instantiated": products(30),
    "gram": products(3, 100, 100),
    "transposed": products(5, shape=[3, 4], order=[1, 0]),
    "lookups": lookups(),
    "direct": Direct([normal(6)], [2, 3], "direct", lambda g: 2 * g),
    "uses of one kind": combine([products(1), products(2)], [4, 3]),
    "lookups, twice": combine([lookups(), lookups()], [7, 3]),
    "products, transposed": combine(
        [products(2), products(3, 3, 4, shape=[4, 3], order=[1, 0])], [4, 3]
    ),
    "tied": combine([lookups(), products(2, 3, 7, shape=[7, 3], order=[1, 0])], [7, 3]),
    "tied, rows first": combine([products(2, 7, 3), lookups(), lookups()], [7, 3]),
    "uses of two kinds": combine(
        [products(2), Direct([normal(12)], [4, 3], "direct", lambda g: g)], [4, 3]
    ),
}


def instantiated(c):
    """The gradients of all examples, `[N, size]`, in the shape's own order."""
    return tf.reshape(c.unflatten(c.flat(c.tensors)), [N, -1]).numpy()


@pytest.mark.parametrize("name", CONTRIBUTIONS)
def test_norms_and_sums_are_those_of_the_instantiated_gradients(name):
    c = CONTRIBUTIONS[name]
    gradients, factors = instantiated(c), RNG.random(N).astype("float32")
    squares = np.float64(c.squares(c.tensors)) / np.sum(gradients.astype("float64") ** 2, 1)
    cancels = "Gram" in c.name or "comparing" in c.name  # Where terms may, bounds are higher.
    assert np.all((squares >= 1) & (squares <= 1 + (1e-4 if cancels else 3e-6)))
    total = c.total(c.tensors, tf.constant(factors))
    assert total.shape.as_list() == c.shape
    np.testing.assert_allclose(np.ravel(total), factors @ gradients, rtol=1e-4, atol=1e-5)


def test_outer_products_are_what_they_say():
    c = products(2)
    a, g = (t.numpy() for t in c.tensors)
    np.testing.assert_allclose(
        instantiated(c), np.einsum("ntp,ntd->npd", a, g).reshape(N, -1), rtol=1e-5
    )
    c = CONTRIBUTIONS["transposed"]
    a, g = (t.numpy() for t in c.tensors)
    np.testing.assert_allclose(
        instantiated(c), np.einsum("ntp,ntd->ndp", a, g).reshape(N, -1), rtol=1e-5, atol=1e-6
    )


def test_lookups_are_what_they_say():
    c = lookups()
    indices, g = (t.numpy() for t in c.tensors)
    expected = np.zeros((N, 7, 3))
    for i in range(N):
        np.add.at(expected[i], indices[i], g[i])
    np.testing.assert_allclose(instantiated(c), expected.reshape(N, -1), atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "fan_in", "fan_out", "factored", "whole"),
    [(1, 4, 3, True, True), (4, 512, 512, True, False), (200, 16, 16, False, False)],
)
def test_the_cheaper_form_is_chosen_by_static_shapes(positions, fan_in, fan_out, factored, whole):
    c = products(positions, fan_in, fan_out)
    assert (c.factored, c.whole) == (factored, whole)


def test_half_precision_is_widened():
    c = OuterProducts(
        tf.cast(300 * normal(2, 4), tf.float16),
        tf.cast(normal(2, 3), tf.float16),
        [4, 3],
        2,
        4,
        3,
        "",
    )
    squares = c.squares(c.tensors)  # More than float16 can hold.
    assert squares.dtype == tf.float32 and np.all(np.isfinite(squares))


def test_combined_uses_need_no_table_per_example():
    assert isinstance(CONTRIBUTIONS["lookups, twice"], Lookups)
    assert isinstance(CONTRIBUTIONS["uses of one kind"], OuterProducts)
    assert isinstance(CONTRIBUTIONS["products, transposed"], OuterProducts)
    assert isinstance(CONTRIBUTIONS["tied"], TiedTable)
    assert isinstance(CONTRIBUTIONS["tied, rows first"], TiedTable)
    assert combine([c := products(1)], [4, 3]) is c
