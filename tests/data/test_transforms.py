"""Transforms draw secret numbers, each row its own, and keep no state."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support
from tfdp.clipping import function_checks
from tfdp.data import source as source_module
from tfdp.data import transforms
from tfdp.data.transforms import Transform

N = 24
X, Y = np.ones([N, 4], "float32"), np.arange(N)
generator = tf.random.Generator.from_seed(3)
counter, total = tf.Variable(0), tf.Variable(0.0)
metric = tf.keras.metrics.Mean()


def shifted(x, y):
    return x + tf.random.normal([4], seed=1), y


def in_branch(x, y):
    noisy = lambda: x + generator.normal([4])  # noqa: E731
    return tf.cond(tf.random.uniform([], seed=1) < 0.5, noisy, lambda: shifted(x, y)[0]), y


def batches(transform, **kwargs):
    kwargs = {"expected_batch_size": N, "steps_per_epoch": 2, **kwargs}
    return tfdp.data.poisson_batches((X, Y), transform=transform, **kwargs)


def numbers(transform, **kwargs):
    """Returns what the rows of two iterations drew, with the same seeds of TensorFlow's."""
    tf.keras.utils.set_random_seed(1)
    generator.reset_from_seed(3)
    data = batches(transform, **kwargs)
    drawn = [batch for _ in range(2) for batch in data.as_numpy_iterator()]
    return np.concatenate([b[0][b[2] > 0] if len(b) == 3 else b[0] for b in drawn])


KINDS = {
    "none": {},
    "buckets": {"padding": "buckets"},
    "full": {"padding": "full"},
    "chunks": {"chunk_size": 7},
    "augmentations": {"augmentations": 3},
    "users": {"privacy_unit": np.arange(N) // 2, "examples_per_user": 2, "expected_batch_size": 12},
    "cycle": {"cycle_length": 3, "expected_batch_size": 8},
}


def assert_rows_draw_their_own(transform, kind):
    rows = numbers(transform, **KINDS[kind])
    both = np.concatenate([rows, numbers(transform, **KINDS[kind])])
    assert len(rows) > N
    assert len(np.unique(both, axis=0)) == len(both)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_draw_secret_numbers_of_their_own(kind):
    assert_rows_draw_their_own(in_branch, kind)


def known(key, rows):
    """Mutant: the secrets are those of every draw."""
    return tf.random.stateless_uniform([rows, 2, 3], [1, 2], None, None, tf.int64)


def of_the_draw(key, rows):
    """Mutant: all rows of a draw have one secret."""
    return tf.tile(transforms.secrets(key, 1), [rows, 1, 1])


@pytest.mark.parametrize("mutant", [known, of_the_draw])
def test_secrets_that_repeat_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(source_module, "secrets", mutant)
    with pytest.raises(AssertionError):
        assert_rows_draw_their_own(shifted, "none")


@pytest.mark.parametrize("padding", ["none", "full"])
def test_with_a_seed_they_are_reproducible(padding):
    first, again = (numbers(in_branch, seed=5, padding=padding) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_row_is_a_function_of_its_example_and_its_secret():
    transform = Transform(in_branch, tf.TensorSpec([4]), tf.TensorSpec([], tf.int64))
    apply = tf.function(lambda x, y, s: transform((x, y), s))
    x = np.random.default_rng(0).normal(size=[N, 4]).astype("float32")
    secrets = np.random.default_rng(1).integers(0, 2**62, [N, 3])
    everyone = apply(x, Y, secrets)[0].numpy()
    order = np.random.default_rng(2).permutation(N)[:9]
    np.testing.assert_array_equal(apply(x[order], Y[order], secrets[order])[0], everyone[order])


def test_the_secrets_are_of_no_other_use_of_the_key():
    key = tf.constant([1, 2, 3, 4, 5], tf.int64)
    own = transforms.secrets(key, 64).numpy().view(np.uint32).ravel()
    for use in (0, 1):
        assert not np.isin(transforms.chacha.random_words(key, own.size, use), own).any()


def test_an_attack_by_a_known_stream_fails():
    """What rows draw agrees with what they draw in another run by chance alone."""

    def flipped(x, y):
        return tf.where(tf.random.uniform([], seed=1) < 0.5, x, -x), y

    many = {"expected_batch_size": 400, "steps_per_epoch": 1, "transform": flipped}

    def signs():
        tf.keras.utils.set_random_seed(1)
        data = tfdp.data.poisson_batches((np.ones([400, 1], "float32"), np.arange(400)), **many)
        return next(iter(data))[0].numpy()[:, 0]

    assert 80 < np.sum(signs() == signs()) < 320  # By luck with a probability below 1e-30.


def test_variables_are_read_when_rows_are_drawn():
    scale = tf.Variable(1.0)
    data = batches(lambda x, y: (scale * x, y))
    before = next(iter(data))[0].numpy().max()
    scale.assign(3.0)
    assert (before, next(iter(data))[0].numpy().max()) == (1.0, 3.0)


def test_a_selective_model_trains_on_them():
    def cropped(x, y):
        x, y = in_branch(x, y)
        return x[:3], y

    data = batches(cropped, expected_batch_size=8)
    base = tf.keras.Sequential([tf.keras.layers.Dense(N)])
    model = selective_support.compiled(selective_support.optimizer(data=data, threshold=9.0), base)
    model.fit(data, steps_per_epoch=1, verbose=0)
    assert model.optimizer.ledger.steps == 1


REFUSED = {
    "gamma": (lambda x, y: (x + tf.random.gamma([], 1.0), y), "RandomGamma.*stateless_gamma"),
    "poisson": (lambda x, y: (x + tf.random.poisson([], 1.0), y), "stateless_poisson"),
    "pooling": (
        lambda x, y: (
            x
            + tf.nn.fractional_max_pool(tf.ones([1, 4, 4, 1]), [1, 1.4, 1.4, 1], seed=1)[0][
                0, 0, 0
            ],
            y,
        ),
        "FractionalMaxPool",
    ),
    "in a data set": (
        lambda x, y: (
            x + tf.data.Dataset.range(2).map(lambda i: tf.random.normal([])).reduce(0.0, tf.add),
            y,
        ),
        "side effects|secret",
    ),
    "counter": (lambda x, y: (x + tf.cast(counter.assign_add(1), tf.float32), y), "no state"),
    "counted only": (lambda x, y: (counter.assign_add(1), (x, y))[1], "side effects"),
    "float state": (lambda x, y: (x + total.assign_add(1.0), y), "no state"),
    "statistic": (lambda x, y: (total.assign_add(x[0]), (x, y))[1], "side effects"),
    "print": (lambda x, y: (tf.print(x), (x, y))[1], "side effects"),
    "python": (
        lambda x, y: (tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), [4]), y),
        "side effects",
    ),
    "file": (lambda x, y: (tf.io.write_file("f", "t"), (x, y))[1], "side effects"),
    "clock": (lambda x, y: (x + tf.cast(tf.timestamp(), tf.float32), y), "side effects"),
    # By its handle, which no tape sees.
    "metric": (
        lambda x, y: (
            x + tf.raw_ops.ReadVariableOp(resource=metric.variables[0].handle, dtype=tf.float32),
            y,
        ),
        "no metric",
    ),
    "ragged": (lambda x, y: (tf.RaggedTensor.from_row_lengths(x, [4]), y), "dense tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_function_of_the_row_is_refused(name):
    transform, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        batches(transform)


def test_mutant_that_looks_at_watched_variables_alone_is_caught(monkeypatch):
    monkeypatch.setattr(function_checks.batch_state, "variable_with", lambda handle: None)
    batches(REFUSED["metric"][0])


def test_the_error_names_the_line():
    with pytest.raises(ValueError, match=r"made at .*test_transforms\.py:\d+\. Use "):
        batches(lambda x, y: (x + tf.random.gamma([], 1.0), y))
    drawn = lambda x: x + tf.random.gamma([], 1.0)  # noqa: E731
    inside = lambda x, y: (tf.cond(x[0] > 0, lambda: drawn(x), lambda: x), y)  # noqa: E731
    with pytest.raises(ValueError, match=r"made at .*test_transforms\.py:\d+\. Use "):
        batches(inside)


def test_a_transform_may_return_more_tensors_than_examples_have():
    names = "abcdefgh"
    made = tfdp.data.poisson_batches(
        (np.ones([20, 2], "float32"), np.arange(20)),
        expected_batch_size=5,
        transform=lambda x, y: ({name: x for name in names}, y),
    )
    assert made.source.element_spec[0] == {name: tf.TensorSpec([2]) for name in names}
    x, _ = next(iter(made))
    assert sorted(x) == list(names)
