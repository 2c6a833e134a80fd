import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both

pytestmark = with_both


def small_model(keras):
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    )


def centered(keras, **kwargs):
    """A layer that mixes examples."""

    class Centered(keras.layers.Layer):
        def call(self, x):
            return x - tf.reduce_mean(x, axis=0)

    return Centered(**kwargs)


def wrong(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(name="b1"),
            layers.BatchNormalization(name="b2"),
            centered(keras, name="centered"),
            layers.Lambda(lambda x: x / tf.reduce_max(x), output_shape=(6, 6, 4), name="largest"),
            layers.Reshape([6, 24]),
            layers.LSTM(3, activation="relu", name="slow"),
            layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


def where(found, refused=True):
    return [finding.where for finding in found.findings if finding.refused == refused]


@pytest.mark.quick_cases(1)
def test_problems_of_all_layers_and_of_the_loss_are_reported_together(front):
    loss = front.crossentropy("none")
    found = front.tfdp.validate(wrong(front.keras), loss)
    assert where(found) == [
        "layer 'b1' (BatchNormalization)",
        "layer 'b2' (BatchNormalization)",
        "layer 'centered' (Centered)",
        "layer 'largest' (Lambda)",
        "the loss",
    ]
    assert f"= {front.part}.replace_batch_normalization(model)" in found.findings[0].remedy
    assert "`reduction` at its default" in found.findings[4].remedy
    with pytest.raises(ValueError, match=r"(?s)'b1'.*'b2'.*'centered'.*'largest'.*the loss"):
        found.check()


def recurrent(keras):
    inputs = keras.Input([5], dtype="int32")
    return keras.Model(inputs, keras.layers.LSTM(3)(keras.layers.Embedding(9, 4)(inputs)))


def inference(keras, *more):
    layers = keras.layers
    base = keras.Sequential(
        [keras.Input([4]), layers.Dense(4), layers.BatchNormalization(name="inner")]
    )
    inputs = keras.Input([4])
    outputs = base(inputs, training=False)
    for layer in (layers.Dense(2), *more):
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def words(keras):
    look_up = keras.layers.StringLookup(output_mode="one_hot")
    look_up.adapt(np.array(["red", "blue"]))
    inputs = keras.Input([1], dtype="string")
    return keras.Model(inputs, keras.layers.Dense(2)(look_up(inputs)))


def two_outputs(keras):
    inputs, dense = keras.Input([4]), keras.layers.Dense
    return keras.Model(inputs, {"a": dense(2, name="a")(inputs), "b": dense(1, name="b")(inputs)})


def called(keras):
    """A model that was called, and has no inputs of its own."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(4), keras.layers.Dropout(0.5)

        def call(self, inputs, training=False):
            return self.second(self.first(inputs["x"]), training=training)

    model = Own()
    model({"x": np.zeros([2, 3], "float32")})
    return model


def sums(keras):
    return keras.losses.CategoricalCrossentropy(reduction="sum")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (small_model, lambda _: "sparse_categorical_crossentropy"),
        (small_model, lambda _: "mse"),
        (small_model, sums),
        (small_model, lambda _: None),
        (recurrent, lambda _: "mae"),
        (words, lambda _: "mse"),
        (two_outputs, lambda _: {"a": "mse", "b": "mae"}),
        (called, lambda _: "mse"),
    ],
)
def test_what_trains_is_found_ok(front, make, loss):
    assert front.tfdp.validate(make(front.keras), loss(front.keras)).ok


@pytest.mark.quick_cases(1)
def test_layers_in_inference_mode_are_not_blamed(front):
    # Keras 3 gives layers the mode of the whole model.
    blamed = [] if front.keras is tf.keras else ["layer 'inner' (BatchNormalization)"]
    assert where(front.tfdp.validate(inference(front.keras), "mse")) == blamed
    model = inference(front.keras, centered(front.keras, name="centered"))
    blamed.append("layer 'centered' (Centered)")
    assert where(front.tfdp.validate(model, "mse")) == blamed


@pytest.mark.quick_cases(1)
def test_the_compiled_model_is_examined_with_its_loss(front):
    model = small_model(front.keras)
    model.compile("adam", loss=lambda y, p: tf.reduce_max(p))
    found = front.tfdp.validate(model)
    assert where(found) == ["the loss"] and "reduces" in found.findings[0].problem
    assert not front.tfdp.validate(model, "mse").notes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n", [1, 3])
def test_data_say_what_targets_are(front, n):
    data = np.zeros([5, 4], "float32"), np.zeros([5, n], "int32")

    def loss(y, p):
        assert y.shape[-1] == n
        return tf.reduce_mean(p, axis=-1)

    assert front.tfdp.validate(small_model(front.keras), loss, data=data).ok
    batches = tfdp.data.poisson_batches(data, expected_batch_size=2)
    assert front.tfdp.validate(small_model(front.keras), loss, data=batches).ok


@pytest.mark.quick_cases(1)
def test_targets_that_are_texts(front):
    data = np.zeros([5, 4], "float32"), np.array(["a", "b", "a", "b", "a"])
    loss = "sparse_categorical_crossentropy"
    (finding,) = front.tfdp.validate(small_model(front.keras), loss, data=data).findings
    assert "targets that are texts" in finding.problem and "Number the classes" in finding.remedy


@pytest.mark.quick_cases(1)
def test_inputs_that_are_texts(front):
    data = np.full([5, 4], "a"), np.zeros([5], "int32")
    loss = "sparse_categorical_crossentropy"
    (finding,) = front.tfdp.validate(small_model(front.keras), loss, data=data).findings
    assert "inputs that are texts" in finding.problem and finding.refused
    count = front.keras.layers.TextVectorization(output_mode="count", vocabulary=["a", "b"])
    model = front.keras.Sequential(
        [front.keras.Input([], dtype="string"), count, front.keras.layers.Dense(3)]
    )
    # The row on which the second model is called is shorter than its texts may be.
    third = front.keras.layers.Lambda(lambda x: tf.strings.to_number(tf.strings.substr(x, 2, 1)))
    short = front.keras.Sequential(
        [front.keras.Input([4], dtype="string"), third, front.keras.layers.Dense(3)]
    )
    for reads_texts, texts in ((model, ["a"] * 5), (short, [["ab1"] * 4] * 5)):
        found = front.tfdp.validate(reads_texts, loss, data=(np.array(texts), data[1]))
        assert "inputs that are texts" not in str(found)


def test_data_that_are_no_examples_are_named(front):
    model = small_model(front.keras)
    for data in (0.5, "a", [3, 1]):
        with pytest.raises(ValueError, match=r"Argument `data` must be .* Received: data="):
            front.tfdp.validate(model, "mse", data=data)
    data = np.zeros([5, 4], "complex64"), np.zeros([5])
    with pytest.raises(ValueError, match=r"`data` must hold real numbers. Received: .* complex64"):
        front.tfdp.validate(model, "mse", data=data)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("loss", "shape"),
    [("sparse_categorical_crossentropy", [3]), ("categorical_crossentropy", [])],
)
def test_targets_that_do_not_fit_the_loss(front, loss, shape):
    data = np.zeros([5, 4], "float32"), np.zeros([5, *shape], "int32")
    (finding,) = front.tfdp.validate(small_model(front.keras), loss, data=data).findings
    assert finding.where == "the loss" and "Give targets of the shape" in finding.remedy
    assert f"of targets {(5, *shape)}" in finding.problem
    assert "outputs (5, 3)" in finding.problem


@pytest.mark.quick_cases(1)
def test_stateful_recurrent_layers(front):
    inputs = front.keras.Input(batch_shape=[4, 5, 2])
    memory = front.keras.layers.LSTM(3, stateful=True, name="memory")
    model = front.keras.Model(inputs, memory(inputs))
    (finding,) = front.tfdp.validate(model, "mse").findings
    assert finding.where == "layer 'memory' (LSTM)" and "stateful=False" in finding.remedy


@pytest.mark.quick_cases(1)
def test_subclassed_models(front):
    class Own(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.first = front.keras.layers.BatchNormalization()
            self.second = centered(front.keras)

        def call(self, x):
            return self.second(self.first(x))

    model = Own()
    with pytest.raises(ValueError, match="call it on a batch"):
        front.tfdp.validate(model)
    model(np.zeros([2, 3], "float32"))
    assert len(where(front.tfdp.validate(model, "mse"))) == 2


@pytest.mark.quick_cases(1)
def test_mixing_in_the_call_of_a_model_itself(front):
    class Own(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = front.keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x - tf.reduce_mean(x, axis=0))

        def train_step(self, data):
            return super().train_step(data)

    model = Own()
    model(np.zeros([2, 3], "float32"))
    found = front.tfdp.validate(model, "mse")
    assert where(found) == ["the model"] and "mixes examples" in found.findings[0].problem
    assert "`train_step` of Own is not examined" in str(found)


@pytest.mark.quick_cases(1)
def test_side_effects_of_the_step(front):
    def printing(x):
        tf.print(tf.reduce_sum(x))
        return x

    layers = front.keras.layers
    model = front.keras.Sequential(
        [front.keras.Input([3]), layers.Dense(2), layers.Lambda(printing, output_shape=(2,))]
    )
    assert not front.tfdp.validate(model, "mse").ok


@pytest.mark.quick_cases(1)
def test_slow_layers_have_a_remedy(front):
    class Unknown(front.keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=[shape[-1]])

        def call(self, x):
            w = tf.convert_to_tensor(self.w)
            return x * tf.where(x > 0, w, w)

    model = front.keras.Sequential(
        [front.keras.Input([4]), front.keras.layers.Dense(3), Unknown(name="unknown")]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = front.tfdp.validate(model, "mse")
    assert found.ok and len(where(found, refused=False)) == 1
    (finding,) = found.findings
    assert "of layer 'unknown' (Unknown)" in finding.where
    assert f"of `{front.name}.layers` with" in finding.remedy
    assert "register_op_gradients" in finding.remedy


@pytest.mark.quick_cases(1)
def test_mixed_float16_and_eager_execution(front):
    model = front.keras.Sequential(
        [front.keras.Input([3]), front.keras.layers.Dense(2, dtype="mixed_float16")]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    found = front.tfdp.validate(model)
    assert {"the policy mixed_float16", "run_eagerly"} <= set(where(found))


@pytest.mark.quick_cases(1)
def test_nothing_of_the_model_changes(front):
    model = small_model(front.keras)
    before = model.get_weights()
    layer = model.layers[-1]
    own = vars(layer)["call"] = layer.call  # As another wrapper sets it.
    front.tfdp.validate(model, "mse")
    assert not model.losses and getattr(model, "optimizer", None) is None
    assert vars(layer)["call"] is own
    assert all("call" not in vars(layer) for layer in model.layers[:-1])
    np.testing.assert_array_equal(
        np.concatenate(before, None), np.concatenate(model.get_weights(), None)
    )


@pytest.mark.skipif(len(FRONT_ENDS) < 2, reason="Keras 3 is not installed")
def test_models_of_the_other_keras_are_refused(front):
    other = next(each for each in FRONT_ENDS if each is not front)
    with pytest.raises(ValueError, match=r"Models of Keras . .*have"):
        front.tfdp.validate(small_model(other.keras), "mse")


@pytest.mark.quick_cases(1)
def test_one_line_for_all_layers_with_the_same_problem(front):
    layers = front.keras.layers
    stack = [layer for _ in range(9) for layer in (layers.Dense(4), layers.BatchNormalization())]
    model = front.keras.Sequential([front.keras.Input([3]), *stack, layers.Dense(1)])
    found = front.tfdp.validate(model, "mse")
    assert len(found.findings) == 9
    with pytest.raises(ValueError) as caught:
        found.check()
    for text in (str(caught.value), str(found)):
        assert text.count("replace_batch_normalization") == 1 and "and 6 more: it keeps" in text
        assert all(str(finding.where) in text for finding in found.findings[:3])
