"""Correlated noise in a training: its distribution, its sensitivity, and what the ledger counts."""

import copy
import itertools

import dp_accounting
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS, with_both
from tfdp.step.noise_memory import NoiseMemory
from tfdp.step.record.cycle_count import CycleCount
from tfdp.step.record.file_ledger import ledger_of_file

CLIP, SIGMA, N, BATCH, CYCLE = 0.5, 1.5, 40, 10, 4
NOISE = tfdp.BandedNoise([3.0, 2.0, 1.0])
BUFFERED = tfdp.BufferedNoise([0.4, 0.3], [0.9, 0.5], cycle_length=CYCLE, cycles=2)
UNITS = 8000  # Coordinates.


def silent_model(front):
    """A model whose loss has no gradient: an update is noise alone."""
    layers = front.keras.layers
    model = front.keras.Sequential(
        [layers.Input([4]), layers.Dense(UNITS // 5, kernel_initializer="zeros", use_bias=True)]
    )

    def loss(y, outputs):
        return 0.0 * tf.reduce_sum(tf.cast(outputs, tf.float32), axis=-1)

    return model, loss


def batches_of(**kwargs):
    x = np.random.default_rng(0).normal(size=[N, 4]).astype("float32")
    arguments = {"expected_batch_size": BATCH, "cycle_length": CYCLE, **kwargs}
    return tfdp.data.poisson_batches((x, np.zeros(N, "int64")), **arguments)


def optimizer_for(batches, front=FRONT_ENDS[0], **kwargs):
    arguments = {"noise_correlation": NOISE, "learning_rate": 1.0, **kwargs}
    return front.tfdp.DPSGD(CLIP, SIGMA, sampling=batches.sampling, **arguments)


def noise_of_steps(front, cycles, jit_compile=False, noise_correlation=NOISE, **kwargs):
    """The noise of each step in the clipped sum, `[steps, coordinates]`, and the model."""
    batches = batches_of(**kwargs)
    model, loss = silent_model(front)
    optimizer = optimizer_for(batches, front, noise_correlation=noise_correlation)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    weights = [support.flat(model.get_weights())]

    def remember(batch, logs=None):
        weights.append(support.flat(model.get_weights()))

    callback = front.keras.callbacks.LambdaCallback(on_train_batch_end=remember)
    model.fit(batches, epochs=cycles, verbose=0, callbacks=[callback])
    noise = -np.diff(np.array(weights), axis=0) * BATCH
    return noise[np.any(noise != 0, axis=1)], model  # Chunks that complete no batch change nothing.


def independent(noise, coefficients=NOISE.coefficients):
    """The independent noise z = C x of which correlated noise x was made."""
    steps = len(noise)
    column = np.pad(coefficients, (0, max(0, steps - len(coefficients))))[:steps]
    return scipy.linalg.toeplitz(column, np.zeros(steps)) @ noise


def assert_independent(z, stddev):
    """The rows are independent normal numbers; a test fails by luck with probability below 1e-9."""
    assert min(scipy.stats.kstest(row, scipy.stats.norm(0, stddev).cdf).pvalue for row in z) > 1e-11
    for first, second in itertools.combinations(z, 2):
        assert scipy.stats.pearsonr(first, second).pvalue > 1e-12


@with_both
def test_noise_is_that_of_the_matrix(front):
    noise, model = noise_of_steps(front, 2)
    assert noise.shape == (2 * CYCLE, UNITS)
    assert_independent(independent(noise), CLIP * SIGMA)
    assert model.optimizer.released_steps() == (2, 0)
    with pytest.raises(AssertionError):  # What independent noise would be.
        assert_independent(noise, CLIP * SIGMA)


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [NOISE, BUFFERED])
@pytest.mark.parametrize("how", ["buckets, xla", "chunks", "full"])
def test_noise_is_that_of_the_matrix_however_batches_come(how, correlation):
    kwargs = {"chunk_size": 20} if how == "chunks" else {"padding": how.split(",")[0]}
    kwargs["noise_correlation"] = correlation
    noise, model = noise_of_steps(FRONT_ENDS[0], 2, jit_compile="xla" in how, **kwargs)
    assert noise.shape == (2 * CYCLE, UNITS)
    assert_independent(independent(noise, correlation.coefficients), CLIP * SIGMA)
    assert model.optimizer.released_steps() == (2, 0)


def test_noise_begins_anew_with_other_batches():
    front = FRONT_ENDS[0]
    noise, model = noise_of_steps(front, 1)
    before = support.flat(model.get_weights())
    again = batches_of(steps_per_epoch=1)
    model.fit(again, verbose=0)
    after = before - support.flat(model.get_weights())
    block = np.array([*noise, after * BATCH])
    with pytest.raises(AssertionError):
        assert_independent(independent(block), CLIP * SIGMA)
    assert_independent(
        np.array([*independent(noise), NOISE.coefficients[0] * block[4]]), CLIP * SIGMA
    )
    assert model.optimizer.released_steps() == (2, 0)


# The cost, in any order of steps.


def some_draws(rng, steps):
    """Draws of two sources, most of them in their order."""
    draws, at = [], [0, 0]
    source = 0
    for _ in range(steps):
        source = 1 - source if rng.random() < 0.1 else source
        at[source] += int(rng.integers(1, 4)) if rng.random() < 0.1 else 1
        draws.append((source, at[source]))
    for i in range(steps - 1):  # Threads that overtake each other.
        if rng.random() < 0.1:
            draws[i : i + 2] = draws[i + 1], draws[i]
    return draws


def numbers(draw):
    """The numbers of the source and of the draw, as tensors."""
    return tf.unstack(tf.constant(draw, tf.int64))


def counted(draws, cycles):
    total = [0]

    def add(costs, stage):
        total[0] += int(costs)
        return tf.no_op(), None

    for draw in draws:
        cycles.count(*numbers(draw), tf.constant(True), add)
    return total[0]


def matrix_of(draws, memory):
    """The matrix C with C x = z, of the noise x that the memory makes of unit vectors z."""
    noise = [
        memory.next(tf.constant(z, tf.float64), *numbers(draw))
        for z, draw in zip(np.eye(len(draws)), draws, strict=True)
    ]
    return np.linalg.inv(np.array(noise))


def is_covered(draws, matrix, number):
    """Returns whether so many releases cover what an example does to C x, each in rows of its own.

    The example is in one set of each source.
    """
    for sets in itertools.product(range(CYCLE), repeat=2):
        steps = [i for i, (source, number) in enumerate(draws) if number % CYCLE == sets[source]]
        columns = matrix[:, steps]
        apart = np.count_nonzero(np.abs(columns) > 1e-9, axis=1).max(initial=0) <= 1
        if not apart or np.sum(columns**2, axis=0).max(initial=0) > 1 + 1e-9 or len(steps) > number:
            return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_cycles_that_are_counted_cover_the_sensitivity(seed):
    rng = np.random.default_rng(seed)
    for steps in (1, 3, 10, 40):
        draws = some_draws(rng, steps)
        number = counted(draws, CycleCount(CYCLE))
        assert is_covered(draws, matrix_of(draws, NoiseMemory(NOISE)), number)
        in_order = [(0, 5 + i) for i in range(steps)]
        assert counted(in_order, CycleCount(CYCLE)) == -(-steps // CYCLE)
        matrix = matrix_of(in_order, NoiseMemory(NOISE))
        column = np.pad(NOISE.coefficients, (0, max(0, steps - 3)))[:steps]
        np.testing.assert_allclose(
            matrix, scipy.linalg.toeplitz(column, np.zeros(steps)), atol=1e-9
        )
        assert is_covered(in_order, matrix, -(-steps // CYCLE))


class KeptMemory(NoiseMemory):
    """Mutant: the memory of any step before is used."""

    def _tag(self, source, sequence, dtype):
        return tf.zeros([5], dtype)


class NeverAnew(CycleCount):
    """Mutant: a run goes on, whatever draw comes."""

    def count(self, source, sequence, first, add):
        run = self._run.read_value()
        return super().count(run[0], run[1], first, add)


def test_mutants_do_not_cover_the_sensitivity():
    def all_covered(memory, cycles):
        rng = np.random.default_rng(0)
        return all(
            is_covered(draws, matrix_of(draws, memory(NOISE)), counted(draws, cycles(CYCLE)))
            for draws in (some_draws(rng, 30) for _ in range(4))
        )

    assert all_covered(NoiseMemory, CycleCount)
    assert not all_covered(NoiseMemory, NeverAnew)
    assert not all_covered(KeptMemory, CycleCount)


def test_steps_that_were_not_counted_are_of_no_run():
    cycles = CycleCount(CYCLE)
    assert counted([(0, 0), (0, 1), (0, 2)], cycles) == 1

    def fail(costs, stage):
        raise RuntimeError

    def nothing(costs, stage):
        return tf.no_op(), None

    with pytest.raises(RuntimeError):
        cycles.count(*numbers((0, 3)), tf.constant(True), fail)
    cycles.count(*numbers((0, 0)), tf.constant(False), nothing)  # A draw used before.
    assert counted([(0, 3), (0, 4)], cycles) == 1 and counted([(0, 6)], cycles) == 1


@pytest.mark.parametrize("how", ["copy", "deepcopy", "fork"])
def test_copies_begin_anew(how):
    cycles, memory = CycleCount(CYCLE), NoiseMemory(NOISE)
    counted([(0, 0)], cycles)
    first = memory.next(tf.ones([3]), *numbers((0, 0)))
    if how == "fork":
        cycles.begin_anew(), memory.begin_anew()  # What a forked process calls.
    else:
        cycles, memory = (getattr(copy, how)(one) for one in (cycles, memory))
    assert counted([(0, 1)], cycles) == 1
    np.testing.assert_array_equal(memory.next(tf.ones([3]), *numbers((0, 1))), first)
    assert not np.array_equal(memory.next(tf.ones([3]), *numbers((0, 2))), first)


# Buffers: each chance of an example to be sampled has its effect in all steps that follow.


def buffered_cost(draws, matrix):
    """The largest squared norm of what an example adds to C x, in one set of each source.

    C has no negative coefficient: it adds most if it is always sampled, with one gradient.
    """
    assert np.all(matrix > -1e-9)
    costs = []
    for sets in itertools.product(range(CYCLE), repeat=2):
        steps = [i for i, (source, number) in enumerate(draws) if number % CYCLE == sets[source]]
        costs.append(np.sum(np.sum(matrix[:, steps], axis=1) ** 2))
    return max(costs)


def ways_to_draw(steps=40):
    yield [(0, i) for i in range(steps)]
    yield [(0, 7 + i) for i in range(steps)]
    yield [(0, 1 + CYCLE * i) for i in range(steps)]  # Draws of one set alone.
    yield from (some_draws(np.random.default_rng(seed), steps) for seed in range(3))


def test_cycles_that_are_counted_cover_the_sensitivity_of_buffers():
    for draws in ways_to_draw():
        whole = matrix_of(draws, NoiseMemory(BUFFERED))
        for steps in (1, 5, 9, 16, 23, 40):  # The first of them: a training may end anywhere.
            number = counted(draws[:steps], CycleCount(CYCLE))
            assert buffered_cost(draws[:steps], whole[:steps, :steps]) <= number
    in_order = next(ways_to_draw())
    matrix = matrix_of(in_order, NoiseMemory(BUFFERED))
    block = scipy.linalg.toeplitz(BUFFERED.coefficients, np.zeros(8))
    np.testing.assert_allclose(matrix, scipy.linalg.block_diag(*[block] * 5), atol=1e-9)


class Endless(NoiseMemory):
    """Mutant: the noise does not begin anew after the cycles."""

    def _ends_before(self, sequence):
        return tf.constant(False)


class UnitColumn(NoiseMemory):
    """Mutant: the first column of C has norm 1."""

    def _noise_after(self, before, fresh):
        norm = np.linalg.norm(self._noise.coefficients)
        noise, after = super()._noise_after(before / norm, fresh)
        return norm * noise, norm * after


@pytest.mark.parametrize(
    ("memory", "cycles"),
    [
        *((Endless, CycleCount), (UnitColumn, CycleCount)),
        *((KeptMemory, CycleCount), (NoiseMemory, NeverAnew)),
    ],
)
def test_mutants_do_not_cover_the_sensitivity_of_buffers(memory, cycles):
    def all_covered(memory, cycles):
        return all(
            buffered_cost(draws, matrix_of(draws, memory(BUFFERED)))
            <= counted(draws, cycles(CYCLE))
            for draws in ways_to_draw()
        )

    assert not all_covered(memory, cycles)


@with_both
def test_noise_of_buffers_is_that_of_the_matrix(front):
    noise, model = noise_of_steps(front, 3, noise_correlation=BUFFERED)
    assert noise.shape == (3 * CYCLE, UNITS)

    def independent_of(noise, correlation=BUFFERED):
        c = correlation.coefficients
        return np.array([*independent(noise[:8], c), *independent(noise[8:], c)])

    z = independent_of(noise) / (CLIP * SIGMA)
    assert_independent(z, 1.0)
    squares = scipy.stats.chi2(z.size)
    assert 1e-10 < squares.cdf(np.sum(z**2)) < 1 - 1e-10
    assert squares.cdf(np.sum(z**2) / 1.05**2) < 1e-10  # Sigma is not 5% more.
    assert squares.sf(np.sum(z**2) * 1.05**2) < 1e-10
    assert model.optimizer.released_steps() == (3, 0)
    others = [
        tfdp.BufferedNoise(weights, decays, CYCLE, 2)
        for weights, decays in (([0.5, 0.3], [0.9, 0.5]), ([0.4, 0.3], [0.9, 0.1]))
    ]
    for z in (noise, *(independent_of(noise, other) for other in others)):
        with pytest.raises(AssertionError):
            assert_independent(z, CLIP * SIGMA)
    with pytest.raises(AssertionError):  # As if the noise did not begin anew.
        longer = tfdp.BufferedNoise(BUFFERED.weights, BUFFERED.decays, CYCLE, 3)
        c = longer.coefficients * (BUFFERED.scale / longer.scale)
        assert_independent(independent(noise, c), CLIP * SIGMA)


def plain_gaussians(count):
    ledger = tfdp.accounting.PrivacyLedger()
    ledger.record(dp_accounting.GaussianDpEvent(SIGMA), count)
    return ledger.epsilon(1e-3)


def test_ledger_counts_a_gaussian_for_each_cycle_of_buffers(tmp_path, capsys, monkeypatch):
    # In a cycle an example is sampled with probability 0.8 only, for which there is no credit.
    batches = batches_of(expected_batch_size=8, steps_per_epoch=5)
    assert batches.sampling.sampling_probability == 0.8
    optimizer = optimizer_for(batches, noise_correlation=BUFFERED)
    assert optimizer.release.event == dp_accounting.GaussianDpEvent(SIGMA)
    model, loss = silent_model(FRONT_ENDS[0])
    model.compile(optimizer, loss)
    model.fit(batches, verbose=0)
    expected = plain_gaussians(2)  # The second has one step.
    assert optimizer.ledger.epsilon(1e-3).by_accountant == pytest.approx(expected.by_accountant)
    assert set(expected.by_accountant) == {"RDP", "PLD"}

    budget = tfdp.PrivacyBudget(plain_gaussians(3).epsilon * 1.01, 1e-3)
    model.fit(batches, epochs=5, callbacks=[budget], verbose=0)
    assert "stops training after 3 cycles of 4 steps, at" in capsys.readouterr().out
    assert optimizer.released_steps() == (3, 0) and int(optimizer.iterations) == 3 * CYCLE
    statement = " ".join(tfdp.privacy_statement(model, 1e-3).split())
    assert "3 cycles of the Gaussian mechanism with noise multiplier 1.5: each example is" in (
        statement
    )
    assert "at most one of the 4 batches of a cycle" in statement and "q = " not in statement
    assert support.stated_epsilon(statement) >= plain_gaussians(3).epsilon

    model.save(tmp_path / "model.keras")
    saved = ledger_of_file(tmp_path / "model.keras").ledger
    assert saved.epsilon(1e-3) == optimizer.ledger.epsilon(1e-3)
    config = optimizer.get_config()
    assert type(optimizer).from_config(config).noise_correlation == BUFFERED

    monkeypatch.setattr(tfdp.BufferedNoise, "counts_sampling", True)  # A mutant.
    sampled = optimizer_for(batches, noise_correlation=BUFFERED)
    ledger = tfdp.accounting.PrivacyLedger()
    ledger.record(sampled.release.event, 2)
    assert ledger.epsilon(1e-3).epsilon < 0.99 * expected.epsilon


# As users have it.


@pytest.mark.quick_cases(1)
@with_both
def test_restarts_and_files_cost_a_cycle_and_hold_no_noise(front, tmp_path):
    _, model = noise_of_steps(front, 1)
    optimizer = model.optimizer
    secret = optimizer._memory._memory.numpy()[5:]
    state = [np.asarray(v) for v in optimizer._state_variables()]
    config = optimizer.get_config()
    assert config["noise_correlation"] == NOISE.get_config()
    clone = type(optimizer).from_config(config)
    assert clone.noise_correlation == NOISE and clone._memory._memory is None
    assert not any(np.isin(secret[:50], value).any() for value in state)
    model.save(tmp_path / "model.keras")
    tf.train.Checkpoint(optimizer=optimizer, model=model).save(str(tmp_path / "checkpoint"))
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert support.flat(model.get_weights())[:50].tobytes() in written  # It is not compressed.
    assert secret[:50].tobytes() not in written
    copied = copy.deepcopy(optimizer) if front.part == "tfdp" else clone
    model.compile(copied, model.loss)
    model.fit(batches_of(steps_per_epoch=1), verbose=0)
    assert model.optimizer.released_steps() == (2, 0)


def test_batches_whose_mask_is_forgotten_are_refused():
    batches = batches_of(padding="full")
    model, loss = silent_model(FRONT_ENDS[0])
    model.compile(optimizer_for(batches), loss)
    x, y, _ = next(iter(batches))
    with pytest.raises(ValueError, match="must take the sample weights of the batch"):
        model.train_on_batch(x, y)
    assert model.optimizer.released_steps() == (0, 0)


def test_attempts_do_not_draw_in_turns():
    model, loss = silent_model(FRONT_ENDS[0])
    model = tfdp.SelectiveModel(model)
    arguments = {"validation_batch_size": 5, "validation_noise_multiplier": 1.0}
    plain = batches_of(cycle_length=1)
    model.compile(tfdp.DPSURSGD(CLIP, SIGMA, sampling=plain.sampling, **arguments), loss)
    with pytest.raises(ValueError, match="without `cycle_length` where each attempt draws"):
        model.fit(batches_of(), verbose=0)


def test_budget_ends_with_a_cycle(capsys):
    batches = batches_of(steps_per_epoch=10)
    ledger = tfdp.accounting.PrivacyLedger()
    optimizer = optimizer_for(batches)
    ledger.record(optimizer.event, 3)
    target = ledger.epsilon(1e-3).epsilon * 1.01
    model, loss = silent_model(FRONT_ENDS[0])
    model.compile(optimizer, loss)
    budget = tfdp.PrivacyBudget(target, 1e-3)
    model.fit(batches, epochs=3, callbacks=[budget], verbose=0)
    assert "stops training after 3 cycles of 4 steps, at" in capsys.readouterr().out
    assert int(optimizer.iterations) == 3 * CYCLE and optimizer.released_steps() == (3, 0)
    statement = tfdp.privacy_statement(model, 1e-3)
    assert support.stated_epsilon(statement) <= target
    assert "3 cycles of the Gaussian mechanism" in statement
    assert "one of 4 random sets" in " ".join(statement.split())
    assert "10 expected per batch" in " ".join(statement.split())
    with pytest.raises(ValueError, match="allows no further step"):
        model.fit(batches, callbacks=[budget], verbose=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lengths", [(4, 1), (1, 4), (4, 2)])
def test_draws_of_other_cycles_are_refused(lengths):
    given, told = (batches_of(cycle_length=length) for length in lengths)
    model, loss = silent_model(FRONT_ENDS[0])
    model.compile(optimizer_for(told, noise_correlation=None), loss)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(given, verbose=0)
    assert model.optimizer.released_steps() == (0, 0)


def refused(**kwargs):
    drawn = ("cycle_length", "padding", "redraw_sets")
    batches = batches_of(**{k: kwargs.pop(k) for k in drawn if k in kwargs})
    cls = kwargs.pop("cls", tfdp.DPSGD)
    arguments = {"sampling": batches.sampling, "noise_correlation": NOISE, "learning_rate": 1.0}
    return cls(CLIP, **{"noise_multiplier": SIGMA, **arguments, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cycle_length": 2}, "cycle_length=3"),
        ({"cycle_length": 1}, "Received: cycle_length=1"),
        ({"sampling": None, "expected_batch_size": 5}, "Received: sampling=None"),
        ({"secure_noise": True, "padding": "full"}, "Received: secure_noise=True"),
        ({"clipping_rule": "adaptive_quantile"}, "Received: clipping_rule"),
        ({"noise_correlation": BUFFERED, "cycle_length": 1}, "cycle_length=4.*Received: cycle_len"),
        ({"noise_correlation": BUFFERED, "cycle_length": 2}, "Received: cycle_length=2"),
        ({"noise_correlation": BUFFERED, "redraw_sets": True}, "Received: sampling.redraws_sets"),
        (
            {"noise_correlation": BUFFERED, "sampling": None, "expected_batch_size": 5},
            "Received: sampling=None",
        ),
        ({"noise_correlation": BUFFERED, "clipping_rule": "adaptive_quantile"}, "clipping_rule"),
        ({"noise_correlation": 0.5}, "a `tfdp.BandedNoise`, a `tfdp.BufferedNoise` or None"),
        (
            {"noise_multiplier": tfdp.schedules.PiecewiseConstantNoise([5], [2.0, 1.0])},
            "Received: a schedule",
        ),
        (
            {"cls": tfdp.DPSURSGD, "validation_batch_size": 5, "validation_noise_multiplier": 1.0},
            "`cycle_length` must be 1 for selective release",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        refused(**kwargs)
