"""Values that are given in the place of an argument, by name."""

import datetime
import decimal
import fractions

import numpy as np
import tensorflow as tf


class Plain:
    """An object of which nothing is known."""

    def __repr__(self):
        return "<an object>"


class Broken:
    """A sequence that fails when it is used."""

    def __len__(self):
        raise RuntimeError("The sequence is broken.")

    def __getitem__(self, index):
        raise RuntimeError("The sequence is broken.")

    def __repr__(self):
        return "<a broken sequence>"


def _no_arguments():
    return 1.0


def _five_arguments(a, b, c, d, e):
    return a


def _fails(*args, **kwargs):
    raise RuntimeError("The function fails.")


def _numbers(*shape, dtype="float32"):
    return np.arange(np.prod(shape), dtype="int64").reshape(shape).astype(dtype)


def _nan_rows():
    values = _numbers(40, 3)
    values[3, 1] = np.nan
    return values


# Made anew for each call: a call may change what it is given.
VALUES = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "zero": lambda: 0,
    "minus_one": lambda: -1,
    "half": lambda: 0.5,
    "minus_half": lambda: -0.5,
    "two_and_a_half": lambda: 2.5,
    "billion": lambda: 10**9,
    "two_to_63": lambda: 2**63,
    "beyond_floats": lambda: 10**400,
    "minus_beyond_floats": lambda: -(10**400),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "minus_inf": lambda: float("-inf"),
    "denormal": lambda: 5e-324,
    "largest": lambda: 1.7e308,
    "complex": lambda: 1j,
    "float16": lambda: np.float16(0.5),
    "numpy_bool": lambda: np.True_,
    "decimal_nan": lambda: decimal.Decimal("nan"),
    "decimal": lambda: decimal.Decimal("0.5"),
    "fraction": lambda: fractions.Fraction(1, 2),
    "text": lambda: "text",
    "empty_text": lambda: "",
    "number_text": lambda: "1",
    "nul_text": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "bytes": lambda: b"bytes",
    "empty_list": list,
    "empty_tuple": tuple,
    "empty_dict": dict,
    "empty_set": set,
    "list_of_none": lambda: [None],
    "list_of_nan": lambda: [float("nan")],
    "list_of_text": lambda: ["a", "b"],
    "list_of_lists": lambda: [[1], [1, 2]],
    "list_of_numbers": lambda: [3, 1, 2],
    "list_of_huge": lambda: [10**400],
    "deep_list": lambda: [[[[[[1.0]]]]]],
    "dict": lambda: {"a": 1},
    "nested_dict": lambda: {"a": {"b": [1, {"c": None}]}},
    "dict_with_number_keys": lambda: {1: 2},
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "object": Plain,
    "broken_sequence": Broken,
    "class": lambda: int,
    "exception": lambda: ValueError("a value"),
    "module": lambda: fractions,
    "date": lambda: datetime.date(2020, 1, 1),
    "no_arguments": lambda: _no_arguments,
    "five_arguments": lambda: _five_arguments,
    "fails": lambda: _fails,
    "scalar_array": lambda: np.array(3.0),
    "empty_array": lambda: np.zeros([0]),
    "empty_rows": lambda: np.zeros([0, 3], "float32"),
    "empty_columns": lambda: np.zeros([40, 0], "float32"),
    "vector": lambda: _numbers(40),
    "matrix": lambda: _numbers(40, 3),
    "rank_6": lambda: _numbers(2, 1, 2, 1, 2, 1),
    "nan_matrix": _nan_rows,
    "complex_matrix": lambda: _numbers(40, 3, dtype="complex64"),
    "bool_matrix": lambda: _numbers(40, 3) > 5,
    "text_matrix": lambda: _numbers(40, 3).astype(str),
    "bytes_vector": lambda: _numbers(40).astype("S"),
    "object_vector": lambda: np.array([None, 1, "a", []] * 10, object),
    "date_vector": lambda: np.zeros([40], "datetime64[s]"),
    "records": lambda: np.zeros([40], [("a", "f4"), ("b", "i4")]),
    "masked": lambda: np.ma.array(_numbers(40), mask=_numbers(40) > 30),
    "text_tensor": lambda: tf.constant(["a"] * 40),
    "complex_tensor": lambda: tf.zeros([40, 3], tf.complex64),
    "ragged_tensor": lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]),
    "sparse_tensor": lambda: tf.sparse.from_dense(tf.eye(4)),
    "dataset": lambda: tf.data.Dataset.range(3),
    "pair_of_lengths": lambda: (_numbers(40, 3), _numbers(30)),
    "complex_pair": lambda: (_numbers(40, 3, dtype="complex64"), _numbers(40, dtype="int64")),
    "text_pair": lambda: (_numbers(40, 3).astype(str), _numbers(40, dtype="int64")),
    "text_labels": lambda: (_numbers(40, 3), (_numbers(40) % 2).astype(str)),
    "one_hot_pair": lambda: (_numbers(40, 3), np.eye(2, dtype="float32")[np.arange(40) % 2]),
    "nan_labels": lambda: (_numbers(40, 3), np.full([40], np.nan, "float32")),
    "two_weights_pair": lambda: (_numbers(40, 3), _numbers(40, dtype="int64") % 2, _numbers(40, 2)),
    "text_weights_pair": lambda: (_numbers(40, 3), np.arange(40) % 2, np.array(["a"] * 40)),
    "four_parts": lambda: (_numbers(40, 3),) * 4,
}
