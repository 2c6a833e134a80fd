import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.data import checks

X, Y = support.small_data(20)


def poisson(*data, **kwargs):
    return tfdp.data.poisson_batches(*data, expected_batch_size=2, **kwargs)


class Loader(tf.keras.utils.Sequence):
    """Batches, as users of Keras make them."""

    def __init__(self, *data):
        self.data = data

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return [part[5 * index : 5 * index + 5] for part in self.data]


class Frame:
    """A table, as those of pandas."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values

    def to_numpy(self):
        return self.values


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((tf.ragged.constant([[1, 2], [3]]), [0, 1]), r"RaggedTensor .* use `x.to_tensor\(\)`"),
        ((np.ma.array(X, mask=X.mean() < X), Y), "`data` must have no masked .*leave these"),
        (({"a": np.ma.masked_less(X, X.max())}, Y), "`data` must have no masked entries"),
        ((tf.sparse.from_dense(X), Y), r"SparseTensor .* use `tf.sparse.to_dense\(x\)`"),
        (([[1, 2], [3]], [0, 1]), r"a list of numbers, \[1, 2\]: use `np.array"),
        ((X.tolist(), Y), r"a list of numbers, .*, \.\.\.\]: use `np.array"),
        ((X, Y.tolist()), "a list of numbers"),
        (({"a": X.tolist()}, Y), "a list of numbers"),
        ((np.array([[1], [2, 3]], dtype=object), Y[:2]), r"of type object and shape \(2,\)"),
        ((["a"] * 20, Y), "a list of strings"),
        (((X, Y) for _ in range(2)), "Received: generator.*`tf.data.Dataset.from_generator`"),
        (Loader(X, Y), "Received: Loader, which gives batches"),
        (
            tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).map(
                lambda x: (x, 1)
            ),
            "examples of one shape.*`map` them to one",
        ),
        ((Frame(np.array([[1, "a"]] * 20, object)), Y), r"Frame of type object.*`dict\(x\)`"),
    ],
)
def test_data_of_other_kinds_are_refused_with_advice(data, message):
    with pytest.raises(ValueError, match=message) as error:
        poisson(data)
    assert len(str(error.value)) < 400


def test_mutants_that_take_batches_have_another_unit_of_privacy(monkeypatch):
    batched = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5, drop_remainder=True)
    monkeypatch.setattr(checks, "_is_loader", lambda data: False)
    monkeypatch.setattr(checks, "_OPENING", (*checks._OPENING, "Map"))
    for data in (Loader(X, Y), batched.map(lambda x, y: (x / 2, y))):
        assert poisson(data).sampling.dataset_size == 4  # Of 20 examples.


def test_two_arguments():
    with pytest.raises(TypeError, match=r"one pair, `\(x, y\)`, in parentheses"):
        poisson(X, Y)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batched_datasets_have_other_units_of_privacy(drop_remainder):
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    batched = examples.batch(5, drop_remainder=drop_remainder).prefetch(1)
    with pytest.raises(ValueError, match=r"single examples, the unit of privacy.* `unbatch\(\)`"):
        poisson(batched)
    with pytest.raises(ValueError, match=r"call `unbatch\(\)`"):
        poisson(batched.map(lambda x, y: (x / 2, y)))  # Of examples of one shape, it may seem.
    with pytest.raises(ValueError, match=r"call `unbatch\(\)`"):
        poisson(batched.concatenate(examples.batch(4)))
    assert poisson(batched.unbatch().map(lambda x, y: (x / 2, y))).sampling.dataset_size == 20
    windows = tf.data.Dataset.from_tensor_slices(X).window(5).flat_map(lambda w: w.batch(5))
    assert poisson(windows.map(lambda w: (w, w[-1, 0]))).sampling.dataset_size == 4
    assert poisson(examples.shuffle(5)).sampling.dataset_size == 20


@pytest.mark.parametrize("x", [(X, X), [X, X], {"a": [X, X]}, X])
def test_several_inputs_are_taken(x):
    batches = poisson((x, Y))
    assert batches.sampling.dataset_size == 20
    for spec in tf.nest.flatten(batches.element_spec):  # No inputs in one stack.
        assert spec.shape[0] is None


@pytest.mark.parametrize(
    "strings", [np.array(["a", "bc"] * 10, object), Frame(np.array(["a"] * 20, object))]
)
def test_arrays_of_objects_that_are_strings_are_taken(strings):
    assert poisson((strings, Y)).element_spec[0].dtype == tf.string
