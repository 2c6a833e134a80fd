"""Training whose unit of privacy is a user, and training on augmented copies of examples."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.clipping import OnePassEngine
from tfdp.step.record import record_ledger

layers = tf.keras.layers
CLIP, USERS = 0.3, 30
rng = np.random.default_rng(0)
IDS = np.concatenate([np.arange(USERS), rng.integers(0, USERS, 70)])
X, Y = support.small_data(len(IDS))


def batches_of(ids=IDS, expected_batch_size=10, x=X, **kwargs):
    return tfdp.data.poisson_batches(
        (x[: len(ids)], Y[: len(ids)]),
        expected_batch_size=expected_batch_size,
        privacy_unit=ids,
        **{"examples_per_user": 4, **kwargs},
    )


def optimizer_of(batches, noise=1.0, cls=tfdp.DPSGD, **kwargs):
    return cls(CLIP, noise, sampling=batches.sampling, **{"learning_rate": 1.0, **kwargs})


def update_with_everyone(ids, x, **kwargs):
    """The update of a step on all users, times the number of users: the clipped sum."""
    batches = batches_of(ids, len(set(ids)), x=x, examples_per_user=12)
    model = support.compiled(optimizer_of(batches, 1e-9, **kwargs), loss=support.crossentropy())
    before = support.flat(model.get_weights())
    model.fit(batches, steps_per_epoch=1, verbose=0)
    return (before - support.flat(model.get_weights())) * len(set(ids))


def looped(ids, x):
    """The clipped sum, one user at a time."""
    model, total = support.small_model(), 0.0
    for user in sorted(set(ids)):
        rows = np.flatnonzero(ids == user)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(support.crossentropy()(Y[rows], model(x[rows])))
        gradient = support.flat(tape.gradient(loss, model.trainable_variables))
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    return total


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["one_pass", "vectorized"])
def test_the_mean_gradient_of_a_user_is_clipped(engine):
    found = update_with_everyone(IDS, X, engine=engine)
    np.testing.assert_allclose(found, looped(IDS, X), atol=2e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("extreme", [1.0, 1e4])
def test_all_examples_of_a_user_move_the_sum_by_the_clip_at_most(extreme):
    """Neighbors: a data set without the last user, of ten examples."""
    ids, x = np.concatenate([IDS[:-10], [USERS] * 10]), X.copy()
    x[-10:] *= extreme
    moved = update_with_everyone(ids, x) - update_with_everyone(ids[:-10], x)
    assert 0.05 * CLIP < np.linalg.norm(moved) <= CLIP * (1 + 1e-4)


@pytest.mark.slow
def test_mutant_that_clips_examples_of_users_apart_is_caught(monkeypatch):
    monkeypatch.setattr(OnePassEngine, "rows_per_example", property(lambda s: 1, lambda s, v: None))
    with pytest.raises(AssertionError):
        test_all_examples_of_a_user_move_the_sum_by_the_clip_at_most(1e4)


def test_ledger_and_statement_are_of_users():
    batches = batches_of()
    model = support.compiled(optimizer_of(batches))
    model.fit(batches, epochs=2, verbose=0)
    ledger = model.optimizer.ledger
    assert (ledger.unit, ledger.steps, ledger.dataset_sizes) == ("user", 6, (USERS,))
    (release,) = ledger.releases
    assert release.event.sampling_probability == 10 / USERS
    statement = " ".join(tfdp.privacy_statement(model, 1e-3).split())
    assert "Unit of privacy: one user." in statement
    assert "each user is in each batch" in statement
    assert "(of 30 users, 10 expected per batch)" in statement
    read_back = tfdp.accounting.PrivacyLedger.from_dict(ledger.to_dict())
    assert read_back.unit == "user"


@pytest.mark.slow
def test_state_survives(tmp_path):
    batches = batches_of()
    model = support.compiled(optimizer_of(batches))
    model.fit(batches, epochs=1, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    assert loaded.optimizer.ledger.unit == "user"
    assert loaded.optimizer.ledger.steps == 3
    assert loaded.optimizer.sampling == batches.sampling
    assert loaded.optimizer.clipping.rows_per_example == 4
    loaded.fit(batches, epochs=1, verbose=0)
    assert loaded.optimizer.ledger.steps == 6


def test_units_are_never_mixed():
    plain = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    model = support.compiled(optimizer_of(plain))
    model.fit(plain, steps_per_epoch=2, verbose=0)
    users = batches_of()
    model.compile(optimizer_of(users), support.crossentropy())
    before = tfdp.privacy_statement(model, 1e-3)  # Nothing was released of users yet.
    assert "one training example" in before
    budget = tfdp.PrivacyBudget(10.0, 1e-3)
    with pytest.raises(ValueError, match="is one user, but that of what has been released before"):
        model.fit(users, epochs=1, verbose=0, callbacks=[budget])
    model.fit(users, steps_per_epoch=1, verbose=0)
    with pytest.raises(dp_accounting.UnsupportedEventError):
        model.optimizer.ledger.epsilon(1e-3)
    assert any("others with users" in note for note in model.optimizer.ledger.notes)
    prior = tfdp.accounting.PrivacyLedger()
    prior.record(optimizer_of(plain).release.event)
    fresh = support.compiled(optimizer_of(users))
    fresh.fit(users, steps_per_epoch=1, verbose=0)
    with pytest.raises(ValueError, match="one unit of privacy"):
        tfdp.privacy_statement(fresh, 1e-3, prior=prior)
    with pytest.raises(ValueError, match="is one user, but that of what has been released before"):
        tfdp.make_private(
            support.small_model(),
            (X, Y),
            privacy_unit=IDS,
            examples_per_user=4,
            prior=prior,
            batch_size=10,
            epochs=1,
            target_epsilon=5.0,
            loss=support.crossentropy(),
        )


@pytest.mark.slow
def test_mutant_that_forgets_the_unit_is_caught(monkeypatch):
    monkeypatch.setattr(record_ledger, "_unit_of", lambda row: "example")
    with pytest.raises(AssertionError):
        test_ledger_and_statement_are_of_users()


@pytest.mark.slow
@pytest.mark.parametrize(("padding", "cls"), [("buckets", tfdp.DPAdam), ("full", tfdp.DPSignSGD)])
def test_padded_batches_and_chunks(padding, cls):
    chunked = {"chunk_size": 16} if padding == "full" else {}
    batches = batches_of(padding=padding, **chunked)
    model = support.compiled(optimizer_of(batches, cls=cls), jit_compile=padding == "buckets")
    model.fit(batches, epochs=2, verbose=0)
    assert model.optimizer.ledger.steps == 6
    assert model.optimizer.ledger.epsilon(1e-3).epsilon < 10


def test_batches_of_other_users_are_refused():
    model = support.compiled(optimizer_of(batches_of()))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(batches_of(examples_per_user=2), steps_per_epoch=1, verbose=0)
    plain = tfdp.data.poisson_batches((X[:30], Y[:30]), expected_batch_size=10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(plain, steps_per_epoch=1, verbose=0)


def test_augmented_copies_are_one_example():
    """Their mean gradient is clipped: with equal copies, the update is that of one."""
    updates = []
    for copies in (1, 5):
        batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=100, augmentations=copies)
        model = support.compiled(optimizer_of(batches, 1e-9))
        before = support.flat(model.get_weights())
        model.fit(batches, steps_per_epoch=1, verbose=0)
        updates.append(before - support.flat(model.get_weights()))
        assert model.optimizer.ledger.unit == "example"
        assert model.optimizer.ledger.steps == 1
    np.testing.assert_allclose(*updates, atol=1e-6)


def test_what_does_not_go_with_several_rows():
    batches = batches_of()
    with pytest.raises(ValueError, match="`num_microbatches` must be None where examples have"):
        optimizer_of(batches, num_microbatches=2)
    model = tfdp.SelectiveModel(support.small_model())
    model.compile(
        tfdp.DPSURSGD(
            CLIP,
            1.0,
            expected_batch_size=10,
            validation_batch_size=10,
            validation_clip=1.0,
            validation_noise_multiplier=1.0,
            learning_rate=0.1,
        ),
        support.crossentropy(),
    )
    with pytest.raises(ValueError, match="one row for each example"):
        model.fit(batches, epochs=1, verbose=0)


@pytest.mark.slow
def test_make_private_for_users(capsys):
    model, batches, budget = tfdp.make_private(
        support.small_model(),
        (X, Y),
        epochs=2,
        target_epsilon=5.0,
        delta=1e-3,
        batch_size=10,
        privacy_unit=IDS,
        examples_per_user=4,
        loss=support.crossentropy(),
        metrics=["accuracy"],
    )
    assert "zero-out of one of 30 users" in capsys.readouterr().out
    history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.unit == "user"
    assert 4.5 < model.optimizer.ledger.epsilon(1e-3).epsilon <= 5.0
    assert "accuracy" in history.history
