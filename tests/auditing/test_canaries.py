"""Audits of private training: they find nothing where it is right, and every mutant."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.auditing import AuditError, CanaryAudit, check_sensitivity
from tfdp.clipping import AdaptiveQuantileClipping, step_check
from tfdp.contrib import ImportanceSamplingClipping, PerturbedClipping, RandomMask, TopK
from tfdp.data import source
from tfdp.schedules import PiecewiseConstantNoise
from tfdp.step import adaptive_clip, private_step
from tfdp.step.noise_memory import NoiseMemory

X, Y = support.small_data(24)
CANARIES, BATCH, STEPS, DELTA = 1000, 256, 48, 1e-5
NOISE = 1.5  # An epsilon of about 6 at q = 1/4.


class Arrangement:
    """An audit, its batches, and arguments of its optimizer."""

    def __init__(self, expected_batch_size=BATCH, users=None, model=None, data=(X, Y), **batches):
        model = model or support.small_model()
        self.audit = CanaryAudit(model, data, CANARIES, privacy_unit=users, seed=3)
        if users is not None:
            batches |= {"privacy_unit": self.audit.privacy_unit, "examples_per_user": 2}
        self.batches = tfdp.data.poisson_batches(
            self.audit.data,
            expected_batch_size=expected_batch_size,
            steps_per_epoch=STEPS,
            seed=5,
            **batches,
        )

    def optimizer(self, cls=tfdp.DPSGD, **changes):
        arguments = {
            "l2_norm_clip": 0.5,
            "noise_multiplier": NOISE,
            "learning_rate": 0.05,
            "sampling": self.batches.sampling,
            "noise_seed": 7,
            **changes,
        }
        return cls(**arguments)

    def result(self, optimizer, **kwargs):
        model = self.audit.model
        if isinstance(optimizer, tfdp.DPSURSGD):
            model = tfdp.SelectiveModel(model)
            self.audit.watch(optimizer)
        if isinstance(model, tfdp.PrivateGAN):
            model.compile(optimizer, "adam")
        else:
            support.compiled(optimizer, model, **kwargs)
        model.fit(self.batches, epochs=1, callbacks=[self.audit.callback], verbose=0)
        return self.audit.result(DELTA)


CASES = {
    "sgd": (tfdp.DPSGD, {"momentum": 0.9}, {}),
    "adam": (tfdp.DPAdam, {}, {}),
    "sign sgd": (tfdp.DPSignSGD, {}, {}),
    "sign adam": (tfdp.DPSignAdam, {}, {}),
    "vectorized": (tfdp.DPSGD, {"engine": "vectorized"}, {}),
    "accumulation": (tfdp.DPAdam, {}, {"chunk_size": 200}),
    "adaptive": (
        tfdp.DPSGD,
        {"clipping_rule": AdaptiveQuantileClipping(target_quantile=0.5)},
        {},
    ),
    "secure": (tfdp.DPSGD, {"secure_noise": True}, {"padding": "full"}),
}


USERS = np.arange(24) // 3
SCHEDULE = PiecewiseConstantNoise([STEPS // 2], [2.0, 1.25])
BANDS = tfdp.BandedNoise([1.0, 0.6])
BUFFERS = tfdp.BufferedNoise([0.4, 0.2], [0.9, 0.5], cycle_length=2, cycles=3)
# Batches come from two random sets in turn. Each batch has 1/4 of its set.
CYCLES = {"expected_batch_size": BATCH // 2, "cycle_length": 2}
PASSES = {"expected_batch_size": 2 * BATCH, "cycle_length": 2}  # Each has its whole set.
CASES |= {
    "schedule": (tfdp.DPSGD, {"noise_multiplier": SCHEDULE}, {}),
    "noise before the clip": (tfdp.DPSGD, {"clipping_rule": PerturbedClipping(0.02)}, {}),
    "importance sampling": (tfdp.DPSGD, {"clipping_rule": ImportanceSamplingClipping()}, {}),
    "top k": (tfdp.DPSGD, {"compression": TopK(0.1), "momentum": 0.9}, {}),
    "random layers": (tfdp.DPSGD, {"compression": RandomMask(0.7), "momentum": 0.9}, {}),
    "correlated": (tfdp.DPSGD, {"noise_multiplier": 1.1, "noise_correlation": BANDS}, CYCLES),
    "buffers": (tfdp.DPSGD, {"noise_multiplier": 4.0, "noise_correlation": BUFFERS}, PASSES),
    "users": (tfdp.DPSGD, {}, {"users": USERS}),
}
# A canary that is masked in 0.3 of the steps shows as much less.
# A sign at a coordinate of its own says less than the bound for any number of them.
SHARES = {"random layers": 0.4, "sign sgd": 0.4, "sign adam": 0.4}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_audits_find_most_of_epsilon_and_no_more(name):
    cls, arguments, batches = CASES[name]
    arrangement = Arrangement(**batches)
    result = arrangement.result(arrangement.optimizer(cls, **arguments))
    result.check()
    assert result.steps == STEPS and result.passed
    assert SHARES.get(name, 0.5) * result.epsilon <= result.lower_bound <= result.epsilon


def private_gan(**kwargs):
    classes = 3 if kwargs.get("num_classes") else 0
    networks = []
    for size, outputs in ((2, 4), (4, 1)):
        inputs = [tf.keras.Input([size]), *([tf.keras.Input([3])] if classes else [])]
        joined = support.layers.Concatenate()(inputs) if classes else inputs[0]
        hidden = support.layers.Dense(5, "tanh")(joined)
        network = tf.keras.Model(
            inputs if classes else inputs[0], support.layers.Dense(outputs)(hidden)
        )
        networks.append(network)
    return tfdp.PrivateGAN(*networks, critic_steps=2, **kwargs)


GANS = {
    "clipped weights": {"weight_clip": 0.3},
    "conditional": {"num_classes": 3, "gradient_penalty": 10.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GANS)
def test_audit_of_the_critic_of_a_gan(name):
    arrangement = Arrangement(model=private_gan(**GANS[name]), data=(X, Y))
    critic = support.flat(arrangement.audit.model.base_model.critic.get_weights())
    result = arrangement.result(arrangement.optimizer())
    result.check()
    assert result.steps == STEPS
    assert result.epsilon / 2 <= result.lower_bound <= result.epsilon
    assert arrangement.audit.model.base_model.generate(2, seed=0).shape == (2, 4)
    assert np.any(critic != support.flat(arrangement.audit.model.base_model.critic.get_weights()))


@pytest.mark.slow
def test_audit_of_compiled_steps():
    arrangement = Arrangement(padding="full")  # XLA compiles each size of a batch.
    result = arrangement.result(arrangement.optimizer(), jit_compile=True)
    result.check()
    assert result.epsilon / 2 <= result.lower_bound


@pytest.mark.slow
def test_audit_of_two_replicas():
    strategy = support.mirrored(2)
    with strategy.scope():
        audit = CanaryAudit(support.small_model(), (X, Y), CANARIES, seed=3)
        batches = tfdp.data.distributed_poisson_batches(
            strategy,
            lambda part, parts: tf.nest.map_structure(lambda a: a[part::parts], audit.data),
            dataset_size=len(Y) + CANARIES,
            expected_batch_size=BATCH,
            seed=5,
        )
        optimizer = tfdp.DPAdam(0.5, NOISE, sampling=batches.sampling, noise_seed=7)
        support.compiled(optimizer, audit.model, loss=support.crossentropy("sum"))
    steps = {"epochs": STEPS // batches.steps_per_epoch, "steps_per_epoch": batches.steps_per_epoch}
    audit.model.fit(batches, callbacks=[audit.callback], verbose=0, **steps)
    result = audit.result(DELTA)
    result.check()
    assert result.epsilon / 2 <= result.lower_bound <= result.epsilon


def selective(arrangement):
    return arrangement.optimizer(
        tfdp.DPSURSGD,
        validation_batch_size=64,
        validation_noise_multiplier=1.3,
        momentum=0.9,
        threshold=0.0,
    )


@pytest.mark.slow
def test_audit_of_selective_updates():
    """Accepted updates alone are seen, and each is as private as an update."""
    arrangement = Arrangement()
    result = arrangement.result(selective(arrangement))
    result.check()
    assert 1 < result.lower_bound <= result.epsilon


# Mutants: an arrangement and its optimizer.


def little_noise(monkeypatch):
    correct = private_step.add_gaussian_noise
    monkeypatch.setattr(
        private_step, "add_gaussian_noise", lambda t, s, k, *_: correct(t, 0.6 * s, k)
    )
    arrangement = Arrangement()
    return arrangement, arrangement.optimizer()


def clip_skipped(monkeypatch):
    arrangement = Arrangement()
    optimizer = arrangement.optimizer()
    optimizer._clipping = support.UnclippedEngine(0.5)
    return arrangement, optimizer


def sampled_twice_as_often(monkeypatch):
    correct = source.draw_indices

    def draw(key, sampling, size):
        return correct(key, dataclasses.replace(sampling, expected_batch_size=2 * BATCH), size)

    monkeypatch.setattr(source, "draw_indices", draw)
    arrangement = Arrangement()
    return arrangement, arrangement.optimizer()


class MeanOverDrawn(tfdp.DPSGD):
    def _add_noise(self, total, step):
        share = self.expected_batch_size / tf.shape(total.batch[0])[0]
        noisy = super()._add_noise(total, step)
        return [sums * tf.cast(share, sums.dtype) for sums in noisy]


def mean_over_drawn(monkeypatch):
    arrangement = Arrangement(expected_batch_size=20)
    return arrangement, arrangement.optimizer(MeanOverDrawn)


def divided_by_drawn(monkeypatch):
    """The noisy sums are right; what is done with them depends on how many were drawn."""
    arrangement = Arrangement(expected_batch_size=20)
    optimizer = arrangement.optimizer()
    add_noise, rows = optimizer._add_noise, []

    def noting(total, *others):
        rows.append(tf.cast(tf.shape(total.batch[0])[0], tf.float32))
        return add_noise(total, *others)

    optimizer._add_noise = noting
    optimizer._transform_private_gradient = lambda gradient: gradient * 20.0 / rows[-1]
    monkeypatch.setattr(step_check, "check_graph", lambda graph: None)  # Which refuses it.
    return arrangement, optimizer


def noise_comes_twice(monkeypatch):
    arrangement = Arrangement()
    optimizer = arrangement.optimizer()
    correct = optimizer._noise.next_key
    optimizer._noise.next_key = lambda position: correct(position // 2)
    return arrangement, optimizer


def rejected_momentum_stays(monkeypatch):
    arrangement = Arrangement()
    optimizer = selective(arrangement)
    correct = optimizer.kept_variables

    def kept():
        trained = arrangement.audit.model.trainable_variables
        return [*correct(), *(optimizer.get_slot(v, "momentum") for v in trained)]

    optimizer.kept_variables = kept
    return arrangement, optimizer


def clip_of_the_critic_skipped(monkeypatch):
    arrangement = Arrangement(model=private_gan(loss="non_saturating"), data=(X, X))
    optimizer = arrangement.optimizer()
    optimizer._clipping = support.UnclippedEngine(0.5)
    return arrangement, optimizer


def last_noise_of_the_schedule(monkeypatch):
    arrangement = Arrangement()
    optimizer = arrangement.optimizer(noise_multiplier=SCHEDULE)
    optimizer._noise_now = lambda stage: SCHEDULE.values[-1]
    return arrangement, optimizer


def noise_of_the_first_clip(monkeypatch):
    """The clip grows, and the noise does not."""
    arrangement = Arrangement()
    rule = AdaptiveQuantileClipping(target_quantile=0.9)
    optimizer = arrangement.optimizer(clipping_rule=rule)
    correct, first = adaptive_clip.add_gaussian_noise, optimizer.noise_stddev

    def noisy(tensors, stddevs, key, *_, **__):
        return correct(tensors, [*[first] * (len(tensors) - 1), stddevs[-1]], key)

    monkeypatch.setattr(adaptive_clip, "add_gaussian_noise", noisy)
    return arrangement, optimizer


def noise_before_the_clip_after_it(monkeypatch):
    """Gradients are perturbed, and not clipped."""
    arrangement = Arrangement()
    optimizer = arrangement.optimizer(clipping_rule=PerturbedClipping(0.02))
    monkeypatch.setattr(PerturbedClipping, "factors", lambda self, norms, clip: 1.0 + 0 * norms)
    return arrangement, optimizer


def clean_sums_of(optimizer, monkeypatch):
    """The clipped sums of the step that is being built, which no rule may see."""
    monkeypatch.setattr(step_check, "check_graph", lambda graph: None)  # Which refuses it.
    add_noise, sums = optimizer._add_noise, []

    def noting(total, *others):
        sums[:] = total.gradients
        return add_noise(total, *others)

    optimizer._add_noise = noting
    return sums


def masks_by_clean_gradients(monkeypatch):
    """The mask is drawn after the gradients were seen: what is not zero is trained."""
    arrangement = Arrangement()
    optimizer = arrangement.optimizer(compression=RandomMask(0.7))
    sums, compressor = clean_sums_of(optimizer, monkeypatch), optimizer._compressor
    compress = compressor.compress
    compressor.compress = lambda gradients, variables, masks: compress(
        gradients, variables, [tf.abs(total) > 0 for total in sums]
    )
    return arrangement, optimizer


def top_k_of_clean_gradients(monkeypatch):
    arrangement = Arrangement()
    optimizer = arrangement.optimizer(compression=TopK(0.3))
    sums, correct = clean_sums_of(optimizer, monkeypatch), TopK.keep
    monkeypatch.setattr(TopK, "keep", lambda self, gradients: correct(self, sums))
    return arrangement, optimizer


def other_matrix(monkeypatch):
    """More noise is taken back than by the matrix that the ledger assumes."""
    arrangement = Arrangement(**CYCLES)
    optimizer = arrangement.optimizer(noise_correlation=BANDS)
    optimizer._memory = NoiseMemory(tfdp.BandedNoise([1.0, 1.0]))
    return arrangement, optimizer


def noise_of_buffers_goes_on(monkeypatch):
    """The noise does not begin anew after its cycles."""
    arrangement = Arrangement(**CYCLES)
    optimizer = arrangement.optimizer(noise_correlation=BUFFERS)
    monkeypatch.setattr(optimizer._memory, "_ends_before", lambda sequence: tf.constant(False))
    return arrangement, optimizer


def examples_of_users_clipped_apart(monkeypatch):
    arrangement = Arrangement(users=USERS)
    optimizer = arrangement.optimizer()
    optimizer._clipping.rows_per_example = 1
    return arrangement, optimizer


# By mutant, the beginning of the check that must find it.
MUTANTS = {
    clip_of_the_critic_skipped: "lower bounds",
    last_noise_of_the_schedule: "noise is as large",
    noise_of_the_first_clip: "noise is as large",
    noise_before_the_clip_after_it: "lower bounds",
    masks_by_clean_gradients: "updates follow",
    top_k_of_clean_gradients: "updates follow",
    other_matrix: "noise of different steps",
    noise_of_buffers_goes_on: "noise of different steps",
    examples_of_users_clipped_apart: "lower bounds",
    little_noise: "noise is as large",
    clip_skipped: "lower bounds",
    sampled_twice_as_often: "lower bounds",
    mean_over_drawn: "noise is as large",
    divided_by_drawn: "updates follow",
    noise_comes_twice: "noise of different steps",
    rejected_momentum_stays: "updates follow",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_found(mutant, monkeypatch):
    arrangement, optimizer = mutant(monkeypatch)
    result = arrangement.result(optimizer)
    assert [c for c in result.checks if c.name.startswith(MUTANTS[mutant]) and not c.passed], result
    with pytest.raises(AuditError, match="must leak no more than its ledger says"):
        result.check()


# Canaries by themselves.


def small_audit(num_canaries=30, model=None, data=(X, Y), **kwargs):
    return CanaryAudit(model or support.small_model(), data, num_canaries, seed=1, **kwargs)


def test_a_canary_moves_its_coordinate_by_the_clip_and_nothing_else():
    audit = small_audit()
    (x, numbers), y = audit.data
    engine = tfdp.clipping.OnePassEngine(0.5)
    sums = support.ClippedSum(engine, audit.model, (x, numbers), target_dtype=tf.int64)
    alone = support.ClippedSum(engine, audit.model.base_model, X)
    found, _ = sums.gradients((x, numbers), y)
    expected, _ = alone.gradients(X, Y)
    *others, coordinates = found
    for a, b in zip(others, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    coins = audit._coins
    assert 5 < coins.sum() < 25
    np.testing.assert_allclose(np.abs(coordinates)[coins], 0.5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(coordinates)[~coins], 0)
    assert len(np.unique(np.sign(coordinates)[coins])) == 1


def test_other_examples_do_not_move_coordinates_and_outputs_are_theirs():
    audit = small_audit()
    outputs = audit.model((X, np.zeros(len(X), "int32")))
    np.testing.assert_array_equal(outputs, audit.model.base_model(X))
    audit.model.coordinates.assign(tf.random.normal([30]))
    canaries = audit.model((X[:2], np.array([3, -1], "int32")))
    np.testing.assert_array_equal(canaries[0], canaries[1])
    np.testing.assert_allclose(canaries[0], audit.model.base_model(X[:1])[0], rtol=1e-6)


def test_canaries_are_examples_of_full_sensitivity():
    audit = small_audit()
    model = support.compiled(tfdp.DPSGD(0.5, 1.0, expected_batch_size=10), audit.model)
    found = check_sensitivity(model, audit.data, examples=16, verbose=False)
    of_canaries = [m for m in found.movements if audit.data[0][1][m.example] > 0]
    assert of_canaries
    assert [m.removed for m in of_canaries] == pytest.approx([1.0] * len(of_canaries), abs=1e-5)
    out = [m for m in found.movements if audit.data[0][1][m.example] < 0]
    assert out and max(m.removed for m in out) < 1e-5


def test_the_size_of_the_data_says_nothing_about_the_coins():
    sizes = {len(CanaryAudit(support.small_model(), (X, Y), 40).data[1]) for _ in range(5)}
    assert sizes == {len(Y) + 40}


def test_coins_are_fair_secret_and_not_those_of_a_global_seed():
    drawn = []
    for _ in range(3):
        tf.keras.utils.set_random_seed(0)
        drawn.append(CanaryAudit(support.small_model(), (X, Y), 2000)._coins)
    assert not np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[1], drawn[2])
    assert abs(np.mean(drawn) - 0.5) < 7 * 0.5 / math.sqrt(6000)


def nested_model():
    inputs = {"a": support.layers.Input([4], name="a"), "b": support.layers.Input([2], name="b")}
    hidden = support.layers.Dropout(0.3)(support.layers.Dense(5)(inputs["a"]))
    outputs = [support.layers.Dense(3)(hidden), support.layers.Dense(1)(inputs["b"])]
    return tf.keras.Model(inputs, outputs)


@pytest.mark.slow
def test_nested_inputs_and_several_outputs():
    data = ({"a": X, "b": X[:, :2]}, (Y, X[:, :1]), np.ones(len(Y)))
    audit = small_audit(model=nested_model(), data=data)
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=20)
    optimizer = tfdp.DPSGD(0.5, 1.0, sampling=batches.sampling)
    audit.model.compile(optimizer, [support.crossentropy("auto"), "mse"])
    audit.model.fit(batches, epochs=2, callbacks=[audit.callback], verbose=0)
    result = audit.result(DELTA, significance=1e-6)
    assert result.steps == 2 * len(batches) and result.passed


def trained(audit, epochs=1, callbacks=True, **kwargs):
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=10, steps_per_epoch=2)
    support.compiled(
        tfdp.DPSGD(0.5, 1.0, learning_rate=0.1, sampling=batches.sampling), audit.model, **kwargs
    )
    callbacks = [audit.callback] if callbacks else []
    audit.model.fit(batches, epochs=epochs, callbacks=callbacks, verbose=0)
    return batches


@pytest.mark.slow
def test_several_calls_of_fit_are_one_training():
    audit = small_audit()
    batches = trained(audit)
    audit.model.optimizer.learning_rate = 0.01
    audit.model.fit(batches, callbacks=[audit.callback], verbose=0)
    result = audit.result(DELTA, significance=1e-6)
    assert result.steps == 4 and result.passed
    with pytest.raises(ValueError, match="an audit is of one training"):
        audit.watch(tfdp.DPSGD(0.5, 1.0, expected_batch_size=10))


@pytest.mark.slow
def test_learning_rates_that_callbacks_and_schedules_change():
    for rate in (0.3, tf.keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.5)):
        audit = small_audit()
        batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=10, steps_per_epoch=2)
        optimizer = tfdp.DPSGD(
            0.5, 1.0, momentum=0.5, learning_rate=rate, sampling=batches.sampling
        )
        support.compiled(optimizer, audit.model)
        callbacks = [audit.callback]
        if isinstance(rate, float):
            by_epoch = lambda epoch, rate: rate / 3  # noqa: E731
            callbacks += [tf.keras.callbacks.LearningRateScheduler(by_epoch)]
        audit.model.fit(batches, epochs=3, callbacks=callbacks, verbose=0)
        assert audit.result(DELTA, significance=1e-6).passed


@pytest.mark.slow
def test_steps_that_were_not_seen_are_an_error():
    audit = small_audit()
    with pytest.raises(ValueError, match="must be called first"):
        audit.result(DELTA)
    batches = trained(audit)
    audit.model.fit(batches, verbose=0)
    with pytest.raises(ValueError, match="must see every step"):
        audit.model.fit(batches, callbacks=[audit.callback], verbose=0)


@pytest.mark.slow
def test_steps_in_one_call_are_an_error():
    with pytest.raises(ValueError, match="`steps_per_execution` must be 1"):
        trained(small_audit(), steps_per_execution=2)


@pytest.mark.slow
def test_other_data_and_other_optimizers_are_an_error():
    audit, other = small_audit(), small_audit(num_canaries=31)
    batches = tfdp.data.poisson_batches(other.data, expected_batch_size=10)
    support.compiled(tfdp.DPSGD(0.5, 1.0, sampling=batches.sampling), audit.model)
    with pytest.raises(ValueError, match=r"`data` must be .*, of 54 rows"):
        audit.model.fit(batches, callbacks=[audit.callback], verbose=0)
    model = tfdp.SelectiveModel(other.model)
    with pytest.raises(ValueError, match="must be a private optimizer"):
        other.watch("adam")
    support.compiled(selective(Arrangement()), model)
    with pytest.raises(ValueError, match="must be watched by the audit"):
        model.fit(Arrangement().batches, callbacks=[other.callback], verbose=0)


@pytest.mark.slow
def test_augmented_copies():
    audit = small_audit(num_canaries=300)
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=60, augmentations=2)
    support.compiled(tfdp.DPSGD(0.5, 0.7, sampling=batches.sampling), audit.model)
    audit.model.fit(batches, epochs=2, callbacks=[audit.callback], verbose=0)
    result = audit.result(DELTA, significance=1e-6)
    assert result.passed and result.steps == 2 * len(batches)
    assert np.mean(result.in_scores) > np.mean(result.out_scores) + 0.5


def test_the_unit_of_privacy_is_that_of_the_canaries():
    audit = small_audit()
    users = {"privacy_unit": np.arange(54) // 2, "examples_per_user": 2}
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=6, **users)
    support.compiled(tfdp.DPSGD(0.5, 1.0, sampling=batches.sampling), audit.model)
    with pytest.raises(ValueError, match="unit of privacy must be that of the canaries"):
        audit.model.fit(batches, callbacks=[audit.callback], verbose=0)
    ids = np.array(["a", "b"])[np.arange(24) % 2]
    audit = small_audit(privacy_unit=ids, examples_per_canary=3)
    assert np.array_equal(np.bincount(audit.privacy_unit), [12, 12, *[3] * 30])
    numbers = audit.data[0][1]
    for user in range(2, 32):
        assert len(set(numbers[audit.privacy_unit == user])) == 1
    batches = tfdp.data.poisson_batches(audit.data, expected_batch_size=6)
    support.compiled(tfdp.DPSGD(0.5, 1.0, sampling=batches.sampling), audit.model)
    with pytest.raises(ValueError, match="whose unit is the example"):
        audit.model.fit(batches, callbacks=[audit.callback], verbose=0)


def test_a_loss_without_gradient_is_an_error():
    audit = small_audit()
    with pytest.raises(ValueError, match="gradient that can be clipped"):
        trained(audit, loss=lambda y, p: tf.reduce_sum(tf.stop_gradient(p), axis=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 1}, "`model` must"),
        ({"num_canaries": 19}, "`num_canaries` must"),
        ({"data": X}, "`data` must"),
        ({"data": (X, Y[:-1])}, "`data` must"),
        ({"seed": "x"}, "`seed` must"),
        ({"privacy_unit": [1]}, "`privacy_unit` must"),
        ({"privacy_unit": np.arange(24), "examples_per_canary": 0}, "`examples_per_canary` must"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"model": support.small_model(), "data": (X, Y), "num_canaries": 20, "seed": 0}
    with pytest.raises(ValueError, match=message):
        CanaryAudit(**{**valid, **arguments})


def test_models_whose_outputs_or_data_canaries_cannot_replace():
    with pytest.raises(ValueError, match="trained by its compiled loss, or be a PrivateGAN"):
        small_audit(model=tfdp.SelectiveModel(support.small_model()))
    with pytest.raises(ValueError, match=r"`data` must be \(x, x\)"):
        small_audit(model=private_gan(loss="non_saturating"), data=(X, Y, Y))
