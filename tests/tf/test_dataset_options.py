"""`tf.data` neither tunes nor rewrites tfdp's datasets, which makes iterators slow."""

import types

import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tfdp._tf.dataset_options import as_it_is

X, Y = support.small_data(40)


def poisson(data=(X, Y), **kwargs):
    return tfdp.data.poisson_batches(data, expected_batch_size=10, **kwargs)


def turned_on(dataset):
    """Returns what the dataset's options let `tf.data` do to it, where iterators begin."""
    options = dataset.options()
    flags = {
        "tuning": options.autotune.enabled,
        "rewriting": options.experimental_optimization.apply_default_optimizations,
    }
    return {name for name, flag in flags.items() if flag is not False}


BOTH = {"tuning", "rewriting"}


def test_it_is_turned_off_in_what_is_made_of_the_dataset():
    plain = tf.data.Dataset.range(3)
    assert turned_on(plain) == BOTH
    off = as_it_is(plain)
    assert not turned_on(off)
    assert not turned_on(off.map(lambda i: i, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2))


class Source:
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i]


BATCHES = {
    "arrays": poisson,
    "read": lambda: poisson(Source()),
    "chunks": lambda: poisson(chunk_size=4),
    "repeated": lambda: poisson().repeat(2).skip(1).take(1).prefetch(1),
    "options": lambda: poisson().with_options(tf.data.Options()),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", BATCHES)
def test_poisson_batches_are_taken_as_they_are(name):
    assert not turned_on(BATCHES[name]())


def test_users_can_turn_it_on():
    options = tf.data.Options()
    options.autotune.enabled = True
    options.experimental_optimization.apply_default_optimizations = True
    assert turned_on(poisson().with_options(options)) == BOTH


def test_batches_for_replicas_are_taken_as_they_are(monkeypatch):
    made = []
    strategy = support.mirrored(2)

    def distribute(function):
        made.append(function(tf.distribute.InputContext()))
        return types.SimpleNamespace()

    monkeypatch.setattr(strategy, "distribute_datasets_from_function", distribute)
    tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (X[index::count], Y[index::count]),
        dataset_size=len(X),
        expected_batch_size=10,
    )
    assert [turned_on(dataset) for dataset in made] == [set()]


@pytest.mark.slow
def test_the_steps_of_selective_models_are_taken_as_they_are(monkeypatch):
    model = selective_support.compiled(selective_support.optimizer())
    taken = []
    monkeypatch.setattr(tf.keras.Model, "fit", lambda self, x, **kwargs: taken.append(x))
    model.fit(selective_support.batches())
    assert [turned_on(dataset) for dataset in taken] == [set()]
