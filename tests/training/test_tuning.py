"""`tfdp.tune`: its ledger is that of the selection, and what it keeps changes no choice."""

import itertools
import json
import math
import random
import types

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests.front_ends import with_both, with_one
from tests.support import small_data
from tfdp.accounting import PrivacyLedger, Repetitions, private_selection
from tfdp.accounting.bounds import Release
from tfdp.accounting.event_codec import allocated_gaussian, sampled_gaussian
from tfdp.accounting.sampling import PoissonSampling
from tfdp.step.record import record_ledger, record_table
from tfdp.step.record.tuned_rows import RunSelection
from tfdp.training.private_training import PrivateTraining
from tfdp.training.tuning import plan, private_tuning
from tfdp.training.tuning.candidates import Runs
from tfdp.training.tuning.independence import independent
from tfdp.training.tuning.kept import FAILED, KeptRuns
from tfdp.training.tuning.measure import Measure, correct

X, Y = small_data(300)
VALIDATION = small_data(100)
CANDIDATES = {"units": [2, 3], "learning_rate": [0.01, 0.02]}
RUNS = Repetitions("geometric", mean=3)


@pytest.fixture
def two_runs(monkeypatch):
    monkeypatch.setattr(Repetitions, "draw", lambda self: 2)


def builder(front):
    keras = front.keras

    def build(units=2, jit=False):
        layers = [keras.Input([4]), keras.layers.Dense(units), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile("adam", front.crossentropy(), jit_compile=jit)
        return model

    return build


def tune(front, build=None, candidates=CANDIDATES, **kwargs):
    arguments = {
        **{"epochs": 1, "target_epsilon": 3.0, "validation_data": VALIDATION, "batch_size": 50},
        **{"repetitions": RUNS, "verbose": 0},
    }
    return tfdp.tune(build or builder(front), (X, Y), candidates, **{**arguments, **kwargs})


def trained_on(front, model, data):
    """Trains a model for one more epoch, privately."""
    arguments = {"noise_multiplier": 5.0, "optimizer": "adam", "verbose": False}
    again = front.tfdp.make_private(model, data, epochs=1, batch_size=50, **arguments)
    again.model.fit(again.batches, epochs=1, verbose=0)
    return again


def by_hand(noise, score_noise, steps=6, held_out=False):
    """The selection's ledger, from its parts."""
    run = [dp_accounting.SelfComposedDpEvent(sampled_gaussian(50 / 300, noise), steps)]
    score = dp_accounting.GaussianDpEvent(score_noise) if score_noise else None
    if score is not None and not held_out:
        run.append(score)
    scored = score if held_out else None
    return private_selection(dp_accounting.ComposedDpEvent(run), RUNS, held_out_score=scored)


@pytest.mark.quick_cases(1)
@with_both
def test_model_and_files_cost_what_the_selection_costs(front, two_runs, tmp_path, capsys):
    tuned = tune(front, verbose=1)
    said = capsys.readouterr().out
    assert "epsilon <= 3 at delta" in said and "of the 4 candidates would cost" in said
    assert said.rstrip().splitlines()[-1].startswith("Chosen: units=")
    assert tuned.settings["units"] in (2, 3) and tuned.settings["learning_rate"] in (0.01, 0.02)
    noise = tuned.ledger.releases[0].event.event.events[0].event.event.noise_multiplier
    epsilon = tuned.ledger.epsilon(tuned.delta).epsilon
    assert 2.99 < epsilon <= 3.0 < tuned.epsilon_of_all
    assert epsilon == pytest.approx(by_hand(noise, 10.0).epsilon(tuned.delta).epsilon, rel=1e-8)
    assert "the best of a random number of runs" in tuned.statement

    def cost(model):
        return record_ledger.ledger_of_model(model).epsilon(tuned.delta).epsilon

    assert cost(tuned.model) == epsilon
    path = tmp_path / "model.keras"
    tuned.model.save(path)
    assert cost(front.keras.models.load_model(path)) == epsilon
    assert str(tfdp.privacy_statement(tuned.model, tuned.delta)) == tuned.statement
    again = trained_on(front, tuned.model, (X, Y))
    assert cost(again.model) > epsilon and again.budget.target_epsilon > epsilon


@with_both
def test_held_out_scores_and_training_cost_the_dearer_of_both(front, two_runs, tmp_path):
    arguments = {"target_epsilon": 1.0, "score_noise_multiplier": 10.0}
    tuned = tune(front, held_out=True, **arguments)
    first = tuned.ledger.releases[0].event.events[0]
    noise = first.event.events[0].event.event.noise_multiplier
    expected = by_hand(noise, 10.0, held_out=True)
    assert tuned.ledger.releases[0].event == expected.releases[0].event
    epsilon = tuned.ledger.epsilon(tuned.delta).epsilon
    assert 0.99 < epsilon <= 1.0 < by_hand(noise, 10.0).epsilon(tuned.delta).epsilon
    # No example pays for the steps of all candidates and for their scores.
    all_published = PrivacyLedger()
    all_published.record(sampled_gaussian(50 / 300, noise), 4 * 6)
    only_steps = all_published.epsilon(tuned.delta).epsilon
    assert tuned.epsilon_of_all == pytest.approx(only_steps, rel=1e-6)
    assert "no example has to do with more than one of the parts" in " ".join(
        tuned.statement.split()
    )

    def ledger(model):
        return record_ledger.ledger_of_model(model)

    path = tmp_path / "model.keras"
    tuned.model.save(path)
    for model in (tuned.model, front.keras.models.load_model(path)):
        assert ledger(model).releases == tuned.ledger.releases
        assert ledger(model).epsilon(tuned.delta).epsilon == epsilon
    # Whoever was held out may be trained on later, and pays for both.
    again = trained_on(front, tuned.model, VALIDATION)
    (selection, steps) = sorted(ledger(again.model).releases, key=lambda one: one.count)
    assert selection.event == tuned.ledger.releases[0].event and steps.count == 2
    scored = PrivacyLedger()
    scored.record(first_of_scores := selection.event.events[1])
    assert first_of_scores.event == dp_accounting.GaussianDpEvent(10.0)
    scored.record(steps.event, steps.count)
    whole = ledger(again.model).epsilon(tuned.delta).epsilon
    assert whole >= scored.epsilon(tuned.delta).epsilon and whole > epsilon


@with_one
def test_a_selection_goes_on_only_with_the_same_promise(front, two_runs, untrained, tmp_path):
    """Runs that were trained with the noise of one price are not stated at another."""

    def score(model, data):
        raise KeyboardInterrupt

    arguments = {"folder": tmp_path, "target_epsilon": 8.0}
    with pytest.raises(KeyboardInterrupt):
        tune(front, score=score, held_out=True, **arguments)
    scored = []

    def late(model, data):  # In the second run, after the trial and the first.
        scored.append(model)
        if len(scored) > 2:
            raise KeyboardInterrupt
        return np.zeros(100)

    with pytest.raises(KeyboardInterrupt):
        tune(front, score=late, held_out=True, **arguments)
    zeros = {"score": lambda model, data: np.zeros(100)}
    with pytest.raises(ValueError, match=r"`folder` .* held_out"):
        tune(front, **zeros, **arguments)
    assert tune(front, held_out=True, **zeros, **arguments).score is not None
    state = json.loads((tmp_path / "selection.json").read_text())
    # A folder of before there was `held_out` is of a selection without it.
    del state["plan"]["held_out"]
    (tmp_path / "selection.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"`folder` .* held_out"):
        tune(front, held_out=True, **zeros, **arguments)


def test_held_out_data_that_are_training_data_are_refused():
    x, y = np.zeros([30, 2], "float32"), np.arange(30)
    tensor = tf.constant(x)
    check = private_tuning._check_held_out
    check((x[:20], y[:20]), (x[20:], y[20:]), False, False)
    check((x[::2], y[::2]), (x[1::2], y[1::2]), False, False)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    check(dataset, (x, y), False, False)  # What it was made of cannot be seen.
    for trained, scored in [
        ((x, y), (x, y)),
        ((x, y), (x[20:], y[20:].copy())),
        ((x[:21], y[:20]), (x[20:], y[20:])),
        ({"a": x}, [y, {"b": x[3]}]),
        ((tensor, y[:20]), (tensor, y[20:])),
        (dataset, dataset),
    ]:
        with pytest.raises(ValueError, match=r"`held_out` must be False where .* share memory"):
            check(trained, scored, False, False)


def test_single_texts_are_not_compared_with_each_other():
    """There may be tens of thousands of them on each side."""
    labels = np.zeros(3)
    (found,) = private_tuning._arrays((["a text"] * 3, labels))
    assert found is labels


def test_rows_of_held_out_scores_cost_the_larger_part_and_older_ones_the_sum():
    sizes = {"dataset_size": 300.0, "expected_batch_size": 50.0, "noise_multiplier": 1.0}
    events = {}
    for held_out in (0.0, 1.0, 2.0):
        parameters = RunSelection(RUNS, 10.0, held_out == 1.0).parameters(record_table.GAUSSIAN)
        assert parameters["selective_release"] == (held_out == 1.0)
        facts = {**sizes, **parameters, "selective_release": held_out}
        row = record_table.new_row(1, record_table.TUNED, False, facts)
        row[record_table.STEPS] = 6
        (release,) = record_ledger.ledger_of_rows(row[np.newaxis]).releases
        events[held_out] = release.event
    both = by_hand(1.0, 10.0).releases[0].event
    assert events[0.0] == events[2.0] == both  # Also where the number is none that is known.
    assert events[1.0] == by_hand(1.0, 10.0, held_out=True).releases[0].event
    free = RunSelection(RUNS, 0.0, True).release(Release(sampled_gaussian(50 / 300, 1.0), 1), 6)
    assert free.event == by_hand(1.0, 0.0).releases[0].event


@with_both
def test_runs_in_epochs_cost_a_selection_of_allocated_epochs(front, two_runs, tmp_path, capsys):
    arguments = {"sampling": "epochs", "epochs": 2, "held_out": True, "target_epsilon": 2.0}
    tuned = tune(front, verbose=1, **arguments)
    assert "2 epochs of 6 steps with batches of 50" in capsys.readouterr().out
    (release,) = tuned.ledger.releases
    (training,) = release.event.events[0].event.events
    assert training.count == 2 and training.event.event.steps == 6
    noise = training.event.event.noise_multiplier
    epochs = dp_accounting.SelfComposedDpEvent(allocated_gaussian(1.0, noise, 6), 2)
    run = dp_accounting.ComposedDpEvent([epochs])
    score = dp_accounting.GaussianDpEvent(10.0)
    assert release.event == private_selection(run, RUNS, held_out_score=score).releases[0].event
    epsilon = tuned.ledger.epsilon(tuned.delta).epsilon
    assert 1.99 < epsilon <= 2.0
    poisson = PrivacyLedger()
    poisson.record(sampled_gaussian(1 / 6, noise), 12)
    assert private_selection(poisson, RUNS).epsilon(tuned.delta).epsilon > 2.0
    text = " ".join(tuned.statement.split())
    assert "of which each is 2 epochs of 6 steps each of the Gaussian mechanism" in text
    path = tmp_path / "model.keras"
    tuned.model.save(path)
    for model in (tuned.model, front.keras.models.load_model(path)):
        ledger = record_ledger.ledger_of_model(model)
        assert ledger.releases == tuned.ledger.releases


@pytest.mark.parametrize(
    ("sampling", "arguments"),
    [
        ({"cycle_length": 6}, {}),
        ({"cycle_length": 6}, {"noise_correlation": tfdp.BandedNoise([1.0, 0.5])}),
        ({}, {"noise_multiplier": tfdp.schedules.PiecewiseConstantNoise([2], [1.0, 2.0])}),
    ],
)
def test_runs_without_a_price_in_a_selection_are_refused(sampling, arguments):
    sampling = PoissonSampling(60, 10, **sampling)
    given = {"noise_multiplier": 1.0, "learning_rate": 0.1, "sampling": sampling, **arguments}
    with pytest.raises(ValueError, match="Poisson batches without cycles or in epochs of new sets"):
        tfdp.DPSGD(1.0, **given).count_as_run_of(RunSelection(RUNS, 10.0))


def test_rows_of_epochs_are_those_of_their_selection():
    """On padded batches, too, whose cut is charged for each step of each epoch of each run."""
    given = {"padding": "full", "cycle_length": 6, "max_truncation_probability": 1e-12}
    sampling = PoissonSampling(300, 50, redraws_sets=True, **given)
    optimizer = tfdp.DPSGD(1.0, 1.5, learning_rate=0.1, sampling=sampling)
    optimizer.count_as_run_of(RunSelection(RUNS, 10.0, held_out=True))
    (row,) = optimizer._released.rows()
    row[record_table.STEPS] = 2
    (release,) = record_ledger.ledger_of_rows(row[np.newaxis]).releases
    (training,) = release.event.events[0].event.events
    assert training.event == allocated_gaussian(1.0, 1.5, 6) and training.count == 2
    expected = RUNS.mean * 2 * 6 * sampling.truncation_probability
    assert sampling.truncation_probability > 1e-14
    assert release.truncation_probability == pytest.approx(expected)


@with_one
def test_a_run_never_states_its_cost_alone_and_public_scores_are_free(front, two_runs):
    seen = []

    def score(model, data):
        seen.append(model.optimizer.ledger.releases)
        return -17.5 - len(seen)

    prior = PrivacyLedger()
    prior.record(dp_accounting.GaussianDpEvent(3.0))
    tuned = tune(front, score=score, public_validation=True, prior=prior)
    seen = seen[1:]  # Before the runs, one step is tried.
    assert len(seen) == 2 and seen[0] == seen[1] == tuned.ledger.releases[1:]
    assert tuned.ledger.releases[0].event == dp_accounting.GaussianDpEvent(3.0)
    assert tuned.score == -19.5  # Without noise.
    (steps,) = tuned.ledger.releases[1].event.event.events  # No score.
    noise = steps.event.event.noise_multiplier
    cost = by_hand(noise, 0).epsilon(tuned.delta).epsilon
    assert cost < 0.99 * tuned.ledger.epsilon(tuned.delta).epsilon
    assert 2.99 < tuned.ledger.epsilon(tuned.delta).epsilon <= 3.0


class _Model:
    """A model that takes no time to train."""

    built, variables, loss = True, (), "sparse_categorical_crossentropy"

    def __init__(self, number, noise=1.0):
        self.weights = [tf.Variable(float(number))]
        self.optimizer = types.SimpleNamespace(
            noise_multiplier=noise,
            sampling=PoissonSampling(300, 50),
            count_as_run_of=lambda selection: None,
            own_steps=lambda: 6,
        )

    def fit(self, *args, **kwargs):
        pass

    @property
    def value(self):
        return float(self.weights[0])


@pytest.fixture
def untrained(monkeypatch):
    """Has `tune` get such models, numbered in their order, instead of trained ones."""
    numbers = itertools.count()

    def prepared(self, candidate, noise_multiplier, delta):
        batches = types.SimpleNamespace(
            sampling=PoissonSampling(300, 50),
            input_spec=None,
            element_spec=None,
            cardinality=lambda: 6,
        )
        budget = types.SimpleNamespace(delta=1e-3)
        return PrivateTraining(_Model(next(numbers), noise_multiplier), batches, budget)

    monkeypatch.setattr(Runs, "prepared", prepared)


@with_one
def test_a_run_that_fails_has_the_lowest_score(front, two_runs, untrained):
    made = []

    def score(model, data):
        made.append(model.value)
        if len(made) in (2, 5, 6):
            raise RuntimeError("diverged")
        return np.zeros(100)  # With noise, its score is below 0 half of the time.

    tuned = tune(front, score=score)
    assert made == [0, 1, 2] and tuned.model.value == 2  # One is tried; none was repeated.
    with pytest.raises(RuntimeError, match="Each run of the selection failed") as caught:
        tune(front, score=score)
    assert "diverged" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match="returns a number for each validation example"):
        tune(front, score=lambda model, data: 0.5)


@with_one
def test_a_score_that_is_no_number_is_the_lowest(front, two_runs, untrained):
    """As the loss of a model that diverged, on public data."""
    scores = iter([0.0, math.nan, -5.0])
    tuned = tune(front, score=lambda model, data: next(scores), public_validation=True)
    assert tuned.score == -5.0 and tuned.model.value == 2


@with_one
def test_runs_of_other_steps_or_noise_are_refused(front, two_runs, untrained, monkeypatch):
    given = Runs.prepared

    def fewer(self, *args, **kwargs):
        training = given(self, *args, **kwargs)
        training.model.optimizer.own_steps = lambda: 5
        return training

    monkeypatch.setattr(Runs, "prepared", fewer)
    with pytest.raises(RuntimeError, match="must take the 6 steps"):
        tune(front, score=lambda model, data: np.zeros(100))

    def less_noise(self, candidate, noise_multiplier, delta):
        return given(self, candidate, 0.99 * noise_multiplier, delta)

    monkeypatch.setattr(Runs, "prepared", less_noise)
    with pytest.raises(ValueError, match="`candidates` must be of one cost"):
        tune(front, score=lambda model, data: np.zeros(100))


@with_both
def test_neither_names_nor_seeds_tell_the_number_of_runs(front):
    def build():
        layers = front.keras.layers
        model = front.keras.Sequential([front.keras.Input([2]), layers.Dense(1), layers.Dropout(0)])
        return model, model.get_weights()[0], random.random(), np.random.random()

    found = []
    for runs in (1, 3):
        front.keras.utils.set_random_seed(7)
        made = []
        for _ in range(runs):
            with independent():
                made.append(build())
        model, *after = build()
        found.append((made, [model.layers[0].name, *after]))
    (one, after_one), (three, after_three) = found
    for made, after in found:  # As if none had been made before.
        assert {each[0].layers[0].name for each in made} == {after[0]}
    assert after_one[2:] == after_three[2:]
    np.testing.assert_array_equal(after_one[1], after_three[1])
    for at in (1, 2, 3):  # Weights are fresh, whatever the seed, and so are all random numbers.
        assert len({float(np.ravel(made[at])[0]) for made in [*one, *three]}) == 4


@with_one
def test_an_interrupted_selection_goes_on(front, two_runs, untrained, tmp_path):
    # The first call tries the function, also when the selection goes on.
    scores = {1: 0.5, 2: 0.2, 3: None, 4: 0.5, 5: 0.9, 6: 0.5}
    made = []

    def score(model, data):
        made.append(model.value)
        if scores[len(made)] is None:
            raise KeyboardInterrupt
        return np.full(100, scores[len(made)])

    arguments = {"score": score, "folder": tmp_path, "score_noise_multiplier": 1.0}
    arguments["target_epsilon"] = 8.0
    with pytest.raises(KeyboardInterrupt):
        tune(front, **arguments)
    drawn = json.loads((tmp_path / "selection.json").read_text())["drawn"]
    other = {**arguments, "score": lambda *_: np.ones(100), "target_epsilon": 9.0}
    with pytest.raises(ValueError, match=r"`folder` .* its noise_multiplier, target_epsilon"):
        tune(front, **other)
    reordered = {**CANDIDATES, "units": [3, 2]}  # The state has their numbers.
    with pytest.raises(ValueError, match=r"`folder` .* its candidates differ"):
        tune(front, **{**other, "target_epsilon": 8.0, "candidates": reordered})
    tuned = tune(front, **arguments)
    assert len(made) == 5 and tuned.model.value == made[4]
    settings = [{"units": u, "learning_rate": r} for u in (2, 3) for r in (0.01, 0.02)]
    assert tuned.settings == settings[drawn[1]]
    # The folder tells no more than what was returned, and another call returns the same.
    kept = json.loads((tmp_path / "selection.json").read_text())
    assert kept["drawn"] == [] and kept["done"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("selection.json", "best.index", "best.data-00000-of-00001")
    }
    again = tune(front, **arguments)
    assert len(made) == 6 and again.score == tuned.score and again.settings == tuned.settings
    assert again.model.value == tuned.model.value


def _best(kept):
    model = _Model(0)
    kept.load_best(model)
    return model.value


class _Draws:
    @staticmethod
    def draw():
        return 3


def test_weights_of_a_run_that_is_not_done_are_not_used(tmp_path, monkeypatch):
    """A process may die between the weights and the state; the run is then made anew."""
    kept = KeptRuns(tmp_path, {}, 5, _Draws)
    kept.finish(_Model(1), 0.5)
    with pytest.raises(ValueError, match="no other selection writes to"):
        KeptRuns(tmp_path, {}, 5, _Draws)
    monkeypatch.setattr(KeptRuns, "_write", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.finish(_Model(2), 0.9)
    monkeypatch.undo()
    kept.close(finished=False)
    resumed = KeptRuns(tmp_path, {}, 5, _Draws)
    assert resumed.done == 1 and _best(resumed) == 1
    resumed.finish(_Model(3), 0.1)
    resumed.finish(_Model(4), FAILED)
    resumed.close(finished=True)
    done = KeptRuns(tmp_path, {}, 5, _Draws)
    assert done.next_candidate() is None and done.score == 0.5
    assert _best(done) == 1
    done.close(finished=True)


def test_rows_of_two_runs_are_never_added_up():
    """A table without room adds up rows of equal parameters: that is no run of twice the steps."""
    sizes = {"dataset_size": 300.0, "expected_batch_size": 50.0, "noise_multiplier": 1.0}
    rows = []
    for uid in (1, 2):
        selection = RunSelection(RUNS, 10.0).parameters(record_table.GAUSSIAN)
        row = record_table.new_row(uid, record_table.TUNED, False, {**sizes, **selection})
        row[record_table.STEPS] = 6
        rows.append(row)
    both = record_ledger.ledger_of_rows(np.array(rows)).epsilon(1e-3).epsilon
    one = record_ledger.ledger_of_rows(np.array(rows[:1]))
    assert one.releases[0].event == by_hand(1.0, 10.0).releases[0].event
    assert both > 1.2 * one.epsilon(1e-3).epsilon
    known = tf.constant(np.zeros([1, record_table.COLUMNS]))
    folded = record_table.merge(known, tf.constant(np.array(rows)), tf.constant(0.0, tf.float64))
    with pytest.raises(dp_accounting.UnsupportedEventError):
        record_ledger.ledger_of_rows(folded.numpy()).epsilon(1e-3)


def test_padded_batches_of_all_runs_may_be_cut_off():
    kind = record_table.cut_off(record_table.GAUSSIAN, 12)
    parameters = RunSelection(RUNS, 10.0).parameters(kind)
    sizes = {"dataset_size": 300.0, "expected_batch_size": 50.0, "noise_multiplier": 1.0}
    row = record_table.new_row(1, record_table.TUNED, False, {**sizes, **parameters})
    row[record_table.STEPS] = 6
    (release,) = record_ledger.ledger_of_rows(row[np.newaxis]).releases
    each = PoissonSampling(300, 50, padding="full", max_truncation_probability=1e-12)
    assert each.truncation_probability > 1e-14
    expected = RUNS.mean * 6 * each.truncation_probability
    assert release.truncation_probability == pytest.approx(expected)


def test_objects_among_the_settings_are_known_by_their_class_and_config():
    decay = tf.keras.optimizers.schedules.PolynomialDecay
    settings = {"rate": decay(0.1, 10), "optimizer": Runs, "units": np.int64(3)}
    plain = plan._plain([settings])
    assert plain == plan._plain([{**settings, "rate": decay(0.1, 10)}])
    assert plain != plan._plain([{**settings, "rate": decay(0.2, 10)}])
    assert json.loads(json.dumps(plain)) == plain and plain[0]["optimizer"] == ["Runs", {}]


def test_candidates_are_drawn_uniformly_for_each_run(tmp_path):
    class _Many:
        @staticmethod
        def draw():
            return 8000

    drawn = KeptRuns(tmp_path, {}, 4, _Many).drawn
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=4)).pvalue > 1e-4


def test_the_noise_of_a_score_is_as_stated_and_an_example_counts_for_one_at_most():
    def score(model, data):
        return [5.0, -3.0, math.nan, 0.25]

    measure = Measure(score, None, False, 3.0)
    values = measure.values(None)
    np.testing.assert_array_equal(values, [1.0, 0.0, 0.0, 0.25])
    noise = np.array([measure.noisy(values) * 4 - 1.25 for _ in range(10_000)])
    assert scipy.stats.kstest(noise / 3.0, "norm").pvalue > 1e-4
    assert scipy.stats.kstest(noise / 3.3, "norm").pvalue < 1e-4  # The test would see 10%.
    assert Measure(score, np.zeros(90_000), False, None).noise == 100.0
    assert Measure(score, np.zeros(9), False, None).noise == 10.0
    assert Measure(score, None, True, None).noise == 0.0


@with_one
@pytest.mark.parametrize(
    ("loss", "predicted", "labels", "expected"),
    [
        ("sparse_categorical_crossentropy", [[0.1, 0.9], [0.8, 0.2]], [[1], [1]], [1, 0]),
        ("categorical_crossentropy", [[0.1, 0.9], [0.8, 0.2]], [[0, 1], [0, 1]], [1, 0]),
        ("binary_crossentropy", [[0.6], [0.4], [0.6]], [1, 0, 0], [1, 1, 0]),
        ("BinaryCrossentropy", [[0.3, -1.0], [-0.2, 2.0]], [[1, 0], [1, 1]], [1, 0.5]),
        ("SparseCategoricalCrossentropy", [[[1, 0], [0, 1]]], [[0, 0]], [0.5]),
    ],
)
def test_right_answers_are_counted_as_the_loss_means_them(front, loss, predicted, labels, expected):
    model = front.keras.Sequential([front.keras.layers.Dense(1)])
    losses = front.keras.losses
    model.compile(loss=getattr(losses, loss)(from_logits=True) if loss[0].isupper() else loss)
    found = correct(model, np.array(predicted), np.array(labels))
    np.testing.assert_array_equal(found, expected)


@with_one
def test_a_dataset_of_validation_examples_is_scored_like_arrays(front):
    model = builder(front)(2)
    x, y = VALIDATION
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True)
    one, other = (Measure("accuracy", given, False, None) for given in (data, (x, y)))
    assert one.noise == other.noise
    np.testing.assert_array_equal(one.values(model), other.values(model))


@with_one
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"candidates": {}}, "`candidates` must be a dict"),
        ({"candidates": {"units": 3}}, "`candidates` must be a dict"),
        ({"candidates": {"augmentations": [8, 16]}}, "all runs must cost the same"),
        ({"candidates": {"chunk_size": [8, 16]}}, "all runs must cost the same"),
        ({"candidates": {"optimizer": ["adam"]}, "optimizer": "adam"}, "given for all runs"),
        ({"repetitions": Repetitions("poisson", 3)}, "`repetitions` must be"),
        ({"repetitions": 3}, "`repetitions` must be"),
        ({"score": "loss"}, "`score` must be 'accuracy' or a function"),
        ({"loss": "mse"}, "`score` must be a function for a model whose loss"),
        ({"validation_data": X}, "`validation_data` must be"),
        ({"score_noise_multiplier": 0.0}, "`score_noise_multiplier` must be a positive"),
        ({"score": len, "validation_data": None}, "`score_noise_multiplier` must be given"),
        (
            {"public_validation": True, "score_noise_multiplier": 1.0},
            "`score_noise_multiplier` must be None with",
        ),
        ({"privacy_unit": np.arange(300)}, "a number for each user"),
        (
            {"privacy_unit": np.arange(300), "held_out": True, "score": lambda *_: np.zeros(9)},
            "`held_out` must be False with `privacy_unit`",
        ),
        ({"held_out": True, "public_validation": True}, "`held_out` must be False with `public"),
        ({"held_out": True, "validation_data": (X, Y)}, "`held_out` must be False where"),
        ({"held_out": "yes"}, "`held_out` must be True or False"),
        ({"target_epsilon": 0.1}, "`score` must be cheaper than `target_epsilon`"),
        ({"epochs": 0}, "`epochs` must be a positive integer"),
        ({"epochs": 10**9}, "`epochs` must be so few that there are at most 100000000 steps"),
    ],
)
def test_bad_arguments_are_refused_before_training(front, arguments, match):
    with pytest.raises(ValueError, match=match):
        tune(front, **arguments)


@pytest.mark.slow
@with_one
def test_candidates_that_cost_more_and_shared_models_are_refused(front, monkeypatch):
    with pytest.raises(TypeError, match="takes no argument `noise_multiplier`"):
        tune(front, noise_multiplier=1.0)
    shared = front.keras.layers.Dense(3)

    def build(jit=False):
        model = front.keras.Sequential([front.keras.Input([4]), shared])
        model.compile("adam", front.crossentropy(), jit_compile=jit)
        return model

    with pytest.raises(ValueError, match="`build` must be a function that returns a new model"):
        tune(front, build=build, candidates={"learning_rate": [0.01]})
    # XLA pads batches, which are then cut to their size with another probability.
    monkeypatch.setattr(KeptRuns, "next_candidate", lambda self: 1)
    with pytest.raises(ValueError, match="`candidates` must be of one cost"):
        tune(front, candidates={"jit": [False, True]})
