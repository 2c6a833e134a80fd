import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support

X, Y = support.small_data(20)


def poisson(*data, **kwargs):
    return tfdp.data.poisson_batches(*data, expected_batch_size=2, **kwargs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((tf.ragged.constant([[1, 2], [3]]), [0, 1]), r"RaggedTensor .* use `x.to_tensor\(\)`"),
        ((tf.sparse.from_dense(X), Y), r"SparseTensor .* use `tf.sparse.to_dense\(x\)`"),
        (([[1, 2], [3]], [0, 1]), r"a list of numbers, \[1, 2\]: use `np.array"),
        ((X.tolist(), Y), r"a list of numbers, .*, \.\.\.\]: use `np.array"),
        ((X, Y.tolist()), "a list of numbers"),
        (({"a": X.tolist()}, Y), "a list of numbers"),
        ((np.array([[1], [2, 3]], dtype=object), Y[:2]), r"of type object and shape \(2,\)"),
    ],
)
def test_data_of_other_kinds_are_refused_with_advice(data, message):
    with pytest.raises(ValueError, match=message) as error:
        poisson(data)
    assert len(str(error.value)) < 400


def test_two_arguments():
    with pytest.raises(TypeError, match=r"one pair: `poisson_batches\(\(x, y\), "):
        poisson(X, Y)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batched_datasets_have_other_units_of_privacy(drop_remainder):
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    batched = examples.batch(5, drop_remainder=drop_remainder).prefetch(1)
    with pytest.raises(ValueError, match=r"single examples, the unit of privacy.* `unbatch\(\)`"):
        poisson(batched)
    assert poisson(batched.unbatch()).sampling.dataset_size == 20
    assert poisson(examples.shuffle(5)).sampling.dataset_size == 20


@pytest.mark.parametrize("x", [(X, X), [X, X], {"a": X}, X.tolist() and X])
def test_several_inputs_are_taken(x):
    assert poisson((x, Y)).sampling.dataset_size == 20
