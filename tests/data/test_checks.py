import types

import numpy as np
import pytest
import scipy.sparse
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


class Examples:
    """A part of a data set, as those of Hugging Face."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"a": X[index]}


class Table(Examples):
    """A table of PyArrow, whose items are columns."""

    column_names = ("a",)


Table.__module__ = "pyarrow.lib"


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
        (Frame(np.array([[1, "a"]] * 20, object)), r"Frame of type object.*`dict\(x\)`"),
        (tf.ragged.constant([[1, 2], [3]]), r"RaggedTensor .* use `x.to_tensor\(\)`"),
        (scipy.sparse.csr_matrix(X), r"csr_matrix .* use `x.toarray\(\)`"),
        ((scipy.sparse.coo_array(X), Y), r"coo_array .* use `x.toarray\(\)`"),
        ({"a": scipy.sparse.csr_matrix(X)}, r"use `x.toarray\(\)`"),
        (np.array([[1], [2, 3]], dtype=object), r"of type object and shape \(2,\)"),
        (np.array(["2030-01-01"] * 20, "datetime64[D]"), r"type datetime64\[D\].*`astype`"),
        (X.tolist(), r"list of length 20.*A list is no array: use `np.array\(...\)`"),
        ([1.0, 2.0], r"a list of numbers, \[1.0, 2.0\]: use `np.array"),
        (["a"] * 20, "a list of strings"),
        (np.array(["a", None] * 10, object), "misses values .*leave out these examples"),
        ((Frame(np.array(["a", np.nan] * 10, object)), Y), "misses values"),
        (([None, "a"] * 10, Y), "misses values"),
        (
            tf.data.Dataset.from_tensor_slices((X, Y)).repeat(),
            "an infinite one.*leave out `repeat`",
        ),
        ([(X, Y)] * 20, "of a list of examples, stack each part"),
        ((X, None), "no None: data without labels are `x`"),
        ((X, None, Y), "no None.*Weights follow labels"),
        ({"a": X, "b": None}, "no None"),
        ((list(X),), r"a list of 20 arrays of 4 rows: .*`np.stack\(...\)`"),
        ({"a": list(X)}, "a list of 20 arrays"),
        ((list(X), Y), "a list of 20 arrays"),
        (np.rec.fromarrays([X[:, 0], Y], names="a,b"), r"type \(numpy.record.*`astype`"),
        (
            {"train": tf.data.Dataset.range(3), "test": tf.data.Dataset.range(3)},
            "Received a _RangeDataset in it: choose a split",
        ),
        ({"train": Examples(), "test": Examples()}, "Received a Examples in it: choose a split"),
        (Table(), r"Received a Table of PyArrow: use `x.to_pandas\(\)`"),
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
        assert poisson(data).sampling.dataset_size == 4  # There are 20 examples.


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
        poisson(batched.map(lambda x, y: (x / 2, y)))  # Each may seem one example.
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


class Tensor:
    """A tensor of another library: NumPy can read it."""

    __array_priority__ = 1000

    def __init__(self, values):
        self._values, self.shape, self.dtype = values, values.shape, values.dtype

    def __len__(self):
        return len(self._values)

    def __getitem__(self, index):
        return Tensor(self._values[index])

    def __array__(self, dtype=None, copy=None):
        return self._values


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Tensor(X), X),
        ((Tensor(X), Tensor(Y)), (X, Y)),
        ((X, range(20)), (X, np.arange(20))),
        ({"a": Frame(X), "b": [Tensor(X), Y]}, {"a": X, "b": (X, Y)}),
        (types.MappingProxyType({"a": X}), {"a": X}),
    ],
)
def test_arrays_of_other_libraries_become_arrays(data, expected):
    found = checks.arrays_of(data)
    tf.nest.assert_same_structure(found, expected)
    for one, wanted in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, wanted)
    assert poisson(data).sampling.dataset_size == 20


def test_sources_and_arrays_on_disk_stay_as_they_are():
    source = Examples()
    assert checks.arrays_of(source) is source
    memory_map = X.view(np.memmap)
    assert checks.arrays_of({"a": memory_map})["a"] is memory_map


def test_complex_data_are_refused_unless_a_transform_makes_them_real():
    x, y = np.zeros([40, 3], "complex64"), np.arange(40) % 2
    with pytest.raises(ValueError, match=r"`data` must hold real numbers. Received: .*complex64"):
        tfdp.data.poisson_batches((x, y), expected_batch_size=10)
    batches = tfdp.data.poisson_batches(
        (x, y), expected_batch_size=10, transform=lambda x, y: (tf.abs(x), y)
    )
    assert batches.element_spec[0].dtype == tf.float32
