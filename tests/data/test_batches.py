"""Poisson batches cannot be changed; their examples stand at secret places."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

import tfdp
from tests import support
from tfdp.base.random import chacha
from tfdp.data import source as source_module
from tfdp.data.batches import PoissonBatches
from tfdp.data.source import sample_indices, sample_places

X, Y = support.small_data(64)


def batches(**kwargs):
    kwargs = {"expected_batch_size": 16, "steps_per_epoch": 2, **kwargs}
    return tfdp.data.poisson_batches((X, Y), **kwargs)


REFUSED = {
    "apply": lambda d: d.apply(lambda d: d),
    "batch": lambda d: d.batch(2),
    "cache": lambda d: d.cache(),
    "concatenate": lambda d: d.concatenate(d),
    "enumerate": lambda d: d.enumerate(),
    "filter": lambda d: d.filter(lambda *_: True),
    "flat_map": lambda d: d.flat_map(tf.data.Dataset.from_tensors),
    "interleave": lambda d: d.interleave(tf.data.Dataset.from_tensors),
    "map": lambda d: d.map(lambda *e: e),
    "shard": lambda d: d.shard(2, 0),
    "reduce": lambda d: d.reduce(0, lambda state, _: state),
    "scan": lambda d: d.scan(0, lambda state, e: (state, e)),
    "shuffle": lambda d: d.shuffle(2),
    "snapshot": lambda d: d.snapshot("x"),
    "take_while": lambda d: d.take_while(lambda *_: True),
    "unbatch": lambda d: d.unbatch(),
    "window": lambda d: d.window(2),
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", REFUSED)
def test_changes_are_refused_with_what_to_do(name):
    with pytest.raises(TypeError, match=f"`{name}` must not be used.*(`transform=|`take)"):
        REFUSED[name](batches())


def test_what_keeps_elements_is_allowed():
    data = batches()
    for kept in (data.take(1), data.skip(1), data.repeat(2), data.prefetch(3)):
        assert isinstance(kept, PoissonBatches)
        assert (kept.sampling, kept.source) == (data.sampling, data.source)
    assert isinstance(data, tf.data.Dataset)
    assert len(data) == 2
    assert len(list(data.repeat(2).as_numpy_iterator())) == 4
    assert "64" in repr(data)


CLASS_WEIGHTS = {0: 0.25, 1: 0.0, 2: 2.0}


def update_with(class_weight=None, sample_weight=None, padding="none"):
    """Returns the update of a step with all examples in its batch, and the steps that count."""
    parts = (X, Y) if sample_weight is None else (X, Y, sample_weight)
    data = tfdp.data.poisson_batches(
        parts, expected_batch_size=64, steps_per_epoch=1, padding=padding
    )
    model = support.compiled(tfdp.DPSGD(0.1, 0.0, learning_rate=1.0, sampling=data.sampling))
    before = support.flat(model.get_weights())
    model.fit(data.prefetch(1), class_weight=class_weight, verbose=0)
    return support.flat(model.get_weights()) - before, model.optimizer.released_steps()


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "full"])
def test_class_weights_are_weights_of_examples(padding):
    of_examples = np.array([CLASS_WEIGHTS[label] for label in Y])
    expected, _ = update_with(sample_weight=of_examples)
    found, steps = update_with(CLASS_WEIGHTS, padding=padding)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert steps == (1, 0)
    both, _ = update_with(CLASS_WEIGHTS, 2 * np.ones(64), padding)
    np.testing.assert_allclose(both, update_with(sample_weight=2 * of_examples)[0], atol=1e-6)


def test_an_example_moves_the_sum_by_its_clip_whatever_its_weight():
    """The weight scales the loss, and so the gradient before it is clipped."""
    heavy = np.zeros(64)
    heavy[3] = 1e6
    moved, _ = update_with(sample_weight=heavy)
    assert np.linalg.norm(moved) * 64 == pytest.approx(0.1, rel=1e-3)


def test_class_weights_are_refused_where_labels_are_made():
    data = batches(transform=lambda x, y: (x, 2 - y))
    model = support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling))
    with pytest.raises(ValueError, match=r"`class_weight` must not be given.*`transform`"):
        model.fit(data, class_weight=CLASS_WEIGHTS, verbose=0)


def test_a_label_without_a_class_weight_is_an_error_before_training():
    data = batches()
    model = support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling))
    with pytest.raises(ValueError, match="`class_weight` must have a weight for each label"):
        model.fit(data, class_weight={0: 1.0, 1: 2.0}, verbose=0)
    assert model.optimizer.released_steps() == (0, 0)


def test_a_loop_in_a_function_reads_them():
    @tf.function
    def total(data):
        count = tf.constant(0)
        for _, y in data:
            count += tf.size(y)
        return count

    @tf.function
    def first(data):
        count, batch = tf.constant(0), tf.constant(0)
        for _, y in data:
            count += tf.size(y)
            batch += 1
            if batch == 1:
                break
        return count

    sizes = [len(y) for _, y in batches(seed=1)]
    assert int(total(batches(seed=1))) == sum(sizes) > 0
    assert int(first(batches(seed=1))) == sizes[0]


def places(keys, rows, n=40, q=0.5):
    draw = tf.function(lambda key: sample_places(key, n, q, rows))
    return np.array([draw(key) for key in keys])


def keys(count, seed=5):
    return np.stack([np.full(count, seed), np.arange(count)], 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "buckets"])
@pytest.mark.parametrize("read", ["for", "get_next", "in the function"])
def test_functions_are_traced_once_for_batches_of_all_sizes(padding, read):
    data = tfdp.data.poisson_batches(({"a": X, "b": X}, Y), expected_batch_size=9, padding=padding)
    traces, sizes = [], []

    def rows(batch):
        traces.append(tf.nest.map_structure(lambda t: t.shape, batch))
        return tf.shape(batch[0]["a"])[0]

    iterator = iter(data)
    if read == "in the function":
        step = tf.function(lambda: rows(next(iterator)))
        sizes = [int(step()) for _ in range(len(data))]
    else:
        step = tf.function(rows)
        elements = data if read == "for" else (iterator.get_next() for _ in range(len(data)))
        for batch in elements:
            sizes.append(int(step(batch)))
            assert batch[0]["a"].shape == (sizes[-1], 4)
    assert len(set(sizes)) > 1
    assert len(traces) == 1 and traces[0][0]["b"].as_list() == [None, 4]


def test_an_iterator_is_prepared_at_its_first_use(monkeypatch):
    """Keras makes two for a `fit` of one epoch, and uses one."""
    prepare, prepared, failing = OwnedIterator._create_iterator, [], [True]

    def counting(self, dataset):
        prepare(self, dataset)
        if failing:
            failing.clear()
            raise RuntimeError("no memory")
        prepared.append(self)

    monkeypatch.setattr(OwnedIterator, "_create_iterator", counting)
    iterator = iter(batches())
    assert iterator.element_spec == batches().element_spec and prepared == []
    with pytest.raises(RuntimeError, match="no memory"):
        next(iterator)
    with tf.device("CPU:1"):  # It is made beside the data set, not where it is used.
        assert len(list(iterator)) == 2 and prepared == [iterator]  # It is prepared again.
    assert iterator._iterator_resource.device.endswith("CPU:0")
    model = support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=batches().sampling))
    model.fit(batches(), verbose=0)
    assert len(prepared) == 2


def test_places_hold_the_sample_each_once():
    for row, key in zip(places(keys(50), 60), keys(50), strict=True):
        expected = in_order(key, 40, 0.5, 60).numpy()
        assert sorted(row[row < 40]) == list(expected[expected < 40])


def assert_uniform_places(drawn, rows):
    """Where example 3 stands, and where it stands given that example 7 is at an even place."""
    at = [np.flatnonzero(row == 3)[0] for row in drawn if 3 in row]
    given = [np.flatnonzero(r == 3)[0] for r in drawn if 3 in r and 7 in r[::2]]
    for found in (at, given):
        counts = np.bincount(np.array(found) // 4, minlength=rows // 4)
        assert scipy.stats.chisquare(counts).pvalue > 1e-6


def test_places_are_uniform():
    assert_uniform_places(places(keys(3000), 40), 40)


def in_order(key, dataset_size, sampling_probability, rows):
    """Mutant: examples stand in the order of the data set."""
    words = chacha.random_words(key, 8 * rows)[: 4 * rows]
    return sample_indices(words, dataset_size, sampling_probability)


@pytest.mark.slow
def test_places_in_order_are_caught(monkeypatch):
    monkeypatch.setattr(f"{__name__}.sample_places", in_order)
    with pytest.raises(AssertionError):
        assert_uniform_places(places(keys(3000), 40), 40)


def movement(monkeypatch, sampler=None):
    """How far one more example moves the sum of a model with dropout of a known stream.

    The places of the others are those of the same draw without the example: the coupling by which
    the sensitivity is that of one row.
    """
    if sampler is not None:
        monkeypatch.setattr(source_module, "sample_places", sampler)
    n, rows = 40, 64
    x = np.random.default_rng(0).normal(size=(n, 64)).astype("float32")

    def drawn(members):
        source = source_module.PoissonSource((x, np.zeros(n)), n, None)
        indices = source_module.sample_places(tf.constant([3, 4], tf.int64), n, 1.0, rows).numpy()
        if sampler is None:
            indices = np.where(np.isin(indices, members), indices, n)
        else:  # Those that are left move up.
            left = [i for i in indices if i in members]
            indices = np.array(left + [n] * (rows - len(left)))
        return source.rows(source_module.Rows(tf.constant(indices)), padded=True)

    def clipped_sum(members):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input([64]),
                tf.keras.layers.Dropout(0.5, seed=1),
                tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
            ]
        )
        optimizer = tfdp.DPSGD(1.0, 0.0, 1, learning_rate=1.0)

        @tf.function
        def step(x, mask):
            with tf.GradientTape() as tape:
                loss = model(x, training=True)[:, 0] * tf.cast(mask, tf.float32)
            optimizer.minimize(loss, model.trainable_variables, tape=tape)

        x_, _, mask = drawn(members)
        before = model.get_weights()[0]
        step.get_concrete_function(tf.TensorSpec([None, 64]), tf.TensorSpec([None], tf.bool))
        step(x_, mask)
        return before - model.get_weights()[0]

    everyone = list(range(n))
    return np.linalg.norm(clipped_sum(everyone) - clipped_sum(everyone[1:]))


def test_with_a_known_stream_of_dropout_an_example_moves_the_sum_by_its_clip(monkeypatch):
    assert movement(monkeypatch) <= 1.0 + 1e-5


def test_with_examples_in_order_it_moves_all_others(monkeypatch):
    assert movement(monkeypatch, in_order) > 3


def flipped(x, y):
    return tf.where(tf.random.uniform([]) < 0.5, x, -x), y + 1


def test_transform_changes_single_examples():
    data = batches(transform=flipped)
    for x, y in data:
        for row, label in zip(x.numpy(), y.numpy(), strict=True):
            matches = np.flatnonzero((np.abs(X) == np.abs(row)).all(axis=1))
            assert any(
                Y[i] + 1 == label and (np.array_equal(X[i], row) or np.array_equal(-X[i], row))
                for i in matches
            )


def test_rows_of_padding_are_zero_after_a_transform():
    for x, y, mask in batches(transform=flipped, padding="full"):
        assert not x.numpy()[~mask.numpy()].any()
        assert not y.numpy()[~mask.numpy()].any()


def test_training_on_transformed_examples():
    data = batches(transform=lambda x, y: (x[:2], y))
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=data.sampling), model).fit(data, verbose=0)
    assert model.optimizer.released_steps() == (2, 0)


state = tf.Variable(0.0)


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        ("flip", "must be a function of one example"),
        (lambda x, y: x, r"must return a pair \(x, y\)"),
        (lambda x, y: (tf.boolean_mask(x, x > 0), y), "fixed shapes"),
        (lambda x, y: (x + state.assign_add(tf.reduce_sum(x)), y), "no state"),
        (lambda x, y: (tf.numpy_function(np.abs, [x], tf.float32), y), "side effects"),
    ],
)
def test_bad_transforms_are_refused(transform, match):
    with pytest.raises(ValueError, match=match):
        batches(transform=transform)
