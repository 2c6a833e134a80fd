"""Tables that examples look up and are multiplied by."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import CLIP, TOKENS, ExpectsRows, N, Y, assert_equals_loop, built
from tests.front_ends import keras as keras_3
from tests.front_ends import needs_keras_3
from tests.keras3 import support as support_3
from tfdp.clipping import OnePassEngine, norms
from tfdp.clipping.one_pass import combined_gradients, tied_tables
from tfdp.clipping.one_pass.per_example_gradients import Lookups, OuterProducts

layers = tf.keras.layers
VOCABULARY, WIDTH = 9, 4


class Tied(tf.keras.Model):
    """A table, a hidden layer, and outputs of the vocabulary's size, `apply` of them."""

    def __init__(self, apply, shape=(VOCABULARY, WIDTH)):
        super().__init__()
        self.table = self.add_weight(
            "table", shape, initializer=tf.keras.initializers.RandomNormal(stddev=1.0)
        )
        self.hidden = layers.Dense(WIDTH, "tanh")
        self.applied = apply

    def call(self, tokens):
        outputs = self.applied(tokens, tf.convert_to_tensor(self.table), self.hidden)
        return tf.reduce_mean(outputs, 1) if outputs.shape.rank == 3 else outputs


def one_output(tokens, table, hidden):
    pooled = tf.reduce_mean(hidden(tf.gather(table, tokens)), 1)
    return tf.matmul(pooled, table, transpose_b=True)


def outputs_of(h, table):
    return tf.tanh(tf.einsum("btd,vd->btv", h, table))


def each_position(tokens, table, hidden):
    return outputs_of(hidden(tf.gather(table, tokens)), table)


def encoder_and_decoder(tokens, table, hidden):
    encoded = tf.reduce_mean(hidden(tf.gather(table, tokens)), 1, keepdims=True)
    decoded = tf.gather(table, tf.cast(tokens[:, 1:], tf.int16))
    return outputs_of(hidden(decoded) * encoded, table)


def two_outputs(tokens, table, hidden):
    h = hidden(tf.gather(table, tokens))
    return outputs_of(h, table) * tf.matmul(h[:, :1], tf.transpose(table))


def one_hot(tokens, table, hidden):
    h = hidden(tf.one_hot(tokens, VOCABULARY) @ table) + tf.gather(table, tokens)
    return outputs_of(h, table)


def transposed_table(tokens, table, hidden):
    h = hidden(tf.gather(tf.transpose(table), tokens))
    return tf.tanh(tf.tensordot(h, table, [[2], [0]]))


TIED = {
    "one output": one_output,
    "each position": each_position,
    "matmul": lambda x, w, f: tf.tanh(f(tf.gather(w, x)) @ tf.transpose(w)),
    "tensordot": lambda x, w, f: tf.tanh(tf.tensordot(f(tf.gather(w, x)), w, [[2], [1]])),
    "one token": lambda x, w, f: each_position(x[:, :1], w, f),
    "tokens in a grid": lambda x, w, f: tf.reduce_mean(
        tf.einsum("btsd,vd->btsv", f(tf.gather(w, tf.reshape(x, [-1, 2, 3]))), w), 1
    ),
    "encoder and decoder": encoder_and_decoder,
    "two outputs": two_outputs,
    "one hot": one_hot,
    "negated": lambda x, w, f: outputs_of(f(tf.gather(w, x)) + tf.gather(-w, x), -w),
    "scaled and capped": lambda x, w, f: (
        3 * tf.tanh(f(tf.gather(w, x) * math.sqrt(WIDTH)) @ tf.transpose(w) / 3)
    ),
    "computed": lambda x, w, f: each_position(x, 2.0 * w, f),
}
# Tables of other shapes: a kernel of outputs that is looked up, and groups of columns.
SHAPED = {
    "products from both sides": (
        (WIDTH, WIDTH),
        lambda x, w, f: outputs_of(f(tf.gather(w, x % WIDTH)) @ w, w),
    ),
    "transposed": ((WIDTH, VOCABULARY), transposed_table),
    "groups": (
        (VOCABULARY, 2, 2),
        lambda x, w, f: outputs_of(
            f(tf.reshape(tf.gather(w, x), [-1, 6, 4])), tf.reshape(w, [VOCABULARY, 4])
        ),
    ),
    "groups, of einsum": (
        (VOCABULARY, 2, 2),
        lambda x, w, f: tf.tanh(tf.einsum("btgd,vgd->btv", tf.sin(tf.gather(w, x)), w)),
    ),
    "axes of one entry": (
        (1, VOCABULARY, WIDTH),
        lambda x, w, f: outputs_of(
            f(tf.gather(tf.squeeze(w, 0), x)), tf.reshape(w, [VOCABULARY, WIDTH])
        ),
    ),
}


def model_of(name):
    if name in SHAPED:
        shape, apply = SHAPED[name]
        return lambda: Tied(apply, shape)
    return lambda: Tied(TIED[name])


@pytest.fixture(autouse=True)
def _not_instantiated(request, monkeypatch):
    """Not even gradients of tables as small as these."""
    if "as_they_are" not in request.fixturenames:
        monkeypatch.setattr(tied_tables, "is_cheaper", lambda *uses: True)


@pytest.fixture
def as_they_are():
    """Leaves the choice of the form to the rule."""


def how_of_table(engine):
    (entry,) = [entry for entry in engine.report().entries if "table" in entry.variable]
    return entry.how


def assert_equals(name, engine=None, **kwargs):
    engine = engine or ExpectsRows(CLIP)
    # Bounds of norms are higher, where terms may cancel.
    assert_equals_loop(engine, model_of(name), TOKENS, atol=1e-5, **kwargs)
    return engine


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [*TIED, *SHAPED])
def test_gradients_equal_a_loop_over_examples(name):
    how = how_of_table(assert_equals(name))
    assert "gather and " in how or "gathers and " in how, how
    assert how.endswith("of computed weights" if name == "computed" else "norms by Gram matrices")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["each position", "two outputs", "transposed"])
@pytest.mark.parametrize("working_set", [1, 10_000])
def test_parts_and_passes_do_not_change_the_sum(name, working_set, monkeypatch):
    monkeypatch.setattr("tfdp.base.devices._CPU_BYTES", working_set)
    assert_equals(name)
    assert_equals(name, OnePassEngine(CLIP, rows_per_pass=3))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["each position", "encoder and decoder", "groups"])
def test_compiled_by_xla(name):
    assert_equals(name, jit_compile=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["each position", "encoder and decoder", "two outputs"])
def test_texts_of_open_length(name, jit_compile):
    spec = tf.TensorSpec([None, None], tf.int32)
    how = how_of_table(assert_equals(name, x_spec=spec, jit_compile=jit_compile))
    assert how.endswith("norms by Gram matrices")


def test_sums_in_float64():
    engine = OnePassEngine(CLIP)
    engine.wide_sums = True
    assert_equals("encoder and decoder", engine)


@pytest.mark.parametrize("dtype", [tf.int16, tf.int32, tf.int64])
def test_tokens_of_any_integer_type(dtype):
    assert_equals("each position", x_spec=tf.TensorSpec([None, 6], dtype))


def test_nothing_of_the_size_of_the_table_is_made_for_an_example():
    """Nor for a position: the largest tensor that has the batch in it is of the outputs."""
    sizes = {}
    for joint in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tied_tables, "is_cheaper", lambda *uses, joint=joint: joint)
            traced = support.ClippedSum(
                ExpectsRows(CLIP), built(model_of("each position"), TOKENS), TOKENS
            )
            shapes = shapes_of(traced._run.get_concrete_function())
        sizes[joint] = [s for s in shapes if s[:1] == [None] and VOCABULARY in s and WIDTH in s]
        sizes[joint] += [s for s in shapes if s == [None, VOCABULARY * WIDTH]]
    assert not sizes[True] and sizes[False]


def shapes_of(function):
    graphs = [function.graph]
    graphs += [f.graph for f in function.graph._functions.values() if hasattr(f, "graph")]
    tensors = [t for graph in graphs for op in graph.get_operations() for t in op.outputs]
    return [t.shape.as_list() for t in tensors if t.shape.rank is not None]


def test_another_use_is_added_to_instantiated_gradients():
    def apply(tokens, table, hidden):
        return each_position(tokens, table, hidden) + tf.reduce_sum(
            hidden(tf.gather(table, tokens[:, :1])) * table[:1], 2, keepdims=True
        )

    engine = ExpectsRows(CLIP)
    assert_equals_loop(engine, lambda: Tied(apply), TOKENS, atol=1e-5)
    assert how_of_table(engine).endswith("instantiated")


# Which form is used.


def uses(size, width, looked_up, multiplied):
    lookups = Lookups(
        tf.zeros([1, looked_up], tf.int32), tf.zeros([1, looked_up, width]), [size, width]
    )
    positions = tf.zeros([1, multiplied or 1, 1])
    return lookups, OuterProducts(
        positions, positions, [size, width], multiplied, width, size, "matmul", order=[1, 0]
    )


@pytest.mark.parametrize(
    ("size", "width", "positions", "joint"),
    [
        (50_257, 768, 64, True),
        (50_257, 768, 512, True),
        (50_257, 768, 1024, False),  # An example's output gradients are larger than the table.
        (256_000, 2048, 1024, True),
        (70, 16, 12, True),
        (70, 16, 128, False),
        (50_257, 768, None, True),  # As texts of 256 tokens.
        (50_257, 128, None, False),
    ],
)
def test_the_cheaper_form_is_chosen(size, width, positions, joint, as_they_are):
    assert tied_tables.is_cheaper(*uses(size, width, positions or 8, positions)) == joint


def test_many_lookups_beside_few_products(as_they_are):
    assert tied_tables.is_cheaper(*uses(30_000, 128, 512, 20))
    assert not tied_tables.is_cheaper(*uses(100, 128, 4096, 1))


# What an example adds.


def neighbours(name="each position", jit_compile=False):
    """Measures how far each example moves the clipped sum, with table and outputs of any scale."""

    def loss(y_true, y_pred, sample_weight=None):  # So that large tables give large gradients.
        return tf.reduce_sum(tf.square(y_pred), 1) * tf.cast(sample_weight, tf.float32)

    engine = OnePassEngine(CLIP)
    model = built(model_of(name), TOKENS)
    clipped_sum = support.ClippedSum(engine, model, TOKENS, loss=loss, jit_compile=jit_compile)
    weights = model.get_weights()
    moved = []
    for scale in (1e-3, 1.0, 30.0, 1e4):
        model.set_weights([scale * w for w in weights])
        whole = clipped_sum(TOKENS, Y)
        assert np.all(np.isfinite(whole))
        for i in range(N):
            others = np.arange(N) != i
            removed = clipped_sum(TOKENS[others], Y[others])
            np.testing.assert_allclose(clipped_sum(TOKENS, Y, others), removed, atol=1e-5)
            moved.append(np.linalg.norm(whole - removed))
    return max(moved) / engine.sensitivity()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["each position", "encoder and decoder", "transposed", "matmul"])
def test_no_example_moves_the_sum_by_more_than_the_clip(name):
    assert 0.9 < neighbours(name) <= 1 + 1e-5


def test_a_token_outside_the_table_makes_its_example_bad():
    make = model_of("encoder and decoder")
    clipped_sum = support.ClippedSum(
        OnePassEngine(CLIP),
        built(make, TOKENS),
        TOKENS,
        jit_compile=True,  # It looks none up.
    )
    others = np.arange(N) != 3
    for token in (-1, VOCABULARY, 250):
        broken = TOKENS.copy()
        broken[3, 2] = token
        expected = clipped_sum(TOKENS[others], Y[others])
        np.testing.assert_allclose(clipped_sum(broken, Y), expected, atol=1e-6)


def test_an_empty_batch_is_zero():
    make = model_of("each position")
    clipped_sum = support.ClippedSum(OnePassEngine(CLIP), built(make, TOKENS), TOKENS)
    assert not np.any(clipped_sum(TOKENS[:0], Y[:0]))
    assert not np.any(clipped_sum(TOKENS, Y, np.zeros(N, bool)))


# Mutants.

_tied_sums = norms.tied_sums


def without(part):
    """Returns a mutant of `norms.tied_sums` that leaves out a part of the squared norm."""

    def mutant(same, at_rows, g, a, b, *sizes):
        if part == "cross term":
            at_rows = 0.0 * at_rows
        elif part == "sign":
            at_rows = -at_rows
        elif part == "factor of two":
            at_rows = at_rows / 2
        elif part == "repeated tokens":
            same = tf.eye(tf.shape(same)[1], batch_shape=[tf.shape(same)[0]])
        elif part == "products":
            found = _tied_sums(same, at_rows, g, a, b, *sizes)
            others = norms.gram_sums(a, b, *sizes)
            return found._replace(products=found.products - others.products)
        return _tied_sums(same, at_rows, g, a, b, *sizes)

    return mutant


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "part", ["cross term", "sign", "factor of two", "repeated tokens", "products"]
)
@pytest.mark.parametrize("name", ["one output", "each position"])
def test_wrong_norms_are_caught(part, name, monkeypatch):
    monkeypatch.setattr(norms, "tied_sums", without(part))
    with pytest.raises(AssertionError):
        assert_equals(name)


@pytest.mark.parametrize("mutant", ["sign", "lookup", "sides"])
def test_other_mutants_are_caught(mutant, monkeypatch):
    if mutant == "sign":  # That of a negated table is forgotten.
        monkeypatch.setattr("tfdp.clipping.one_pass.weight_uses.View.negates", False)
    elif mutant == "lookup":  # The sum is that of the products alone.
        monkeypatch.setattr(tf, "tensor_scatter_nd_add", lambda total, *args: total)
    else:  # First and second vectors of joined products are not told apart.
        joined = combined_gradients._joined_products
        monkeypatch.setattr(combined_gradients, "_joined_products", lambda c, first=(): joined(c))
    names = {"sign": "negated", "lookup": "each position", "sides": "products from both sides"}
    with pytest.raises(AssertionError):
        assert_equals(names[mutant])


# Keras 3.


@needs_keras_3
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", ["plain", "capped", "masked", "compiled", "adapted", "narrow"])
def test_reversible_embeddings_of_keras_3(case):
    keras = keras_3
    options = {
        "capped": {"logit_soft_cap": 3.0, "reverse_dtype": "float32"},
        "masked": {"mask_zero": True},
        "narrow": {"dtype": "mixed_bfloat16", "reverse_dtype": "float32"},
    }
    table = keras.layers.ReversibleEmbedding(
        VOCABULARY, WIDTH, embeddings_initializer="normal", name="table", **options.get(case, {})
    )
    tokens = TOKENS.astype("uint8" if case == "masked" else "int32")
    inputs = keras.Input([6], dtype=tokens.dtype.name)
    hidden = keras.layers.Dense(WIDTH, "tanh")(table(inputs))
    outputs = keras.layers.GlobalAveragePooling1D()(table(hidden, reverse=True))
    if case == "adapted":
        table.enable_lora(2)
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape))
    clip = 0.5
    expected = support_3.looped_clipped_sum(model, tokens, Y, clip)
    compiled = {"jit_compile": True} if case == "compiled" else {}
    found = support_3.update_of(model, tokens, Y, l2_norm_clip=clip, **compiled)
    tolerance = 2e-2 if case == "narrow" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=tolerance)
    report = model.optimizer.clipping.report()
    assert report.fast_fraction == 1, str(report)
    (how,) = [e.how for e in report.entries if "table" in e.variable and e.parameters > 8]
    assert how.startswith("gather") and "matmul" in how and "instantiated" not in how, how
