import gc

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tfdp.accounting.sampling import PoissonSampling, padded_batch_size, truncation_probability
from tfdp.base.random import chacha
from tfdp.data import poisson
from tfdp.data import source as source_module
from tfdp.data.source import draw_indices, sample_indices

N, B = 50, 8
X = np.arange(N, dtype="float32")[:, None] * np.ones([1, 3], "float32")
Y = np.arange(N)


def indices_of(key, n, q, rows):
    return sample_indices(chacha.random_words(key, 4 * rows), n, q)


def draw_many(steps, sampler=None, n=N, q=B / N, rows=None):
    """The samples of many batches, as an inclusion matrix `[steps, n]`."""
    rows = rows or padded_batch_size(n, round(n * q))
    sampler = sampler or indices_of
    keys = np.stack([np.full(steps, 11), np.arange(steps)], 1)
    draw_all = tf.function(lambda keys: tf.map_fn(lambda key: sampler(key, n, q, rows), keys))
    indices = draw_all(tf.constant(keys)).numpy()
    included = np.zeros([steps, n], bool)
    for step, drawn in enumerate(indices):
        included[step, drawn[drawn < n]] = True
    return included


def assert_poisson_sampling(included, q):
    """Chi-square tests that examples are in batches independently, with probability q."""
    steps, n = included.shape
    counts = included.sum(axis=0)
    variance = steps * q * (1 - q)
    if q < 1:
        statistic = np.sum((counts - steps * q) ** 2) / variance
        assert 1e-5 < scipy.stats.chi2.sf(statistic, n) < 1 - 1e-5  # How often each example is in.
    sizes = included.sum(axis=1)
    distribution = scipy.stats.binom(n, q)
    edges = np.unique(distribution.ppf(np.linspace(0.02, 0.98, 12)).astype(int))
    observed = np.histogram(sizes, [-1, *edges, n + 1])[0]  # Bins are [a, b).
    expected = steps * np.diff(distribution.cdf(np.array([-1, *edges, n + 2]) - 1))
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-5  # Batch sizes.
    products = included.T.astype(float) @ included
    pairs = products[np.triu_indices(n, 1)]
    z = (pairs - steps * q * q) / np.sqrt(steps * q * q * (1 - q * q))
    assert abs(np.mean(z)) < 5 * np.sqrt(1 / len(z) + (n - 1) / len(z))  # Pairs of examples.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("n", "q"), [(50, 0.16), (20, 0.5), (40, 0.9), (400, 0.02)])
def test_each_example_is_in_each_batch_independently(n, q):
    assert_poisson_sampling(draw_many(4000, n=n, q=q), q)


@pytest.mark.parametrize("padding", ["none", "full"])
def test_a_draw_has_room_for_all_that_is_not_charged(padding, monkeypatch):
    """A sample of all examples, with the gaps of a huge data set, is cut off where charged."""
    n, b = 60000, 256
    sampling = PoissonSampling(n, b, padding=padding)
    monkeypatch.setattr(chacha, "exponentials", lambda words: tf.zeros([len(words[0])]))
    rows = len(draw_indices(tf.constant([1, 2], tf.int64), sampling, n))
    assert truncation_probability(rows, n, b / n) == sampling.truncation_probability
    assert rows == {"none": 614, "full": 408}[padding]


def test_all_examples_with_probability_one():
    assert np.all(draw_many(5, n=20, q=1.0))


def fixed_size(key, n, q, rows):
    """Mutant: a uniform sample of fixed size, as shuffled batches are."""
    order = tf.argsort(tf.random.stateless_uniform([n], key))
    return tf.cast(
        tf.concat([order[: round(n * q)], tf.fill([rows - round(n * q)], n)], 0), tf.int64
    )


def too_likely(key, n, q, rows):
    """Mutant: the probability is a tenth too large."""
    return indices_of(key, n, 1.1 * q, rows)


def truncated(key, n, q, rows):
    """Mutant: larger batches are cut off."""
    drawn = indices_of(key, n, q, rows)
    return tf.where(tf.range(rows) < round(n * q) + 2, drawn, n)


@pytest.mark.parametrize("mutant", [fixed_size, too_likely, truncated])
def test_other_sampling_is_caught(mutant):
    with pytest.raises(AssertionError):
        assert_poisson_sampling(draw_many(4000, mutant), B / N)


def batches(**kwargs):
    kwargs = {"expected_batch_size": B, "steps_per_epoch": 6, **kwargs}
    return tfdp.data.poisson_batches((X, Y), **kwargs)


def test_batches_hold_what_was_drawn():
    sizes = set()
    for x, y in batches(seed=1):
        np.testing.assert_array_equal(x[:, 0], y)
        assert len(set(y.numpy())) == len(y)  # Without repetition.
        sizes.add(len(y))
    assert len(sizes) > 1


@pytest.mark.parametrize("padding", ["buckets", "full"])
def test_batches_are_padded_and_masked(padding):
    plain = collect(batches(seed=1))
    for i, (x, y, mask) in enumerate(batches(seed=1, padding=padding)):
        x, y, mask = x.numpy(), y.numpy(), mask.numpy()
        sizes = {"full": (padded_batch_size(N, B),), "buckets": (11, 16, padded_batch_size(N, B))}
        assert len(x) == min(size for size in sizes[padding] if size >= mask.sum())
        assert mask.dtype == bool
        assert padding == "full" or tuple(y[mask]) == plain[i]
        np.testing.assert_array_equal(x[mask][:, 0], y[mask])
        assert len(set(y[mask])) == mask.sum()  # Without repetition.
        assert not np.any(x[~mask]) and not np.any(y[~mask])


def test_how_often_batches_are_cut_off_can_be_chosen():
    data = batches(padding="full", max_truncation_probability=1e-6)
    assert {len(mask) for *_, mask in data} == {padded_batch_size(N, B, 1e-6)}
    assert data.sampling.max_truncation_probability == 1e-6
    assert padded_batch_size(N, B, 1e-6) < padded_batch_size(N, B)
    in_chunks = batches(padding="full", max_truncation_probability=1e-6, chunk_size=7)
    chunks = in_chunks.sampling.gradient_accumulation_steps
    assert chunks == -(-padded_batch_size(N, B, 1e-6) // 7)
    with pytest.raises(ValueError, match=r"`max_truncation_probability` must be None with padding"):
        batches(max_truncation_probability=1e-12)


def test_the_first_dimension_is_open_and_the_length_known():
    data = batches()
    assert [spec.shape[0] for spec in data.element_spec] == [None] * 2
    assert data.element_spec[0].shape[1:] == [3]
    assert len(data) == 6
    assert len(tfdp.data.poisson_batches((X, Y), expected_batch_size=8)) == 6


def collect(data):
    return [tuple(y.numpy()) for _, y, *_ in data]


def test_every_epoch_draws_anew():
    data = batches()
    first, second = collect(data), collect(data)
    assert not set(first) & set(second)


def test_sampling_is_secret_unless_a_seed_is_given():
    tf.keras.utils.set_random_seed(1)
    first = collect(batches())
    tf.keras.utils.set_random_seed(1)
    assert collect(batches()) != first
    assert collect(batches(seed=3)) == collect(batches(seed=3)) != collect(batches(seed=4))


def test_sampling_resumes_after_an_interruption():
    data = batches(seed=3)
    first, second = collect(data), collect(data)
    assert collect(batches(seed=3, first_step=6)) == second
    assert collect(batches(seed=3, first_step=2))[:4] == first[2:]


def test_chunks_hold_the_same_batches():
    whole, parts = batches(seed=3), batches(seed=3, chunk_size=7)
    steps = parts.sampling.gradient_accumulation_steps
    assert steps == -(-padded_batch_size(N, B, 1e-30) // 7) == len(parts) / len(whole)
    chunks = collect(parts)
    assert max(map(len, chunks)) <= 7
    joined = [sum(chunks[i : i + steps], ()) for i in range(0, len(chunks), steps)]

    def without_zeros(drawn):  # A row of zeros stands for a chunk of no examples.
        return [[label for label in batch if label] for batch in drawn]

    assert without_zeros(joined) == without_zeros(collect(whole))


def test_padded_chunks_have_one_size():
    parts = batches(seed=3, chunk_size=7, padding="full")
    steps = parts.sampling.gradient_accumulation_steps
    assert {len(mask) for _, _, mask in parts} == {-(-padded_batch_size(N, B) // steps)}
    drawn = [tuple(y.numpy()[mask.numpy()]) for _, y, mask in parts]
    joined = [sum(drawn[i : i + steps], ()) for i in range(0, len(drawn), steps)]
    assert all(len(set(batch)) == len(batch) for batch in joined)  # Without repetition.
    assert 0.5 * B < np.mean(list(map(len, joined))) < 2 * B


WEIGHTS = np.linspace(0, 2, N)


@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_weights_of_examples_are_delivered(padding):
    data = tfdp.data.poisson_batches((X, Y, WEIGHTS), expected_batch_size=B, padding=padding)
    x, y, weights = next(iter(data))
    drawn = np.where(x.numpy().any(axis=1) | (y.numpy() > 0), WEIGHTS[y.numpy()], 0)
    np.testing.assert_allclose(weights, drawn, rtol=1e-6)
    assert weights.dtype == tf.float32


def largest_tensor_of_functions(dataset):
    """The most bytes that a tensor has of those that functions of a dataset have captured."""
    handles = (tf.resource, tf.variant)
    captured = [
        tensor
        for function in dataset._functions()
        for tensor in function.function.captured_inputs
        if tensor.dtype not in handles
    ]
    sizes = [int(tf.size(tensor)) * tensor.dtype.size for tensor in captured]
    return max([*sizes, *map(largest_tensor_of_functions, dataset._inputs())], default=0)


def test_an_iteration_begins_without_a_copy_of_the_data(monkeypatch):
    x, w = np.zeros([1000, 100], "float32"), np.ones(1000, "float32")

    def batches():
        made = tfdp.data.poisson_batches((x, w, w), expected_batch_size=10)
        return made.map(make_class_weight_map_fn())

    assert largest_tensor_of_functions(batches()) < 100
    monkeypatch.setattr(poisson, "in_variables", lambda data: data)  # The mutant.
    assert largest_tensor_of_functions(batches()) == x.nbytes


def make_class_weight_map_fn():
    """Named as in Keras 3: batches know the function by its name."""

    def class_weights_map_fn(x, y, weights):
        return x, y, weights

    return class_weights_map_fn


def test_data_of_an_iterator_live_as_long_as_it():
    iterator = iter(tfdp.data.poisson_batches((X, Y), expected_batch_size=N, steps_per_epoch=9))
    gc.collect()
    np.testing.assert_array_equal(next(iterator)[0], X)


def test_data_in_compiled_functions_for_gpus_are_tensors(monkeypatch):
    source = tfdp.data.poisson_batches((X, Y), expected_batch_size=B).source
    monkeypatch.setattr(source_module.devices, "compiled_for_gpu", lambda: True)
    rows = tf.function(
        lambda: source.rows(source_module.Rows(tf.constant([3, 1], tf.int64)), padded=False)
    )
    handles = [t for t in rows.get_concrete_function().captured_inputs if t.dtype == tf.resource]
    assert not handles
    np.testing.assert_array_equal(rows()[0], X[[3, 1]])


def test_nested_inputs():
    data = tfdp.data.poisson_batches(
        ({"a": X, "b": (Y, X[:, 0])}, Y), expected_batch_size=B, steps_per_epoch=1
    )
    ((x, y),) = data
    np.testing.assert_array_equal(x["b"][0], y)


def test_a_tf_data_dataset_of_examples():
    source = tf.data.Dataset.from_tensor_slices((X, Y))
    data = tfdp.data.poisson_batches(source, expected_batch_size=B, seed=3, steps_per_epoch=6)
    assert collect(data) == collect(batches(seed=3))
    assert data.sampling.dataset_size == N


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_fit_with_metrics(padding):
    """Weighted metrics are those of the examples; without padding, loss and metrics are, too."""
    model = support.small_model()
    x, y = support.small_data(60)

    def drawn(padding):
        return tfdp.data.poisson_batches((x, y), expected_batch_size=30, seed=1, padding=padding)

    data, name = drawn(padding), "metrics" if padding == "none" else "weighted_metrics"
    model.compile(
        tfdp.DPSGD(1.0, 1.0, learning_rate=0.0, sampling=data.sampling),
        loss="sparse_categorical_crossentropy",
        **{name: ["accuracy", support.crossentropy_metric()]},
    )
    logs = model.fit(data, epochs=1, verbose=0).history
    xs, ys = (np.concatenate(parts) for parts in zip(*drawn("none"), strict=True))
    expected = model.evaluate(xs, ys, verbose=0, return_dict=True)
    assert logs["accuracy"][0] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert logs["crossentropy"][0] == pytest.approx(expected["crossentropy"], rel=1e-5)
    assert padding != "none" or logs["loss"][0] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected_batch_size": 0}, "`expected_batch_size` must be an integer of at least 1"),
        ({"expected_batch_size": 51}, "at most 50, the number of examples.*=51"),
        ({"expected_batch_size": 2.5}, "`expected_batch_size` must be an integer"),
        ({"chunk_size": 0}, "`chunk_size` must be an integer of at least 1 or None"),
        ({"steps_per_epoch": -1}, "`steps_per_epoch` must"),
        ({"seed": "x"}, "`seed` must"),
        ({"first_step": -1}, "`first_step` must"),
        ({"augmentations": 10**12}, "`augmentations` must be a positive integer of at most"),
        ({"padding": "some"}, "`padding` must be one of.*'some'"),
        ({"padding": "buckets", "chunk_size": 5}, "`padding` must be.*with `chunk_size`"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        batches(**change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:-1]), "one positive length"),
        ((X[:0], Y[:0]), "one positive length"),
        ((X, 3), "one positive length"),
        ((X, Y, Y, Y), "of length 4"),
        ((), "of length 0"),
        (None, "hold no None"),
        (3, "Received: int"),
        ("images", "Received: str"),
        (X[:0], "one positive length"),
        (np.float32(3), "one positive length"),
        ({}, "one positive length"),
        ({"a": X, "b": Y[:-1]}, "one positive length"),
        ((X, Y, {"a": Y.astype(str)}), "numbers as its third part"),
        (tf.data.Dataset.from_tensors((1, 2, 3, 4)), r"examples \(x, y\)"),
        (tf.data.Dataset.range(0), "Received an empty dataset"),
        (tf.data.Dataset.from_tensor_slices((X, None)), "dense tensors, none of them None"),
        (tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(X)), "tf.sparse.to_dense"),
        (tf.data.Dataset.from_tensors((1.0, 2)).repeat(), "infinite"),
        (
            tf.data.Dataset.from_generator(
                lambda: ((np.zeros(n), n) for n in (1, 2)),
                output_signature=(tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)),
            ),
            "one shape",
        ),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(ValueError, match=f"Argument `data` must.*{message}"):
        tfdp.data.poisson_batches(data, expected_batch_size=1)
