"""Data sets of which only the rows of a batch are read."""

import os

import numpy as np
import pytest
import tensorflow as tf
from tf_keras.src.engine import data_adapter

import tfdp
from tests import support
from tests.data.test_written import written
from tfdp.data import stored

N = 90
X = np.arange(N * 4, dtype="float32").reshape([N, 4]) / 100
Y = np.arange(N)


class Items:
    """Examples like a data set of PyTorch."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.read.append(index)
        return X[index], Y[index]


class ManyItems(Items):
    """Examples of which several are read at once."""

    def __getitems__(self, indices):
        self.read += indices
        return [(X[i], Y[i]) for i in indices]


class Table:
    """Array like one of HDF5: rows in increasing order, each once."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, rows):
        assert isinstance(rows, np.ndarray) and np.all(np.diff(rows) > 0)
        return self._array[rows]


def mapped(folder):
    np.save(folder / "x.npy", X)
    return np.load(folder / "x.npy", mmap_mode="r"), Y


SOURCES = {
    "memory map": mapped,
    "items": lambda folder: Items(),
    "many items": lambda folder: ManyItems(),
    "table": lambda folder: (Table(X), Table(Y)),
    "written": written,
}


def drawn(data, count=3, **kwargs):
    batches = tfdp.data.poisson_batches(data, expected_batch_size=20, seed=3, **kwargs)
    return [tf.nest.map_structure(np.asarray, batch) for batch in batches.take(count)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kwargs", [{}, {"padding": "full"}, {"chunk_size": 9}])
@pytest.mark.parametrize("name", SOURCES)
def test_batches_are_those_from_memory(name, kwargs, tmp_path):
    expected, found = drawn((X, Y), **kwargs), drawn(SOURCES[name](tmp_path), **kwargs)
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_rows_in_another_order_are_caught(monkeypatch, tmp_path):
    """Mutant: rows stay in the order in which they were read."""
    unique = np.unique

    def in_order(values, **kwargs):
        found, places = unique(values, **kwargs)
        return found, np.sort(places)

    monkeypatch.setattr(np, "unique", in_order)
    expected, found = drawn((X, Y), padding="full"), drawn(Items(), padding="full")
    assert any(np.any(a[1] != b[1]) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", [Items, ManyItems])
def test_only_the_rows_of_a_batch_are_read(kind):
    items = kind()
    batches = tfdp.data.poisson_batches(items, expected_batch_size=5, steps_per_epoch=1)
    opened = items.read.copy()
    assert set(opened) == {0}  # The first was read for its type, and to see that it stays.
    ((_, y),) = list(batches)
    read = items.read[len(opened) :]
    assert sorted(read) == sorted(y.numpy().tolist() if read else [])


def test_weights_and_transform():
    data = [(X[i], Y[i], i + 1) for i in range(N)]

    class Weighted(Items):
        def __getitem__(self, index):
            return data[index]

    ((x, y, w), *_) = drawn(Weighted(), transform=lambda x, y: (2 * x, y))
    np.testing.assert_array_equal(w, (y + 1).astype("float32"))
    np.testing.assert_array_equal(x, 2 * X[y])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["memory map", "written"])
def test_training_counts_its_steps(name, tmp_path):
    batches = tfdp.data.poisson_batches(SOURCES[name](tmp_path), expected_batch_size=20)
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model = tf.keras.Sequential([tf.keras.layers.Dense(N, input_shape=(4,))])
    support.compiled(optimizer, model).fit(batches, epochs=2, verbose=0)
    assert optimizer.released_steps() == (8, 0)


@pytest.mark.slow
def test_selective_training():
    batches = tfdp.data.poisson_batches(Items(), expected_batch_size=20)
    model = tfdp.SelectiveModel(tf.keras.Sequential([tf.keras.layers.Dense(N, input_shape=(4,))]))
    optimizer = tfdp.DPSURSGD(
        1.0,
        1.0,
        sampling=batches.sampling,
        validation_batch_size=10,
        validation_noise_multiplier=1.0,
        threshold=0.5,
    )
    model.compile(optimizer, support.crossentropy())
    model.fit(batches, steps_per_epoch=3, verbose=0)
    assert optimizer.ledger.steps == 3


def test_an_example_that_cannot_be_read_ends_training_and_is_named():
    class Broken(Items):
        def __getitem__(self, index):
            if index > 50:
                raise OSError("no such file")
            return super().__getitem__(index)

    batches = tfdp.data.poisson_batches(Broken(), expected_batch_size=20)
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model = tf.keras.Sequential([tf.keras.layers.Dense(N, input_shape=(4,))])
    support.compiled(optimizer, model)
    with pytest.raises(tf.errors.OpError, match=r"Example \d+ could not be read: .*no such file"):
        model.fit(batches, verbose=0)
    assert optimizer.released_steps()[1] == 0


def test_an_example_of_another_shape_is_named():
    class Uneven(Items):
        def __getitem__(self, index):
            return (X[index, : 3 + (index < 50)], Y[index])

    with pytest.raises(tf.errors.OpError, match=r"like the first, .* example \d+, of shapes"):
        drawn(Uneven())


def test_an_example_that_cannot_be_read_with_others_is_named():
    class Broken(ManyItems):
        def __getitem__(self, index):
            if index == 7:
                raise OSError("no such file")
            return super().__getitem__(index)

        def __getitems__(self, indices):
            return [self[i] for i in indices]

    with pytest.raises(tf.errors.OpError, match=r"Example 7 could not be read: .*no such file"):
        drawn(Broken(), count=30)


def test_each_index_must_have_an_example():
    class Short(ManyItems):
        def __getitems__(self, indices):
            return super().__getitems__(indices[1:])

    with pytest.raises(ValueError, match="must give one example for each index"):
        drawn(Short())


def test_tensors_beside_memory_maps(tmp_path):
    x, y = mapped(tmp_path)
    for one, other in zip(drawn((x, tf.constant(y))), drawn((X, Y)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_lists_in_examples_are_arrays():
    class Lists(Items):
        def __getitem__(self, index):
            return [X[index].tolist(), int(Y[index])]

    ((x, y), *_) = drawn(Lists())
    np.testing.assert_array_equal(x.astype("float32"), X[y])

    class Uneven(Items):
        def __getitem__(self, index):
            return [[0.0], [0.0] * (1 + (index > 30))] if index > 30 else [0.0, 0.0], 1

    with pytest.raises(tf.errors.OpError, match=r"Example \d+ is not like the first"):
        drawn(Uneven())


@pytest.mark.parametrize("other", [(({"b": 1.0},), 1), (({"a": 1.0}, 2.0), 1), (1.0, 1)])
def test_an_example_of_another_structure_is_named(other):
    class Other(Items):
        def __getitem__(self, index):
            return (({"a": 1.0},), 1) if index < 50 else other

    with pytest.raises(tf.errors.OpError, match=r"Example \d+ is not like the first: it has no"):
        drawn(Other())


def test_many_rows_of_a_table(monkeypatch):
    monkeypatch.setattr(stored, "_SELECTED", 7)
    for one, other in zip(drawn((Table(X), Table(Y))), drawn((X, Y)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((1.0, None), "of type NoneType"),
        ((1.0, 1, "a"), "an array of numbers as its third part"),
        ((1.0, 1, (1.0, "a")), "an array of numbers as its third part"),
    ],
)
def test_examples_of_no_numbers_are_refused(example, message):
    class Other(Items):
        def __getitem__(self, index):
            return example

    with pytest.raises(ValueError, match=message):
        drawn(Other())


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ([1, 2, 3, 4], "a list of 4"),
        ((1, 2, 3, 4), "a tuple of 4"),
        ((), "a tuple of 0"),
        (None, "type NoneType"),
        ((1.0, None), "type NoneType"),
    ],
)
def test_examples_of_other_forms_are_refused(first, message):
    class Other(Items):
        def __getitem__(self, index):
            return first

    with pytest.raises(ValueError, match=message):
        drawn(Other())


def test_arrays_must_have_one_length():
    with pytest.raises(ValueError, match="one positive length"):
        drawn((Table(X), Table(Y[:-1])))


WEIGHTS = {label: 1.0 + label for label in range(3)}


def weighed(data, weights, count=3):
    """Batches as `fit` gets them with class weights."""
    batches = tfdp.data.poisson_batches(data, expected_batch_size=20, seed=3)
    batches = batches.map(data_adapter._make_class_weight_map_fn(weights))
    return [tf.nest.map_structure(np.asarray, batch) for batch in batches.take(count)]


def classes(folder, labels, weights=()):
    """Examples of three classes on disk."""
    np.save(folder / "x.npy", X)
    return (np.load(folder / "x.npy", mmap_mode="r"), labels, *weights)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [Y % 3, np.eye(3)[Y % 3]])
@pytest.mark.parametrize("weights", [(), (np.arange(N),)])
def test_class_weights_are_those_of_data_in_memory(labels, weights, tmp_path):
    found = weighed(classes(tmp_path, labels, weights), WEIGHTS)
    expected = weighed((X, labels, *weights), WEIGHTS)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        found[0][2],
        (1 + np.round(found[0][0][:, 0] * 25).astype(int) % 3)
        * (np.round(found[0][0][:, 0] * 25) if weights else 1),
    )


@pytest.mark.slow
def test_weights_of_other_rows_are_caught(monkeypatch, tmp_path):
    """Mutant: an example gets the weight of the one before."""
    original = stored.Weighted._weighted

    def turned(self, indices, secrets=None):
        rows, weights = original(self, indices, secrets)
        return rows, np.roll(weights, 1)

    monkeypatch.setattr(stored.Weighted, "_weighted", turned)
    with pytest.raises(AssertionError):
        test_class_weights_are_those_of_data_in_memory(Y % 3, (), tmp_path)


@pytest.mark.slow
def test_training_with_class_weights(tmp_path):
    batches = tfdp.data.poisson_batches(classes(tmp_path, Y % 3), expected_batch_size=20)
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
    support.compiled(optimizer, model).fit(batches, class_weight=WEIGHTS, verbose=0)
    assert optimizer.released_steps() == (4, 0)


def test_a_label_without_a_weight_ends_training(tmp_path):
    labels = np.where(Y > 60, 2, 1)
    batches = tfdp.data.poisson_batches(classes(tmp_path, labels), expected_batch_size=20)
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
    support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling), model)
    with pytest.raises(tf.errors.OpError, match="must have a weight for each label"):
        model.fit(batches, class_weight={0: 1.0, 1: 1.0}, epochs=5, verbose=0)


def test_a_data_set_that_is_too_large_for_memory_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tfdp.data.poisson, "_available_bytes", lambda: 3 * 1000)
    with pytest.raises(ValueError, match="write_examples"):
        drawn(tf.data.Dataset.from_tensor_slices((X, Y)))


class Noisy(Items):
    """Examples that draw from what they are given."""

    def __getitem__(self, index, rng):
        return rng.normal(size=4).astype("float32"), Y[index]


class ManyNoisy(Items):
    """The same of a source that reads several at once."""

    def __getitems__(self, indices, rngs):
        return [
            (r.normal(size=4).astype("float32"), Y[i]) for i, r in zip(indices, rngs, strict=True)
        ]


class NoisyRecords(Items):
    """The same of examples that are dicts."""

    def __getitem__(self, index, rng=None):
        rng = rng or np.random.default_rng(0)
        return {"x": rng.normal(size=4).astype("float32"), "y": Y[index]}


NOISY = {
    "one": (Noisy, {}),
    "many": (ManyNoisy, {}),
    "dicts": (NoisyRecords, {"features": "x", "label": "y"}),
}


def noise_of(kind, seed=None, **kwargs):
    """Returns the numbers that all rows of two iterations drew, `[rows, 4]`."""
    source, names = NOISY[kind]
    data = source()
    batches = tfdp.data.poisson_batches(
        data, expected_batch_size=20, steps_per_epoch=3, seed=seed, **names, **kwargs
    )
    drawn = [batch for _ in range(2) for batch in batches.as_numpy_iterator()]
    return np.concatenate([b[0][b[2]] if len(b) == 3 else b[0] for b in drawn])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("one", {"augmentations": 3}),
        ("many", {"padding": "full"}),
        ("dicts", {}),
        ("one", {"chunk_size": 9}),
        ("many", {"transform": lambda x, y: (x + tf.random.normal([4], seed=1), y)}),
    ],
)
def test_each_row_that_is_read_draws_numbers_of_its_own(kind, kwargs):
    drawn = noise_of(kind, **kwargs)
    both = np.concatenate([drawn, noise_of(kind, **kwargs)])
    assert len(np.unique(both, axis=0)) == len(both) > 100
    np.testing.assert_array_equal(noise_of(kind, 5, **kwargs), noise_of(kind, 5, **kwargs))


def test_rows_that_share_their_numbers_are_caught(monkeypatch):
    """Mutant: the secret is that of the draw."""
    generator = stored._generator
    monkeypatch.setattr(stored, "_generator", lambda secret: generator(np.zeros([3], np.int64)))
    with pytest.raises(AssertionError):
        test_each_row_that_is_read_draws_numbers_of_its_own("one", {})


def test_a_source_that_draws_from_its_own_generator_is_refused():
    class Seeded(Items):
        def __init__(self):
            self.rng = np.random.default_rng(1)

        def __getitem__(self, index):
            return X[index] + self.rng.normal(), Y[index]

    with pytest.raises(ValueError, match=r"its index alone.*__getitem__\(self, index, rng\)"):
        drawn(Seeded())


def test_a_file_that_changes_ends_training(tmp_path):
    x, y = mapped(tmp_path)
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=20)
    next(iter(batches))
    changed = np.load(tmp_path / "x.npy", mmap_mode="r+")
    changed[3] = 1.0
    changed.flush()
    os.utime(tmp_path / "x.npy", (1, 1))  # Some file systems count time in seconds.
    with pytest.raises(tf.errors.OpError, match=r"must not change during training.*x\.npy"):
        next(iter(batches))


def test_a_source_that_grows_ends_training():
    items = Items()
    batches = tfdp.data.poisson_batches(items, expected_batch_size=20)
    type(items).__len__, before = lambda self: N + 1, type(items).__len__
    try:
        with pytest.raises(tf.errors.OpError, match=f"{N + 1} examples, where there were {N}"):
            next(iter(batches))
    finally:
        type(items).__len__ = before
