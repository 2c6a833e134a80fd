"""Random numbers of a function follow from the secret that it is called with."""

import math

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfdp.base.random import keyed_functions
from tfdp.base.random.keyed_functions import SECRET, KeyedFunction, Rewriting

generator = tf.random.Generator.from_seed(3)


@tf.function
def traced_before(x):
    return x + tf.random.normal([], seed=1)


traced_before(tf.zeros([2]))


def in_branch(x):
    return tf.cond(x[0] > -1e9, lambda: x + tf.random.uniform([], seed=1), lambda: x)


def in_loop(x):
    """A number of each iteration in an entry of its own."""

    def body(i, a):
        return i + 1, a + tf.one_hot(i, 2) * tf.random.normal([], seed=1)

    return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def in_condition(x):
    """The number of iterations until a number is small."""
    going = (0, x)
    return tf.while_loop(
        lambda *_: tf.random.uniform([], seed=1) < 0.999, lambda i, a: (i + 1, a + 1), going
    )[1]


def nested(x):
    def inner(a):
        return tf.while_loop(
            lambda j, _: j < 2,
            lambda j, b: (j + 1, tf.cond(b[0] > 1e9, lambda: b, lambda: traced_before(b))),
            (0, a),
        )[1]

    return tf.while_loop(lambda i, _: i < 2, lambda i, a: (i + 1, inner(a)), (0, x))[1]


def by_cases(x):
    drawn = [lambda: x + tf.random.normal([], seed=1), lambda: traced_before(x)]
    return tf.switch_case(tf.random.uniform([], 0, 2, tf.int32, seed=1), drawn)


def after_reset(x):
    generator.reset_from_seed(1)
    return x + generator.normal([])


def of_seeds(x):
    return x + tf.random.stateless_normal([], generator.make_seeds(1)[:, 0])


def boxed(x):
    boxes = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
    drawn = tf.image.sample_distorted_bounding_box([999, 999, 1], boxes, seed=1)
    return x + tf.reduce_sum(drawn[2]) + tf.cast(tf.reduce_sum(drawn[0]), tf.float32)


def shuffled(x):
    order = tf.random.shuffle(tf.range(30.0), seed=1)
    return x + tf.reduce_sum(order * 1.1 ** tf.range(30.0))


def large(draw):
    return lambda x: x + tf.cast(tf.reshape(draw(), []), tf.float32)


@tf.function(jit_compile=True)
def compiled(x):
    return x + tf.random.normal([], seed=1)


DRAWING = {
    "compiled": compiled,
    "uniform": large(lambda: tf.random.uniform([], seed=1)),
    "normal": large(lambda: tf.random.normal([], seed=1)),
    "truncated normal": large(lambda: tf.random.truncated_normal([], seed=1)),
    "integers": large(lambda: tf.random.uniform([], 0, 2**30, tf.int32, seed=1)),
    "categorical": large(lambda: tf.random.categorical(tf.zeros([1, 10**6]), 1, seed=1)),
    "generator": large(lambda: generator.uniform([])),
    "generator, binomial": large(lambda: generator.binomial([1], [1e6], [0.5])),
    "global generator": large(lambda: tf.random.get_global_generator().normal([])),
    "seeds of a generator": of_seeds,
    "generator that is reset": after_reset,
    "bounding box": boxed,
    "shuffle": shuffled,
    "branch": in_branch,
    "loop": in_loop,
    "condition of a loop": in_condition,
    "traced before": traced_before,
    "nested": nested,
    "cases": by_cases,
    "map_fn": lambda x: tf.map_fn(lambda a: a + tf.random.normal([], seed=1), x),
    "vectorized_map": lambda x: tf.vectorized_map(lambda a: a + tf.random.normal([], seed=1), x),
}


def keyed(function):
    spec = tf.TensorSpec([2], tf.float32)
    return KeyedFunction(tf.function(function, autograph=False).get_concrete_function(spec), {})


def secret(number):
    return tf.constant([12345, number, 6], tf.int64)


def assert_follows_from_the_secret(function):
    """The same secret draws the same numbers, another one others."""
    call, x = keyed(function), tf.zeros([2])
    tf.random.set_seed(1)
    first = call(secret(1), [x]).numpy()
    np.testing.assert_array_equal(first, call(secret(1), [x]))
    tf.random.set_seed(1)
    others = [call(secret(number), [x]).numpy() for number in range(2, 5)]
    assert all(np.any(first != other) for other in others)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", DRAWING)
def test_numbers_follow_from_the_secret(name):
    assert_follows_from_the_secret(DRAWING[name])


def leave(monkeypatch, left):
    """Mutant: an operation with a stream of its own stays as it is."""
    source = Rewriting._source
    monkeypatch.setattr(
        Rewriting,
        "_source",
        lambda self, name, node: None if node.op == left else source(self, name, node),
    )


@pytest.mark.parametrize(
    ("name", "left"), [("by seed", "RandomUniform"), ("state", "RngReadAndSkip")]
)
def test_an_operation_that_is_left_is_caught(name, left, monkeypatch):
    leave(monkeypatch, left)
    other = {"by seed": DRAWING["uniform"], "state": DRAWING["generator"]}[name]
    with pytest.raises(AssertionError):
        assert_follows_from_the_secret(lambda x: other(x) + 0 * tf.random.normal([]))


def test_a_branch_that_is_left_is_caught(monkeypatch):
    rewrite = Rewriting._rewrite_call
    monkeypatch.setattr(
        Rewriting, "_rewrite_call", lambda self, node: node.op == "If" or rewrite(self, node)
    )
    with pytest.raises(AssertionError):
        assert_follows_from_the_secret(in_branch)


def iterations():
    call = keyed(in_loop)
    return np.array([call(secret(number), [tf.zeros([2])]) for number in range(50)])


def test_iterations_draw_numbers_of_their_own():
    drawn = iterations()
    assert len(np.unique(drawn)) == drawn.size


def test_iterations_with_one_secret_are_caught(monkeypatch):
    add = keyed_functions._add_seeds

    def stuck(function, role):
        add(function, role)
        if role == "body":
            for name in [n for n in function.ret if n.startswith("next_")]:
                function.ret[name] = name.removeprefix("next_")

    monkeypatch.setattr(keyed_functions, "_add_seeds", stuck)
    with pytest.raises(AssertionError):
        test_iterations_draw_numbers_of_their_own()


def assert_independent(seeds_of_each=True):
    """Two operations, for many secrets that are numbered: uniform, and not correlated."""

    def draw(x):
        return tf.stack([tf.random.uniform([], seed=1), tf.random.uniform([], seed=1)])

    call = keyed(draw)
    count = 4000
    draw_all = tf.function(
        lambda: tf.map_fn(
            lambda n: call(tf.stack([tf.constant(7, tf.int64), n, n]), [tf.zeros([2])]),
            tf.range(count, dtype=tf.int64),
            fn_output_signature=tf.float32,
        )
    )
    drawn = draw_all().numpy()
    for numbers in drawn.T:
        assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-10
    pairs = [
        (drawn[:, 0], drawn[:, 1]),
        (drawn[1:, 0], drawn[:-1, 0]),
        (drawn[1:, 0], drawn[:-1, 1]),
    ]
    for first, second in pairs:
        assert abs(np.corrcoef(first, second)[0, 1]) < 6.5 / np.sqrt(count)


def test_numbers_are_uniform_and_independent():
    assert_independent()


def test_operations_with_one_seed_are_caught(monkeypatch):
    add = keyed_functions._add_seeds

    def same(function, role):
        add(function, role)
        for node in function.node_def:
            node.input[:] = [
                "secret/seeds:output:0" if r.startswith("secret/seeds:") else r for r in node.input
            ]

    monkeypatch.setattr(keyed_functions, "_add_seeds", same)
    with pytest.raises(AssertionError):
        assert_independent()


def test_operations_that_share_a_seed_agree():
    """As those that augment an image and its mask do."""

    def draw(x):
        seed = tf.random.uniform([2], 0, 2**62, tf.int64)
        return tf.stack(
            [tf.random.stateless_normal([], seed), tf.random.stateless_normal([], seed)]
        )

    drawn = np.array([keyed(draw)(secret(number), [tf.zeros([2])]) for number in range(3)])
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
    assert len(np.unique(drawn[:, 0])) == 3


def orders(rows, count=3000):
    """Returns how often each order of a shuffle comes."""
    concrete = tf.function(lambda x: tf.random.shuffle(x, seed=1)).get_concrete_function(
        tf.TensorSpec([None, 2], tf.float32)
    )
    call = KeyedFunction(concrete, {})
    x = tf.repeat(tf.range(float(rows))[:, None], 2, axis=1)
    secrets = tf.constant(np.random.default_rng(0).integers(0, 2**62, [count, SECRET]))
    found = tf.map_fn(lambda s: call(s, [x]), secrets, fn_output_signature=tf.float32).numpy()
    assert np.all(found[..., 0] == found[..., 1])  # Rows stay whole.
    assert np.all(np.sort(found[..., 0]) == np.arange(rows))
    return np.unique(found[..., 0], axis=0, return_counts=True)[1]


def assert_all_orders_are_as_likely(rows):
    found = orders(rows)
    assert len(found) == math.factorial(rows) and scipy.stats.chisquare(found).pvalue > 1e-4


def test_all_orders_of_a_shuffle_are_as_likely():
    assert_all_orders_are_as_likely(3)
    assert orders(1).tolist() == [3000] and orders(0).tolist() == [3000]


def test_a_shuffle_that_uses_few_bits_is_caught(monkeypatch):
    """Mutant: the order is that of single bits, and equal ones stay in their order."""
    constant = keyed_functions._constant
    original = keyed_functions._shuffled

    def few(function, name, value, dtype, made):
        reference = original(function, name, value, dtype, made)
        top = next(n for n in function.node_def if n.op == "TopKV2")
        shift = constant(function, f"{name}/few", np.array(63, np.int64))
        node = function.node_def.add(name=f"{name}/of_few", op="RightShift")
        node.input.extend([top.input[0], shift])
        node.attr["T"].type = tf.int64.as_datatype_enum
        top.input[0] = f"{name}/of_few:z:0"
        return reference

    monkeypatch.setattr(keyed_functions, "_shuffled", few)
    with pytest.raises(AssertionError):
        assert_all_orders_are_as_likely(3)


def test_what_draws_nothing_needs_no_secret():
    call = keyed(lambda x: x + tf.random.stateless_normal([2], [1, 2]))
    assert not call.draws
    np.testing.assert_array_equal(
        call(None, [tf.zeros([2])]), tf.random.stateless_normal([2], [1, 2])
    )
    with pytest.raises(ValueError, match="must be called with a secret"):
        keyed(DRAWING["normal"])(None, [tf.zeros([2])])


def test_variables_are_read_anew_and_assertions_hold():
    scale = tf.Variable(1.0)

    def draw(x):
        tf.debugging.assert_less(x, 5.0)
        return x + scale * tf.random.normal([])

    call = keyed(draw)
    first = call(secret(1), [tf.zeros([2])])
    scale.assign(2.0)
    np.testing.assert_allclose(call(secret(1), [tf.zeros([2])]), 2 * first)
    with pytest.raises(tf.errors.InvalidArgumentError):
        call(secret(1), [tf.fill([2], 9.0)])
