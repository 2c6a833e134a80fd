"""Examples that are dicts, of which features and label are chosen."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.data import columns

N = 90
A = np.arange(N * 4, dtype="float32").reshape([N, 4]) / 100
B = np.arange(N * 2, dtype="float32").reshape([N, 2])
Y = np.arange(N) % 3


class Records:
    """Examples as data sources of TFDS give them."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"a": A[index], "b": B[index], "y": Y[index], "id": f"example {index}"}


class ManyRecords(Records):
    """Examples as Hugging Face's data sets give them."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def table():
    return {"a": A, "b": B, "y": Y}


def dataset():
    return tf.data.Dataset.from_tensor_slices(table())


SOURCES = {
    "records": Records,
    "many records": ManyRecords,
    "list": lambda: [Records()[i] for i in range(N)],
    "dict": table,
    "tf.data": dataset,
}


def drawn(data, **kwargs):
    batches = tfdp.data.poisson_batches(data, expected_batch_size=20, seed=3, **kwargs)
    return [tf.nest.map_structure(np.asarray, batch) for batch in batches.take(3)]


def assert_same(found, expected):
    tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SOURCES)
def test_one_feature_is_the_input(name):
    assert_same(drawn(SOURCES[name](), features="a", label="y"), drawn((A, Y)))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SOURCES)
def test_several_features_are_a_dict(name):
    found = drawn(SOURCES[name](), features=["b", "a"], label="y")
    assert_same(found, drawn(({"a": A, "b": B}, Y)))


def test_the_features_of_another_example_are_caught(monkeypatch):
    """Mutant: the label is of the next example."""

    def shifted(self, index):
        x, _ = columns._picked(self._items[index], "a", "y")
        return x, self._items[(index + 1) % N]["y"]

    monkeypatch.setattr(columns.Columns, "__getitem__", shifted)
    with pytest.raises(AssertionError):
        test_one_feature_is_the_input("records")


def test_written_examples(tmp_path):
    tfdp.data.write_examples(dataset(), tmp_path, features=["a", "b"], label="y")
    assert_same(drawn(tfdp.data.read_examples(tmp_path)), drawn(({"a": A, "b": B}, Y)))


def test_replicas():
    batches = tfdp.data.distributed_poisson_batches(
        support.mirrored(1),
        lambda index, count: Records(),
        dataset_size=N,
        expected_batch_size=20,
        features="a",
        label="y",
    )
    x, y = next(iter(batches))
    assert x.shape[1:] == [4]
    assert y.shape[1:] == []


@pytest.mark.slow
def test_one_call():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
    model, batches, budget = tfdp.make_private(
        model,
        Records(),
        features="a",
        label="y",
        epochs=1,
        target_epsilon=2.0,
        batch_size=20,
        loss=support.crossentropy(),
        verbose=False,
    )
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 4


@pytest.mark.slow
def test_training_on_several_features():
    inputs = {"a": tf.keras.Input([4], name="a"), "b": tf.keras.Input([2], name="b")}
    joined = tf.keras.layers.Concatenate()(list(inputs.values()))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(joined))
    batches = tfdp.data.poisson_batches(
        Records(), expected_batch_size=20, features=["a", "b"], label="y"
    )
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    support.compiled(optimizer, model).fit(batches, verbose=0)
    assert optimizer.released_steps() == (4, 0)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("features", "label", "message"),
    [
        ("image", "y", r"`features` must name what the examples have: \['a', 'b'.*'image'"),
        (["a", "image"], "y", r"`features` must name what the examples have"),
        ("a", "target", r"`label` must name what the examples have: .*'target'"),
        ("a", 3, "`label` must be the name of the target, or None"),
        (None, "y", "`features` must be the name of a feature"),
        ([], "y", "`features` must be the name of a feature"),
        (["a", "a"], "y", "list of different names"),
        (3, "y", "`features` must be the name of a feature"),
    ],
)
def test_unknown_names_are_refused(name, features, label, message):
    with pytest.raises(ValueError, match=message):
        drawn(SOURCES[name](), features=features, label=label)


@pytest.mark.parametrize("data", [(A, Y), 3, [], tf.data.Dataset.from_tensor_slices((A, Y))])
def test_names_are_for_dicts(data):
    with pytest.raises(ValueError, match="data whose examples are dicts"):
        drawn(data, features="a", label="y")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SOURCES)
def test_features_without_a_label_are_examples_without_labels(name):
    assert_same(drawn(SOURCES[name](), features="a"), drawn(A))
    assert_same(drawn(SOURCES[name](), features=["a", "b"]), drawn({"a": A, "b": B}))


@pytest.mark.parametrize("name", ["records", "many records", "dict", "tf.data"])
def test_dicts_without_names_are_inputs(name):
    for batch in drawn(SOURCES[name]()):
        assert set(batch) >= {"a", "b", "y"}
        rows = batch["b"][:, 0].astype(int) // 2
        np.testing.assert_array_equal(batch["a"], A[rows])


def test_an_example_without_the_feature_is_named():
    class Broken(Records):
        def __getitem__(self, index):
            return super().__getitem__(index) if index < 50 else {"y": 1}

    with pytest.raises(tf.errors.OpError, match=r"Example \d+ could not be read: KeyError\('a'\)"):
        drawn(Broken(), features="a", label="y")
