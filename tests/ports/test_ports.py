"""Everyday Keras programs as users write them: the optimizer and the batches are changed."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from benchmarks import fine_tuning, programs

N, B = 60, 12


def batches_of(*data):
    return tfdp.data.poisson_batches(data, expected_batch_size=B, steps_per_epoch=2)


def private(batches, **kwargs):
    return tfdp.DPAdam(1.0, 1.0, learning_rate=0.01, sampling=batches.sampling, **kwargs)


# Those with tests of their own are left out.
BUILDERS = {
    name: timed.build
    for name, timed in programs.PROGRAMS.items()
    if timed.build not in (programs.fine_tuned, programs.gan)
}


def assert_fast(report):
    assert report.fallback is None
    assert [entry for entry in report.entries if not entry.fast] == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", BUILDERS)
def test_program(name):
    """The program runs on the fast engine, and an epsilon can be stated."""
    model, loss, data = BUILDERS[name](N)
    batches = batches_of(*data)
    optimizer = private(batches)
    model.compile(
        optimizer=optimizer, loss=loss, metrics=None if isinstance(loss, dict) else ["mae"]
    )
    history = model.fit(batches, epochs=2, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    assert model.optimizer.ledger.steps == 4
    assert "epsilon = " in tfdp.privacy_statement(model, delta=1e-3)
    assert_fast(optimizer.clipping.report())
    assert model.predict(data[0], verbose=0) is not None


NETWORKS = {"mobilenet_v2": 14, "resnet50": 14, "convnext_tiny": 13, "vgg16": 8}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_fine_tuning_in_two_phases(network):
    """A new head on a frozen base; then the base's last block as well, at a smaller rate.

    Of a frozen base only the outputs matter: one network trains its head alone.
    """
    model, loss, data = programs.fine_tuned(N, network)
    batches = batches_of(*data)
    steps = 0
    for phase, trained in (("head", 2), ("last_block", NETWORKS[network])):
        fine_tuning.train_part(model.layers[1], network, phase)
        assert len(model.trainable_variables) == trained
        if phase == "head" and network != "mobilenet_v2":
            continue
        optimizer = private(batches)
        model.compile(optimizer, loss, metrics=["accuracy"])
        frozen = [w.numpy() for w in model.non_trainable_variables]
        assert np.isfinite(model.fit(batches, verbose=0).history["loss"][0])
        for old, new in zip(frozen, model.non_trainable_variables, strict=True):
            np.testing.assert_array_equal(old, new)
        assert_fast(optimizer.clipping.report())
        steps += 2
    assert model.optimizer.ledger.steps == steps


@pytest.mark.slow
def test_a_training_loop_of_ones_own():
    model, _, data = programs.convnet(N)
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


@pytest.mark.slow
def test_a_gan_with_a_private_critic():
    model, _, data = programs.gan(N, batch=B)
    batches = batches_of(*data)
    model.compile(private(batches))
    before = [w.numpy() for w in model.trainable_weights]
    model.fit(batches, epochs=2, verbose=0)
    for old, new in zip(before, model.trainable_weights, strict=True):
        assert not np.array_equal(old, new)
    assert model.optimizer.ledger.steps == 4


@pytest.mark.slow
def test_callbacks(tmp_path):
    model, loss, data = programs.several_labels(N)
    batches = batches_of(*data)
    model.compile(private(batches), loss, metrics=["accuracy"])
    callbacks = tf.keras.callbacks
    with pytest.warns(UserWarning, match="`TerminateOnNaN`, which acts on"):
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
                tfdp.PrivacyBudget(target_epsilon=20.0, delta=1e-3),
            ],
        )
    assert model.optimizer.ledger.steps == 6
    assert tf.keras.models.load_model(tmp_path / "model.keras").optimizer.ledger.steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["keras", "tf", "h5"])
def test_saving_and_training_on(form, tmp_path):
    model, loss, data = programs.convnet(N)
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
