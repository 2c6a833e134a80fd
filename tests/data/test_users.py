"""Users who are sampled in place of examples."""

import collections

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tfdp.data import users as users_module
from tfdp.data.users import Users

# Users "a" to "d" have 1, 2, 3 and 6 examples, in no order.
IDS = np.array(list("dbdcdacdbcdd"))
COUNTS = {"a": 1, "b": 2, "c": 3, "d": 6}
X = np.arange(12, dtype="float32")[:, np.newaxis]


def chosen(users, indices, seeds=1):
    """Examples and weights of users with these indices, `[seeds, users, most]`."""

    @tf.function
    def choose(key):
        return users.choose(key, tf.constant(list(indices), tf.int64))

    found = [choose(tf.constant([5, seed], tf.int64)) for seed in range(seeds)]
    shape = [seeds, len(indices), users.most]
    return tuple(np.reshape([t.numpy() for t in part], shape) for part in zip(*found, strict=True))


def test_examples_are_those_of_their_user_and_none_is_taken_twice():
    users = Users.of(IDS, 3, 12)
    assert users.number == 4
    indices, weights = chosen(users, range(4), seeds=20)
    for place, (name, count) in enumerate(COUNTS.items()):
        assert set(IDS[indices[:, place].ravel()]) == {name}
        for draw, weight in zip(indices[:, place], weights[:, place], strict=True):
            taken = draw[weight > 0]
            assert len(set(taken)) == len(taken) == min(count, 3)
            np.testing.assert_allclose(weight[weight > 0], 3 / len(taken), rtol=1e-6)


def test_every_subset_of_a_users_examples_is_as_likely():
    indices, _ = chosen(Users.of(IDS, 3, 12), [3], seeds=2000)
    subsets = collections.Counter(frozenset(draw[0]) for draw in indices)
    assert len(subsets) == 20  # Subsets of 3 of 6.
    assert scipy.stats.chisquare(list(subsets.values())).pvalue > 1e-4  # Keys are fixed.


def test_a_biased_choice_is_caught(monkeypatch):
    def last_ones(self, key, counts):
        return tf.maximum(counts - self.most, 0) + tf.range(self.most, dtype=tf.int64)

    monkeypatch.setattr(Users, "_places", last_ones)
    with pytest.raises(AssertionError):
        test_every_subset_of_a_users_examples_is_as_likely()


def test_places_beyond_the_users_are_padding():
    indices, _ = chosen(Users.of(IDS, 2, 12), [4, 0, 9])
    np.testing.assert_array_equal(indices[0, [0, 2]], 12)
    assert indices[0, 1, 0] == 5


def test_more_than_any_user_has():
    """The number of rows does not follow from the data: it is saved with the sampling."""
    users = Users.of(IDS, 8, 12)
    assert users.most == 8
    indices, weights = chosen(users, [3, 0])
    assert sorted(indices[0, 0, :6]) == sorted(np.flatnonzero(IDS == "d"))
    np.testing.assert_allclose(weights[0], [[8 / 6] * 6 + [0] * 2, [8] + [0] * 7], rtol=1e-6)
    assert set(indices[0, 1]) == {5}  # Rows without weight are of the same user.
    assert set(IDS[indices[0, 0]]) == {"d"}


@pytest.mark.parametrize(
    "ids",
    [IDS, IDS.astype(object), IDS.astype("S"), np.unique(IDS, return_inverse=True)[1], list(IDS)],
)
def test_ids_of_any_type(ids):
    assert Users.of(ids, 3, 12).number == 4


@pytest.mark.parametrize(
    ("ids", "most", "words"),
    [
        (IDS[:11], 3, "the 12 examples. Received: shape \\(11,\\)"),
        (IDS.reshape(3, 4), 3, "Received: shape \\(3, 4\\)"),
        (np.arange(12.0), 3, "one integer or string .* type float64"),
        (
            np.array([*"abcdefghijk", None], dtype=object),
            3,
            "type object. Give an example without a user",
        ),
        (np.array([*range(11), np.nan]), 3, "type float64. Give an example without a user"),
        (np.ma.array(IDS, mask=IDS == "a"), 3, "`privacy_unit` must have no masked entries"),
        (np.ma.array(np.arange(12), mask=np.arange(12) == 0), 3, "with 1 masked: leave these"),
        (IDS, 0, "`examples_per_user` must be a positive integer"),
        (IDS, None, "`examples_per_user` must be given with `privacy_unit`"),
    ],
)
def test_errors(ids, most, words):
    with pytest.raises(ValueError, match=words):
        tfdp.data.poisson_batches(
            (X, X), expected_batch_size=2, privacy_unit=ids, examples_per_user=most
        )


def test_mutant_that_drops_the_mask_of_users_is_caught(monkeypatch):
    """It takes what stands under the mask, one user here, for the user of all examples there."""
    monkeypatch.setattr("tfdp.data.users.check_unmasked", lambda name, value: None)
    assert Users.of(np.ma.array(np.zeros(12, int), mask=np.ones(12)), 3, 12).number == 1
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_errors(np.ma.array(IDS, mask=IDS == "a"), 3, "masked")


def test_errors_of_other_arguments():
    def batches(data=(X, X), **kwargs):
        return tfdp.data.poisson_batches(data, expected_batch_size=2, **kwargs)

    with pytest.raises(ValueError, match="`examples_per_user` must be None without"):
        batches(examples_per_user=2)
    with pytest.raises(ValueError, match="`augmentations` must be a positive integer"):
        batches(augmentations=0)
    with pytest.raises(ValueError, match="at most 4"):
        tfdp.data.poisson_batches(
            (X, X), expected_batch_size=5, privacy_unit=IDS, examples_per_user=2
        )
    with pytest.raises(ValueError, match="whose order may be another each time"):
        data = tf.data.Dataset.from_tensor_slices((X, X))
        batches(data, privacy_unit=IDS, examples_per_user=2)
    with pytest.raises(ValueError, match="`chunk_size` must be an integer of at least 6"):
        batches(chunk_size=5, privacy_unit=IDS, examples_per_user=3, augmentations=2)


def drawn(draws=400, **kwargs):
    """Numbers of the users in each batch, and the batches."""
    batches = tfdp.data.poisson_batches(
        (X, X),
        expected_batch_size=2,
        steps_per_epoch=draws,
        privacy_unit=IDS,
        examples_per_user=3,
        **kwargs,
    )
    return batches, [tuple(t.numpy() for t in batch) for batch in batches]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_users_are_sampled_independently_with_their_probability(padding):
    batches, found = drawn(padding=padding)
    each = batches.sampling.rows_per_example
    assert (batches.sampling.unit, batches.sampling.dataset_size, each) == ("user", 4, 3)
    present = np.zeros([len(found), 4])
    for batch, (x, y, weights) in enumerate(found):
        np.testing.assert_array_equal(x, y)
        assert len(x) % each == 0
        for rows, of_rows in zip(x.reshape(-1, each), weights.reshape(-1, each), strict=True):
            if of_rows.any():  # One user, whose weights have a mean of 1.
                (name,) = set(IDS[rows[of_rows > 0].astype(int)])
                assert of_rows.mean() == pytest.approx(1, rel=1e-6)
                present[batch, "abcd".index(name)] += 1
    assert present.max() == 1
    counts = present.sum(axis=0)
    assert np.all(np.abs(counts - 200) < 6.5 * 10)  # Standard deviations of 10: below 1e-9.
    patterns = collections.Counter(map(tuple, present))
    assert len(patterns) == 16
    assert scipy.stats.chisquare(list(patterns.values())).pvalue > 1e-6  # Secrets are repeatable.


def test_chunks_hold_whole_users():
    batches, found = drawn(draws=50, chunk_size=7)
    steps = batches.sampling.gradient_accumulation_steps
    assert steps == 3  # For 5 users at most, 2 at a time.
    assert len(found) == 50 * steps
    assert all(len(x) % 3 == 0 and len(x) <= 6 for x, _, _ in found)


def test_weights_of_examples_are_kept():
    weights = np.linspace(1, 2, 12)
    batches = tfdp.data.poisson_batches(
        (X, X, weights), expected_batch_size=4, privacy_unit=IDS, examples_per_user=2
    )
    ((x, _, found),) = batches.take(1)
    expected = weights[x.numpy()[:, 0].astype(int)]
    factors = found.numpy() / expected
    assert set(np.round(factors, 5)) <= {0, 1, 2}


@pytest.mark.parametrize("stored", [False, True])
def test_augmentations_are_rows_next_to_each_other_each_transformed_anew(stored):
    class Source:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return X[index], X[index]

    def noisy(x, y):
        return x + tf.random.uniform(tf.shape(x)), y

    batches = tfdp.data.poisson_batches(
        Source() if stored else (X, X), expected_batch_size=6, augmentations=3, transform=noisy
    )
    assert batches.sampling.rows_per_example == 3
    assert (batches.sampling.unit, batches.sampling.dataset_size) == ("example", 12)
    for x, y in batches.take(5):
        x, y = np.reshape(x, [-1, 3]), np.reshape(y, [-1, 3])
        assert np.all(y == y[:, :1])
        assert len(set(np.ravel(x))) == x.size
        assert np.all((x >= y) & (x < y + 1))


def test_the_choice_is_secret(monkeypatch):
    """Two keys choose other examples; one key the same."""
    users = Users.of(np.zeros(1000, int), 5, 1000)
    first, second = chosen(users, [0], seeds=2)[0]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, chosen(users, [0])[0][0])
    assert users_module._OF_CHOICE != 0  # The use of the key that draws the users.
