"""A label or id that is out of range makes no operation fail: its example adds nothing."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.loss_graph import loss_reader, out_of_range

layers = tf.keras.layers

ENGINES = [OnePassEngine, VectorizedEngine]
BAD = [3, 4, 5]


def embedding_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential(
        [
            layers.Input([5], dtype="int64"),
            layers.Embedding(7, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )


def ids_and_labels(n=20):
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, [n, 5]), rng.integers(0, 3, n)


def with_bad_ones(x, y):
    x, y = x.copy(), y.copy()
    x[3, 2], y[4], y[5] = 7, 3, -1
    return x, y


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_examples_out_of_range_add_nothing(engine, jit_compile):
    x, y = ids_and_labels()
    engine = engine(0.1)
    clipped = support.ClippedSum(engine, embedding_model(), x, jit_compile=jit_compile)
    mask = np.ones(len(y), bool)
    mask[BAD] = False
    without = clipped(x, y, mask)
    np.testing.assert_allclose(clipped(*with_bad_ones(x, y)), without, atol=1e-6)
    assert np.any(np.abs(clipped(x, y) - without) > 1e-3)
    if isinstance(engine, OnePassEngine):
        assert all(entry.fast for entry in engine.report().entries)


@pytest.mark.parametrize("engine", ENGINES)
def test_operations_that_are_not_guarded_are_caught(engine, monkeypatch):
    monkeypatch.setattr(out_of_range, "guard", lambda loss, depends_on_data: loss)
    x, y = ids_and_labels()
    clipped = support.ClippedSum(engine(0.1), embedding_model(), x)
    with pytest.raises(tf.errors.InvalidArgumentError):
        clipped(*with_bad_ones(x, y))


def guarded(compute, *arrays):
    """What a function of data computes, with its operations guarded; and whether any was."""

    @tf.function(input_signature=support.open_spec(list(arrays)), autograph=False)
    def run(*tensors):
        found = compute(*tensors)
        data = loss_reader.data_of(found)[1]
        return out_of_range.guard(found, lambda t: loss_reader.depends_on(t, data))

    names = [op.name for op in run.get_concrete_function().graph.get_operations()]
    return run(*arrays).numpy(), any("within_range" in name for name in names)


TABLE = np.arange(24.0).reshape([4, 3, 2]).astype("float32")
IDS = np.array([[0, 2], [1, 5], [2, -1], [0, 0]])

GATHERS = {
    "first axis": (lambda ids: tf.gather(TABLE, ids), 4),
    "second axis": (lambda ids: tf.gather(TABLE, ids, axis=1), 3),
    "last axis": (lambda ids: tf.gather(TABLE, ids, axis=-1), 2),
    "batch": (lambda ids: tf.gather(TABLE, ids, batch_dims=1), 3),
    "batch, last axis": (lambda ids: tf.gather(TABLE, ids, axis=2, batch_dims=1), 2),
    "one per row": (lambda ids: tf.gather(TABLE[:, 0], ids[:, 1], batch_dims=1), 2),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathers_of_all_shapes(name):
    compute, limit = GATHERS[name]
    found, changed = guarded(lambda ids: 1.0 * compute(ids), IDS)
    assert changed
    valid = np.isin(IDS, range(limit))
    right = compute(tf.constant(np.where(valid, IDS, 0))).numpy()
    nan = np.isnan(found)
    np.testing.assert_array_equal(found[~nan], right[~nan])
    marked = compute(tf.constant(IDS)).numpy() if valid.all() else None
    assert nan.any() == (marked is None)
    number = {"second axis": 4 * 2, "last axis": 4 * 3, "first axis": 3 * 2}.get(name)
    if number is not None:
        assert nan.sum() == (~valid).sum() * number


def test_a_loss_that_is_the_operation_itself_and_a_second_reading():
    def compute(y, logits):
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        data = loss_reader.data_of(loss)[1]
        first = out_of_range.guard(loss, lambda t: loss_reader.depends_on(t, data))
        again = out_of_range.guard(loss, lambda t: loss_reader.depends_on(t, data))
        assert first is again and first is not loss
        return loss

    found, _ = guarded(compute, np.array([0, 3]), np.zeros([2, 3], "float32"))
    np.testing.assert_allclose(found, [np.log(3), np.nan], rtol=1e-6)


SAFE = {
    "argmax": lambda x: tf.gather(TABLE[:3], tf.argmax(x, axis=1)),
    "bucket": lambda x: tf.gather(TABLE, tf.raw_ops.Bucketize(input=x, boundaries=[0.0, 1.0])),
    "byte": lambda x: tf.gather(tf.range(256.0), tf.cast(tf.cast(x, tf.uint8), tf.int32)),
    "positions": lambda x: x + tf.gather(TABLE[0], tf.constant([0, 1, 0])),
}


@pytest.mark.parametrize("name", SAFE)
def test_values_that_are_surely_in_range_cost_nothing(name):
    def compute(x):
        found = SAFE[name](x)
        return found[..., 0] if name == "positions" else found

    rows = np.ones([2, 3] if name != "positions" else [3, 2], "float32")
    assert not guarded(compute, rows)[1]


def test_tables_of_integers_are_looked_up_in_range():
    table = tf.range(10, 14)
    found, _ = guarded(lambda ids: tf.gather(table, ids) + 0, np.array([3, 4]))
    np.testing.assert_array_equal(found, [13, 10])


@pytest.mark.slow
@pytest.mark.parametrize("selective", [False, True])
def test_training_continues_over_a_bad_label(selective):
    x, y = support.small_data()
    y = y + 0
    y[0] = 7
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
    options = {"sampling": batches.sampling}
    model = support.small_model()
    if selective:
        test = {"validation_batch_size": 50, "validation_noise_multiplier": 1.0, "threshold": 9.0}
        model = tfdp.SelectiveModel(model)
        support.compiled(tfdp.DPSURSGD(1.0, 1.0, **options, **test), model)
    else:
        support.compiled(tfdp.DPSGD(1.0, 1.0, **options), model)
    model.fit(batches, verbose=0, **({"steps_per_epoch": 30} if selective else {"epochs": 15}))
    assert model.optimizer.released_steps() == ((30 if selective else 15), 0)
    assert np.all(np.isfinite(support.flat(model.trainable_variables)))
