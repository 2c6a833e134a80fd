"""More everyday Keras programs: losses, weights, masks and inputs of other kinds."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.ports.test_ports import N, assert_fast, batches_of, private

layers = tf.keras.layers
random = np.random.default_rng(0)
LOGITS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def numbers(*shape):
    return random.normal(size=[N, *shape]).astype("float32")


def ids(*shape, below=3):
    return random.integers(0, below, [N, *shape])


def siamese():
    """One layer for two named inputs, and a contrastive loss that returns a scalar."""
    a, b = layers.Input([6], name="a"), layers.Input([6], name="b")
    base = tf.keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4)])
    distance = layers.Lambda(lambda t: tf.norm(t[0] - t[1] + 1e-6, axis=1, keepdims=True))

    def contrastive(same, d):
        same = tf.cast(same, d.dtype)
        near, far = tf.square(d), tf.square(tf.maximum(1 - d, 0))
        return tf.reduce_mean(same * near + (1 - same) * far)

    model = tf.keras.Model({"a": a, "b": b}, distance([base(a), base(b)]))
    return model, contrastive, ({"a": numbers(6), "b": numbers(6)}, ids(1, below=2))


def masked_tags():
    """A class for each token; padding is masked."""
    model = tf.keras.Sequential(
        [
            layers.Embedding(10, 4, mask_zero=True),
            layers.GRU(4, return_sequences=True),
            layers.TimeDistributed(layers.Dense(3)),
        ]
    )
    return model, LOGITS, (ids(6, below=10), ids(6))


def translation():
    """An encoder, and a decoder that begins with its states; both mask."""
    source, target = layers.Input([None]), layers.Input([None])
    _, *states = layers.LSTM(4, return_state=True)(layers.Embedding(12, 5, mask_zero=True)(source))
    decoder = layers.LSTM(4, return_sequences=True)
    decoded = decoder(layers.Embedding(12, 5, mask_zero=True)(target), initial_state=states)
    model = tf.keras.Model([source, target], layers.Dense(12, activation="softmax")(decoded))
    x = (ids(5, below=12), ids(6, below=12))
    return model, "sparse_categorical_crossentropy", (x, ids(6, below=12))


def smoothed_labels():
    """Layers without an input shape, weights of examples."""
    model = tf.keras.Sequential(
        [layers.Dense(8, activation="gelu"), layers.Dropout(0.3), layers.Dense(3)]
    )
    loss = tf.keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    weights = random.random(N).astype("float32")
    return model, loss, (numbers(5), tf.keras.utils.to_categorical(ids(), 3), weights)


def weighted_outputs():
    """Outputs by name, with weights of their losses."""
    inputs = layers.Input([5])
    outputs = [layers.Dense(3, name="kind")(inputs), layers.Dense(1, name="price")(inputs)]
    loss = {"kind": LOGITS, "price": "mae"}
    model = tf.keras.Model(inputs, outputs)
    return model, loss, (numbers(5), {"kind": ids(), "price": numbers(1)})


class OwnLoss(tf.keras.Model):
    """A model that computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, activation="relu"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return tf.reduce_mean(tf.square(y - y_pred)) + 0.1 * tf.reduce_mean(tf.abs(y_pred))


def own_loss():
    return OwnLoss(), None, (numbers(5), numbers(1))


class Sample(layers.Layer):
    """Draws codes, and adds their divergence to the loss."""

    def call(self, inputs):
        mean, log_variance = inputs
        divergence = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
        self.add_loss(-0.5 * tf.reduce_mean(tf.reduce_sum(divergence, axis=-1)))
        return mean + tf.exp(log_variance / 2) * tf.random.normal(tf.shape(mean))


def variational_autoencoder():
    inputs = layers.Input([8])
    hidden = layers.Dense(6, activation="relu")(inputs)
    codes = Sample()([layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
    x = random.random([N, 8]).astype("float32")
    model = tf.keras.Model(inputs, layers.Dense(8, activation="sigmoid")(codes))
    return model, "binary_crossentropy", (x, x)


def nested_models():
    """One encoder for images as they are, and changed."""
    encoder = tf.keras.Sequential([layers.Conv2D(3, 3), layers.GlobalMaxPooling2D()])
    inputs = layers.Input([8, 8, 1])
    sums = layers.Add()([encoder(inputs), encoder(layers.RandomFlip()(inputs))])
    return tf.keras.Model(inputs, layers.Dense(3)(sums)), LOGITS, (numbers(8, 8, 1), ids())


def recommender():
    user, item = layers.Input([], dtype="int64"), layers.Input([], dtype="int64")
    users = layers.Embedding(20, 4, embeddings_regularizer="l2")(user)
    model = tf.keras.Model([user, item], layers.Dot(1)([users, layers.Embedding(30, 4)(item)]))
    return model, "mse", ([ids(below=20), ids(below=30)], numbers(1))


PROGRAMS = [
    siamese,
    masked_tags,
    translation,
    smoothed_labels,
    weighted_outputs,
    own_loss,
    variational_autoencoder,
    nested_models,
    recommender,
]


@pytest.mark.slow
@pytest.mark.parametrize("build", PROGRAMS)
def test_program(build):
    """The program runs on the fast engine, is evaluated, and an epsilon can be stated."""
    model, loss, data = build()
    batches = batches_of(*data)
    optimizer = private(batches)
    weights = {"kind": 0.3, "price": 1.0} if isinstance(loss, dict) else None
    model.compile(optimizer, loss, loss_weights=weights)
    history = model.fit(batches, epochs=2, verbose=0, validation_data=data).history
    assert history or build is own_loss  # Keras logs the compiled losses.
    assert all(np.all(np.isfinite(values)) for values in history.values())
    assert model.optimizer.ledger.steps == 4
    assert "epsilon = " in tfdp.privacy_statement(model, delta=1e-3)
    assert_fast(optimizer.clipping.report())


@pytest.mark.slow
def test_one_call_for_a_table_with_words_and_two_outputs():
    """Inputs by name, one of them a word, and weights of the examples for each output."""
    words = np.array(["red", "green", "blue"])[ids(1)]
    look_up = layers.StringLookup(output_mode="one_hot")
    look_up.adapt(words)
    inputs = {"size": layers.Input([1]), "color": layers.Input([1], dtype="string")}
    hidden = layers.Concatenate()([inputs["size"], look_up(inputs["color"])])
    outputs = {name: layers.Dense(1, name=name)(hidden) for name in ("price", "age")}
    model = tf.keras.Model(inputs, outputs)
    model.compile("adam", {"price": "mse", "age": "mae"}, metrics={"price": ["mae"]})
    x = {"size": numbers(1), "color": words}
    y = {"price": numbers(1), "age": numbers(1)}
    weights = {"price": random.random(N), "age": np.zeros(N)}
    model, batches, budget = tfdp.make_private(
        model, (x, y, weights), epochs=2, target_epsilon=3.0, verbose=False
    )
    model.fit(batches, epochs=2, callbacks=[budget], validation_data=(x, y, weights), verbose=0)
    assert model.optimizer.ledger.steps == 2 * len(batches) > 20
    assert model.optimizer.ledger.epsilon(budget.delta).epsilon <= 3.0
    assert_fast(model.optimizer.clipping.report())


class Ctc(layers.Layer):
    """Adds the CTC loss, `[batch, 1]`."""

    def call(self, labels, outputs):
        rows = tf.cast(tf.shape(labels)[0], tf.int64)
        lengths = [n * tf.ones([rows, 1], tf.int64) for n in (outputs.shape[1], labels.shape[1])]
        self.add_loss(tf.keras.backend.ctc_batch_cost(labels, outputs, *lengths))
        return outputs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
def test_reading_lines_by_ctc():
    """The slower engine clips."""
    inputs, labels = layers.Input([10, 3]), layers.Input([4])
    hidden = layers.LSTM(6, return_sequences=True)(inputs)
    outputs = layers.Dense(5, activation="softmax")(hidden)
    model = tf.keras.Model([inputs, labels], Ctc()(labels, outputs))
    batches = batches_of((numbers(10, 3), ids(4).astype("float32")), numbers(1))
    model.compile(private(batches))
    assert np.isfinite(model.fit(batches, verbose=0).history["loss"][0])
    assert model.optimizer.ledger.steps == 2


@pytest.mark.slow
def test_weights_of_classes_and_of_examples():
    model, _, (x, y, weights) = smoothed_labels()
    batches = batches_of(x, np.argmax(y, axis=-1), weights)
    model.compile(private(batches), LOGITS)
    model.fit(batches, epochs=2, verbose=0, class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    assert model.optimizer.ledger.steps == 4


@pytest.mark.slow
def test_bfloat16():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = tf.keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu"),
                layers.Flatten(),
                layers.LayerNormalization(),
                layers.Dense(3, dtype="float32"),
            ]
        )
        batches = batches_of(numbers(8, 8, 1), ids())
        optimizer = private(batches)
        model.compile(optimizer, LOGITS)
        assert np.isfinite(model.fit(batches, verbose=0).history["loss"][0])
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert_fast(optimizer.clipping.report())


@pytest.mark.slow
def test_a_pipeline_in_front_and_clones_behind():
    data = tf.data.Dataset.from_tensor_slices((numbers(8, 8, 1), ids()))
    batches = tfdp.data.poisson_batches(
        data.map(lambda x, y: (x / 2, y)),
        expected_batch_size=12,
        steps_per_epoch=2,
        transform=lambda x, y: (tf.image.random_flip_left_right(x), y),
    )
    model = tf.keras.Sequential([layers.Input([8, 8, 1]), layers.Flatten(), layers.Dense(3)])
    clone = tf.keras.models.clone_model(model)
    for each in (model, clone):
        each.compile(private(batches), LOGITS)
        each.fit(batches, verbose=0, validation_data=data.batch(16))
        assert each.predict(batches, verbose=0).shape[1] == 3
        assert np.isfinite(each.evaluate(data.batch(16), verbose=0))
        assert each.optimizer.ledger.steps == 2
