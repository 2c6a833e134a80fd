"""Generative adversarial networks whose critic is trained privately."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, needs_keras_3, with_both, with_one
from tests.gan_support import N, X, Y, batches, compiled, critic_of, front_of, gan, network
from tfdp.training.private_gan import GANTraining

CLIP = 0.1


# What training does.


@pytest.fixture(scope="module", params=FRONT_ENDS, ids=lambda front: front.part)
def trained(request):
    """A conditional GAN after four steps, and what was shown."""
    front = request.param
    model = gan(front, conditional=True, critic_steps=2)
    before = model.get_weights()
    seen = []
    show = front.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: seen.append(set(logs))
    )
    compiled(model)
    history = model.fit(batches(), epochs=2, verbose=0, callbacks=[show])
    return model, before, [*seen, set(history.history)]


def test_a_step_of_the_critic_is_counted_once(trained):
    model = trained[0]
    priced = tfdp.accounting.PrivacyLedger()
    priced.record(
        dp_accounting.PoissonSampledDpEvent(16 / N, dp_accounting.GaussianDpEvent(1.1)),
        4,
        truncation_probability=batches().sampling.truncation_probability,
    )
    assert model.optimizer.ledger.steps == 4
    assert model.optimizer.ledger.epsilon(1e-5).epsilon == priced.epsilon(1e-5).epsilon
    assert int(model.generator_optimizer.iterations) == 2
    assert model.optimizer.clipping.report().fast_fraction == 1.0


def test_both_networks_were_trained_and_nothing_was_shown(trained):
    model, before, seen = trained
    moved = [np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert np.mean(moved) > 0.8
    assert all(shown == {"updates"} for shown in seen)
    assert model.metrics[0].result() == 0


def test_evaluation_is_of_held_out_examples(trained):
    found = trained[0].evaluate(X, Y, verbose=0, return_dict=True)
    assert set(found) == {"critic_loss"} and np.isfinite(found["critic_loss"])


def test_generating(trained):
    model = trained[0]
    first, again = (model.generate(5, seed=1) for _ in range(2))
    assert first.shape == (5, 4) and np.array_equal(first, again)
    assert not np.array_equal(model.generate(5, 0, seed=1), model.generate(5, 2, seed=1))
    assert model.generate(0).shape == (0, 4)
    for labels in ([0, 1], [3] * 5, -1):
        with pytest.raises(ValueError, match="`labels` must be labels in"):
            model.generate(5, labels)
    with pytest.raises(ValueError, match="`n` must be"):
        model.generate(-1)


def test_saved_models_keep_the_ledger(trained, tmp_path):
    model = trained[0]
    path = str(tmp_path / "gan.keras")
    model.save(path)
    loaded = front_of(model).keras.models.load_model(path)
    assert loaded.optimizer.ledger.steps == 4
    assert int(loaded.generator_optimizer.iterations) == 2
    np.testing.assert_array_equal(loaded.generate(3, seed=1), model.generate(3, seed=1))
    assert loaded.optimizer.ledger.event == model.optimizer.ledger.event
    optimizers = (loaded.generator_optimizer, model.generator_optimizer)
    for a, b in zip(*(optimizer.variables for optimizer in optimizers), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    own, saved = loaded.get_config(), model.get_config()
    for name in ("generator", "critic"):  # Keras 3 describes a loaded one in other words.
        assert own.pop(name)["class_name"] == saved.pop(name)["class_name"]
    assert own == saved


def steps_of_a_second_gan(front, seed):
    """Returns what the ledger of a new critic says, with a generator that has cost four steps."""
    first = compiled(gan(front, seed=seed))
    first.optimizer._released._own.assign_add([[4, 0, 0]])
    second = compiled(gan(front, generator=first.generator, seed=seed + 1))
    return second.optimizer.ledger.steps


@with_both
def test_a_generator_takes_its_cost_along(front, monkeypatch):
    assert steps_of_a_second_gan(front, seed=1) == 4
    monkeypatch.setattr(GANTraining, "_record_generator", lambda self: None)  # Mutant.
    assert steps_of_a_second_gan(front, seed=3) == 0


@pytest.fixture
def fixed(monkeypatch):
    """The random numbers of the losses are constants."""
    monkeypatch.setattr(tf.random, "normal", lambda shape, **_: tf.ones(shape))
    monkeypatch.setattr(tf.random, "uniform", lambda shape, **_: 0.3 * tf.ones(shape))


def updates_of(model, *batches):
    """The clipped sums that a step subtracts."""
    optimizer = front_of(model).tfdp.DPSGD(
        l2_norm_clip=CLIP, noise_multiplier=0.0, expected_batch_size=1, learning_rate=1.0
    )
    model.compile(critic_optimizer=optimizer, generator_optimizer="sgd")
    spec = [tf.TensorSpec([None, 4])]
    step = tf.function(lambda x: model.train_step((x, x)), input_signature=spec, autograph=False)
    weights, found = model.critic.get_weights(), []
    for rows in batches:
        model.critic.set_weights(weights)
        step(rows)
        found.append(support.flat(weights) - critic_of(model))
    return found


@with_both
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": "non_saturating", "gradient_penalty": None}],
    ids=["penalty", "non_saturating"],
)
def test_the_update_is_the_sum_of_clipped_gradients(front, fixed, changes):
    model, x = gan(front, critic_steps=10, **changes), X[:4]
    total = 0.0
    for i in range(4):
        with tf.GradientTape() as tape:
            loss = model._critic_losses(tf.constant(x[i : i + 1]), None, training=True)
        gradients = tape.gradient(loss, model.critic.trainable_variables)
        gradient = support.flat(tf.zeros([1]) if g is None else g for g in gradients)
        total = total + gradient / max(1.0, np.linalg.norm(gradient) / CLIP)
    with_all, without_one = updates_of(model, x, x[:-1])
    np.testing.assert_allclose(with_all, total, atol=1e-6)
    assert 0 < np.linalg.norm(with_all - without_one) <= CLIP * (1 + 1e-5)


@needs_keras_3
def test_both_kerases_make_the_same_updates(fixed):
    """Of the critic and of the generator, which learns from it."""
    models = [gan(front) for front in FRONT_ENDS]
    weights = [models[0].generator.get_weights(), models[0].critic.get_weights()]
    found = []
    for model in models:
        model.generator.set_weights(weights[0])
        model.critic.set_weights(weights[1])
        updates_of(model, X[:8])
        found.append([support.flat(model.generator.get_weights()), critic_of(model)])
    for before, own, other in zip(weights, *found, strict=True):
        assert np.abs(own - support.flat(before)).max() > 1e-3
        np.testing.assert_allclose(own, other, atol=1e-6)


# What would not be private is refused.


class PenaltyOfTheBatch:
    """Mutant: the penalty is on the norm of all gradients together."""

    def _penalty(self, x, fakes, labels, training):
        with tf.GradientTape() as tape:
            tape.watch(x)
            scores = self._score(x, labels, training)
        return tf.square(tf.norm(tape.gradient(scores, x)) - 1.0) * scores


class MeetsOthers:
    """Mutant: an example meets the mean of all."""

    def _score(self, x, labels, training):
        return super()._score(x - tf.reduce_mean(x, 0), labels, training)


class GeneratorSeesData:
    """Mutant: the generator's batch has as many rows as the critic's."""

    def train_step(self, data):
        self._rows = tf.cast(tf.shape(data[0])[0], tf.float32)
        return super().train_step(data)

    def _generator_step(self):
        variable = self.generator.trainable_variables[0]
        variable.assign_sub(0.1 * tf.ones_like(variable) * self._rows)
        return tf.constant(True)


@with_one
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (PenaltyOfTheBatch, "mixes examples"),
        (GeneratorSeesData, "writes a statistic of the batch"),
        (MeetsOthers, "mixes examples"),
    ],
)
def test_mutants_are_refused(front, mutant, message):
    with pytest.raises(ValueError, match=message):
        compiled(gan(front, mutant)).fit(batches(X), verbose=0)


@with_both
def test_a_critic_with_batch_normalization_is_refused(front):
    critic = network(front, 4, 1, normalized=True)
    with pytest.raises(ValueError, match="writes a statistic of the batch"):
        compiled(gan(front, critic=critic)).fit(batches(X), verbose=0)


@with_one
def test_a_conditional_gan_needs_labels(front):
    with pytest.raises(ValueError, match=r"integer labels, .*Received: float32 labels"):
        compiled(gan(front, conditional=True)).fit(batches(X), verbose=0)


def shared(front):
    model = network(front, 4, 4)
    critic = front.keras.Sequential([model, front.keras.layers.Dense(1)])
    return {"generator": model, "critic": critic}


ARGUMENTS = {
    "no bound": ({"gradient_penalty": None}, "`gradient_penalty` or `weight_clip` must"),
    "two bounds": ({"weight_clip": 0.1}, "`gradient_penalty` or `weight_clip` must"),
    "a negative penalty": ({"gradient_penalty": -1.0}, "`gradient_penalty` must be"),
    "another loss": ({"loss": "hinge"}, "`loss` must be one of"),
    "no steps": ({"critic_steps": 0}, "`critic_steps` must be"),
    "probabilities": ({"label_probabilities": [1.0]}, "`label_probabilities` must be None"),
    "other probabilities": (
        {"conditional": True, "label_probabilities": [0.5, 0.2, 0.2]},
        "`label_probabilities` must be 3 numbers",
    ),
    "not built": ({"critic": "not built"}, "`critic` must be a model of Keras"),
    "of another Keras": ({"critic": "of another Keras"}, "`critic` must be a model of Keras"),
    "one input": ({"num_classes": 3}, "`generator` must take noise"),
}


@with_both
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_checked(front, name):
    changes, message = ARGUMENTS[name]
    critics = {
        "not built": front.keras.Sequential([front.keras.layers.Dense(1)]),
        "of another Keras": tf.Module(),
    }
    if "critic" in changes:
        changes = {"critic": critics[name]}
    with pytest.raises(ValueError, match=message):
        gan(front, **changes)


@with_both
def test_networks_must_share_no_layers(front):
    with pytest.raises(ValueError, match="must share no layers"):
        gan(front, **shared(front))


@with_both
def test_optimizers_are_checked(front):
    private = front.tfdp.DPSGD(1.0, 1.0, expected_batch_size=16)
    ordinary = front.keras.optimizers.Adam()
    model = gan(front)
    with pytest.raises(ValueError, match="`critic_optimizer` must be"):
        model.compile(critic_optimizer=ordinary, generator_optimizer=private)
    with pytest.raises(ValueError, match="`generator_optimizer` must be"):
        model.compile(critic_optimizer=private, generator_optimizer=private)
    with pytest.raises(ValueError, match="`loss` must not be given"):
        model.compile(critic_optimizer=private, generator_optimizer="adam", loss="mse")
    with pytest.raises(TypeError):
        model.compile("adam")


@with_one
@pytest.mark.slow
def test_weights_are_clipped_after_each_step(front):
    model = gan(front, gradient_penalty=None, weight_clip=0.05, non_private_diagnostics=True)
    history = compiled(model).fit(batches(X), verbose=0).history
    assert np.max(np.abs(critic_of(model))) <= np.float32(0.05)
    assert set(history) == {"updates", "non_private_critic_loss"}


@with_both
@pytest.mark.slow
def test_compiling_again_keeps_the_ledger(front):
    model = gan(front, gradient_penalty=None, loss="non_saturating")
    for _ in range(2):
        compiled(model).fit(batches(X), verbose=0)
    assert model.optimizer.ledger.steps == 4


@with_both
@pytest.mark.slow
def test_single_batches_train(front):
    model = compiled(gan(front, gradient_penalty=None, loss="non_saturating"))
    for batch in batches(X).take(2):
        model.train_on_batch(*batch)
    assert model.optimizer.ledger.steps == 2
