import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.models import batch_normalization

layers = tf.keras.layers


def convolutions():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            layers.Conv2D(16, 3, input_shape=[8, 8, 1], use_bias=False),
            layers.BatchNormalization(epsilon=1e-4, name="bn"),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(12),
            layers.BatchNormalization(scale=False),
            layers.Dense(3),
        ]
    )


def residual():
    inputs = tf.keras.Input([6, 6, 8])
    normalize = layers.BatchNormalization(name="shared")
    a = normalize(layers.Conv2D(8, 3, padding="same")(inputs))
    b = normalize(a * 2.0 + inputs)
    return tf.keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.add([a, b]))))


def nested():
    inputs = tf.keras.Input([8, 8, 1])
    return tf.keras.Model(inputs, layers.Softmax()(convolutions()(inputs)))


def images(shape, n=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, *shape)).astype("float32"), rng.integers(0, 3, n)


def values(model):
    """The values of all weights but moving statistics, in an order of their own."""
    return sorted(v.numpy().tobytes() for v in model.variables if "moving" not in v.name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [convolutions, residual, nested])
@pytest.mark.parametrize("by", ["group", "frozen"])
def test_the_model_trains_and_has_the_weights(make, by):
    model = make()
    for v in model.variables:
        v.assign(tf.random.uniform(v.shape, 0.5, 1.5, seed=3))
    new = tfdp.replace_batch_normalization(model, by)
    assert new.name == model.name
    assert values(new) == values(model)
    x, y = images(model.input_shape[1:])
    if by == "frozen":
        np.testing.assert_array_equal(new(x, training=True), model(x, training=False))
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=20)
    optimizer = tfdp.DPSGD(1.0, 1.0, learning_rate=0.1, sampling=batches.sampling)
    support.compiled(optimizer, new).fit(batches, verbose=0)
    assert optimizer.clipping.report().fast_fraction == 1


def test_outputs_follow_from_the_example_alone():
    new, (x, _) = tfdp.replace_batch_normalization(convolutions()), images([8, 8, 1])
    np.testing.assert_allclose(new(x, training=True)[:1], new(x[:1], training=True), atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "has_positions", "groups"),
    [(64, True, 16), (16, True, 4), (256, True, 32), (96, True, 24), (7, True, 1), (64, False, 1)],
)
def test_number_of_groups(channels, has_positions, groups):
    assert batch_normalization.number_of_groups(channels, has_positions) == groups


def test_layers_in_inference_mode_are_left():
    base = convolutions()
    inputs = tf.keras.Input([8, 8, 1])
    model = tf.keras.Model(inputs, layers.BatchNormalization()(base(inputs, training=False)))
    new = tfdp.replace_batch_normalization(model)
    kinds = [type(layer).__name__ for layer in new._flatten_layers(include_self=False)]
    assert kinds.count("BatchNormalization") == 2 and kinds.count("GroupNormalization") == 1
    x, _ = images([8, 8, 1])
    inner = next(layer for layer in new.layers if isinstance(layer, tf.keras.Sequential))
    np.testing.assert_array_equal(inner(x), base(x))


def test_frozen_layers_are_left():
    model = convolutions()
    model.layers[1].trainable = False
    new = tfdp.replace_batch_normalization(model)
    assert isinstance(new.layers[1], layers.BatchNormalization) and not new.layers[1].trainable
    assert isinstance(new.layers[5], layers.GroupNormalization)


def test_time_distributed():
    model = tf.keras.Sequential(
        [layers.TimeDistributed(layers.BatchNormalization(), input_shape=[5, 8]), layers.Dense(2)]
    )
    new = tfdp.replace_batch_normalization(model)
    assert isinstance(new.layers[0].layer, layers.GroupNormalization)
    assert new(np.zeros([2, 5, 8], "float32")).shape == (2, 5, 2)


def test_subclassed_models_are_refused_with_advice():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.normalize = layers.BatchNormalization()

        def call(self, x):
            return self.normalize(x)

    model = Own()
    model(np.zeros([2, 3], "float32"))
    with pytest.raises(ValueError, match=r"a Own with a `call` of its own. Use tf.keras.layers.Gr"):
        tfdp.replace_batch_normalization(model)


def test_layers_that_make_their_own_are_refused_by_name():
    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.normalize = layers.BatchNormalization(name="within")

        def call(self, x):
            return self.normalize(x)

    model = tf.keras.Sequential([layers.Dense(3, input_shape=[3]), Block(name="block")])
    with pytest.raises(ValueError, match=r"'block' \(Block\), which makes 'within' itself"):
        tfdp.replace_batch_normalization(model)


@pytest.mark.parametrize(
    ("model", "by", "message"),
    [
        (convolutions, "layer", "'group' or 'frozen'"),
        (object, "group", "a model of Keras 2"),
        (lambda: tf.keras.Sequential([layers.Dense(2)]), "group", "must be built"),
    ],
)
def test_arguments(model, by, message):
    with pytest.raises(ValueError, match=message):
        tfdp.replace_batch_normalization(model(), by)
