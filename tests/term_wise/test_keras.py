"""Variational autoencoders in Keras: what training costs and shows, evaluation, saving."""

import functools
import json
import os

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, with_both
from tests.vae_support import (
    MASK,
    NOISE,
    PRIOR,
    SEED,
    N,
    X,
    Y,
    batches,
    compiled,
    conditional,
    flat,
    front_of,
    negative_elbo,
    not_private,
    one_batch,
    optimizer,
    penalty,
    tables,
    vae,
)
from tfdp.accounting import event_codec
from tfdp.training.term_wise.training import TermWiseTraining


@pytest.fixture
def fixed(monkeypatch):
    """The random numbers of a batch are those of the tables."""
    monkeypatch.setattr(TermWiseTraining, "_draws", tables)


# Private training.


def logs_of(front, seen):
    """A callback that appends to `seen` everything that it gets to see of the training."""

    def append(number, logs=None):
        seen.append(dict(logs or {}))

    return front.keras.callbacks.LambdaCallback(on_epoch_end=append, on_train_batch_end=append)


KERAS_2 = FRONT_ENDS[0]
# Each optimizer, by turns of the two Kerases.
TRAINED = [
    (FRONT_ENDS[i // 2 % len(FRONT_ENDS)], cls.__name__) for i, cls in enumerate(support.OPTIMIZERS)
]


@pytest.fixture(scope="module", params=TRAINED, ids=lambda case: f"{case[0].part}.{case[1]}")
def trained(request):
    """A model that was trained for four steps, and what was shown."""
    front, name = request.param
    seen, model = [], compiled(vae(front), name)
    history = model.fit(batches(), epochs=2, verbose=0, callbacks=[logs_of(front, seen)])
    return model, history, seen


@pytest.fixture(scope="module")
def without_divergence():
    """The ledger of `tfdp.DPSGD` after as many steps."""
    model = compiled(vae(divergence=None))
    model.fit(batches(), epochs=2, verbose=0)
    return model.optimizer.ledger


@pytest.mark.quick_cases(2)
def test_the_divergence_costs_no_epsilon(trained, without_divergence):
    """Whichever the optimizer: one Gaussian mechanism with its noise multiplier, or its signs."""
    own, signs = trained[0].optimizer.ledger, trained[0].optimizer.releases_signs
    assert own.steps == without_divergence.steps == 4
    priced = tfdp.accounting.PrivacyLedger()
    priced.record(
        event_codec.sampled_gaussian(16 / N, 1.1, signs),
        4,
        truncation_probability=batches().sampling.truncation_probability,
    )
    assert own.event == priced.event
    assert own.epsilon(1e-5).epsilon == priced.epsilon(1e-5).epsilon
    assert signs or own.event == without_divergence.event


@pytest.mark.quick_cases(2)
def test_it_was_trained(trained):
    model, _, _ = trained
    assert np.all(np.isfinite(flat(model)))
    assert np.mean(flat(model) == flat(vae(front_of(model)))) < 0.7


def shows_nothing(history, seen, model):
    values = [m.result().numpy() for m in model.metrics]
    public = [history.history, *seen]
    return all(set(shown) <= {"updates"} for shown in public) and not any(values)


@pytest.mark.quick_cases(2)
def test_training_shows_nothing(trained):
    model, history, seen = trained
    assert len(seen) > 0 and shows_nothing(history, seen, model)
    assert [m.name for m in model.metrics] == ["loss", "negative_elbo", "divergence"]


class ShowsTheLoss:
    """Mutant: the loss of the batch is returned."""

    def train_step(self, data):
        return {**super().train_step(data), "loss": self._terms(*self._drawn_rows(data), True)[0]}


class CountsTheLoss:
    """Mutant: the metrics of evaluation see the training batches."""

    def train_step(self, data):
        self.test_step(data)
        return super().train_step(data)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mutant", [ShowsTheLoss, CountsTheLoss])
@with_both
def test_a_step_that_shows_something_would_be_seen(front, mutant):
    cls = type(mutant.__name__, (mutant, front.tfdp.TermWiseVAE), {})
    seen, model = [], not_private(vae(front, cls, aggregation="none"))
    history = model.fit(X, verbose=0, callbacks=[logs_of(front, seen)])
    assert not shows_nothing(history, seen, model)


@pytest.mark.quick_cases(2)
def test_generating_uses_the_weights_alone(trained):
    """What sees no data costs no epsilon: a model that never saw any says the same."""
    model, _, _ = trained
    other = vae(front_of(model), seed=5)
    other.set_weights(model.get_weights())
    for sample in (False, True):
        np.testing.assert_array_equal(
            model.generate(9, seed=1, sample=sample), other.generate(9, seed=1, sample=sample)
        )
    steps = model.optimizer.ledger.steps
    model.generate(9)
    assert model.optimizer.ledger.steps == steps


def test_diagnostics_are_the_loss_of_the_batch(fixed):
    model = vae(aggregation="none", non_private_diagnostics=True, alpha=3.0)
    samples = tf.boolean_mask(negative_elbo(model, X, NOISE), MASK)
    expected = tf.reduce_mean(samples) + penalty(model, X, NOISE, PRIOR, MASK)
    history = not_private(model, tf.keras.optimizers.SGD(0.0)).fit(one_batch(), verbose=0)
    assert list(history.history) == ["updates", "non_private_loss"]
    assert history.history["non_private_loss"][0] == pytest.approx(float(expected), rel=1e-4)


def test_diagnostics_of_private_training():
    model = compiled(vae(divergence=None, non_private_diagnostics=True))
    history = model.fit(batches(), verbose=0, epochs=2, validation_data=(X, X)).history
    names = ["updates", "non_private_loss", "val_loss", "val_negative_elbo", "val_divergence"]
    assert list(history) == names
    assert np.all(np.isfinite(history["non_private_loss"]))


def shuffled(*weights):
    """A data set of batches; `fit` refuses arrays before it begins."""
    return tf.data.Dataset.from_tensor_slices((X, X, *weights)).shuffle(len(X)).batch(16)


@with_both
def test_other_batches_are_refused(front):
    model = compiled(vae(front, divergence=None))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(shuffled(), verbose=0)
    assert model.optimizer.released_steps() == (0, 0)


@pytest.mark.slow
def test_under_xla_other_batches_show_nothing_and_get_no_epsilon():
    model = vae(divergence=None)
    model.compile(optimizer(sampling=batches(padding="full").sampling), jit_compile=True)
    ones = np.ones(len(X), bool)
    assert list(model.fit(shuffled(ones), verbose=0).history) == ["updates"]
    model.train_on_batch(X[:16], X[:16], ones[:16])
    shown = model.train_on_batch(X[:16], X[:16], ones[:16], return_dict=True)
    assert list(shown) == ["updates"]
    assert model.optimizer.released_steps() == (0, 6)
    with pytest.raises(Exception, match="UnsupportedDpEvent"):
        model.optimizer.ledger.epsilon(1e-5)


@with_both
def test_weights_are_those_of_the_networks(front):
    """And not the sums of the last evaluation, which files would otherwise show."""
    model = not_private(vae(front, aggregation="none"))
    model.evaluate(X, verbose=0)
    assert len(model.variables) == len(model.weights)
    assert len(model.weights) == len(model.encoder.weights) + len(model.decoder.weights)


# Evaluation.


def test_validation_is_evaluation(fixed):
    model, held_out = not_private(vae(aggregation="none", alpha=3.0)), (X + 1, X + 1)
    history = model.fit(X, verbose=0, validation_data=held_out).history
    found = model.evaluate(*held_out, verbose=0, return_dict=True)
    expected = {f"val_{name}": [value] for name, value in found.items()}
    assert {"updates": history["updates"], **expected} == history
    assert expected.keys() == {"val_loss", "val_negative_elbo", "val_divergence"}


@with_both
def test_evaluation_is_the_loss_of_the_rows_that_exist(front, fixed):
    model = not_private(vae(front, aggregation="none", alpha=3.0))
    found = model.evaluate(one_batch(), verbose=0, return_dict=True)
    samples = float(tf.reduce_mean(tf.boolean_mask(negative_elbo(model, X, NOISE), MASK)))
    weighted = float(penalty(model, X, NOISE, PRIOR, MASK))
    assert found["loss"] == pytest.approx(samples + weighted, rel=1e-4)
    assert found["negative_elbo"] == pytest.approx(samples, rel=1e-4)
    assert found["divergence"] == pytest.approx(weighted / 3, rel=1e-4)
    padded = np.where(MASK[:, None], X, 1e3).astype("float32")
    assert found == model.evaluate(one_batch(padded, padded), verbose=0, return_dict=True)
    absent = np.where(MASK[:, None], X, np.nan).astype("float32")
    assert found == model.evaluate(one_batch(absent, absent), verbose=0, return_dict=True)


@with_both
def test_batches_count_by_their_examples(front, fixed):
    """Also those without any, which say nothing."""
    model = not_private(vae(front, aggregation="none", alpha=3.0))
    parts = [(10, 10), (10, 2), (10, 0)]
    arrays = [(X[:n], X[:n], np.arange(n) < k) for n, k in parts]
    data = tf.data.Dataset.from_generator(
        lambda: arrays, output_signature=support.open_spec(arrays[0])
    )
    found = model.evaluate(data, verbose=0, return_dict=True)
    elbo = negative_elbo(model, X, NOISE).numpy()
    distance = [float(penalty(model, X, NOISE, PRIOR, np.arange(N) < k)) / 3 for _, k in parts]
    expected = (elbo[:10].sum() + elbo[:2].sum()) / 12
    assert found["negative_elbo"] == pytest.approx(expected, rel=1e-4)
    of_divergence = (10 * distance[0] + 2 * distance[1]) / 12
    assert found["divergence"] == pytest.approx(of_divergence, rel=1e-3)
    assert found["loss"] == pytest.approx(expected + 3 * of_divergence, rel=1e-4)


def test_the_divergence_is_shown_without_its_weight(fixed):
    """Also where the weight is zero: to see how far codes are from the prior without it."""
    shown = [
        not_private(vae(aggregation="none", alpha=alpha)).evaluate(one_batch(), verbose=0)[2]
        for alpha in (1.0, 4.0, 0.0)
    ]
    assert shown[0] != 0
    assert shown == pytest.approx([shown[0]] * 3, rel=1e-5)


def test_masks_of_evaluation_are_no_reason_for_a_warning(caplog, capfd):
    not_private(vae(aggregation="none")).evaluate(batches(), verbose=0)
    assert "weighted_metrics" not in caplog.text + "".join(capfd.readouterr())


@with_both
def test_networks_of_half_precision(front, fixed):
    """Their outputs are added up in full precision; loss scaling is refused."""
    model = not_private(vae(front, aggregation="none"))
    expected = model.evaluate(one_batch(), verbose=0)
    policy = front.keras.mixed_precision.global_policy()
    try:
        front.keras.mixed_precision.set_global_policy("mixed_bfloat16")
        half = not_private(vae(front, aggregation="none"))
        front.keras.mixed_precision.set_global_policy("mixed_float16")
        with pytest.raises(ValueError, match="use mixed_bfloat16"):
            compiled(vae(front))
    finally:
        front.keras.mixed_precision.set_global_policy(policy)
    half.set_weights(model.get_weights())
    np.testing.assert_allclose(half.evaluate(one_batch(), verbose=0), expected, rtol=0.1)
    assert half.generate(2).dtype == np.float32


# Conditional ones.


@pytest.mark.slow
def test_a_conditional_one_is_trained_with_labels(tmp_path):
    model = compiled(conditional(divergence="kl"))
    held_out = (X[:16], Y[:16])
    history = model.fit(batches(Y), verbose=0, validation_data=held_out).history
    assert model.optimizer.ledger.steps == 2
    assert np.isfinite(history["val_loss"][0])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.num_classes == 3
    np.testing.assert_array_equal(loaded.reconstruct(X, Y), model.reconstruct(X, Y))
    np.testing.assert_array_equal(loaded.generate(5, 1, seed=2), model.generate(5, 1, seed=2))


@with_both
def test_a_conditional_one_needs_labels(front):
    model = not_private(conditional(front, aggregation="none"))
    with pytest.raises(ValueError, match="`y` must be labels for a conditional VAE"):
        model.fit(X, verbose=0)
    with pytest.raises(ValueError, match="`y` must be labels for a conditional VAE"):
        model.evaluate(X, verbose=0)


# Saving.


def train(model, first_step=0):
    model.fit(batches(first_step=first_step), verbose=0)
    return flat(model)


def seeded(front):
    return compiled(vae(front, divergence=None), momentum=0.9, noise_seed=SEED)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each Keras: a model saved in every form after two steps; its weights after two more."""

    @functools.cache
    def save(front):
        folder = tmp_path_factory.mktemp("saved")
        model = seeded(front)
        train(model)
        predicted = model.predict(X, verbose=0)
        model.save(folder / "model.keras")
        if front is KERAS_2:
            model.save(folder / "model", save_format="tf")
        model.save_weights(folder / "model.weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
        return folder, model.get_config(), predicted, train(model, first_step=2)

    return save


def restored(form, front, folder):
    if form == "checkpoint":
        model = seeded(front)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(tf.train.latest_checkpoint(folder))
        return model
    return front.keras.models.load_model(
        os.path.join(folder, "model.keras" if form == "keras" else "model")
    )


# SavedModels of Keras 3 are not trained further.
FILES = [(KERAS_2, "tf"), *((front, "keras") for front in FRONT_ENDS)]
FORMS = [(KERAS_2, "tf"), (FRONT_ENDS[-1], "keras"), (FRONT_ENDS[-1], "checkpoint")]


@pytest.mark.slow
@pytest.mark.parametrize(("front", "form"), FORMS)
def test_training_resumes_bit_for_bit(front, form, saved):
    folder, _, predicted, expected = saved(front)
    model = restored(form, front, folder)
    np.testing.assert_array_equal(model.predict(X, verbose=0), predicted)
    assert type(model.optimizer) is front.tfdp.DPSGD
    np.testing.assert_array_equal(train(model, first_step=2), expected)
    assert model.optimizer.ledger.steps == 4


@pytest.mark.parametrize(("front", "form"), FILES)
def test_a_loaded_model_is_the_same_one(front, form, saved):
    folder, config, predicted, _ = saved(front)
    model = restored(form, front, folder)
    assert type(model) is front.tfdp.TermWiseVAE
    assert json.dumps(model.get_config()) == json.dumps(config)
    np.testing.assert_array_equal(model.reconstruct(X), predicted)
    assert model.log_likelihood(X[:3], num_samples=2).shape == (3,)
    assert model.generate(3).shape == (3, 6)
    assert model.optimizer is not None
    assert model.optimizer.ledger.steps == 2  # Known as soon as it is loaded.


@with_both
def test_weights_alone(front, saved):
    folder, _, predicted, _ = saved(front)
    model = vae(front, seed=5)
    model.load_weights(folder / "model.weights.h5")
    np.testing.assert_array_equal(model.reconstruct(X), predicted)


def test_it_is_saved_before_it_is_called(tmp_path):
    model, inputs = conditional(), [X, tf.one_hot(Y, 3)]
    model.save(tmp_path / "model", save_format="tf")
    loaded = tf.keras.models.load_model(tmp_path / "model")
    assert type(loaded) is tfdp.TermWiseVAE
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )
