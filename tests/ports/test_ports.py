"""Everyday Keras programs as users write them: the optimizer and the batches are changed."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp

layers = tf.keras.layers
N, B = 60, 12
random = np.random.default_rng(0)


def images(size=12, channels=1):
    return random.random([N, size, size, channels], dtype="float32")


def classes(number=3):
    return random.integers(0, number, N)


def batches_of(*data):
    return tfdp.data.poisson_batches(data, expected_batch_size=B, steps_per_epoch=2)


def private(batches, **kwargs):
    return tfdp.DPAdam(1.0, 1.0, learning_rate=0.01, sampling=batches.sampling, **kwargs)


def convnet():
    model = tf.keras.Sequential(
        [
            layers.Input([12, 12, 1]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return model, "sparse_categorical_crossentropy", (images(), classes())


class TokenAndPosition(layers.Layer):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(20, 8), layers.Embedding(10, 8)

    def call(self, x):
        return self.tokens(x) + self.positions(tf.range(10))


def transformer():
    inputs = layers.Input([10], dtype="int64")
    h = TokenAndPosition()(inputs)
    attended = layers.MultiHeadAttention(2, 4)(h, h)
    h = layers.LayerNormalization()(h + layers.Dropout(0.1)(attended))
    feed = layers.Dense(8)(layers.Dense(16, activation="relu")(h))
    h = layers.LayerNormalization()(h + feed)
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(h))
    x = random.integers(0, 20, [N, 10])
    return tf.keras.Model(inputs, outputs), "sparse_categorical_crossentropy", (x, classes(2))


def bidirectional_lstm():
    model = tf.keras.Sequential(
        [
            layers.Input([10], dtype="int64"),
            layers.Embedding(20, 6),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    return model, "binary_crossentropy", (random.integers(0, 20, [N, 10]), classes(2)[:, None])


def structured_data():
    age, city = layers.Input([1], name="age"), layers.Input([1], name="city", dtype="string")
    normalize = layers.Normalization(mean=40.0, variance=100.0)
    look_up = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    h = layers.Concatenate()([normalize(age), look_up(city)])
    h = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(h))
    model = tf.keras.Model({"age": age, "city": city}, layers.Dense(1, activation="sigmoid")(h))
    x = {"age": random.normal(40, 10, [N, 1]), "city": random.choice(["a", "b", "c"], [N, 1])}
    return model, "binary_crossentropy", (x, classes(2)[:, None])


def text_classifier():
    vectorize = layers.TextVectorization(
        vocabulary=["good", "bad", "film"], output_sequence_length=5
    )
    model = tf.keras.Sequential(
        [
            layers.Input([], dtype="string"),
            vectorize,
            layers.Embedding(5, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    x = random.choice(["good film", "bad film", "a very bad film indeed"], N)
    return model, "binary_crossentropy", (x, classes(2)[:, None])


def autoencoder():
    model = tf.keras.Sequential(
        [
            layers.Input([12, 12, 1]),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    x = images()
    return model, "binary_crossentropy", (x, x)


def u_net():
    inputs = layers.Input([12, 12, 3])
    down = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    h = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D()(down))
    h = layers.GroupNormalization(2)(h)
    h = layers.Concatenate()([layers.UpSampling2D()(h), down])
    outputs = layers.Conv2D(3, 1, activation="softmax")(h)
    y = random.integers(0, 3, [N, 12, 12, 1])
    return tf.keras.Model(inputs, outputs), "sparse_categorical_crossentropy", (images(12, 3), y)


def several_outputs():
    inputs = layers.Input([5])
    h = layers.Dense(6, activation="relu")(inputs)
    outputs = {
        "a": layers.Dense(3, activation="softmax", name="a")(h),
        "b": layers.Dense(1, name="b")(h),
    }
    loss = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    y = {"a": classes(), "b": random.normal(size=[N, 1])}
    return tf.keras.Model(inputs, outputs), loss, (random.normal(size=[N, 5]), y)


def time_series():
    model = tf.keras.Sequential(
        [
            layers.Input([8, 2]),
            layers.Conv1D(4, 3, padding="causal", activation="relu"),
            layers.GRU(4),
            layers.Dense(1),
        ]
    )
    return model, tf.keras.losses.Huber(), (random.normal(size=[N, 8, 2]), random.random([N, 1]))


def several_labels():
    model = tf.keras.Sequential(
        [
            layers.Input([6]),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.Dense(4, activation="sigmoid"),
        ]
    )
    return model, "binary_crossentropy", (random.random([N, 6]), random.integers(0, 2, [N, 4]))


def fine_tuned():
    base = tf.keras.Sequential(
        [
            layers.Input([12, 12, 3]),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    )
    base.trainable = False
    inputs = layers.Input([12, 12, 3])
    h = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    model = tf.keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(h)))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, (images(12, 3), classes())


PROGRAMS = (
    *(convnet, transformer, bidirectional_lstm, structured_data, text_classifier, autoencoder),
    *(u_net, several_outputs, time_series, several_labels, fine_tuned),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(program):
    """The program runs on the fast engine, and an epsilon can be stated."""
    model, loss, data = program()
    batches = batches_of(*data)
    optimizer = private(batches)
    model.compile(
        optimizer=optimizer, loss=loss, metrics=None if isinstance(loss, dict) else ["mae"]
    )
    history = model.fit(batches, epochs=2, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    assert model.optimizer.ledger.steps == 4
    assert "epsilon = " in tfdp.privacy_statement(model, delta=1e-3)
    report = optimizer.clipping.report()
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []
    assert model.predict(data[0], verbose=0) is not None


def test_a_training_loop_of_ones_own():
    model, _, data = convnet()
    batches = batches_of(*data)
    optimizer, loss_of = private(batches), tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return loss

    losses = [float(step(x, y)) for x, y in batches]
    assert np.all(np.isfinite(losses)) and optimizer.ledger.steps == 2


class WithTrainStep(tf.keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def test_a_training_step_of_ones_own():
    plain, loss, data = several_labels()
    model, batches = WithTrainStep(plain.inputs, plain.outputs), batches_of(*data)
    model.compile(private(batches), loss)
    assert np.all(np.isfinite(model.fit(batches, verbose=0).history["loss"]))
    assert model.optimizer.ledger.steps == 2


class Gan(tf.keras.Model):
    """The critic sees private examples; the generator sees the critic alone."""

    def __init__(self):
        super().__init__()
        self.generator = tf.keras.Sequential([layers.Input([3]), layers.Dense(6)])
        self.critic = tf.keras.Sequential([layers.Input([6]), layers.Dense(1)])

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile(optimizer=critic_optimizer)
        self.generator_optimizer = generator_optimizer

    def train_step(self, data):
        real, _ = data
        bce = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        noise = tf.random.normal([tf.shape(real)[0], 3])
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = bce(tf.ones_like(fake), self.critic(real)) + bce(tf.zeros_like(fake), fake)
        self.optimizer.minimize(loss, self.critic.trainable_variables, tape=tape)
        noise = tf.random.normal([B, 3])
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            loss = tf.reduce_mean(bce(tf.ones_like(fake), fake))
        self.generator_optimizer.minimize(loss, self.generator.trainable_variables, tape=tape)
        return {}


def test_a_gan_with_a_private_critic():
    x = random.normal(size=[N, 6]).astype("float32")
    model, batches = Gan(), batches_of(x, x[:, 0])
    model.compile(private(batches), tf.keras.optimizers.legacy.Adam())
    before = [w.numpy() for w in model.trainable_weights]
    model.fit(batches, epochs=2, verbose=0)
    for old, new in zip(before, model.trainable_weights, strict=True):
        assert not np.array_equal(old, new)
    assert model.optimizer.ledger.steps == 4


def test_callbacks(tmp_path):
    model, loss, data = several_labels()
    batches = batches_of(*data)
    model.compile(private(batches), loss, metrics=["accuracy"])
    callbacks = tf.keras.callbacks
    model.fit(
        batches,
        epochs=3,
        verbose=0,
        validation_data=data,
        callbacks=[
            callbacks.BackupAndRestore(str(tmp_path / "backup")),
            callbacks.CSVLogger(str(tmp_path / "log.csv")),
            callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
            callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
            callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_best_only=True),
            callbacks.ReduceLROnPlateau("val_loss"),
            callbacks.TerminateOnNaN(),
            tfdp.callbacks.PrivacyBudget(target_epsilon=20.0, delta=1e-3),
        ],
    )
    assert model.optimizer.ledger.steps == 6
    assert tf.keras.models.load_model(tmp_path / "model.keras").optimizer.ledger.steps > 0


@pytest.mark.parametrize("form", ["keras", "tf", "h5"])
def test_saving_and_training_on(form, tmp_path):
    model, loss, data = convnet()
    batches = batches_of(*data)
    model.compile(private(batches), loss)
    model.fit(batches, verbose=0)
    path = str(tmp_path / {"keras": "model.keras", "tf": "model", "h5": "model.h5"}[form])
    model.save(path, save_format=form)
    loaded = tf.keras.models.load_model(path)
    np.testing.assert_allclose(
        loaded.predict(data[0], verbose=0), model.predict(data[0], verbose=0), atol=1e-6
    )
    loaded.fit(batches, verbose=0)
    assert loaded.optimizer.ledger.steps == 4
