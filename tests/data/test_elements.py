"""Data without labels: their batches have their structure, and what needs labels is refused."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import gan_support, selective_support, support, vae_support
from tests.front_ends import with_both, with_one
from tfdp.auditing import check_sensitivity
from tfdp.data import source as source_module
from tfdp.data.elements import has_labels, parts_of

N, B = 60, 12
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = np.arange(N)
slices = tf.data.Dataset.from_tensor_slices


def batches(data, **kwargs):
    kwargs = {"expected_batch_size": B, "seed": 3, "steps_per_epoch": 4, **kwargs}
    return tfdp.data.poisson_batches(data, **kwargs)


def arrays(batch):
    return tf.nest.map_structure(np.asarray, batch)


def drawn(data, **kwargs):
    return list(map(arrays, batches(data, **kwargs)))


def assert_same(found, expected):
    tf.nest.assert_same_structure(found, expected)
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


class Items:
    """Examples that are read one by one."""

    def __init__(self, example):
        self._example = example

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self._example(index)


class Table:
    """An array like one of HDF5."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __len__(self):
        return len(self._array)

    def __getitem__(self, rows):
        return self._array[rows]


class Frame:
    """A table in memory, as those of Polars."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)
        self.shape = (N, len(columns))

    def __len__(self):
        return N

    def __getitem__(self, name):
        return Series(self._columns[name])

    def to_numpy(self):
        return np.stack(list(self._columns.values()), 1)


class Series:
    """A column, which looks like an array on disk."""

    def __init__(self, values):
        self._values, self.shape, self.dtype = values, values.shape, values.dtype

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self._values[index]

    def to_numpy(self):
        return self._values


def mapped(folder):
    np.save(folder / "x.npy", X)
    return np.load(folder / "x.npy", mmap_mode="r")


def written(data):
    def write(folder):
        tfdp.data.write_examples(slices(data), folder, verbose=False)
        return tfdp.data.read_examples(folder)

    return write


FRAME = {"a": X[:, 0], "b": X[:, 1]}
# Data, and the batch of all of them.
DATA = {
    "array": (lambda _: X, X),
    "tensor": (lambda _: tf.constant(X), X),
    "one column": (lambda _: X[:, :1], X[:, :1]),
    "numbers": (lambda _: Y, Y),
    "tuple": (lambda _: (X,), (X,)),
    "list": (lambda _: [X], (X,)),
    "dict": (lambda _: {"a": X, "i": Y}, {"a": X, "i": Y}),
    "nested": (lambda _: {"a": {"b": X}, "c": [X, Y]}, {"a": {"b": X}, "c": (X, Y)}),
    "tuple of inputs": (lambda _: ((X, Y),), ((X, Y),)),
    "dataset": (lambda _: slices(X), X),
    "dataset of tuples": (lambda _: slices((X,)), (X,)),
    "dataset of dicts": (lambda _: slices({"a": X, "i": Y}), {"a": X, "i": Y}),
    "memory map": (mapped, X),
    "dict of memory maps": (
        lambda folder: {"a": mapped(folder), "i": Y},
        {"a": X, "i": Y},
    ),
    "table": (lambda _: Table(X), X),
    "frame": (lambda _: Frame(FRAME), X[:, :2]),
    "dict of columns": (lambda _: {"a": Series(X[:, 0])}, {"a": X[:, 0]}),
    "items": (lambda _: Items(lambda i: X[i]), X),
    "items that are tuples": (lambda _: Items(lambda i: (X[i],)), (X,)),
    "items that are dicts": (lambda _: Items(lambda i: {"a": X[i]}), {"a": X}),
    "written": (written(X), X),
    "written tuples": (written((X,)), (X,)),
    "written dicts": (written({"a": X, "i": Y}), {"a": X, "i": Y}),
}


@pytest.fixture(scope="module")
def sample():
    """The examples in each batch, as data with labels have them."""
    return [labels for _, labels in drawn((X, Y))]


def assert_batches_hold(sample, data, whole, **kwargs):
    for found, rows in zip(drawn(data, **kwargs), sample, strict=True):
        expected = tf.nest.map_structure(lambda t, rows=rows: t[rows], whole)
        assert type(found) is type(expected)
        assert_same(found, expected)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", DATA)
def test_batches_have_the_structure_of_the_data_and_hold_the_sample(name, sample, tmp_path):
    make, whole = DATA[name]
    assert_batches_hold(sample, make(tmp_path), whole)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda indices: (indices + 1) % N,
        lambda indices: indices[1:],
        lambda indices: tf.concat([indices, indices[:1]], 0),
    ],
    ids=["the next", "one missing", "one twice"],
)
def test_other_rows_are_caught(mutant, sample, monkeypatch):
    gathered = source_module.PoissonSource._gathered

    def changed(source, which):
        return gathered(source, which._replace(indices=mutant(which.indices)))

    monkeypatch.setattr(source_module.PoissonSource, "_gathered", changed)
    with pytest.raises(AssertionError):
        assert_batches_hold(sample, X, X)


@pytest.mark.parametrize(("element", "parts"), [(1, (1,)), ((1,), (1,)), ((1, 2), (1, 2))])
def test_parts_are_those_of_keras(element, parts):
    assert parts_of(element) == parts
    assert has_labels(element) == (len(parts) > 1)
    unpacked = tf.keras.utils.unpack_x_y_sample_weight(element)
    assert unpacked == (*parts, None, None)[:3]


@pytest.mark.parametrize("data", [X, (X,), {"a": X}, (X, Y), (X, Y, Y)], ids=lambda d: str(type(d)))
def test_specs_of_inputs_and_targets(data):
    made = batches(data)
    inputs, targets = made.input_spec, made.target_spec
    assert tf.nest.flatten(inputs) == [tf.TensorSpec([None, 4])]
    assert targets == (tf.TensorSpec([None], tf.int64) if has_labels(data) else None)


class Seen:
    """Returns a model of either Keras that notes what its training step is given."""

    def __init__(self, keras):
        class Model(keras.Model):
            def train_step(model, data):
                self.data = tf.nest.map_structure(lambda t: t.shape[1:].as_list(), data)
                return {"nothing": tf.zeros([])}

        self.data, self.model = None, Model()
        self.model.compile()

    def __call__(self, *args, **kwargs):
        self.model.fit(*args, verbose=0, **kwargs)
        return self.data


@with_both
@pytest.mark.parametrize(
    "data",
    [X, {"a": X, "i": Y}, (X,), ((X, Y),), ({"a": X},)],
    ids=["x", "dict", "1", "(2,)", "d"],
)
def test_training_steps_get_what_fit_gives_them(front, data):
    seen = Seen(front.keras)
    expected = seen(slices(data).batch(7))
    found = seen(batches(data))
    assert (found, type(found)) == (expected, type(expected))
    if not isinstance(data, tuple):
        assert seen(data) == found


def private_model(front, sampling, noise=0.0, clip=0.1, **kwargs):
    """A linear autoencoder whose training step takes x alone."""

    class Autoencoder(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = front.keras.layers.Dense(4, kernel_initializer="ones")

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            (x, _, weights) = front.keras.utils.unpack_x_y_sample_weight(data)
            assert weights is None
            losses = tf.reduce_sum(tf.square(self(x) - x), axis=1)
            self.optimizer.minimize(losses, self.trainable_variables)
            return {"nothing": tf.zeros([])}

    model = Autoencoder()
    optimizer = front.tfdp.DPSGD(clip, noise, sampling=sampling, learning_rate=1.0, **kwargs)
    model.compile(optimizer)
    model(X[:1])
    return model


def weights_of(model):
    return support.flat(model.get_weights())


def looped(groups):
    """The sum of the clipped gradients of the mean losses of groups of examples."""
    kernel, total = tf.ones([4, 4]), 0.0
    for rows in groups:
        bias = tf.zeros([4])
        with tf.GradientTape() as tape:
            tape.watch([kernel, bias])
            errors = tf.square(X[rows] @ kernel + bias - X[rows])
            loss = tf.reduce_mean(tf.reduce_sum(errors, axis=1))
        gradient = support.flat(tape.gradient(loss, [kernel, bias]))
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / 0.1)
    return total


def update(front, data=X, **kwargs):
    """The clipped sum of a step on all examples, and the steps that were counted."""
    kwargs = {"expected_batch_size": N, "steps_per_epoch": 1, **kwargs}
    made = tfdp.data.poisson_batches(data, **kwargs)
    model = private_model(front, made.sampling)
    before = weights_of(model)
    model.fit(made, verbose=0)
    moved = (before - weights_of(model)) * made.sampling.expected_batch_size
    return moved, model.optimizer.released_steps()


@with_both
def test_examples_are_clipped_and_counted(front):
    found, counted = update(front)
    np.testing.assert_allclose(found, looped([[i] for i in Y]), rtol=1e-4, atol=1e-5)
    assert counted == (1, 0)


KINDS = {
    "users": {"privacy_unit": Y % 20, "examples_per_user": 1, "expected_batch_size": 20},
    "augmentations": {"augmentations": 3},
    "chunks": {"chunk_size": 9},
    "cycle": {"cycle_length": 2, "expected_batch_size": 30},
    "transform": {"transform": lambda x: x},
}


@pytest.mark.quick_cases(2)
@with_one
@pytest.mark.parametrize("kind", KINDS)
def test_training_counts_its_steps(front, kind):
    kwargs = {"expected_batch_size": B, **KINDS[kind]}
    made = tfdp.data.poisson_batches(X, steps_per_epoch=2, **kwargs)
    model = private_model(front, made.sampling)
    model.fit(made, verbose=0)
    assert model.optimizer.released_steps() == (2 // made.sampling.cycle_length, 0)


@pytest.mark.slow
@with_one
def test_rows_of_an_example_are_clipped_together(front):
    found, _ = update(front, augmentations=3)
    np.testing.assert_allclose(found, looped([[i] for i in Y]), rtol=1e-4, atol=1e-5)


def test_of_each_user_one_example_is_drawn_and_needs_no_weight():
    users = Y % 20
    kwargs = {"privacy_unit": users, "examples_per_user": 1, "expected_batch_size": 5}
    made = batches(Y, **kwargs)
    assert (made.sampling.unit, made.sampling.dataset_size) == ("user", 20)
    labelled = drawn((Y, Y), **kwargs)
    for found, (x, _, weights) in zip(map(arrays, made), labelled, strict=True):
        np.testing.assert_array_equal(found, x)
        np.testing.assert_array_equal(weights, np.ones(len(x)))
        assert len(set(users[found])) == len(found)


@with_one
@pytest.mark.parametrize("change", ["again", "changed", "elsewhere"])
def test_a_batch_that_is_no_unused_draw_is_refused(front, change):
    made = batches(X, seed=None)  # With a seed, other tests have left equal draws.
    model = private_model(front, made.sampling)
    step = tf.function(model.train_step, reduce_retracing=True)
    x = next(iter(made))
    if change == "again":
        step(x)
    x = {"again": x, "changed": x * 1.5, "elsewhere": tf.constant(X[:9])}[change]
    before = model.optimizer.released_steps()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        step(x)
    assert before == ((1, 0) if change == "again" else (0, 0))


@with_one
def test_an_empty_batch_moves_nothing(front, monkeypatch):
    """It is delivered as a row of zeros, whose loss has a gradient if there is a bias."""

    def nothing(key, sampling, size):
        return tf.zeros([0], tf.int64)

    monkeypatch.setattr("tfdp.data.source.draw_indices", nothing)
    made = batches({"x": X, "target": X + 1}, steps_per_epoch=1)
    model = front.keras.Sequential([front.keras.layers.Input([4]), front.keras.layers.Dense(4)])

    class Trained(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = model

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            losses = tf.reduce_sum(tf.square(self(data["x"]) - 1.0), axis=1)
            self.optimizer.minimize(losses, self.trainable_variables)
            return {"nothing": tf.zeros([])}

    trained = Trained()
    trained.compile(front.tfdp.DPSGD(1.0, 0.0, sampling=made.sampling, learning_rate=1.0))
    before = weights_of(model)
    trained.fit(made, verbose=0)
    np.testing.assert_array_equal(weights_of(model), before)
    assert trained.optimizer.released_steps() == (1, 0)


@pytest.mark.parametrize("name", ["map", "shuffle"])
def test_changes_of_batches_are_refused(name):
    with pytest.raises(TypeError, match=r"`transform=lambda x: \.\.\.`"):
        getattr(batches(X), name)(lambda x: x)


@with_one
def test_the_check_of_a_step_takes_them(front):
    model = private_model(front, batches(X).sampling, noise=1.0)
    for data in (X, [X]):
        found = check_sensitivity(model, data, examples=5, verbose=False)
        assert 0 < max(m.removed for m in found.movements) <= found.bounds[0]


@with_one
@pytest.mark.parametrize("data", [X, (X,)], ids=["x", "tuple"])
def test_private_training_in_one_call(front, data):
    model = private_model(front, batches(X).sampling)
    model, made, budget = front.tfdp.make_private(
        model, data, epochs=1, target_epsilon=2.0, batch_size=B, optimizer="sgd", verbose=False
    )
    assert made.sampling.padding == "none"
    model.fit(made, epochs=1, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == N // B


@with_both
def test_a_gan_takes_them(front):
    made = batches(gan_support.X, expected_batch_size=16, steps_per_epoch=2)
    model = gan_support.compiled(gan_support.gan(front))
    model.fit(made, verbose=0)
    assert model.optimizer.released_steps() == (2, 0)


@pytest.mark.quick_cases(1)
@with_both
def test_a_vae_takes_them(front):
    made = batches(vae_support.X, expected_batch_size=16, steps_per_epoch=2)
    model = vae_support.vae(front)
    model.compile(vae_support.optimizer(front.tfdp.DPSGD, sampling=made.sampling))
    model.fit(made, verbose=0, validation_data=slices(vae_support.X).batch(16))
    assert model.optimizer.released_steps() == (2, 0)


# Transforms.


def test_a_transform_of_x_alone(sample):
    for data in (X, (X,)):
        for batch, rows in zip(drawn(data, transform=lambda x: 2 * x), sample, strict=True):
            assert type(batch) is type(data)
            np.testing.assert_array_equal(parts_of(batch)[0], 2 * X[rows])
    ((found,),) = drawn(((X, Y),), transform=lambda x: (({"a": x[0]}, x[1]),), steps_per_epoch=1)
    assert_same(found, ({"a": X[sample[0]]}, Y[sample[0]]))


@pytest.mark.parametrize("padding", ["none", "full"])
def test_a_transform_may_make_targets(padding):
    """A denoising autoencoder: the target is the example, the input has noise."""
    made = batches(X, transform=lambda x: (x + tf.random.normal([4]), x), padding=padding)
    assert made.target_spec == tf.TensorSpec([None, 4])
    for noisy, x, *mask in map(arrays, made):
        keep = mask[0] if mask else np.ones(len(x), bool)
        assert len(mask) == (padding == "full")
        assert {tuple(row) for row in x[keep]} <= {tuple(row) for row in X}
        assert np.all(noisy[keep] != x[keep])
        assert not noisy[~keep].any()


@pytest.mark.parametrize(
    ("data", "transform", "message"),
    [
        (X, lambda x, y: (x, y), r"a function of x alone.*Received a function of \(x, y\)"),
        ((X,), lambda x, y: x, "a function of x alone"),
        ((X, Y), lambda x: x, r"a function of one example.*Received a function of \(x\)"),
        (X, 3, "a function of x alone"),
        (X, lambda x: [x, x], r"return x, or a pair \(x, y\)"),
        (X, lambda x: (x, x, x), r"return x, or a pair \(x, y\)"),
        (X, lambda x: None, "must return dense tensors"),
    ],
)
def test_bad_transforms_are_refused(data, transform, message):
    with pytest.raises(ValueError, match=message):
        batches(data, transform=transform)


# What needs labels.


@pytest.mark.parametrize("padding", ["buckets", "full"])
@pytest.mark.parametrize("data", [X, (X,), {"a": X, "b": X}], ids=["x", "tuple", "dict"])
def test_padding_is_refused(data, padding):
    with pytest.raises(ValueError, match=r'must be "none" for data without labels.*any y'):
        batches(data, padding=padding)


def test_padding_that_is_not_refused_gives_no_mask_for_a_label(monkeypatch):
    """Mutant: without the check of arguments, the source refuses to pad."""
    monkeypatch.setattr("tfdp.data.poisson.check_padding", lambda *args: None)
    with pytest.raises(ValueError, match="must have weights, which follow labels"):
        batches(X, padding="full")


def test_several_examples_of_a_user_are_refused():
    with pytest.raises(ValueError, match=r"`examples_per_user` must be 1 for data without labels"):
        batches(X, privacy_unit=Y % 20, examples_per_user=2, expected_batch_size=5)
    made = batches(
        X,
        transform=lambda x: (x, x),
        privacy_unit=Y % 20,
        examples_per_user=2,
        expected_batch_size=5,
    )
    assert len(next(iter(made))) == 3


@with_both
def test_class_weights_are_refused(front):
    made = batches(X)
    with pytest.raises(ValueError, match="`class_weight` must not be given with data without"):
        private_model(front, made.sampling).fit(made, class_weight={0: 1.0, 1: 2.0}, verbose=0)


def test_selective_update_is_refused():
    made = batches(X)
    model = selective_support.compiled(selective_support.optimizer(data=made))
    with pytest.raises(ValueError, match=r"examples with labels, \(x, y\)"):
        model.fit(made)


@with_one
def test_a_loss_without_labels_is_found_before_training(front):
    model = front.keras.Sequential([front.keras.layers.Input([4]), front.keras.layers.Dense(4)])
    for data in (X, (X,), [X], batches(X), slices(X)):
        (finding,) = front.tfdp.validate(model, "mse", data=data).findings
        assert finding.refused
        assert "the data have none" in finding.problem
    unbuilt = front.keras.Sequential([front.keras.layers.Dense(4)])
    with pytest.raises(ValueError, match=r"the data have none.*`features` and `label`"):
        front.tfdp.make_private(unbuilt, X, loss="mse", epochs=1, target_epsilon=1.0, verbose=False)
    assert unbuilt.input_shape == (None, 4)


def test_replicas():
    strategy = support.mirrored(1)

    def open_batches(**kwargs):
        return tfdp.data.distributed_poisson_batches(
            strategy, lambda i, n: {"a": X}, dataset_size=N, expected_batch_size=B, **kwargs
        )

    batch = next(iter(open_batches()))
    assert {name: t.shape[1:].as_list() for name, t in batch.items()} == {"a": [4]}
    assert open_batches().local_element_spec == {"a": tf.TensorSpec([None, 4])}
    with pytest.raises(ValueError, match='`padding` must be "none" for data without labels'):
        open_batches(padding="full")
