import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both
from tfdp.training import batch_normalization

pytestmark = with_both


def convolutions(keras):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(epsilon=1e-4, name="bn"),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(12),
            layers.BatchNormalization(scale=False),
            layers.Dense(3),
        ]
    )


def residual(keras):
    layers = keras.layers
    inputs = keras.Input([6, 6, 8])
    normalize = layers.BatchNormalization(name="shared")
    a = normalize(layers.Conv2D(8, 3, padding="same")(inputs))
    b = normalize(a * 2.0 + inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.add([a, b]))))


def nested(keras):
    inputs = keras.Input([8, 8, 1])
    return keras.Model(inputs, keras.layers.Softmax()(convolutions(keras)(inputs)))


def images(shape, n=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, *shape)).astype("float32"), rng.integers(0, 3, n)


def values(model):
    """The values of all weights but moving statistics, in an order of their own."""
    return sorted(v.numpy().tobytes() for v in model.variables if "moving" not in v.name)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "by"),
    [
        (convolutions, "group"),
        (residual, "group"),
        (nested, "frozen"),
        (residual, "frozen"),
        (nested, "group"),
    ],
)
def test_the_model_trains_and_has_the_weights(front, make, by):
    model = make(front.keras)
    for v in model.variables:
        v.assign(tf.random.uniform(v.shape, 0.5, 1.5, seed=3))
    new = front.tfdp.replace_batch_normalization(model, by)
    assert new.name == model.name
    assert values(new) == values(model)
    x, y = images(model.input_shape[1:])
    if by == "frozen":
        np.testing.assert_array_equal(new(x, training=True), model(x, training=False))
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=20)
    optimizer = front.tfdp.DPSGD(1.0, 1.0, learning_rate=0.1, sampling=batches.sampling)
    new.compile(optimizer, front.crossentropy())
    new.fit(batches, verbose=0)
    assert optimizer.clipping.report().fast_fraction == 1


def test_outputs_follow_from_the_example_alone(front):
    new = front.tfdp.replace_batch_normalization(convolutions(front.keras))
    x, _ = images([8, 8, 1])
    np.testing.assert_allclose(new(x, training=True)[:1], new(x[:1], training=True), atol=1e-5)


def test_layers_in_inference_mode_are_left_where_training_leaves_them(front):
    keras = front.keras
    base = convolutions(keras)
    inputs = keras.Input([8, 8, 1])
    outputs = keras.layers.BatchNormalization()(base(inputs, training=False))
    model = keras.Model(inputs, outputs)
    x, _ = images([8, 8, 1])
    moving = base.get_layer("bn").moving_mean.numpy().copy()
    model(x, training=True)
    asleep = np.array_equal(moving, base.get_layer("bn").moving_mean.numpy())
    assert asleep == (keras is tf.keras)  # Keras 3 gives layers the mode of the whole model.
    new = front.tfdp.replace_batch_normalization(model)
    kinds = [type(layer).__name__ for layer in new._flatten_layers(include_self=False)]
    expected = (2, 1) if asleep else (0, 3)
    assert (kinds.count("BatchNormalization"), kinds.count("GroupNormalization")) == expected
    if asleep:
        inner = next(layer for layer in new.layers if isinstance(layer, keras.Sequential))
        np.testing.assert_array_equal(inner(x), base(x))


def test_frozen_layers_are_left(front):
    model = convolutions(front.keras)
    model.layers[1].trainable = False
    new = front.tfdp.replace_batch_normalization(model)
    assert isinstance(new.layers[1], front.keras.layers.BatchNormalization)
    assert not new.layers[1].trainable
    assert isinstance(new.layers[5], front.keras.layers.GroupNormalization)


def test_time_distributed(front):
    layers = front.keras.layers
    model = front.keras.Sequential(
        [
            front.keras.Input([5, 8]),
            layers.TimeDistributed(layers.BatchNormalization()),
            layers.Dense(2),
        ]
    )
    new = front.tfdp.replace_batch_normalization(model)
    assert isinstance(new.layers[0].layer, layers.GroupNormalization)
    assert new(np.zeros([2, 5, 8], "float32")).shape == (2, 5, 2)


def test_the_copy_is_not_compiled_and_the_model_stays_as_it_is(front):
    keras = front.keras
    model = convolutions(keras)
    model.compile("adam", lambda y, p: y - p)
    before = [len(layer._inbound_nodes) for layer in model.layers]
    new = front.tfdp.replace_batch_normalization(model)
    assert not getattr(new, "compiled", False) and getattr(new, "optimizer", None) is None
    assert model.optimizer is not None and getattr(model, "compiled", True)
    assert not {id(v) for v in new.variables} & {id(v) for v in model.variables}
    assert [len(layer._inbound_nodes) for layer in model.layers] == before


def test_functions_and_operations_are_copied(front):
    keras = front.keras
    inputs = keras.Input([4])
    double = keras.layers.Lambda(lambda x: tf.add(x, x), name="double")
    sums = double(inputs) + keras.layers.BatchNormalization()(inputs)
    new = front.tfdp.replace_batch_normalization(keras.Model(inputs, sums), "frozen")
    assert new.get_layer("double") is not double
    np.testing.assert_allclose(new(np.ones([2, 4], "float32")), np.full([2, 4], 2.9995), atol=1e-4)


def test_subclassed_models_are_refused_with_advice(front):
    class Own(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.normalize = front.keras.layers.BatchNormalization()

        def call(self, x):
            return self.normalize(x)

    model = Own()
    model(np.zeros([2, 3], "float32"))
    advice = rf"a Own with a `call` of its own. Use {front.name}.layers.Gr"
    with pytest.raises(ValueError, match=advice):
        front.tfdp.replace_batch_normalization(model)
    inputs = front.keras.Input([3])
    with pytest.raises(ValueError, match=advice):
        front.tfdp.replace_batch_normalization(front.keras.Model(inputs, model(inputs)))


def test_layers_that_make_their_own_are_refused_by_name(front):
    class Block(front.keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.normalize = front.keras.layers.BatchNormalization(name="within")

        def call(self, x):
            return self.normalize(x)

    model = front.keras.Sequential(
        [front.keras.Input([3]), front.keras.layers.Dense(3), Block(name="block")]
    )
    message = rf"'block' \(Block\), which makes 'within' itself: use {front.name}\.layers"
    with pytest.raises(ValueError, match=message):
        front.tfdp.replace_batch_normalization(model)


@pytest.mark.parametrize(
    ("model", "by", "message"),
    [
        (convolutions, "layer", r"one of \['group', 'frozen'\]"),
        (lambda keras: object(), "group", "must be a model of Keras"),
        (lambda keras: keras.Sequential([keras.layers.Dense(2)]), "group", "must be built"),
    ],
)
def test_arguments(front, model, by, message):
    with pytest.raises(ValueError, match=message):
        front.tfdp.replace_batch_normalization(model(front.keras), by)


@pytest.mark.skipif(len(FRONT_ENDS) < 2, reason="Keras 3 is not installed")
def test_models_of_the_other_keras_are_refused(front):
    other = next(each for each in FRONT_ENDS if each is not front)
    with pytest.raises(ValueError, match=r"Models of Keras . .*have"):
        front.tfdp.replace_batch_normalization(convolutions(other.keras))


@pytest.mark.parametrize(
    ("channels", "has_positions", "groups"),
    [(64, True, 16), (16, True, 4), (256, True, 32), (96, True, 24), (7, True, 1), (64, False, 1)],
)
def test_number_of_groups(front, channels, has_positions, groups):
    layers = front.keras.layers
    shape = [2, channels] if has_positions else [channels]
    model = front.keras.Sequential([front.keras.Input(shape), layers.BatchNormalization()])
    assert front.tfdp.replace_batch_normalization(model).layers[0].groups == groups
    assert batch_normalization.number_of_groups(channels, has_positions) == groups


def test_a_single_number_for_each_example_has_no_group(front):
    layers = front.keras.layers
    model = front.keras.Sequential([front.keras.Input([1]), layers.BatchNormalization(name="bn")])
    with pytest.raises(ValueError, match=r"(?s)'bn'.*\[batch, 1\].*by='frozen'"):
        front.tfdp.replace_batch_normalization(model)
    frozen = front.tfdp.replace_batch_normalization(model, "frozen")
    assert frozen.predict(np.array([[3.0]]), verbose=0) > 2.9
