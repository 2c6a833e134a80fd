"""Randomized response on labels: exact probabilities, what is drawn, and the corrected loss."""

import decimal
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import with_both
from tfdp.data import RandomizedLabels, label_privacy, randomized_response_labels
from tfdp.data.label_privacy import _replaced, _words_of_another

EPSILONS = [0.001, 0.1, 1.0, np.log(3), 3.0, 20.0]
CLASSES = [2, 3, 10, 1000, 2**20]


def probabilities(num_classes, epsilon):
    """The probability that a label is kept, and that of each other class, exact."""
    kept = RandomizedLabels(np.array([0]), num_classes, epsilon).keep_probability
    return kept, (1 - kept) / (num_classes - 1)


def exceeds(ratio, epsilon):
    """Returns whether a rational number is larger than exp(epsilon), by 100 digits."""
    with decimal.localcontext(decimal.Context(prec=100)):
        quotient = decimal.Decimal(ratio.numerator) / decimal.Decimal(ratio.denominator)
        return quotient > decimal.Decimal(epsilon).exp()


def assert_epsilon_is_reached_and_never_exceeded():
    for epsilon in map(float, EPSILONS):
        for num_classes in CLASSES:
            kept, another = probabilities(num_classes, epsilon)
            assert kept + (num_classes - 1) * another == 1 and another > 0
            # The ratios of an output's probabilities under two labels, both ways.
            assert kept / another >= 1 and not exceeds(kept / another, epsilon)
            # One word less for each other class is too much.
            less = another - Fraction(1, 2**64)
            assert exceeds((1 - (num_classes - 1) * less) / less, epsilon)


def test_epsilon_is_reached_and_never_exceeded():
    assert_epsilon_is_reached_and_never_exceeded()


@pytest.mark.parametrize(
    "mutant",
    [
        lambda num_classes, epsilon: _words_of_another(2, epsilon) // (num_classes - 1),
        lambda num_classes, epsilon: _words_of_another(num_classes, epsilon) - 1,
        lambda num_classes, epsilon: _words_of_another(num_classes, epsilon) + 1,
        lambda num_classes, epsilon: int(2**64 / (np.exp(epsilon) + num_classes - 1)),
    ],
    ids=["of two classes", "rounded down", "rounded up twice", "in float64"],
)
def test_wrong_probabilities_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(label_privacy, "_words_of_another", mutant)
    with pytest.raises(AssertionError):
        assert_epsilon_is_reached_and_never_exceeded()


def assert_words_give_the_probabilities():
    """All words of eight bits, in place of 64; then the first and last ones of 64 bits."""
    words = np.arange(256, dtype=np.uint64)
    for num_classes, others in ((2, 100), (5, 20), (10, 25), (16, 16)):
        for label in range(num_classes):
            made = label_privacy._replaced(np.full(256, label), words, others, num_classes)
            counts = np.bincount(made, minlength=num_classes)
            expected = np.full(num_classes, others)
            expected[label] = 256 - (num_classes - 1) * others
            np.testing.assert_array_equal(counts, expected)
    for num_classes, epsilon in ((2, 0.001), (10, 1.0), (2**20, 20.0)):
        others = _words_of_another(num_classes, epsilon)
        ends = [0, others - 1, others, (num_classes - 1) * others - 1]
        words = np.array([*ends, (num_classes - 1) * others, 2**64 - 1], np.uint64)
        made = label_privacy._replaced(np.full(6, 1), words, others, num_classes)
        steps = [1, 1, min(2, num_classes) % num_classes, num_classes - 1, 0, 0]
        np.testing.assert_array_equal(made, (1 + np.array(steps)) % num_classes)


def test_words_give_the_probabilities():
    assert_words_give_the_probabilities()


def maybe_the_label_again(labels, words, others, num_classes):
    """Mutant: what replaces a label is drawn from all classes, the label included."""
    each = (num_classes - 1) * others // num_classes
    steps = (words // np.uint64(each)).astype(np.int64)
    return (labels + np.where(steps < num_classes, steps, 0)) % num_classes


def one_class_never(labels, words, others, num_classes):
    """Mutant: one of the other classes is never drawn."""
    steps = (words // np.uint64(others)).astype(np.int64) + 1
    return (labels + np.where(steps < num_classes - 1, steps, 0)) % num_classes


@pytest.mark.parametrize("mutant", [maybe_the_label_again, one_class_never])
def test_wrong_words_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(label_privacy, "_replaced", mutant)
    with pytest.raises(AssertionError):
        assert_words_give_the_probabilities()


def assert_an_audit_is_below_epsilon(num_classes=2, epsilon=1.0, n=100_000):
    """Fails by chance with a probability below 1e-10: whether labels are 1 tells what they were."""
    given = np.arange(n) % 2
    released = randomized_response_labels(given, num_classes=num_classes, epsilon=epsilon)
    scores = (released.labels == 1).astype(float)
    bound = tfdp.auditing.epsilon_lower_bound(
        scores[given == 1], scores[given == 0], delta=0.0, significance=1e-10
    )
    assert 0.8 * epsilon < bound <= epsilon


def test_an_audit_of_the_labels():
    assert_an_audit_is_below_epsilon()


def test_an_audit_finds_labels_that_are_kept_too_often(monkeypatch):
    monkeypatch.setattr(
        label_privacy, "_words_of_another", lambda k, epsilon: _words_of_another(k, 1.2 * epsilon)
    )
    with pytest.raises(AssertionError):
        assert_an_audit_is_below_epsilon()


def assert_draws_have_the_probabilities(n=300_000, num_classes=10, epsilon=1.0):
    """Fails by chance with a probability below 1e-10: 100 counts, each below 1e-12."""
    labels = np.arange(n) % num_classes
    kept = np.exp(epsilon) / (np.exp(epsilon) + num_classes - 1)
    another = 1 / (np.exp(epsilon) + num_classes - 1)
    made = randomized_response_labels(labels, num_classes=num_classes, epsilon=epsilon).labels
    counts = np.bincount(labels * num_classes + made).reshape(num_classes, num_classes)
    for label in range(num_classes):
        for other in range(num_classes):
            p = kept if other == label else another
            count = int(counts[label, other])
            assert scipy.stats.binomtest(count, n // num_classes, p).pvalue > 1e-12


def test_draws_have_the_probabilities():
    assert_draws_have_the_probabilities()


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_words_of_another", lambda k, epsilon: _words_of_another(2, epsilon) // (k - 1)),
        ("_words_of_another", lambda k, epsilon: _words_of_another(k, 1.1 * epsilon)),
        ("_words_of_another", lambda k, epsilon: _words_of_another(k, 0.9 * epsilon)),
        ("_replaced", maybe_the_label_again),
        ("_replaced", one_class_never),
        ("_replaced", lambda labels, words, m, k: _replaced(labels, words[:1], m, k)),
    ],
    ids=["of two classes", "more epsilon", "less epsilon", "again", "never", "one word for all"],
)
def test_wrong_draws_are_caught(name, mutant, monkeypatch):
    monkeypatch.setattr(label_privacy, name, mutant)
    with pytest.raises(AssertionError):
        assert_draws_have_the_probabilities()


def test_no_seed_fixes_the_draw():
    def draw():
        tf.keras.utils.set_random_seed(0)
        return randomized_response_labels([0] * 200, num_classes=4, epsilon=0.5).labels

    assert (draw() != draw()).any()  # Equal with a probability below 1e-100.


def test_labels_of_every_integer_type():
    for labels in ([0, 1, 2], (0, 1, 2), np.array([0, 1, 2], np.uint8), tf.constant([0, 1, 2])):
        released = randomized_response_labels(labels, num_classes=3, epsilon=20)
        assert released.labels.dtype == np.int64 and released.labels.shape == (3,)
    released = randomized_response_labels(np.arange(1000), num_classes=1000, epsilon=20)
    assert (released.labels == np.arange(1000)).mean() > 0.99  # Each with probability 0.999998.


ONE_EACH = "hold one integer for each example"


@pytest.mark.parametrize(
    ("name", "kwargs", "requirement", "received"),
    [
        ("labels", {"labels": [0.0, 1.0]}, ONE_EACH, "dtype float64"),
        ("labels", {"labels": [True, False]}, ONE_EACH, "dtype bool"),
        ("labels", {"labels": [[0], [1]]}, ONE_EACH, "shape [2, 1]"),
        ("labels", {"labels": np.array([], int)}, ONE_EACH, "shape [0]"),
        ("labels", {"labels": 1}, ONE_EACH, "shape []"),
        ("labels", {"labels": ["a"]}, ONE_EACH, "dtype <U1"),
        ("labels", {"labels": np.ma.array([0, 2], mask=[0, 1])}, "no masked", "with 1 masked"),
        ("labels", {"labels": [0, 3]}, "in [0, num_classes), here [0, 3)", "values in [0, 3]"),
        ("labels", {"labels": [-1, 2]}, "in [0, num_classes), here [0, 3)", "values in [-1, 2]"),
        ("num_classes", {"num_classes": 1}, "an integer in [2, 2^20]", "num_classes=1"),
        ("num_classes", {"num_classes": 2.0}, "an integer in [2, 2^20]", "num_classes=2.0"),
        ("num_classes", {"num_classes": 2**20 + 1}, "an integer in [2, 2^20]", "1048577"),
        ("epsilon", {"epsilon": 0}, "in [0.001, 20]", "epsilon=0"),
        ("epsilon", {"epsilon": float("nan")}, "in [0.001, 20]", "epsilon=nan"),
        ("epsilon", {"epsilon": 20.1}, "in [0.001, 20]", "epsilon=20.1"),
        ("epsilon", {"epsilon": "1"}, "in [0.001, 20]", "epsilon='1'"),
    ],
)
@pytest.mark.parametrize("make", [randomized_response_labels, RandomizedLabels])
def test_errors(make, name, kwargs, requirement, received):
    arguments = {"labels": [0, 1, 2], "num_classes": 3, "epsilon": 1.0, **kwargs}
    with pytest.raises(ValueError, match=f"^Argument `{name}` must ") as raised:
        make(**arguments)
    message, _, received_part = str(raised.value).partition(" Received")
    assert requirement in message and received in received_part


def test_statement():
    text = randomized_response_labels([0, 1], num_classes=2, epsilon=1.25).statement()
    said = " ".join(text.split())
    for part in (
        "Label differential privacy: epsilon = 1.25 at delta = 0.",
        "Unit of privacy: one label.",
        "the features are not protected",
        "Released, once: 2 labels of 2 classes",
        "kept with probability 0.7773,",
        "is post-processing",
        "the epsilons add up",
        "No ledger counts this release",
    ):
        assert part in said
    assert max(map(len, text.splitlines())) <= 88


# The corrected loss.

K = 4
RELEASED = RandomizedLabels(np.array([0]), K, 1.0)
SPARSE = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def expected_loss(loss, truth, logits):
    """The mean of a loss over randomized labels, of a distribution of the original ones."""
    kept, another = map(float, probabilities(K, RELEASED.epsilon))
    randomized = another + (kept - another) * truth
    losses = loss(np.arange(K), tf.repeat(logits[tf.newaxis], K, axis=0))
    return tf.reduce_sum(randomized * losses)


def assert_least_at_the_truth(loss):
    rng = np.random.default_rng(0)
    for truth in rng.dirichlet(np.ones(K), 5):
        at = tf.constant(np.log(truth))
        with tf.GradientTape() as tape:
            tape.watch(at)
            least = expected_loss(loss, truth, at)
        assert np.abs(tape.gradient(least, at)).max() < 1e-9
        for other in rng.normal(0, 2, (50, K)):
            assert expected_loss(loss, truth, tf.constant(other)) > least


def test_corrected_loss_is_least_at_the_distribution_of_the_original_labels():
    assert_least_at_the_truth(RELEASED.crossentropy(from_logits=True))


@pytest.mark.parametrize(
    "loss",
    [SPARSE, RandomizedLabels(np.array([0]), K, 1.2).crossentropy(from_logits=True)],
    ids=["not corrected", "of another epsilon"],
)
def test_wrong_losses_are_caught(loss):
    with pytest.raises(AssertionError):
        assert_least_at_the_truth(loss)


def test_corrected_loss_is_that_of_the_transition_matrix():
    kept, another = map(float, probabilities(K, RELEASED.epsilon))
    matrix = np.where(np.eye(K, dtype=bool), kept, another)
    logits = np.random.default_rng(0).normal(0, 3, (7, K))
    labels = np.arange(7) % K
    p = tf.nn.softmax(logits).numpy()
    expected = -np.log((p @ matrix)[np.arange(7), labels])
    for y in (labels, labels[:, np.newaxis], labels.astype("float32")):
        of_logits = RELEASED.crossentropy(from_logits=True)(y, logits)
        of_probabilities = RELEASED.crossentropy(from_logits=False)(y, p)
        np.testing.assert_allclose(of_logits, expected, rtol=1e-12)
        np.testing.assert_allclose(of_probabilities, expected, rtol=1e-12)


def test_corrected_loss_of_extreme_outputs():
    loss = RandomizedLabels(np.array([0]), K, 20.0).crossentropy(from_logits=True)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        outputs = tf.Variable(tf.cast([[0.0, 1e4, 0, 0], [1e4, 0, 0, 0]], dtype))
        with tf.GradientTape() as tape:
            losses = loss([0, 0], outputs)
        gradient = tape.gradient(losses, outputs)
        # At most -log(o), where epsilon is 20 and so o is about exp(-20).
        np.testing.assert_allclose(losses, [20, 0], atol=1e-3)
        assert np.isfinite(np.asarray(tf.cast(gradient, "float32"))).all()


def test_corrected_loss_refuses_outputs_of_other_classes():
    for outputs in (tf.zeros([2, 3]), tf.zeros([2, 5, K])):
        with pytest.raises(ValueError, match=r"must be \[batch, 4\].* Received: shape \("):
            RELEASED.crossentropy(from_logits=True)([0, 1], outputs)


# Training.


def digits():
    """Two thirds of the digits with randomized labels, and the others."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    return images[:1200], labels[:1200], images[1200:], labels[1200:]


@pytest.mark.slow
def test_corrected_loss_beats_the_uncorrected_one_on_digits():
    x, y, x_test, y_test = digits()
    released = randomized_response_labels(y, num_classes=10, epsilon=2.5)
    assert 0.4 < (released.labels != y).mean() < 0.5
    found = {}
    for name, loss in (
        ("corrected", released.crossentropy(from_logits=True)),
        ("uncorrected", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    ):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.layers.Dense(10, input_shape=[64])])
        model.compile(tf.keras.optimizers.Adam(0.02), loss)
        model.fit(x, released.labels, batch_size=200, epochs=20, verbose=0)
        outputs = model.predict(x_test, verbose=0)
        accuracy = (outputs.argmax(axis=1) == y_test).mean()
        found[name] = accuracy, float(tf.reduce_mean(SPARSE(y_test, outputs)))
    assert found["corrected"][0] > found["uncorrected"][0] - 0.02
    assert found["corrected"][1] < 0.7 * found["uncorrected"][1]


@pytest.mark.quick_cases(1)
@with_both
def test_private_training_has_two_guarantees_that_stay_apart(front, recwarn):
    x, y = support.small_data(120)
    released = randomized_response_labels(y, num_classes=3, epsilon=2.0)
    statements = []
    for labels, loss in (
        (released.labels, released.crossentropy(from_logits=True)),
        (y, front.crossentropy()),
    ):
        batches = tfdp.data.poisson_batches((x, labels), expected_batch_size=30)
        model = front.keras.Sequential([front.keras.layers.Dense(3)])
        optimizer = front.tfdp.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling)
        model.compile(optimizer, loss, metrics=["accuracy"])
        model.fit(batches, epochs=1, verbose=0)
        statements.append(tfdp.privacy_statement(model, delta=1e-3))
    assert not [w for w in recwarn if "slower" in str(w.message)]
    # The ledger has the example's epsilon, whatever was done to the labels.
    assert statements[0] == statements[1]
    assert "label" not in statements[0].lower()
    with pytest.raises(TypeError, match="ledger"):
        tfdp.privacy_statement(released, delta=1e-3)


@pytest.mark.parametrize("from_logits", [True, False])
def test_clipped_sum_of_corrected_losses_is_that_of_a_loop(from_logits):
    model = support.small_model()
    if not from_logits:
        model.add(tf.keras.layers.Softmax())
    x, y = support.small_data(20)
    loss = RandomizedLabels(y, 3, 1.0).crossentropy(from_logits=from_logits)

    def weighted(y, outputs, sample_weight=1.0):
        return loss(y, outputs) * tf.cast(sample_weight, tf.float32)

    engine = tfdp.clipping.OnePassEngine(0.1)
    clipped = support.ClippedSum(engine, model, x, weighted)(x, y)
    expected = support.looped_clipped_sum(model, x, y, 0.1, weighted)
    np.testing.assert_allclose(clipped, expected, rtol=1e-4, atol=1e-6)


@with_both
def test_saved_models(front, tmp_path):
    x, y = support.small_data(40)
    released = randomized_response_labels(y, num_classes=3, epsilon=2.0)
    loss = released.crossentropy(from_logits=True)
    model = front.keras.Sequential([front.keras.layers.Dense(3)])
    model.compile("sgd", loss)
    model.fit(x, released.labels, verbose=0)
    model.save(tmp_path / "model.keras")
    again = front.keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"corrected_crossentropy": loss}
    )
    value = model.evaluate(x, released.labels, verbose=0)
    assert again.evaluate(x, released.labels, verbose=0) == pytest.approx(value)
    assert value == pytest.approx(float(tf.reduce_mean(loss(released.labels, model(x)))), rel=1e-5)
