"""Training on tfdp's datasets starts no tuning of `tf.data`, which makes iterators slow to drop."""

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

import tfdp
from tests import selective_support, support
from tfdp.base.tf.autotuning import untuned_on_devices, without_autotuning

X, Y = support.small_data(40)


def poisson(data=(X, Y), **kwargs):
    return tfdp.data.poisson_batches(data, expected_batch_size=10, **kwargs)


def is_tuned(dataset):
    """Returns whether the dataset's options let an iterator start the thread that tunes it."""
    return dataset.options().autotune.enabled is not False


def test_it_is_turned_off_in_what_is_made_of_the_dataset():
    plain = tf.data.Dataset.range(3)
    assert is_tuned(plain)
    off = without_autotuning(plain)
    assert not is_tuned(off)
    assert not is_tuned(off.map(lambda i: i, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2))


def test_datasets_are_rewritten_without_which_iterators_of_strategies_crash():
    options = without_autotuning(tf.data.Dataset.range(3)).options()
    assert options.experimental_optimization.apply_default_optimizations is not False


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
def test_poisson_batches_are_not_tuned(name):
    assert not is_tuned(BATCHES[name]())


def test_users_can_turn_it_on():
    options = tf.data.Options()
    options.autotune.enabled = True
    assert is_tuned(poisson().with_options(options))


def iterated(monkeypatch, batches):
    """Returns which datasets an iterator over distributed batches makes iterators of."""
    datasets, iterate = [], tf.data.Dataset.__iter__

    def record(dataset):
        datasets.append(dataset)
        return iterate(dataset)

    with monkeypatch.context() as patch:
        patch.setattr(tf.data.Dataset, "__iter__", record)
        next(iter(batches))
    return datasets


def test_batches_for_replicas_are_not_tuned(monkeypatch):
    strategy, made = support.mirrored(2), []
    distribute = strategy.distribute_datasets_from_function

    def recorded(function):
        def dataset(context):
            made.append(function(context))
            return made[-1]

        return distribute(dataset)

    monkeypatch.setattr(strategy, "distribute_datasets_from_function", recorded)
    batches = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda index, count: (X[index::count], Y[index::count]),
        dataset_size=len(X),
        expected_batch_size=10,
    )
    of_devices = iterated(monkeypatch, batches)
    assert [is_tuned(dataset) for dataset in (*made, *of_devices)] == [False] * 3
    # The user's own are as they were.
    users = distribute(lambda _: tf.data.Dataset.range(4).batch(2))
    assert [is_tuned(dataset) for dataset in iterated(monkeypatch, users)] == [True] * 2


def test_the_strategys_iterators_are_left_alone_where_they_cannot_be_changed(monkeypatch):
    monkeypatch.delattr(multi_device_iterator_ops, "_create_device_dataset")
    with untuned_on_devices():
        assert not hasattr(multi_device_iterator_ops, "_create_device_dataset")


@pytest.mark.slow
def test_the_steps_of_selective_models_are_not_tuned(monkeypatch):
    model = selective_support.compiled(selective_support.optimizer())
    taken = []
    monkeypatch.setattr(tf.keras.Model, "fit", lambda self, x, **kwargs: taken.append(x))
    model.fit(selective_support.batches())
    assert [is_tuned(dataset) for dataset in taken] == [False]
