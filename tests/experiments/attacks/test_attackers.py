"""Attackers see members where there is something to see, and guess where there is not."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import networks
from experiments.attacks import attackers
from experiments.attacks.attackers import Observed
from experiments.datasets import Data

CLASSES = 4


def data(members, others, seed=0):
    """Noise, with labels at random: what is learned of it is learned by heart."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(members + others, 20)).astype(np.float32)
    y = random.integers(0, CLASSES, len(x))
    return Data(x[:members], y[:members], x[members:], y[members:])


def classifier(width=64):
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input([20]),
            tf.keras.layers.Dense(width, "relu"),
            tf.keras.layers.Dense(CLASSES),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.legacy.Adam(0.01), loss)
    return model


def found(trained, view):
    """Success on data of which a model has learned the members, or nothing."""
    model, both = classifier(), data(600, 600)
    if trained:
        model.fit(both.train_x, both.train_y, epochs=30, batch_size=64, verbose=0)
    observed = attackers.observe(view, model, both).balanced(0)
    return attackers.success(*observed.halves(), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("view", [attackers.posteriors, attackers.internals])
def test_attackers_succeed_on_a_model_that_memorises_and_not_on_one_that_saw_nothing(view):
    """Of 300 + 300 guesses at chance, the standard deviation is 0.02; 0.13 is six of them."""
    seen, nothing = found(True, view), found(False, view)
    for attacker in attackers.ATTACKERS:
        assert seen[attacker]["accuracy"] > 0.65 and seen[attacker]["auc"] > 0.7
        assert abs(nothing[attacker]["accuracy"] - 0.5) < 0.13
        assert abs(nothing[attacker]["auc"] - 0.5) < 0.15


def normals(difference, size=400, seed=0):
    random = np.random.default_rng(seed)
    return Observed(
        random.normal(difference, 1.0, (size, 2)).astype(np.float32),
        random.normal(0.0, 1.0, (size, 2)).astype(np.float32),
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("attacker", ["forest", "network"])
def test_attackers_learn_what_distinguishes_members(attacker, monkeypatch):
    """The best accuracy for two normal distributions 2 sqrt(2) apart is 0.921."""
    monkeypatch.setattr(attackers, "ATTACKERS", {attacker: attackers.ATTACKERS[attacker]})
    (result,) = attackers.success(normals(2.0), normals(2.0, seed=1), 0).values()
    assert 0.85 < result["accuracy"] < 0.98 and 0.93 < result["auc"] < 1


def test_threads_grow_the_same_trees(monkeypatch):
    threads, fit = [], attackers.RandomForestClassifier.fit

    def noted(self, x, y):
        threads.append(self.n_jobs)
        return fit(self, x, y)

    monkeypatch.setattr(attackers.RandomForestClassifier, "fit", noted)
    known, others = normals(0.5, 50), normals(0.5, 50, seed=1).inside
    guesses = []
    for count, seed in ((0, 0), (3, 0), (3, 1)):
        name = "get_intra_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, name, lambda count=count: count)
        guesses.append(attackers.forest(known, others, seed))
    assert threads == [None, 3, 3]
    np.testing.assert_array_equal(guesses[0], guesses[1])
    assert (guesses[1] != guesses[2]).any()  # Mutant: another seed.


def constant(known, others, seed):
    """Guesses what most of the known examples are."""
    return np.full(len(others), len(known.inside) / (len(known.inside) + len(known.outside)))


def memory(known, others, seed):
    """Recognizes the examples that it learned from."""
    rows = {row.tobytes() for row in known.inside}
    return np.array([float(row.tobytes() in rows) for row in others])


def test_success_is_measured_on_others_and_balanced(monkeypatch):
    monkeypatch.setattr(attackers, "ATTACKERS", {"constant": constant, "memory": memory})
    observed = Observed(normals(0.0, 40).inside, normals(0.0, 20, seed=1).outside).balanced(0)
    assert len(observed.inside) == len(observed.outside) == 20
    known, others = observed.halves()
    success = attackers.success(known, others, 0)
    expected = {"accuracy": 0.5, "auc": 0.5, "tpr": 0.0}
    assert success == {"constant": expected, "memory": expected}
    # Mutants: others that were learned from; more members than others.
    assert attackers.success(known, known, 0)["memory"]["accuracy"] == 1.0
    heavy = Observed(normals(0.0, 40).inside, normals(0.0, 20, seed=1).outside)
    assert attackers.success(heavy, heavy, 0)["constant"]["accuracy"] > 0.6


def test_halves_share_no_example():
    known, others = normals(0.0, 7).halves()
    assert (len(known.inside), len(others.inside)) == (3, 4)
    for a, b in ((known.inside, others.inside), (known.outside, others.outside)):
        assert not {row.tobytes() for row in a} & {row.tobytes() for row in b}


def test_posteriors_are_sorted_and_say_whether_the_guess_is_right():
    model, both = classifier(), data(5, 5)
    rows = attackers.posteriors(model, both.train_x, both.train_y)
    assert rows.shape == (5, CLASSES + 1)
    logits = model.predict(both.train_x, verbose=0)
    expected = np.sort(tf.nn.softmax(logits).numpy(), axis=1)[:, ::-1]
    np.testing.assert_allclose(np.exp(rows[:, :-1]), expected, rtol=1e-5)
    np.testing.assert_array_equal(rows[:, -1], logits.argmax(axis=1) == both.train_y)


def last_gradients(model, x, y):
    """Each example's gradient by the last kernel and bias, and its loss, by differentiation."""
    kernels, biases, losses = [], [], []
    for i in range(len(y)):
        with tf.GradientTape() as tape:
            loss = model.loss(y[i : i + 1], model(x[i : i + 1]))
        by_kernel, by_bias = tape.gradient(loss, model.layers[-1].variables)
        kernels.append(by_kernel.numpy())
        biases.append(by_bias.numpy())
        losses.append(loss.numpy())
    return np.stack(kernels), np.stack(biases), np.array(losses)


@pytest.mark.parametrize("width", [6, 300])
def test_internals_are_losses_activations_and_gradients(width, monkeypatch):
    monkeypatch.setattr(attackers, "_BATCH", 2)  # Smaller than the 5 examples.
    model, both = classifier(width), data(5, 1)
    x, y = both.train_x, both.train_y
    rows = attackers.internals(model, x, y)
    public, rest = rows[:, : CLASSES + 1], rows[:, CLASSES + 1 :]
    np.testing.assert_allclose(public, attackers.posteriors(model, x, y), rtol=1e-5)
    kernels, biases, losses = last_gradients(model, x, y)
    hidden = model.layers[0](x).numpy()
    if width * CLASSES <= 1000:
        gradients = kernels.reshape(5, -1)
    else:
        gradients = np.linalg.norm(kernels, axis=1)
    expected = np.column_stack([losses, np.eye(CLASSES)[y], hidden, biases, gradients])
    np.testing.assert_allclose(rest, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_every_network_of_the_tables_can_be_attacked(name):
    model = networks.NETWORKS[name](networks.make_activation("relu"))
    x = np.ones([3, *model.input_shape[1:]], np.float32)
    rows = attackers.internals(model, x, np.array([0, 1, 1]))
    classes, width = model.output_shape[1], model.layers[-1].input.shape[1]
    gradients = width * classes if width * classes <= 1000 else classes
    assert rows.shape == (3, 3 * classes + 2 + width + gradients)


def test_what_is_wide_is_given_by_its_norm():
    """Takes them for inputs of a linear classifier: they are no activations."""
    model = tf.keras.Sequential([tf.keras.layers.Input([1500]), tf.keras.layers.Dense(2)])
    x = np.random.default_rng(0).normal(size=(3, 1500)).astype(np.float32)
    rows = attackers.internals(model, x, np.array([0, 1, 1]))
    assert rows.shape == (3, 3 + 1 + 2 + 1 + 2 + 2)
    np.testing.assert_allclose(rows[:, 6], np.linalg.norm(x, axis=1), rtol=1e-5)


def test_probabilities_of_zero_are_finite():
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(2)])
    x = np.array([[1e4, -1e4]], np.float32)
    for view in (attackers.posteriors, attackers.internals):
        assert np.isfinite(view(model, x, np.array([1]))).all()
