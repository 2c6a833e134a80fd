"""Replayed steps: of both Kerases, what they find, and that nothing of them is left behind."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import gan_support, support, vae_support
from tests.front_ends import FRONT_ENDS, needs_keras_3, with_both, with_one
from tfdp.auditing import SensitivityError, check_sensitivity, replay, sensitivity
from tfdp.clipping import AdaptiveQuantileClipping, OnePassEngine, step_check
from tfdp.step.accumulator import Accumulator
from tfdp.step.private_step import PrivateStep
from tfdp.step.record.release_count import ReleaseRecord

FRONT = FRONT_ENDS[-1]  # Keras 3, where it is installed.
X, Y = support.small_data(40)


def network(front):
    layers = front.keras.layers
    front.keras.utils.set_random_seed(0)
    return front.keras.Sequential(
        [layers.Input([4]), layers.Dense(5, "tanh"), layers.Dropout(0.3), layers.Dense(3)]
    )


def private(front, name="DPSGD", clip=0.1, noise=1.1, **kwargs):
    if "sampling" not in kwargs:
        kwargs.setdefault("expected_batch_size", 10)
    kwargs.setdefault("learning_rate", 0.1)
    return getattr(front.tfdp, name)(clip, noise, **kwargs)


def compiled(front, optimizer=None, model=None, **kwargs):
    model = model or network(front)
    model.compile(optimizer or private(front), front.crossentropy(), **kwargs)
    return model


def checked(front, optimizer=None, model=None, data=(X, Y), examples=4, **kwargs):
    model = compiled(front, optimizer, model, **kwargs)
    return check_sensitivity(model, data, examples=examples, verbose=False)


def sampling(**kwargs):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=10, **kwargs).sampling


def users():
    return sampling(privacy_unit=np.arange(40) // 4, examples_per_user=2)


OPTIMIZERS = {
    "momentum": {"momentum": 0.9},
    "adam": {"name": "DPAdam"},
    "chunks": {"gradient_accumulation_steps": 2},
    "adaptive": {"clipping_rule": AdaptiveQuantileClipping(target_quantile=0.5)},
    "schedule": {"noise": tfdp.schedules.PiecewiseConstantNoise([5], [1.0, 2.0])},
    "users": {"sampling": users},
    "full": {"sampling": lambda: sampling(padding="full")},
    "secure": {"sampling": lambda: sampling(padding="full"), "secure_noise": True},
    "secure, adaptive": {
        "sampling": lambda: sampling(padding="full"),
        "secure_noise": True,
        "clipping_rule": AdaptiveQuantileClipping(target_quantile=0.5),
    },
    "top-k": {"compression": tfdp.contrib.TopK(0.5)},
    "mask": {"compression": tfdp.contrib.RandomMask(0.5)},
    "bands": {
        "sampling": lambda: sampling(cycle_length=2),
        "noise_correlation": tfdp.BandedNoise([0.8, 0.6]),
    },
    "buffers": {
        "sampling": lambda: sampling(cycle_length=2),
        "noise_correlation": tfdp.BufferedNoise([0.5], [0.8], cycle_length=2, cycles=1),
    },
    "microbatches": {"num_microbatches": 2},
    "no noise": {"noise": 0.0},
    "no noise, adaptive": {
        "noise": 0.0,
        "clipping_rule": AdaptiveQuantileClipping(target_quantile=0.5),
    },
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@with_both
def test_steps_let_nothing_out_but_the_noisy_sum(front, name):
    arguments = dict(OPTIMIZERS[name])
    if callable(arguments.get("sampling")):
        arguments["sampling"] = arguments["sampling"]()
    found = checked(front, private(front, **arguments), metrics=["accuracy"])
    assert len(found.movements) == 4 and not found.broken
    assert found.leaks == found.not_replayed == ()
    # Gradients are far longer than the clip; those of a microbatch are the mean of several.
    least = 0.0 if name == "microbatches" else 1 - 1e-4
    assert all(m.removed > least for m in found.movements)
    # Without padding there are no masks.
    masked = [m.masked for m in found.movements]
    assert all(masked) if name not in ("users", "bands", "buffers") else not any(masked)


@needs_keras_3
def test_both_kerases_find_the_same():
    movements = []
    for front in FRONT_ENDS:
        layers = front.keras.layers
        model = front.keras.Sequential([layers.Input([4]), layers.Dense(5, "tanh")])
        model.add(layers.Dense(3))
        model.set_weights(support.small_model().get_weights())
        movements.append(checked(front, private(front, clip=0.7), model).movements)
    for first, second in zip(*movements, strict=True):
        assert first.example == second.example
        assert [first.removed, first.replaced] == pytest.approx(
            [second.removed, second.replaced], abs=1e-5
        )


@pytest.mark.slow
@needs_keras_3
def test_any_optimizer_of_keras_3():
    keras = FRONT.keras
    inner = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.1, 100), use_ema=True, global_clipnorm=1.0
    )
    found = checked(FRONT, FRONT.tfdp.DPOptimizer(inner, 0.1, 1.1, expected_batch_size=10))
    assert not found.broken and not found.leaks
    with pytest.raises(ValueError, match="`optimizer` must be a private optimizer"):
        checked(FRONT, keras.optimizers.Adam())
    assert FRONT.tfdp.check_sensitivity is check_sensitivity


@pytest.mark.slow
@with_both
def test_selective_models_autoencoders_and_gans(front):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    model = compiled(
        front,
        private(
            front,
            "DPSURSGD",
            sampling=batches.sampling,
            validation_batch_size=10,
            validation_noise_multiplier=1.3,
        ),
        front.tfdp.SelectiveModel(network(front)),
    )
    found = check_sensitivity(model, (X, Y), examples=4, verbose=False)
    assert not found.leaks and found.movements[0].removed > 0.9
    vae = vae_support.compiled(vae_support.vae(front))
    found = check_sensitivity(vae, (vae_support.X, vae_support.X), examples=6, verbose=False)
    assert not found.leaks and not found.not_replayed
    gan = gan_support.compiled(gan_support.gan(front))
    found = check_sensitivity(gan, (gan_support.X, gan_support.X), examples=4, verbose=False)
    # The generator's own noise cannot be drawn again; the critic is compared.
    random = set(found.not_replayed)
    assert {name_of(v) for v in gan.generator.trainable_weights} <= random
    assert not {name_of(v) for v in gan.critic.weights} & random


def name_of(variable):
    return (variable if isinstance(variable, tf.Variable) else variable.value).name


# What is left behind.


@with_one
def test_nothing_is_left_behind(front, monkeypatch):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    model = compiled(front, private(front, "DPAdam", sampling=batches.sampling))
    model.fit(batches, epochs=1, verbose=0)
    optimizer = model.optimizer
    attributes, steps = dict(vars(optimizer)), optimizer.ledger.steps

    def state():
        variables = [*model.variables, *optimizer._state_variables()]
        return [np.array(v) for v in variables], optimizer.ledger.epsilon(1e-5).epsilon

    before = state()
    check_sensitivity(model, (X, Y), examples=4, verbose=False)
    assert vars(optimizer) == attributes and model.optimizer is optimizer
    for old, new in zip(before[0], state()[0], strict=True):
        np.testing.assert_array_equal(old, new)
    assert state()[1] == before[1]
    # Steps after it have noise, and other noise.
    weights, sums = model.get_weights(), []
    for _ in range(2):
        model.set_weights(weights)
        model.fit(batches, epochs=1, verbose=0)
        sums.append(support.flat(model.get_weights()))
    assert optimizer.ledger.steps == 3 * steps
    assert np.linalg.norm(sums[0] - sums[1]) > 1e-3
    before = state()
    monkeypatch.setattr(replay.Replay, "restore", lambda self: None)  # Mutant.
    with pytest.raises((SensitivityError, RuntimeError)):
        check_sensitivity(model, (X, Y), examples=4, verbose=False)
    assert state()[1] > before[1]


def nested(front):
    """Returns a model whose step is in a function of its own, which keeps its traces."""

    class Nested(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = front.keras.layers.Dense(3)

        def call(self, inputs):
            return self.layer(inputs)

        @tf.function
        def step(self, x, y, weights):
            losses = front.crossentropy("none")(y, self(x), sample_weight=weights)
            self.optimizer.minimize(losses, self.trainable_variables)
            return tf.constant(0)

        def train_step(self, data):
            return {"steps": self.step(*data)}

    return Nested()


@pytest.mark.slow
@with_one
def test_a_nested_function_keeps_no_trace(front, monkeypatch):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10, padding="buckets")
    for is_mutant in (False, True):
        if is_mutant:
            monkeypatch.setattr(replay, "_function_of", lambda graph: None)
            monkeypatch.setattr(replay.Replay, "_traced", None, raising=False)
            monkeypatch.setattr(replay.Replay, "__setattr__", all_but_traced)
        model = compiled(front, private(front, sampling=batches.sampling), nested(front))
        model.build([None, 4])
        found = check_sensitivity(model, (X, Y), examples=4, verbose=False)
        assert found.movements[0].removed > 0.9 and not tf.config.functions_run_eagerly()
        if is_mutant:
            with pytest.raises(AssertionError, match="variables which have been deleted"):
                model.fit(batches, verbose=0)
        else:
            model.fit(batches, verbose=0)
            assert model.optimizer.ledger.steps == len(batches)


def all_but_traced(self, name, value):
    if name != "_traced":
        object.__setattr__(self, name, value)


@needs_keras_3
def test_models_of_a_strategy_are_refused():
    with support.mirrored(1).scope():
        model = compiled(FRONT)
    with pytest.raises(ValueError, match="outside of the scope of a distribution strategy"):
        check_sensitivity(model, (X, Y), examples=4)


# Mutants. What a program does around the sum: the analysis of the graph is switched off, which
# would refuse it.


class Tracked:
    """Programs that keep the loss in a metric, or elsewhere, and read it in the update."""

    def __init__(self, front, after=False):
        keras = self.keras = front.keras
        self.front, self.after = front, after
        self.tracker = tracker = keras.metrics.Mean(name="tracked")
        self.loss = tf.constant(0.0)
        program = self

        class Schedule(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return 0.1 / (1.0 + tracker.result())

            def get_config(self):
                return {}

        class Constraint(keras.constraints.Constraint):
            def __call__(self, w):
                return w / (1.0 + tracker.result())

        class Descent(keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate):
                super().update_step(gradient * program.loss, variable, learning_rate)

        class Model(keras.Model):
            def __init__(self, constraint=None):
                super().__init__()
                self.layer = keras.layers.Dense(3, kernel_constraint=constraint)

            def call(self, inputs):
                return self.layer(inputs)

            @property
            def metrics(self):
                return [tracker]

            def train_step(self, data):
                x, y, weights = data
                loss = self.compute_loss(x, y, self(x), weights)
                program.loss = tf.stop_gradient(loss)
                if not program.after:
                    tracker.update_state(loss)
                self.optimizer.minimize(loss, self.trainable_variables)
                if program.after:
                    tracker.update_state(loss)
                return {}

        self.schedule, self.constraint = Schedule, Constraint
        self.descent, self.model = Descent, Model

    def check(self, inner, constraint=None):
        optimizer = self.front.tfdp.DPOptimizer(inner, 0.1, 1.1, expected_batch_size=10)
        return checked(self.front, optimizer, self.model(constraint))


LEAKS = {
    "schedule": lambda p: p.check(p.keras.optimizers.Adam(p.schedule())),
    "callable": lambda p: p.check(p.keras.optimizers.SGD(lambda: 0.1 / (1 + p.tracker.result()))),
    "constraint": lambda p: p.check(p.keras.optimizers.SGD(0.1), p.constraint()),
    "inner": lambda p: p.check(p.descent(0.1)),
}


@pytest.fixture
def without_analysis(monkeypatch):
    monkeypatch.setattr(step_check, "check_graph", lambda graph: None)
    monkeypatch.setattr(step_check, "check_update", lambda tensors, *_: None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("leak", LEAKS)
@needs_keras_3
def test_updates_that_read_data_are_found(leak, after, without_analysis, monkeypatch):
    """After the update, a metric shows in the second step alone."""
    with pytest.raises(SensitivityError, match=r"through the noisy sum alone.*kernel"):
        LEAKS[leak](Tracked(FRONT, after))
    if after and leak != "inner":  # A mutant of the check.
        monkeypatch.setattr(sensitivity._Comparison, "_second_step", one_step)
        assert not LEAKS[leak](Tracked(FRONT, after)).leaks


def one_step(self):
    return np.zeros(1), {}


@pytest.mark.slow
@with_one
def test_sums_of_the_next_step_that_read_data_are_found(front, without_analysis, monkeypatch):
    """A metric in the loss, with the analysis of the loss switched off, too."""
    program = Tracked(front, after=True)
    original = PrivateStep._clipped_step

    def scaled(self, loss, variables):
        step = original(self, loss, variables)
        gradients = [g / (1 + program.tracker.result()) for g in step.clipped.gradients]
        step.clipped.gradients[:] = gradients
        return step

    monkeypatch.setattr(PrivateStep, "_clipped_step", scaled)
    with pytest.raises(SensitivityError, match="the clipped sum of the next step"):
        checked(front, private(front), program.model())


# Mutants of the library.


@with_one
def test_noise_that_is_less_than_what_was_counted_is_found(front, monkeypatch):
    original = PrivateStep._noise_now
    monkeypatch.setattr(PrivateStep, "_noise_now", lambda self, stage: original(self, stage) / 2)
    noise = tfdp.schedules.PiecewiseConstantNoise([5], [1.0, 2.0])
    with pytest.raises(SensitivityError, match="TOO FAR"):
        checked(front, private(front, noise=noise))


@pytest.mark.slow
@with_one
def test_steps_that_release_twice_are_found(front, monkeypatch):
    original = PrivateStep._add_noise

    def twice(self, total, step):
        first, second = original(self, total, step), original(self, total, step)
        return [(a + b) / 2 for a, b in zip(first, second, strict=True)]

    monkeypatch.setattr(PrivateStep, "_add_noise", twice)
    with pytest.raises(SensitivityError, match="TOO FAR"):
        checked(front)


@pytest.mark.slow
@with_one
def test_steps_that_are_not_counted_are_found(front, monkeypatch):
    original = ReleaseRecord.add
    monkeypatch.setattr(
        ReleaseRecord, "add", lambda self, fresh, *args: original(self, fresh, False)
    )
    with pytest.raises(RuntimeError, match="counted 0 times"):
        checked(front)


@pytest.mark.slow
@with_one
def test_sums_of_chunks_that_are_left_are_found(front, monkeypatch):
    original = Accumulator.take

    def left(self, last, variables):
        taken = original(self, last, variables)
        for total, gradient in zip(self.sums, taken.gradients, strict=True):
            total.assign(tf.cast(gradient, total.dtype))
        return taken

    monkeypatch.setattr(Accumulator, "take", left)
    with pytest.raises(SensitivityError, match="through the noisy sum alone"):
        checked(front, private(front, gradient_accumulation_steps=2))


@pytest.mark.slow
@with_one
def test_a_clip_that_moves_by_the_count_without_noise_is_found(front, monkeypatch):
    from tfdp.step.adaptive_clip import AdaptiveClip

    original = AdaptiveClip.step

    def step(self, sums, within_clip, *rest):
        noisy = original(self, sums, within_clip, *rest)
        self._clip.assign_add(1e-6 * within_clip)
        return noisy

    monkeypatch.setattr(AdaptiveClip, "step", step)
    rule = AdaptiveQuantileClipping(target_quantile=0.5)
    with pytest.raises(SensitivityError, match="l2_norm_clip"):
        checked(front, private(front, clip=1.0, clipping_rule=rule))


class Unclipped(OnePassEngine):
    @property
    def clips(self):
        return False


@needs_keras_3
def test_a_clip_that_does_not_clip_is_found():
    optimizer = private(FRONT, clip=1e-3)
    vars(optimizer)["_clipping"] = Unclipped(1e-3)
    with pytest.raises(SensitivityError, match="TOO FAR"):
        checked(FRONT, optimizer)
