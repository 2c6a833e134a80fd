"""DPAGD: what is released is what is paid for, and it learns."""

import math
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from experiments import datasets, networks
from tests import support
from tfdp.accounting import BoundedRangeDpEvent, RdpFilter
from tfdp.contrib import (
    AdaptiveGradientDescent,
    DescentOptions,
    adaptive_descent,
    calibrate_descent,
)
from tfdp.contrib.descent_budget import grown_precision

N, CLIP, LOSS_CLIP = 64, 0.5, 1.2
X, Y = support.small_data(N)


def descend(
    cls=AdaptiveGradientDescent,
    x=X,
    y=Y,
    batch=16,
    epsilon=8.0,
    budget=None,
    model=None,
    padding="none",
    **changes,
):
    options = DescentOptions(
        **{
            "l2_norm_clip": CLIP,
            "noise_multiplier": 3.0,
            "loss_clip": LOSS_CLIP,
            "selection_range": 1.0,
            "selection_batch_size": 16,
            "candidates": 5,
            **changes,
        }
    )
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=batch, seed=7, padding=padding)
    budget = budget or RdpFilter(epsilon, 1e-5)
    model = model or support.small_model()
    return cls(model, support.crossentropy(), batches, budget, options, noise_seed=3)


def weights(descent):
    return support.flat(descent.model.get_weights())


class TakesTheLongest(AdaptiveGradientDescent):
    """Chooses the same step whatever the scores are."""

    def _choose(self, scores, key):
        return tf.size(scores) - 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_models_of_bfloat16_take_the_steps_of_float32(dtype):
    """Sums, noise and velocity are float32: only what the model itself computes is rounded."""
    start = [np.round(w * 16) / 16 for w in support.small_model().get_weights()]  # Exact in both.
    found = {}
    for policy in ("float32", dtype):
        layers = [tf.keras.layers.Dense(w.size, dtype=policy) for w in start[1::2]]
        model = tf.keras.Sequential([tf.keras.layers.Input([X.shape[1]]), *layers])
        model.set_weights(start)
        descent = descend(TakesTheLongest, model=model, candidates=1, momentum=0.5, epsilon=50.0)
        assert descent.run(iterations=3) == 3
        found[policy] = descent
    exact, rounded = (weights(descent).astype("float32") for descent in found.values())
    assert np.linalg.norm(exact) > 1.0
    np.testing.assert_allclose(rounded, exact, atol=0.05)
    for velocity in found[dtype]._velocity:
        assert velocity.dtype == tf.float32


# One example.


def bad_rows():
    """Examples of all sorts: ordinary, huge, infinite, and no numbers."""
    x = X.copy()
    x[3], x[4], x[5] = 1e4, np.inf, np.nan
    x[6] = 1e30
    return x


def sums_without(descent, x, row):
    """The clipped sum and the clipped loss, with all examples and without one."""
    mask = np.ones(N, bool)
    found = []
    for keep in (True, False):
        mask[row] = keep
        found.append(
            (support.flat(descent._clipped_sum(x, Y, mask)), float(loss(descent, x, mask)))
        )
    (g, loss_with), (without, loss_without) = found
    return np.linalg.norm(g - without), loss_with - loss_without


def loss(descent, x, mask):
    return descent._clipped_loss(x, Y, mask)


def test_sensitivity_of_one_example():
    descent, x = descend(), bad_rows()
    moves = np.array([sums_without(descent, x, row) for row in range(20)])
    assert np.all(moves[:, 0] <= CLIP * (1 + 1e-5)) and np.max(moves[:, 0]) > 0.99 * CLIP
    assert np.all(moves[:, 1] >= 0) and np.all(moves[:, 1] <= LOSS_CLIP * (1 + 1e-12))
    np.testing.assert_allclose(moves[4:6, 1], LOSS_CLIP)
    assert moves[4, 0] == moves[5, 0] == 0


@pytest.mark.slow
def test_mutants_without_clips_are_caught():
    descent = descend()
    descent._engine = support.UnclippedEngine(CLIP)
    assert max(sums_without(descent, X, row)[0] for row in range(10)) > 1.1 * CLIP
    loose = descend(loss_clip=100.0)
    assert max(sums_without(loose, X, row)[1] for row in range(20)) > 1.1 * LOSS_CLIP


def test_the_clipped_sums_are_those_of_a_loop():
    descent, mask = descend(), np.arange(N) % 3 > 0
    expected = support.looped_clipped_sum(descent.model, X[mask], Y[mask], CLIP)
    found = support.flat(descent._clipped_sum(X, Y, mask))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    losses = support.crossentropy()(Y[mask], descent.model(X[mask])).numpy()
    assert float(loss(descent, X, mask)) == pytest.approx(np.minimum(losses, LOSS_CLIP).sum())


def test_examples_that_are_mixed_are_refused():
    layers = tf.keras.layers
    mixing = tf.keras.Sequential(
        [
            layers.Input([4]),
            layers.Dense(3),
            layers.Lambda(lambda x: x - tf.reduce_mean(x, 0, keepdims=True)),
        ]
    )
    with pytest.raises(ValueError, match="example"):
        descend(model=mixing).run(1)


class Publishes(tf.keras.layers.Layer):
    """Hands the data to Python code."""

    seen: ClassVar[list] = []

    def call(self, x):
        tf.numpy_function(self.seen.append, [x], [])
        return x


def test_layers_that_hand_data_to_something_else_are_refused():
    layers = tf.keras.layers
    descent = descend(model=tf.keras.Sequential([layers.Input([4]), Publishes(), layers.Dense(3)]))
    with pytest.raises(ValueError, match="no side effects"):
        descent.run(1)
    assert not [x for x in Publishes.seen if len(x) > 1]


# Where examples stand.


class Shaken(tf.keras.layers.Layer):
    """Multiplies by random numbers that are a known function of the row, in training or not."""

    def call(self, x):
        return x * tf.random.stateless_uniform(tf.shape(x), [1, 2])


class DrawsInBranches(tf.keras.layers.Layer):
    """Draws where no secret key can be given."""

    def call(self, x):
        return tf.cond(tf.size(x) > 0, lambda: x * tf.random.uniform(tf.shape(x)), lambda: x)


def with_layer(layer):
    return tf.keras.Sequential([tf.keras.layers.Input([4]), layer, tf.keras.layers.Dense(3)])


class KnownNumbers(AdaptiveGradientDescent):
    """Mutant: random numbers stay a known function of the row, and places are not random."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._engine.streams = None


@pytest.mark.parametrize(
    ("cls", "padding", "secret"),
    [
        (AdaptiveGradientDescent, "none", True),
        (AdaptiveGradientDescent, "buckets", True),
        (AdaptiveGradientDescent, "full", False),
        (KnownNumbers, "none", False),
    ],
)
def test_examples_that_move_to_other_rows_keep_no_known_numbers(cls, padding, secret):
    """Draws of layers are secret and new in each pass. With "full" the places are random."""
    descent, mask = descend(cls, model=with_layer(Shaken()), padding=padding), np.ones(N, bool)
    sums = [support.flat(descent._clipped_sum(X, Y, mask)) for _ in range(2)]
    losses = [float(loss(descent, X, mask)) for _ in range(2)]
    assert np.allclose(*sums) != secret and np.allclose(*losses) != secret
    *_, drawn = descent._source.draw(tf.constant([1, 2], tf.int64), descent._sampling)
    in_front = np.sort(drawn)[::-1]  # Examples first, and then padding.
    assert np.array_equal(drawn, in_front) == (padding != "full")


def test_numbers_that_cannot_be_secret_need_full_batches():
    descent = descend(model=with_layer(DrawsInBranches()))
    with pytest.raises(ValueError, match='padding="full"'):
        descent.run(1)
    assert descent.budget.spent == 0
    assert descend(model=with_layer(DrawsInBranches()), padding="full").run(1) == 1


@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
def test_batches_are_padded_as_the_user_says(padding):
    descent = descend(padding=padding)
    for sampling in (descent._sampling, descent._selection):
        sizes = {
            len(descent._source.draw(tf.constant([1, key], tf.int64), sampling)[0])
            for key in range(20)
        }
        most = {sampling.padded_batch_size}
        assert sizes == most if padding == "full" else sizes <= set(sampling.bucket_sizes) - most


# The noise.


def wide_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential(
        [tf.keras.layers.Input([4]), tf.keras.layers.Dense(400), tf.keras.layers.Dense(3)]
    )


def noise_of(measure):
    """Noise on the sum of all examples, in units of the clip: two measurements differ by it."""
    descent = descend(batch=N, model=wide_model())
    first, second = (support.flat(measure(descent)) for _ in range(2))
    return (first - second) / (math.sqrt(2) * CLIP)


def once(descent):
    return descent._measure(0.25)


def in_two(descent):
    return adaptive_descent.average(descent._measure(0.16), descent._measure(0.09), 0.16, 0.09)


def unweighted(descent):
    """Mutant: as if the first had been as precise as the second."""
    return adaptive_descent.average(descent._measure(0.16), descent._measure(0.01), 0.09, 0.09)


def p_value(noise, sigma):
    return scipy.stats.kstest(noise, scipy.stats.norm(0, sigma).cdf).pvalue


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("measure", "right"), [(once, True), (in_two, True), (unweighted, False)])
def test_the_distribution_of_the_noise(measure, right):
    """Precision 1/4 is sigma 2, at once or as 0.16 + 0.09; wrong ones are rejected."""
    noise = noise_of(measure)
    assert (p_value(noise, 2.0) > 1e-3) == right
    assert p_value(noise, 2.0 * 2 / 3) < 1e-9 and p_value(noise, 2.0 * 3 / 2) < 1e-9


def test_measurements_share_no_noise():
    descent = descend(batch=N, model=wide_model())
    first, second, third = (support.flat(once(descent)) for _ in range(3))
    assert abs(np.corrcoef(first - second, third - second)[0, 1] - 0.5) < 0.1


# The choice.

SCORES = np.array([0.3, 0.0, 1.4, 0.9])


def choices(descent, n=2000):
    keys = tf.stack([tf.range(n, dtype=tf.int64), tf.ones([n], tf.int64)], axis=1)

    @tf.function(autograph=False)
    def pick(keys):
        return tf.map_fn(
            lambda key: descent._choose(tf.constant(SCORES), key),
            keys,
            fn_output_signature=tf.int32,
        )

    return np.bincount(pick(keys).numpy(), minlength=len(SCORES))


def test_the_distribution_of_the_choice():
    """That of the exponential mechanism, of the range that is paid for; wrong ones are rejected."""
    width = 2.0
    counts = choices(descend(selection_range=width))
    for factor, right in ((1, True), (0.5, False), (2, False)):
        p = np.exp(-factor * width * SCORES / LOSS_CLIP)
        p_value = scipy.stats.chisquare(counts, counts.sum() * p / p.sum()).pvalue
        assert p_value > 0.01 if right else p_value < 1e-6
    # It is report-noisy-min with Gumbel noise.
    gumbel = np.random.default_rng(0).gumbel(size=(2000, len(SCORES)))
    noisy = (SCORES - LOSS_CLIP / width * gumbel).argmin(axis=1)
    table = np.stack([np.bincount(noisy, minlength=len(SCORES)), counts])
    assert scipy.stats.chi2_contingency(table).pvalue > 0.01


def test_a_clear_winner_is_found_and_the_step_is_taken():
    """On all examples, and with odds of e^100 for each loss_clip: the best of the candidates."""
    descent = descend(batch=N, selection_batch_size=N, selection_range=100.0, loss_clip=5.0)
    before = descent.model.get_weights()
    sums = [s.numpy() for s in descent._measure(1e4)]
    length = np.linalg.norm(support.flat(sums))
    sizes, losses = np.linspace(0, 2.0, 6), []
    for size in sizes:
        moved = [w - size * s / length for w, s in zip(before, sums, strict=True)]
        descent.model.set_weights(moved)
        losses.append(float(tf.reduce_sum(support.crossentropy()(Y, descent.model(X)))))
    descent.model.set_weights(before)
    chosen = descent._step([tf.constant(s) for s in sums])
    assert chosen == pytest.approx(sizes[np.argmin(losses)]) and chosen > 0
    assert np.linalg.norm(weights(descent) - support.flat(before)) == pytest.approx(chosen, 1e-4)


def test_momentum_keeps_a_share_of_the_last_step_that_was_taken():
    """Every other step is none, in the mean: it leaves the velocity as it was."""
    descent = descend(momentum=0.5, candidates=1, selection_range=1e-9)
    shapes = [w.shape for w in descent.model.get_weights()]
    random, velocity, chosen = np.random.default_rng(0), 0.0, []
    for _ in range(12):
        sums = [random.normal(size=shape).astype("float32") for shape in shapes]
        direction = 0.5 * velocity + support.flat(sums) / 16
        before = weights(descent)
        chosen.append(descent._step([tf.constant(s) for s in sums]))
        step = -chosen[-1] * direction / np.linalg.norm(direction)
        np.testing.assert_allclose(weights(descent) - before, step, rtol=1e-3, atol=1e-5)
        velocity = direction if chosen[-1] else velocity
    assert set(chosen) == {0.0, 2.0}


@pytest.mark.slow
def test_when_no_step_is_better_the_gradient_is_measured_again():
    """Steps of length 1000: the weights stay, bit for bit, and the precision grows to the end."""
    changes = {"batch": N, "selection_batch_size": N, "selection_range": 5.0, "loss_clip": 9.0}
    descent = descend(max_step_size=1e3, epsilon=22.0, **changes)
    before = weights(descent)
    assert descent.run() == 0 and descent.finished
    np.testing.assert_array_equal(weights(descent), before)
    noises = measured(descent)
    assert len(noises) > 2 and noises[0] == pytest.approx(3.0)
    # On all examples: the paper's, which pays the difference.
    grown = 1 / 9 * 1.1 ** np.arange(len(noises))
    np.testing.assert_allclose(np.power(noises[1:], -2.0), np.diff(grown), rtol=1e-9)
    assert descent.noise_multiplier == pytest.approx(3.0 * 1.1 ** (-len(noises) / 2))


def measured(descent):
    """The noise of the measurements that were paid for, in their order."""
    releases = descent.budget.to_dict()["releases"]
    events = [tfdp.accounting.event_codec.decode(release["event"]) for release in releases]
    return [event.events[0].event.noise_multiplier for event in events]


@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
def test_the_cost_grows_as_the_options_say(q):
    budget = RdpFilter(3.0, 1e-5)

    def cost(precision):
        return budget.cost(tfdp.accounting.event_codec.sampled_gaussian(q, precision**-0.5))

    grown = grown_precision(budget, q, 0.25, 0.1)
    assert cost(grown) == pytest.approx(1.1 * cost(0.25), rel=1e-6)
    assert cost(grown - 0.25) <= cost(grown) - cost(0.25) + 1e-9  # A fresh batch costs no more.


@pytest.mark.slow
def test_the_largest_step_size_follows_those_chosen(monkeypatch):
    descent = descend(step_size_window=3)
    chosen = iter([0.4, 0.8, 0.1, 0.2, 0.1, 0.1, 2.0, 1.9, 0.1])
    monkeypatch.setattr(descent, "_step", lambda sums: next(chosen))
    found = []
    descent.run(9, on_progress=lambda d: found.append(d.largest_step_size))
    assert found == pytest.approx([2.0, 2.0, 0.88, 0.88, 0.88, 0.22, 0.22, 0.22, 2.0])


def test_the_largest_step_size_falls_as_its_schedule_does(monkeypatch):
    """Between the windows, too; training ends where no length is left, and pays no more."""
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(2.0, 4, end_learning_rate=0.0)
    descent = descend(max_step_size=schedule, step_size_window=2, epsilon=50.0)
    assert descent.largest_step_size == 2.0
    chosen = iter([1.0, 0.5, 0.5, 0.5, 0.5])
    monkeypatch.setattr(descent, "_step", lambda sums: next(chosen))
    found = []
    assert descent.run(on_progress=lambda d: found.append(d.largest_step_size)) == 4
    assert found == pytest.approx([1.5, 1.0, 0.5, 0.0])
    spent = descent.budget.spent
    assert descent.finished and descent.run() == 0 and descent.budget.spent == spent
    event, _ = descent._release(1 / 9)
    assert descent.budget.can_afford(event)


@pytest.mark.slow
def test_a_schedule_that_returns_no_length_is_refused():
    with pytest.raises(ValueError, match=r"`max_step_size\(0\)` must be a positive"):
        descend(max_step_size=lambda iterations: 0.0)
    for wrong in (-1.0, math.nan, "long"):
        descent = descend(max_step_size=lambda made, wrong=wrong: 2.0 if made < 1 else wrong)
        with pytest.raises(ValueError, match=r"`max_step_size\(1\)` must be a non-negative"):
            descent.run(3)


# The budget.


class Recording(AdaptiveGradientDescent):
    """Adds up the costs of what is run."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.total_cost = 0.0

    def _add(self, q, event):
        self.total_cost += self.budget.cost(dp_accounting.PoissonSampledDpEvent(q, event))
        assert self.total_cost <= self.budget.spent * (1 + 1e-9)  # Paid before.

    def _measure(self, precision):
        self._add(16 / N, dp_accounting.GaussianDpEvent(precision**-0.5))
        return super()._measure(precision)

    def _step(self, sums):
        self._add(16 / N, BoundedRangeDpEvent(self.options.selection_range))
        return super()._step(sums)


class Forgetful(Recording):
    """Mutant: does not pay for measurements that are repeated."""

    def _pay(self, precision):
        return precision < 0.1 or super()._pay(precision)


def test_what_is_run_is_what_is_paid_for():
    descent = descend(Recording, epsilon=12.0)
    made = descent.run()
    assert made == descent.iterations > 3 and descent.finished and descent.run() == 0
    assert len(measured(descent)) > 2  # Some measurements were repeated.
    assert descent.total_cost == pytest.approx(descent.budget.spent)
    assert 0.5 * descent.budget.budget < descent.budget.spent <= descent.budget.budget
    assert descent.budget.guarantee.epsilon == 12.0


@pytest.mark.slow
def test_mutant_that_does_not_pay_is_caught():
    with pytest.raises(AssertionError):
        descend(Forgetful, epsilon=12.0).run()


def test_a_spent_budget_allows_nothing():
    budget = RdpFilter(8.0, 1e-5)
    all_of_it = math.sqrt(budget.order / (2 * budget.budget))
    budget.spend(dp_accounting.GaussianDpEvent((1 + 1e-9) * all_of_it))
    descent = descend(budget=budget)
    before = weights(descent)
    assert descent.finished and descent.run(5) == 0
    np.testing.assert_array_equal(weights(descent), before)


def test_a_calibrated_budget_lasts_as_long_as_it_says():
    budget, noise, width = calibrate_descent(
        target_epsilon=2.0,
        delta=1e-5,
        dataset_size=1000,
        expected_batch_size=100,
        selection_batch_size=50,
        iterations=70,
        selection_share=0.25,
    )
    step = tfdp.accounting.event_codec.sampled_gaussian(0.1, noise)
    choice = dp_accounting.PoissonSampledDpEvent(0.05, BoundedRangeDpEvent(width))
    both = dp_accounting.ComposedDpEvent([step, choice])
    assert budget.can_afford(both, 70) and not budget.can_afford(both, 71)
    assert budget.cost(choice) == pytest.approx(0.25 * budget.cost(both), rel=1e-3)


def test_an_empty_batch_is_harmless():
    """Batches of one example on average, that is none in a third of the draws."""
    descent = descend(batch=1, selection_batch_size=1, selection_range=0.1)
    none = np.zeros(N, bool)
    assert not support.flat(descent._clipped_sum(X, Y, none)).any()
    assert float(loss(descent, X, none)) == 0
    assert descent.run(9) == 9 and np.isfinite(weights(descent)).all()


def test_a_broken_example_cannot_break_the_model():
    descent = descend(x=bad_rows())
    assert descent.run(3) == 3 and np.isfinite(weights(descent)).all()


# Its state.


@pytest.mark.slow
def test_a_saved_run_resumes(tmp_path):
    whole = descend(selection_range=0.3, momentum=0.9)
    whole.run(9)
    first = descend(selection_range=0.3, momentum=0.9)
    first.run(5)
    path = tf.train.Checkpoint(descent=first).save(str(tmp_path / "c"))
    resumed = descend(selection_range=0.3, momentum=0.9)
    tf.train.Checkpoint(descent=resumed).restore(path).assert_consumed()
    assert not resumed.finished and resumed.iterations == 5
    assert resumed.budget.spent == first.budget.spent > 0
    resumed.run(4)
    assert resumed.budget.spent == pytest.approx(whole.budget.spent, rel=1e-12)
    assert resumed.largest_step_size == whole.largest_step_size
    np.testing.assert_allclose(weights(resumed), weights(whole), rtol=1e-4, atol=1e-5)


def test_an_older_checkpoint_does_not_give_the_budget_back(tmp_path):
    descent = descend(selection_range=0.3)
    checkpoint = tf.train.Checkpoint(descent=descent)
    path = checkpoint.save(str(tmp_path / "c"))
    descent.run(4)
    spent = descent.budget.spent
    checkpoint.restore(path)
    assert not descent.finished and descent.budget.spent == spent
    descent.run(1)
    assert descent.budget.spent > spent


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"l2_norm_clip": 0.6}, "l2_norm_clip"),
        ({"selection_range": 0.5}, "selection_range"),
        ({"batch": 17}, "expected_batch_size"),
        ({"epsilon": 9.0}, "target_epsilon"),
    ],
)
def test_resuming_with_other_privacy_parameters_is_refused(changes, name, tmp_path):
    path = tf.train.Checkpoint(descent=descend()).save(str(tmp_path / "c"))
    other = descend(**changes)
    tf.train.Checkpoint(descent=other).restore(path)
    with pytest.raises(tfdp.accounting.PrivacyParametersChangedError, match=name):
        other.run(1)


BAD = [
    ({"l2_norm_clip": 0.0}, "l2_norm_clip"),
    ({"loss_clip": math.inf}, "loss_clip"),
    ({"candidates": 2.5}, "candidates"),
    ({"selection_range": -1.0}, "selection_range"),
    ({"momentum": 1.0}, "momentum"),
    ({"max_step_size": -1.0}, "max_step_size"),
    ({"selection_batch_size": N + 1}, "selection_batch_size"),
    ({"model": tf.keras.Sequential([tf.keras.layers.Dense(3, kernel_regularizer="l2")])}, "model"),
]


@pytest.mark.parametrize(("changes", "name"), BAD)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` must"):
        descend(**changes)


@pytest.mark.parametrize(
    ("data", "changes", "name"),
    [
        ((X, Y), {"chunk_size": 8}, "chunk_size"),
        ((X, Y), {"transform": lambda x, y: (x, y)}, "transform"),
        ((X, Y, np.ones(N, "float32")), {}, "sample_weight"),
    ],
)
def test_batches_that_it_cannot_draw_are_refused(data, changes, name):
    batches = tfdp.data.poisson_batches(data, expected_batch_size=16, **changes)
    options = DescentOptions(CLIP, 3.0, LOSS_CLIP, 1.0, 16)
    with pytest.raises(ValueError, match=f"Argument `batches` must be without {name}"):
        AdaptiveGradientDescent(
            support.small_model(), support.crossentropy(), batches, RdpFilter(8.0, 1e-5), options
        )


@pytest.mark.slow
def test_it_learns_digits():
    data = datasets.load("digits")
    tf.keras.utils.set_random_seed(0)
    batches = tfdp.data.poisson_batches((data.train_x, data.train_y), expected_batch_size=256)
    budget, noise, width = calibrate_descent(
        target_epsilon=3.0,
        delta=1e-5,
        dataset_size=data.size,
        expected_batch_size=256,
        selection_batch_size=256,
        iterations=40,
    )
    options = DescentOptions(1.0, noise, 3.0, width, 256, candidates=10)
    model = networks.digits(networks.make_activation("tanh"))
    descent = AdaptiveGradientDescent(model, support.crossentropy(), batches, budget, options)
    descent.run()
    logits = model.predict(data.eval_x, verbose=0)
    assert np.mean(logits.argmax(-1) == data.eval_y) > 0.6
