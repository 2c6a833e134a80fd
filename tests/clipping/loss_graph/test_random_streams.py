"""Random layers draw from secret streams where an added example may move others."""

import itertools

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tfdp.clipping.loss_graph import random_streams

N, FEATURES = 24, 50
X = np.ones([N, FEATURES], "float32")
layers = tf.keras.layers
generator = tf.random.Generator.from_seed(3)


def batches(padding="none", **kwargs):
    """Batches of all examples: what differs is what layers draw."""
    return tfdp.data.poisson_batches(
        (X, X), expected_batch_size=N, steps_per_epoch=2, padding=padding, **kwargs
    )


def updates_of(makers, data, jit_compile=False, engine="one_pass"):
    """Returns, for each layer of a model that has them side by side, two updates of the weights
    behind it: sums of the values that it returns."""
    tf.keras.utils.set_random_seed(1)
    inputs = layers.Input([FEATURES])
    denses = [layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in makers]
    outputs = [dense(maker()(inputs)) for maker, dense in zip(makers, denses, strict=True)]
    model = tf.keras.Model(inputs, tf.add_n(outputs))
    optimizer = tfdp.DPSGD(1e6, 0.0, learning_rate=1.0, sampling=data.sampling, engine=engine)
    model.compile(optimizer, lambda y, out: tf.reduce_sum(out, axis=1), jit_compile=jit_compile)
    weights = [[dense.get_weights()[0] for dense in denses]]
    for _ in range(2):
        model.fit(data.take(1), verbose=0)
        weights.append([dense.get_weights()[0] for dense in denses])
    return [
        [N * (a - b)[:, 0] for a, b in itertools.pairwise(values)]
        for values in zip(*weights, strict=True)
    ]


def updates(layer, data, **kwargs):
    return updates_of([layer], data, **kwargs)[0]


def drawn_by(draw):
    return lambda: layers.Lambda(lambda x: x + tf.cast(draw(tf.shape(x)), x.dtype))


KNOWN = {
    "dropout": lambda: layers.Dropout(0.5, seed=1),
    "spatial dropout": lambda: tf.keras.Sequential(
        [layers.Reshape([10, 5]), layers.SpatialDropout1D(0.5, seed=1), layers.Flatten()]
    ),
    "noise layer": lambda: layers.GaussianNoise(1.0, seed=1),
    "uniform": drawn_by(lambda shape: tf.random.uniform(shape, seed=1)),
    "normal": drawn_by(lambda shape: tf.random.normal(shape, seed=1)),
    "truncated normal": drawn_by(lambda shape: tf.random.truncated_normal(shape, seed=1)),
    "integers": drawn_by(lambda shape: tf.random.uniform(shape, 0, 9, tf.int32, seed=1)),
    "stateless uniform": drawn_by(lambda shape: tf.random.stateless_uniform(shape, [1, 2])),
    "stateless normal": drawn_by(lambda shape: tf.random.stateless_normal(shape, [1, 2])),
    "generator": drawn_by(lambda shape: generator.uniform(shape)),
}


def repeated(names, jit_compile=False, engine="one_pass"):
    """Names of what draws the same numbers again: with an equal seed, or in an equal step."""
    runs = []
    for _ in range(2):
        generator.reset_from_seed(3)
        data = batches("full" if jit_compile else "none")
        makers = [KNOWN[name] for name in names]
        runs.append(updates_of(makers, data, jit_compile=jit_compile, engine=engine))
    return {
        name
        for name, first, second in zip(names, *runs, strict=True)
        if any(np.abs(a - b).max() < 0.01 for a, b in itertools.combinations(first + second, 2))
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [["dropout", "generator"], list(KNOWN)], ids=["two", "all"])
def test_streams_are_secret(names):
    assert not repeated(names)


@pytest.mark.slow
def test_streams_are_secret_of_the_vectorized_engine():
    assert not repeated(KNOWN, engine="vectorized")


@pytest.mark.slow
def test_streams_are_secret_under_xla():
    assert not repeated(["dropout", "generator"], jit_compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("names", [sorted(set(KNOWN) - {"generator"}), ["generator"]])
def test_known_streams_are_caught(names, monkeypatch):
    monkeypatch.setattr(random_streams, "make_secret", lambda loss, stream: None)
    assert repeated(names) == set(names)


def test_the_distribution_is_that_of_the_layer():
    kept = np.concatenate(updates(KNOWN["dropout"], batches())) / 2  # Kept values are doubled.
    expected = scipy.stats.binom(N, 0.5)
    statistic = np.sum((kept - expected.mean()) ** 2) / expected.var()
    assert 1e-9 < scipy.stats.chi2.sf(statistic, len(kept)) < 1 - 1e-9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["one_pass", "vectorized"])
def test_rows_draw_independent_numbers(engine):
    """Each example moves weights of its own, by the mask that it has drawn."""
    x = np.eye(N, dtype="float32")
    data = tfdp.data.poisson_batches((x, x), expected_batch_size=N, steps_per_epoch=30)
    tf.keras.utils.set_random_seed(1)
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([layers.Input([N]), layers.Dropout(0.5, seed=1), dense])
    optimizer = tfdp.DPSGD(1e6, 0.0, learning_rate=1.0, sampling=data.sampling, engine=engine)
    model.compile(optimizer, lambda y, out: tf.reduce_sum(out, axis=1))
    weights = [dense.get_weights()[0]]
    note = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: weights.append(dense.get_weights()[0])
    )
    model.fit(data, verbose=0, callbacks=[note])
    rows = np.array([(a - b)[:, 0] > 0 for a, b in itertools.pairwise(weights)], float)
    assert len(rows) == 30
    assert 0.4 < rows.mean() < 0.6
    correlations = np.corrcoef(rows.T)[np.triu_indices(N, 1)]
    assert np.abs(correlations).max() < 0.95 and np.abs(correlations.mean()) < 0.1


RANDOM_LAYERS = {
    "one": lambda: [layers.Dense(8), layers.Dropout(0.5)],
    "in a row": lambda: [
        layers.GaussianNoise(0.5),
        layers.Dense(8),
        layers.Dropout(0.5),
        layers.Reshape([4, 2]),
        layers.SpatialDropout1D(0.3),
        layers.Flatten(),
    ],
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chosen", RANDOM_LAYERS)
def test_all_engines_use_the_numbers_of_the_forward_pass(chosen):
    """In parts as well."""
    data = batches()
    model = tf.keras.Sequential(
        [layers.Input([FEATURES]), *RANDOM_LAYERS[chosen](), layers.Dense(1)]
    )
    for rows_per_pass in (None, 7):
        optimizer = tfdp.DPSGD(1.0, 0.0, sampling=data.sampling)
        own = optimizer.clipping
        optimizer._clipping = support.ComparedClipping(1.0, rows_per_pass=rows_per_pass)
        optimizer._clipping.streams, optimizer._clipping.usual_rows = own.streams, own.usual_rows
        model.compile(optimizer, lambda y, out: tf.square(out[:, 0] - 1))
        model.fit(data, verbose=0)
        assert optimizer.own_steps() == 2


def by_time(x):
    """Draws with the examples on the second axis."""
    return tf.transpose(tf.nn.dropout(tf.transpose(x, [1, 0, 2]), 0.5), [1, 0, 2])


LAYOUTS = {
    "several rows for an example": lambda: layers.TimeDistributed(layers.Dropout(0.5)),
    "examples on another axis": lambda: layers.Lambda(by_time),
    "shared by all examples": lambda: layers.Lambda(lambda x: x + tf.random.normal([10, 5])),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("engine", "rows_per_pass"), [("one_pass", None), ("one_pass", 7), ("vectorized", None)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_may_be_laid_out_in_any_way(layout, engine, rows_per_pass):
    data = batches()
    model = tf.keras.Sequential(
        [
            layers.Input([FEATURES]),
            layers.Reshape([10, 5]),
            layers.Dense(5),
            LAYOUTS[layout](),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    optimizer = tfdp.DPSGD(1.0, 0.0, sampling=data.sampling, engine=engine)
    optimizer.clipping.rows_per_pass = rows_per_pass
    model.compile(optimizer, lambda y, out: tf.square(out[:, 0] - 1))
    model.fit(data, verbose=0)
    assert optimizer.own_steps() == 2
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())


def in_a_loop(x):
    def body(i, h):
        return i + 1, h + tf.random.uniform([])

    return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def in_a_branch(x):
    return tf.cond(generator.state[0] > 0, lambda: x + tf.random.uniform([]), lambda: x)


@tf.function
def nested(x):
    return x + tf.random.uniform(tf.shape(x))


REFUSED = {
    "loop": in_a_loop,
    "nested function": nested,
    "branch": in_a_branch,
    "gamma": lambda x: x + tf.random.gamma(tf.shape(x), 1.0),
    "poisson": lambda x: x + tf.random.poisson([], tf.ones_like(x)),
    "categorical": lambda x: x + tf.cast(tf.random.categorical(x, 1), x.dtype),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_secret_is_refused(name):
    def layer():
        return layers.Lambda(REFUSED[name])

    with pytest.raises(ValueError, match=r'so that tfdp can give them secret keys.*padding="full"'):
        updates(layer, batches())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gamma", "poisson"])
def test_it_is_allowed_where_places_are_free(name):
    assert len(updates(lambda: layers.Lambda(REFUSED[name]), batches("full"))) == 2


def generator_states():
    """The states of a generator after two steps, on batches of other sizes."""
    found = set()
    for size in (4, 8, 16):
        generator.reset_from_seed(3)
        data = tfdp.data.poisson_batches((X, X), expected_batch_size=size, steps_per_epoch=2)
        updates(KNOWN["generator"], data)
        found.add(tuple(generator.state.numpy()))
    return found


@pytest.mark.slow
def test_states_of_generators_tell_no_number_of_rows():
    assert len(generator_states()) == 1


def test_states_that_would_tell_it_are_refused(monkeypatch):
    monkeypatch.setattr(random_streams, "hide_counts", lambda graph: None)
    with pytest.raises(ValueError, match="statistic of the batch"):
        generator_states()


@pytest.mark.slow
def test_without_sampling_the_layers_seeds_hold():
    """Training without epsilon can be repeated, as Keras users expect."""
    runs = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([layers.Dropout(0.5), layers.Dense(3)])
        support.compiled(tfdp.DPSGD(1.0, 0.0, N), model)
        model.fit(X, np.zeros(N, int), batch_size=N, verbose=0)
        runs.append(support.flat(model.get_weights()))
    np.testing.assert_array_equal(*runs)


def two_term_updates():
    """As `updates`, by a TwoTermLoss, whose functions are traced in graphs of their own."""
    data, dropout = batches(), layers.Dropout(0.5, seed=1)
    tf.keras.utils.set_random_seed(1)
    weights = tf.Variable(tf.zeros([FEATURES]))
    optimizer = tfdp.DPSGD(1e6, 0.0, learning_rate=1.0, sampling=data.sampling)

    @tf.function(input_signature=data.element_spec)
    def step(x, y):
        loss = tfdp.clipping.TwoTermLoss(
            lambda x: tf.linalg.matvec(dropout(x, training=True), weights),
            None,
            batch=(x,),
            aggregation=tfdp.clipping.TermWiseAggregation(1.0, 2),
        )
        optimizer.minimize(loss, [weights])

    found = [weights.numpy()]
    for batch in data:
        step(*batch)
        found.append(weights.numpy())
    assert optimizer.released_steps() == (2, 0)
    return [N * (a - b) for a, b in itertools.pairwise(found)]


def assert_two_term_streams_are_secret():
    found = [*two_term_updates(), *two_term_updates()]
    for some, other in itertools.combinations(found, 2):
        assert np.abs(some - other).max() > 0.01


def test_streams_of_a_two_term_loss_are_secret():
    assert_two_term_streams_are_secret()


@pytest.mark.slow
def test_known_streams_of_a_two_term_loss_are_caught(monkeypatch):
    monkeypatch.setattr(random_streams, "make_secret", lambda loss, stream: None)
    with pytest.raises(AssertionError):
        assert_two_term_streams_are_secret()
