import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support

layers = tf.keras.layers


class Centered(layers.Layer):
    """Mixes examples."""

    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)


def wrong():
    return tf.keras.Sequential(
        [
            layers.Conv2D(4, 3, input_shape=[8, 8, 1]),
            layers.BatchNormalization(name="b1"),
            layers.BatchNormalization(name="b2"),
            Centered(name="centered"),
            layers.Lambda(lambda x: x / tf.reduce_max(x), name="largest"),
            layers.Reshape([6, 24]),
            layers.LSTM(3, activation="relu", name="slow"),
            layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


def where(found, refused=True):
    return [finding.where for finding in found.findings if finding.refused == refused]


def test_problems_of_all_layers_and_of_the_loss_are_reported_together():
    found = tfdp.validate(wrong(), support.crossentropy())
    assert where(found) == [
        "layer 'b1' (BatchNormalization)",
        "layer 'b2' (BatchNormalization)",
        "layer 'centered' (Centered)",
        "layer 'largest' (Lambda)",
        "the loss",
    ]
    assert "replace_batch_normalization" in found.findings[0].remedy
    assert "`reduction` at its default" in found.findings[4].remedy
    with pytest.raises(ValueError, match=r"(?s)'b1'.*'b2'.*'centered'.*'largest'.*the loss"):
        found.check()


def recurrent():
    return tf.keras.Sequential([layers.Embedding(9, 4, input_length=5), layers.LSTM(3)])


def inference():
    base = tf.keras.Sequential([layers.Dense(4, input_shape=[4]), layers.BatchNormalization()])
    inputs = tf.keras.Input([4])
    return tf.keras.Model(inputs, layers.Dense(2)(base(inputs, training=False)))


def words():
    look_up = layers.StringLookup(output_mode="one_hot", input_shape=[1])
    look_up.adapt(np.array(["red", "blue"]))
    return tf.keras.Sequential([look_up, layers.Dense(2)])


def two_outputs():
    inputs = tf.keras.Input([4])
    outputs = {"a": layers.Dense(2, name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)}
    return tf.keras.Model(inputs, outputs)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (support.small_model, "sparse_categorical_crossentropy"),
        (support.small_model, "mse"),
        (support.small_model, tf.keras.losses.CategoricalCrossentropy(reduction="sum")),
        (support.small_model, None),
        (recurrent, "mae"),
        (inference, "mse"),
        (words, "mse"),
        (two_outputs, {"a": "mse", "b": "mae"}),
    ],
)
def test_what_trains_is_found_ok(make, loss):
    assert tfdp.validate(make(), loss).ok


def test_the_compiled_model_is_examined_with_its_loss():
    model = support.compiled("adam", loss=lambda y, p: tf.reduce_max(p))
    found = tfdp.validate(model)
    assert where(found) == ["the loss"] and "reduces" in found.findings[0].problem
    assert not tfdp.validate(model, "mse").notes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, 3])
def test_data_say_what_targets_are(n):
    data = np.zeros([5, 4], "float32"), np.zeros([5, n], "int32")

    def loss(y, p):
        assert y.shape[-1] == n and y.dtype == tf.int32
        return tf.reduce_mean(p, axis=-1)

    assert tfdp.validate(support.small_model(), loss, data=data).ok
    batches = tfdp.data.poisson_batches(data, expected_batch_size=2)
    assert tfdp.validate(support.small_model(), loss, data=batches).ok


@pytest.mark.parametrize(
    ("loss", "shape"),
    [("sparse_categorical_crossentropy", [3]), ("categorical_crossentropy", [])],
)
def test_targets_that_do_not_fit_the_loss(loss, shape):
    data = np.zeros([5, 4], "float32"), np.zeros([5, *shape], "int32")
    (finding,) = tfdp.validate(support.small_model(), loss, data=data).findings
    assert finding.where == "the loss" and "Give targets of the shape" in finding.remedy
    assert f"of targets {(5, *shape)}" in finding.problem
    assert "outputs (5, 3)" in finding.problem


def test_stateful_recurrent_layers():
    inputs = tf.keras.Input(batch_shape=[4, 5, 2])
    model = tf.keras.Model(inputs, layers.LSTM(3, stateful=True, name="memory")(inputs))
    (finding,) = tfdp.validate(model, "mse").findings
    assert finding.where == "layer 'memory' (LSTM)" and "stateful=False" in finding.remedy


def test_subclassed_models():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers.BatchNormalization(), Centered()

        def call(self, x):
            return self.second(self.first(x))

    model = Own()
    with pytest.raises(ValueError, match="call it on a batch"):
        tfdp.validate(model)
    model(np.zeros([2, 3], "float32"))
    assert len(where(tfdp.validate(model, "mse"))) == 2


def test_mixing_in_the_call_of_a_model_itself():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x - tf.reduce_mean(x, axis=0))

        def train_step(self, data):
            return super().train_step(data)

    model = Own()
    model(np.zeros([2, 3], "float32"))
    found = tfdp.validate(model, "mse")
    assert where(found) == ["the model"] and "mixes examples" in found.findings[0].problem
    assert "`train_step` of Own is not examined" in str(found)


def test_side_effects_of_the_step():
    def printing(x):
        tf.print(tf.reduce_sum(x))
        return x

    model = tf.keras.Sequential([layers.Dense(2, input_shape=[3]), layers.Lambda(printing)])
    assert not tfdp.validate(model, "mse").ok


def test_slow_layers_have_a_remedy():
    class Unknown(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", [shape[-1]])

        def call(self, x):
            w = self.w.value()
            return x * tf.where(x > 0, w, w)

    model = tf.keras.Sequential([layers.Dense(3, input_shape=[4]), Unknown(name="unknown")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tfdp.validate(model, "mse")
    assert found.ok and len(where(found, refused=False)) == 1
    assert (
        "'unknown'" in found.findings[0].where
        and "register_op_gradients" in found.findings[0].remedy
    )


def test_mixed_float16_and_eager_execution():
    model = tf.keras.Sequential([layers.Dense(2, input_shape=[3], dtype="mixed_float16")])
    model.compile("sgd", "mse", run_eagerly=True)
    assert {"the policy mixed_float16", "run_eagerly"} <= set(where(tfdp.validate(model)))


def test_nothing_of_the_model_changes():
    model = support.small_model()
    before = model.get_weights()
    tfdp.validate(model, "mse")
    assert not model.losses and model.optimizer is None
    np.testing.assert_array_equal(np.concatenate(before, None), np.concatenate(model.weights, None))


def test_models_of_keras_3():
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"Models of Keras 3 .* have `tfdp\.keras3`"):
        tfdp.validate(model, "mse")
