"""Optimizers whose noise follows a schedule: what is added, and what is recorded, in each step."""

import copy

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support, two_term_support
from tfdp.accounting import PrivacyParametersChangedError
from tfdp.clipping import TermWiseAggregation
from tfdp.schedules import ExponentialDecayNoise, PiecewiseConstantNoise
from tfdp.step.record.record_table import STEPS, parameters_of
from tfdp.step.record.release_count import ReleaseRecord

CLIP, BATCH = 0.5, 16
X, Y = support.small_data(64)
SCHEDULE = PiecewiseConstantNoise([2, 3], [2.0, 1.6, 1.2])
layers = tf.keras.layers


def batches(steps=5, **kwargs):
    return tfdp.data.poisson_batches(
        (X, Y), expected_batch_size=BATCH, steps_per_epoch=steps, **kwargs
    )


def make(data=None, noise=SCHEDULE, cls=tfdp.DPSGD, **kwargs):
    sampling = (data or batches()).sampling
    return cls(CLIP, noise, sampling=sampling, learning_rate=1.0, **kwargs)


def network():
    return tf.keras.Sequential([layers.Input([4]), layers.Dense(1000), layers.Dense(3)])


def nothing(y, outputs):
    """A loss without gradients: what an update moves is noise alone."""
    return 0.0 * tf.reduce_sum(outputs, axis=-1)


class Moves(tf.keras.callbacks.Callback):
    """The differences that each step makes to the weights, in units of the clip."""

    def __init__(self, chunks=1):
        super().__init__()
        self.noise, self._chunks = [], chunks

    def on_train_begin(self, logs=None):
        self._before = support.flat(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self._chunks == 0:
            after = support.flat(self.model.get_weights())
            self.noise.append((self._before - after) * BATCH / CLIP)
            self._before = after


def trained(optimizer, data, model=None, epochs=1, steps=None, **kwargs):
    model = model or network()
    model.compile(optimizer, loss=nothing, **kwargs)
    chunks = optimizer.gradient_accumulation_steps
    moves = Moves(chunks)
    model.fit(data, epochs=epochs, steps_per_epoch=steps, callbacks=[moves], verbose=0)
    return model, moves.noise


def has_stddev(sample, stddev):
    """Returns whether a sample is normal, of this standard deviation: of 8003 numbers, to 5%."""
    squares = scipy.stats.chi2(len(sample)).cdf(np.sum((sample / stddev) ** 2))
    normal = scipy.stats.kstest(sample, scipy.stats.norm(0, stddev).cdf).pvalue
    return 1e-6 < squares < 1 - 1e-6 and normal > 1e-6


def follows(noise, first=0, schedule=SCHEDULE):
    return [has_stddev(sample, schedule(first + i)) for i, sample in enumerate(noise)]


def recorded(ledger):
    """Noise multipliers in their order, and how many steps each was recorded for."""
    return [(r.event.event.noise_multiplier, r.count) for r in ledger.releases]


RIGHT = [(2.0, 2), (1.6, 1), (1.2, 2)]


# The noise, and the record.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kwargs", "sampled"),
    [
        ({}, {}),
        ({}, {"chunk_size": 32, "padding": "full"}),
        ({"jit_compile": True}, {"padding": "full"}),
    ],
)
def test_each_step_gets_the_noise_of_its_number_and_is_recorded_with_it(kwargs, sampled):
    data = batches(**sampled)
    model, noise = trained(make(data), data, **kwargs)
    assert follows(noise) == [True] * 5
    assert recorded(model.optimizer.ledger) == RIGHT
    assert model.optimizer.noise_stddev == 1.2 * CLIP


@pytest.mark.slow
def test_noise_of_secure_sums():
    data = batches(padding="full")
    model, noise = trained(make(data, secure_noise=True), data)
    assert follows(noise) == [True] * 5 and recorded(model.optimizer.ledger) == RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_an_adaptive_clip_is_split_in_each_stage(secure):
    data = batches(padding="full")
    rule = tfdp.clipping.AdaptiveQuantileClipping(learning_rate=1e-6, count_noise=2.5)
    optimizer = make(data, clipping_rule=rule, secure_noise=secure)
    model, noise = trained(optimizer, data)
    for step, sample in enumerate(noise):
        sum_noise, _ = rule.noise(SCHEDULE(step), BATCH)
        assert sum_noise > 1.02 * SCHEDULE(step) and has_stddev(sample, sum_noise)
    assert recorded(model.optimizer.ledger) == RIGHT


@pytest.mark.slow
def test_noise_of_a_batch_wise_term():
    aggregation = TermWiseAggregation(batch_clip=1.0, num_groups=4)
    noises = {}
    for noise in (PiecewiseConstantNoise([200], [1.0, 3.0]), 1.0):
        optimizer = tfdp.DPSGD(CLIP, noise, expected_batch_size=BATCH, learning_rate=1.0)
        noises[noise] = two_term_support.noise_of_steps(optimizer, aggregation, 400)
    scheduled, constant = noises.values()
    for sample, reference in zip(scheduled, constant, strict=True):
        stddev = np.std(reference)
        for stage, half in zip((1.0, 3.0), np.split(sample, 2), strict=True):
            assert np.std(half) == pytest.approx(stage * stddev, rel=0.1)


@pytest.mark.slow
def test_noise_of_replicas_is_that_of_one():
    strategy = support.mirrored(2)
    data = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda part, count: (X[part::count], Y[part::count]),
        dataset_size=64,
        expected_batch_size=BATCH,
        steps_per_epoch=5,
    )
    with strategy.scope():
        model, noise = trained(make(data), data, network(), steps=5)
    assert follows(noise) == [True] * 5
    assert recorded(model.optimizer.ledger) == RIGHT


def one_step_late(self, own, others):
    """Mutant of `_scheduled_steps`: it counts from -1."""
    return _scheduled_steps(self, own, others) - 1


_scheduled_steps, _add = ReleaseRecord._scheduled_steps, ReleaseRecord.add


@pytest.mark.slow
def test_a_change_one_step_late_is_caught(monkeypatch):
    monkeypatch.setattr(ReleaseRecord, "_scheduled_steps", one_step_late)
    model, noise = trained(make(), batches())
    assert follows(noise) == [True, True, False, False, True]
    assert recorded(model.optimizer.ledger) == [(2.0, 3), (1.6, 1), (1.2, 1)]


def records_the_first(self, fresh, begins=True, stage=None, costs=True):
    """Mutant of `add`: every step is recorded with the first noise multiplier."""
    return _add(self, fresh, begins, tf.zeros_like(stage), costs)


@pytest.mark.slow
def test_a_record_of_the_first_value_alone_is_caught(monkeypatch):
    monkeypatch.setattr(ReleaseRecord, "add", records_the_first)
    model, _ = trained(make(), batches())
    assert recorded(model.optimizer.ledger) != RIGHT


def interrupted(optimizer):
    """Noise of the second step, of which another record is taken over when it is half done."""
    data = batches(chunk_size=32, padding="full")
    other, _ = trained(make(data), data)
    model = network()
    optimizer = optimizer(data)
    optimizer.build(model.trainable_variables)

    @tf.function
    def part(x, y, mask):
        losses = nothing(y, model(x)) * tf.cast(mask, tf.float32)
        optimizer.minimize(losses, model.trainable_variables)

    parts = iter(data)
    for _ in range(3):
        part(*next(parts))
    before = support.flat(model.get_weights())
    optimizer._released.absorb(other.optimizer._released.rows())
    optimizer._released.refresh()
    part(*next(parts))
    own = optimizer._released.tables()[-1]
    counts = {parameters_of(row)["noise_multiplier"]: row[STEPS] for row in own}
    return (before - support.flat(model.get_weights())) * BATCH / CLIP, counts


class StageAtTheEnd(tfdp.DPSGD):
    """Mutant: the noise is that of the number when the logical batch is complete."""

    def _noise_now(self, stage):
        return super()._noise_now(self._released.stage(tf.constant(True)))


def test_a_logical_batch_gets_the_noise_that_it_was_counted_with():
    noise, counts = interrupted(make)
    assert counts == {2.0: 2, 1.6: 0, 1.2: 0} and has_stddev(noise, 2.0)


@pytest.mark.slow
def test_noise_of_another_stage_than_was_counted_is_caught():
    noise, counts = interrupted(lambda data: make(data, cls=StageAtTheEnd))
    assert counts == {2.0: 2, 1.6: 0, 1.2: 0} and not has_stddev(noise, 2.0)


# What was before.


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recompiled", "keras", "checkpoint"])
def test_training_continues_the_schedule(form, tmp_path):
    data = batches(2)
    model, _ = trained(make(data), data)
    if form == "recompiled":
        again, optimizer = model, make(data)
    elif form == "keras":
        model.save(tmp_path / "m.keras")
        again = tf.keras.models.load_model(tmp_path / "m.keras", {"nothing": nothing})
        optimizer = again.optimizer
        assert optimizer.noise_multiplier == SCHEDULE
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(tmp_path / "c")
        again, optimizer = network(), make(data)
        optimizer.build(again.trainable_variables)
        tf.train.Checkpoint(model=again, optimizer=optimizer).read(path)
    again, noise = trained(optimizer, data, again)
    assert follows(noise, first=2) == [True, True]
    assert recorded(again.optimizer.ledger) == [(2.0, 2), (1.6, 1), (1.2, 1)]


def test_an_older_checkpoint_does_not_turn_the_schedule_back(tmp_path):
    data = batches(2)
    model, _ = trained(make(data), data)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(tmp_path / "c")
    model.fit(data, verbose=0)
    checkpoint.read(path)
    model.optimizer.iterations.assign(0)
    assert model.optimizer.scheduled_steps() == 4
    model.fit(data, verbose=0)
    assert recorded(model.optimizer.ledger) == [(2.0, 2), (1.6, 1), (1.2, 3)]


@pytest.mark.slow
def test_copies_continue_it_and_record_for_themselves():
    data = batches(2)
    model, _ = trained(make(data), data)
    other = copy.deepcopy(model.optimizer)
    assert recorded(other.ledger) == [(2.0, 2)] and other.scheduled_steps() == 2
    again, noise = trained(other, data, tf.keras.models.clone_model(model))
    assert follows(noise, first=2) == [True, True]
    assert recorded(again.optimizer.ledger) == [(2.0, 2), (1.6, 1), (1.2, 1)]
    assert recorded(model.optimizer.ledger) == [(2.0, 2)]


@pytest.mark.slow
def test_other_steps_do_not_count():
    data = batches(2)
    model, _ = trained(make(data, noise=3.0), data)
    model, noise = trained(make(data), data, model, epochs=2)
    assert follows(noise) == [True] * 4
    assert sorted(recorded(model.optimizer.ledger)) == [(1.2, 1), (1.6, 1), (2.0, 2), (3.0, 2)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("noise", [2.0, PiecewiseConstantNoise([2, 4], [2.0, 1.6, 1.2])])
def test_resuming_with_another_schedule_is_refused(noise):
    data = batches(2)
    model, _ = trained(make(data), data)
    store = {}
    model.optimizer.save_own_variables(store)
    with pytest.raises(PrivacyParametersChangedError, match="`noise_multiplier` must stay the"):
        make(data, noise=noise).load_own_variables(store)


# Arguments.


@pytest.mark.slow
def test_a_constant_schedule_is_the_number():
    data = batches(padding="full", seed=1)
    constant = make(data, noise=PiecewiseConstantNoise([2], [1.5, 1.5]), noise_seed=3)
    number = make(data, noise=1.5, noise_seed=3)
    assert constant._privacy_parameters() == number._privacy_parameters()
    assert constant.release == number.release and constant.noise_stddev == number.noise_stddev
    tf.keras.utils.set_random_seed(0)
    first = trained(constant, data)[0]
    tf.keras.utils.set_random_seed(0)
    second = trained(number, data)[0]
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Loud(PiecewiseConstantNoise):
    """A subclass that could look at anything."""

    def __call__(self, step):
        return 0.1


@pytest.mark.parametrize(
    "noise",
    [
        lambda step: 1.0,
        tf.Variable(1.0),
        tf.keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.5),
        Loud([1], [2.0, 1.0]),
    ],
)
def test_noise_that_could_depend_on_data_is_refused(noise):
    with pytest.raises(ValueError, match=r"`noise_multiplier` must .*could depend on the data"):
        make(noise=noise)


def test_selective_release_and_several_workers_take_a_number(monkeypatch):
    with pytest.raises(ValueError, match="`noise_multiplier` must be a number with selective"):
        tfdp.DPSURSGD(1.0, SCHEDULE, 16, validation_batch_size=16, validation_noise_multiplier=1.3)
    from tfdp.step import replicas

    monkeypatch.setattr(replicas, "several_workers", lambda: True)
    with pytest.raises(ValueError, match="`noise_multiplier` must be a number under a MultiWorker"):
        trained(make(), batches())


def test_limits_hold_for_the_largest_value():
    with pytest.raises(ValueError, match=r"`noise_multiplier` must be at most .* `secure_noise`"):
        make(batches(padding="full"), PiecewiseConstantNoise([5], [1.0, 1e9]), secure_noise=True)
    with pytest.raises(ValueError, match="`count_noise` must be more than half"):
        rule = tfdp.clipping.AdaptiveQuantileClipping(count_noise=1.0)
        make(noise=PiecewiseConstantNoise([5], [1.0, 3.0]), clipping_rule=rule)


def test_config_and_text():
    decay = ExponentialDecayNoise(3.0, 10, 0.9, 1.0)
    optimizer = make(noise=decay)
    again = tfdp.DPSGD.from_config(optimizer.get_config())
    assert again.noise_multiplier == decay and "ExponentialDecayNoise" in repr(again)
