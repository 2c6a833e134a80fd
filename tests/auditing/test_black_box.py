"""Canaries that are scored by the trained model: they catch what learns by heart, and no others."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support, vae_support
from tfdp.auditing import (
    AuditError,
    BlackBoxAudit,
    confidence_scores,
    epsilon_lower_bound,
    loss_scores,
    mislabelled,
)

layers = tf.keras.layers
DELTA = 1e-5
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(200, 400)).astype("float32"), RANDOM.integers(0, 3, 200)
CANARIES = mislabelled((RANDOM.normal(size=(200, 400)).astype("float32"), Y), 150)


def linear():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([layers.Input([400]), layers.Dense(3)])


@pytest.mark.slow
def test_what_is_learnt_by_heart_is_found():
    audit = BlackBoxAudit((X, Y), CANARIES, seed=0)
    model = support.compiled("adam", linear(), loss=support.crossentropy("auto"))
    x, y, weights = audit.data
    model.fit(x, y, sample_weight=weights, epochs=100, verbose=0)
    result = audit.result(model, DELTA)
    assert result.lower_bound > 1.5 and result.lower_bounds["one_run_f_dp"] > 3
    assert result.epsilon is None and result.passed
    assert np.mean(result.in_scores) > np.mean(result.out_scores)
    assert "none: no sampling" in str(result)


@pytest.mark.slow
def test_private_models_pass_and_a_claim_that_is_too_small_does_not(monkeypatch):
    audit = BlackBoxAudit((X, Y), CANARIES, seed=0)
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=50, seed=1)

    def result(noise, epochs):
        optimizer = tfdp.DPAdam(
            1.0, noise, learning_rate=0.01, sampling=batches.sampling, noise_seed=1
        )
        model = support.compiled(optimizer, linear())
        model.fit(batches, epochs=epochs, verbose=0)
        return audit.result(model, DELTA)

    right = result(2.0, 3)
    right.check()
    assert right.lower_bound <= right.epsilon and right.steps == 21
    # Mutant: no noise is added, and the ledger does not know.
    monkeypatch.setattr("tfdp.step.private_step.add_gaussian_noise", lambda t, *_: t)
    with pytest.raises(AuditError, match="lower bounds do not exceed epsilon"):
        result(8.0, 20).check()


def test_rows_of_canaries_that_are_out_have_no_weight_and_the_size_is_constant():
    weighted = BlackBoxAudit((X, Y, np.full(200, 0.5)), CANARIES, seed=0)
    x, y, weights = weighted.data
    assert len(x) == len(y) == len(weights) == 350
    np.testing.assert_array_equal(weights[:200], 0.5)
    np.testing.assert_array_equal(weights[200:], weighted._coins)
    np.testing.assert_array_equal(x[200:], CANARIES[0])
    left_out = BlackBoxAudit((X, Y), CANARIES, keep_size=False, seed=0)
    assert len(left_out.data) == 2 and len(left_out.data[1]) == 200 + left_out._coins.sum()
    drawn = [BlackBoxAudit((X, Y), CANARIES)._coins for _ in range(2)]
    assert not np.array_equal(*drawn) and 40 < drawn[0].sum() < 110


def test_mislabelled_examples_have_wrong_labels_of_all_classes():
    y = np.array([3, 7, 9] * 100)
    x = {"a": np.arange(300), "b": np.ones([300, 2])}
    inputs, labels = mislabelled((x, y), 200, seed=4)
    assert len(set(inputs["a"].tolist())) == 200 and inputs["b"].shape == (200, 2)
    assert not np.any(labels == y[inputs["a"]])
    assert set(labels.tolist()) == {3, 7, 9}


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", support.crossentropy("auto")])
def test_scores_are_losses_of_each_example(loss):
    from_logits = not isinstance(loss, str)
    model = linear() if from_logits else tf.keras.Sequential([linear(), layers.Softmax()])
    model.compile("sgd", loss)
    scores = loss_scores(model, X[:20], Y[:20])
    alone = [-model.evaluate(X[i : i + 1], Y[i : i + 1], verbose=0) for i in (0, 7)]
    np.testing.assert_allclose(scores[[0, 7]], alone, rtol=1e-4)
    p = np.exp(scores)
    np.testing.assert_allclose(
        confidence_scores(model, X[:20], Y[:20]), np.log(p / (1 - p)), rtol=1e-3, atol=1e-3
    )


def test_scores_of_errors_in_several_coordinates():
    model = tf.keras.Sequential([layers.Input([400]), layers.Dense(400)])
    model.compile("sgd", "mse")
    expected = -np.mean((model.predict(X[:5], verbose=0) - X[:5]) ** 2, axis=1)
    np.testing.assert_allclose(loss_scores(model, X[:5], X[:5]), expected, rtol=1e-4)


@pytest.mark.slow
def test_generative_models_are_scored_by_a_function():
    x = vae_support.X
    audit = BlackBoxAudit((x, x), (x + 5, x + 5), keep_size=False, seed=0)
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=10, seed=1)
    model = vae_support.compiled(vae_support.vae(), sampling=batches.sampling)
    model.fit(batches, epochs=2, verbose=0)
    result = audit.result(
        model, DELTA, score=lambda model, x, y: model.log_likelihood(x, num_samples=8)
    )
    result.check()
    with pytest.raises(ValueError, match="`score` must be given"):
        audit.result(model, DELTA)


def test_bounds_are_those_of_one_run():
    audit = BlackBoxAudit((X, Y), CANARIES, seed=0)
    result = audit.result(None, DELTA, score=lambda model, x, y: audit._coins)
    assert set(result.lower_bounds) == {"one_run", "one_run_f_dp"}
    seen = audit._coins.sum()
    expected = epsilon_lower_bound(np.ones(seen), np.zeros(150 - seen), DELTA, method="one_run")
    assert result.lower_bound == expected > 2.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlackBoxAudit(X, CANARIES), "`data` must"),
        (lambda: BlackBoxAudit((X, Y), X), "`canaries` must"),
        (lambda: BlackBoxAudit((X, Y), CANARIES, seed=0.5), "`seed` must"),
        (lambda: mislabelled((X, Y), 201), "`count` must be at most"),
        (lambda: mislabelled((X, X), 2), "`data` must be .* integer labels"),
        (lambda: mislabelled((X, np.zeros(200, int)), 2), "two classes"),
        (lambda: loss_scores(linear(), X, Y), "`score` must be given"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scores_of_another_shape_are_an_error():
    audit = BlackBoxAudit((X, Y), CANARIES)
    for wrong in (np.zeros([150, 1]), np.full(150, np.nan)):
        with pytest.raises(ValueError, match="a number for each example"):
            audit.result(None, DELTA, score=lambda *_, wrong=wrong: wrong)
