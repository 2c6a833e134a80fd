"""Low-rank adapters: gradients of weights that are a product with a variable."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import (
    CLIP,
    IMAGES,
    SEQUENCES,
    TOKENS,
    VECTORS,
    Y,
    assert_equals_loop,
    built,
)
from tests.front_ends import keras as keras_3
from tests.front_ends import needs_keras_3
from tests.keras3 import support as support_3
from tfdp.clipping import OnePassEngine, SlowClippingWarning
from tfdp.clipping.one_pass import low_rank_weights

layers = tf.keras.layers


class Adapted(layers.Layer):
    """Frozen weights plus a multiple of a product, which `apply` uses."""

    def __init__(self, shape, apply, rank=2, multiply=tf.matmul, scale=0.7, frozen=None):
        super().__init__()
        self.multiply, self.frozen = multiply, frozen
        self.of, self.applied, self.rank, self.by = shape, apply, rank, scale

    def build(self, shape):
        normal = {"initializer": "glorot_normal"}
        self.kernel = self.add_weight("kernel", self.of, trainable=False, **normal)
        shapes = {"a": [*self.of[:-1], self.rank], "b": [self.rank, self.of[-1]]}
        self.a, self.b = (
            self.add_weight(name, shape, trainable=name != self.frozen, **normal)
            for name, shape in shapes.items()
        )

    def call(self, x):
        return self.applied(x, self.kernel + self.by * self.multiply(self.a, self.b))


def grouped(a, b):
    """Multiplies as Keras 3 does, with a matrix on the right."""
    product = tf.reshape(a, [-1, a.shape[-1]]) @ b
    return tf.reshape(product, [*a.shape[:-1], b.shape[-1]])


FAST = {
    "matrix": (VECTORS, [5, 6], lambda x, w: tf.tanh(x @ w)),
    "sequence": (SEQUENCES, [4, 6], lambda x, w: tf.tanh(x @ w)),
    "used twice": (VECTORS, [5, 6], lambda x, w: tf.tanh(x @ w) * (tf.square(x) @ w)),
    "heads": (SEQUENCES, [4, 2, 3], lambda x, w: tf.einsum("btd,dnh->btnh", x, w)),
    "heads in one matrix": (
        SEQUENCES,
        [4, 2, 3],
        lambda x, w: tf.tanh(x @ tf.reshape(w, [4, 6])),
    ),
    "from heads": (
        SEQUENCES,
        [2, 2, 3],
        lambda x, w: tf.einsum("btnh,nhd->btd", tf.reshape(x, [-1, 6, 2, 2]), w),
    ),
    "transposed matrix": (VECTORS, [6, 5], lambda x, w: tf.tanh(tf.matmul(x, w, transpose_b=True))),
    "transposed, of sequences": (SEQUENCES, [6, 4], lambda x, w: tf.einsum("abc,dc->abd", x, w)),
    "transposed, and back": (VECTORS, [6, 5], lambda x, w: tf.tanh(x @ tf.transpose(w))),
    "transposed, to heads": (SEQUENCES, [3, 2, 4], lambda x, w: tf.einsum("abc,dec->abde", x, w)),
    "heads first": (SEQUENCES, [2, 4, 3], lambda x, w: tf.einsum("btd,ndh->btnh", x, w)),
    "heads first, as long": (SEQUENCES, [4, 4, 3], lambda x, w: tf.einsum("btd,ndh->btnh", x, w)),
    "convolution": (IMAGES, [3, 3, 2, 4], lambda x, w: tf.nn.conv2d(x, w, 2, "SAME")),
    "embedding": (TOKENS, [9, 4], lambda x, w: tf.tanh(tf.gather(w, x))),
}


def model_of(shape, apply, **kwargs):
    return lambda: tf.keras.Sequential(
        [Adapted(shape, apply, **kwargs), layers.Flatten(), layers.Dense(3)]
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", FAST)
def test_gradients_equal_a_loop_over_examples(name):
    x, shape, apply = FAST[name]
    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, model_of(shape, apply), x)
    report = engine.report()
    assert report.fast_fraction == 1, str(report)
    assert ["low-rank" in entry.how for entry in report.entries] == [True, True, False, False]


@tf.custom_gradient
def doubled_backwards(w):
    return tf.identity(w), lambda gradient: 2 * gradient


def overridden(w):
    with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": "NegativeIdentity"}):
        return tf.identity(w)


@tf.RegisterGradient("NegativeIdentity")
def _negative_identity(op, gradient):
    return -gradient


OTHERWISE = {
    "a gradient of its own": {"multiply": lambda a, b: doubled_backwards(a @ b)},
    "another factor": {"multiply": lambda a, b: tf.matmul(a, tf.tanh(b))},
    "one transposed": {"multiply": lambda a, b: tf.matmul(a, tf.transpose(b), transpose_b=True)},
    "other groups": {"multiply": grouped},
    "a scale of its own": {"multiply": lambda a, b: (3.0 * a) @ b, "scale": tf.constant([[2.0]])},
    "a scale of columns": {"scale": tf.range(1.0, 7.0)},
    "a sum with itself": {"multiply": lambda a, b: a @ b + 2.0 * tf.matmul(a, b)},
    "a square": {"multiply": lambda a, b: tf.square(a @ b)},
    "a broadcast sum": {"multiply": lambda a, b: (a @ b)[tf.newaxis][0] + tf.ones([5, 1])},
}


@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_products_of_other_forms(name):
    """Those that are no plain product are still clipped right."""
    engine = OnePassEngine(CLIP)
    apply = FAST["matrix"][2]
    assert_equals_loop(engine, model_of([5, 6], apply, **OTHERWISE[name]), VECTORS)
    for entry in engine.report().entries[:2]:
        assert entry.fast == ("low-rank" in entry.how), entry
        assert entry.fast or "a product of shape" in entry.how or "vectorized" in entry.how, entry


def test_what_is_slow_says_so():
    """A convolution in groups: each example's gradient of the whole kernel is made."""
    engine = OnePassEngine(CLIP)
    make = model_of([3, 3, 1, 4], lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"))
    with pytest.warns(SlowClippingWarning, match="by a slow rule.*depthwise convolution"):
        assert_equals_loop(engine, make, np.tile(IMAGES, 2))
    assert [entry.fast for entry in engine.report().entries] == [False, False, True, True]


@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
@pytest.mark.slow
@pytest.mark.parametrize("of", ["product", "first", "second"])
def test_a_gradient_that_was_overridden(of):
    """Eagerly there is none to override: the expected sum is that of a negative one."""
    apply = FAST["matrix"][2]
    sums = []
    for change in (overridden, lambda w: 2.0 * tf.stop_gradient(w) - w):
        places = {
            "product": lambda a, b, change=change: change(a @ b),
            "first": lambda a, b, change=change: change(a) @ b,
            "second": lambda a, b, change=change: a @ change(b),
        }
        model = built(model_of([5, 6], apply, multiply=places[of]), VECTORS)
        sums.append(support.ClippedSum(OnePassEngine(CLIP), model, VECTORS)(VECTORS, Y))
    np.testing.assert_allclose(*sums, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_frozen_factor(frozen):
    x, shape, apply = FAST["matrix"]
    assert_equals_loop(OnePassEngine(CLIP), model_of(shape, apply, frozen=frozen), x)


@pytest.mark.parametrize("mutant", ["scale", "side"])
def test_mutants_are_caught(monkeypatch, mutant):
    find = low_rank_weights._find_product

    def wrong(view, end):
        product = find(view, end)
        if product is not None:
            kept = () if mutant == "scale" else product.scales
            object.__setattr__(product, "scales", kept)
            if mutant == "side":
                object.__setattr__(product, "other", 2.0 * product.other)
        return product

    monkeypatch.setattr(low_rank_weights, "_find_product", wrong)
    x, shape, apply = FAST["matrix"]
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), model_of(shape, apply), x)


def test_axes_in_another_order_are_caught(monkeypatch):
    """Mutant: axes that were transposed and merged are taken in the order of the variable."""
    transposed = low_rank_weights._of_transposed

    def wrong(part, view):
        found, end = transposed(part, view)
        found.order = sorted(found.order)
        return found, end

    monkeypatch.setattr(low_rank_weights, "_of_transposed", wrong)
    x, shape, apply = FAST["heads first, as long"]
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), model_of(shape, apply), x)


@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
@pytest.mark.slow
def test_axes_that_are_split_anew():
    """Rows that mix the axes of the variable are no product, and still clipped right."""
    engine = OnePassEngine(CLIP)

    def apply(x, w):
        return tf.tanh(tf.matmul(x, tf.reshape(tf.transpose(w, [1, 0, 2]), [6, 4]), False, True))

    assert_equals_loop(engine, model_of([2, 4, 3], apply), SEQUENCES)
    assert not any("low-rank" in entry.how for entry in engine.report().entries)


def test_an_index_outside_of_the_table_makes_the_example_bad():
    product = low_rank_weights._Product(tf.ones([9, 2]), False, 2, 4)

    @tf.function
    def squares(indices, g):
        table = low_rank_weights.Lookups(indices, g, [9, 4])
        found = low_rank_weights._lookups_of(table, product, [2, 4])
        return found.squares(found.tensors)

    good, bad = squares(tf.constant([[0, 1], [2, 9]]), tf.ones([2, 2, 4])).numpy()
    assert good > 0 and np.isnan(bad)


@needs_keras_3
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dense", "transposed", "heads", "attention", "convolution", "embedding"]
)
def test_adapters_of_keras_3_are_fast(name):
    keras = keras_3
    if name == "dense":
        x, inner = VECTORS, [keras.layers.Dense(6, "tanh")]
    elif name == "transposed":
        x, inner = SEQUENCES, [keras.layers.EinsumDense("abc,dc->abd", [6, 6])]
    elif name == "heads":
        x, inner = SEQUENCES, [keras.layers.EinsumDense("btd,ndh->btnh", [6, 2, 3])]
    elif name == "convolution":
        x, inner = IMAGES, [keras.layers.Conv2D(4, 3, activation="tanh")]
    elif name == "embedding":
        x, inner = TOKENS, [keras.layers.Embedding(9, 4)]
    else:
        x, inner = SEQUENCES, []
    inputs = keras.Input(x.shape[1:], dtype=x.dtype.name if name == "embedding" else None)
    if name == "attention":
        attention = keras.layers.MultiHeadAttention(2, 4)
        hidden = attention(inputs, inputs)
        inner = [attention._query_dense, attention._value_dense, attention._output_dense]
        attention._key_dense.trainable = False
    else:
        (layer,) = inner
        hidden = layer(inputs)
    for layer in inner:
        layer.enable_lora(2)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))
    for variable in model.trainable_variables:  # B is zero at first, and so is A's gradient.
        if "lora" in variable.path:
            variable.assign(np.random.default_rng(0).normal(size=variable.shape))
    expected = support_3.looped_clipped_sum(model, x, Y, 0.5)
    found = support_3.update_of(model, x, Y, l2_norm_clip=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    report = model.optimizer.clipping.report()
    assert report.fast_fraction == 1
    assert sum("low-rank" in entry.how for entry in report.entries) == 2 * len(inner), str(report)
