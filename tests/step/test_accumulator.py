"""Parts of two logical batches never get into one sum."""

import contextlib
import copy
import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

import tfdp
from tests import support
from tests.support import compiled
from tfdp.step.accumulator import Accumulator

X, Y = support.small_data(64)
CLIP = 0.5


def chunks(seed=1, padding="none"):
    return tfdp.data.poisson_batches(
        (X, Y),
        expected_batch_size=16,
        steps_per_epoch=2,
        seed=seed,
        chunk_size=15,
        padding=padding,
    )


def make(padding="none"):
    sampling = chunks(padding=padding).sampling
    assert sampling.gradient_accumulation_steps == 4
    return compiled(tfdp.DPSGD(CLIP, 0.0, learning_rate=1.0, sampling=sampling))


def weights(model):
    return support.flat(model.get_weights())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"secure_noise": True},
        {"clipping_rule": "adaptive_quantile"},
        {"compression": tfdp.contrib.RandomMask(0.5)},
    ],
)
def test_xla_reaches_all_variables_on_a_gpu(arguments, monkeypatch):
    """Those of int32 would be on the CPU."""
    data = chunks(padding="full")
    types, create = set(), ResourceVariable.__init__

    def init(self, *args, **kwargs):
        create(self, *args, **kwargs)
        types.add(self.dtype)

    monkeypatch.setattr(ResourceVariable, "__init__", init)
    model = compiled(tfdp.DPSGD(CLIP, 1.0, sampling=data.sampling, **arguments))
    model.fit(data, verbose=0)
    assert types and tf.int32 not in types


class NeverDrops(Accumulator):
    """Mutant: counts batches, and does not look where a logical batch begins."""

    def fits(self, use):
        return tf.constant(True)

    def add(self, clipped, variables, use):
        use = dataclasses.replace(use, fresh=tf.constant(True), chunk=self.next[1])
        return super().add(clipped, variables, use)

    def begin_anew(self):
        pass


def equal_to_uninterrupted(places):
    """Returns, for each place of a break, whether training goes on as if there had been none."""
    model, found = make(), {}
    start = model.get_weights()
    model.fit(chunks(), verbose=0)
    whole = weights(model)
    for place in places:
        model.fit(chunks().take(place), verbose=0)
        model.set_weights(start)
        done = model.optimizer.iterations.numpy()
        model.fit(chunks(), verbose=0)
        steps = model.optimizer.iterations.numpy() - done
        found[place] = steps == 2 and np.allclose(weights(model), whole, atol=1e-6)
    return found


def test_what_is_broken_off_is_dropped():
    places = [1, 2, 3, 4, 6]
    assert equal_to_uninterrupted(places) == dict.fromkeys(places, True)


@pytest.mark.slow
@pytest.mark.parametrize("place", [1, 3])
def test_mixing_two_logical_batches_is_caught(place, monkeypatch):
    monkeypatch.setattr("tfdp.step.private_step.Accumulator", NeverDrops)
    assert equal_to_uninterrupted([place]) == {place: False}


SMALL = tfdp.data.poisson_batches((X, Y), expected_batch_size=8, steps_per_epoch=4, chunk_size=2)


def fits_small_chunks(interrupted=0):
    """`fit` four times, each with an iterator that is dropped; most chunks have no rows."""
    model = compiled(tfdp.DPSGD(CLIP, 1.0, sampling=SMALL.sampling))
    steps = SMALL.sampling.gradient_accumulation_steps
    for _ in range(4):
        if interrupted:
            model.fit(SMALL, steps_per_epoch=interrupted, verbose=0)
        model.fit(SMALL, steps_per_epoch=steps, verbose=0)
    assert model.optimizer.iterations.numpy() == 4


@pytest.mark.parametrize("interrupted", [0, 5])
def test_chunks_without_rows_are_of_the_newest_iteration(interrupted):
    """Draws that a dropped iterator made ahead have such chunks, too."""
    fits_small_chunks(interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "interrupted"),
    [
        ("tfdp.data.draw_record.DrawRecord.begin_iteration", 0),
        ("tfdp.step.parameters.PrivacyParameters.drop_partial_sum", 5),
    ],
)
def test_chunks_of_a_dropped_iteration_are_caught(name, interrupted, monkeypatch):
    monkeypatch.setattr(name, lambda self: None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        fits_small_chunks(interrupted)


def interleaved(padding="none"):
    """Chunks of two logical batches in turns."""
    first, second = (list(chunks(seed, padding).take(4)) for seed in (1, 2))
    return [part for pair in zip(first, second, strict=True) for part in pair]


def test_chunks_of_two_draws_are_refused():
    model = make()
    parts = interleaved()
    model.train_on_batch(*parts[0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.train_on_batch(*parts[3])


@pytest.mark.slow
def test_under_xla_chunks_of_two_draws_make_no_step():
    """XLA drops assertions; what does not belong to the draw must not get into its sum."""
    model = make("full")
    model.compile(model.optimizer, loss=support.crossentropy(), jit_compile=True)
    for part in interleaved("full"):
        model.train_on_batch(*part)
    assert model.optimizer.iterations.numpy() == 0


def waste() -> list[tf.Tensor]:
    """Tensors that take their time."""
    return tf.while_loop(lambda i, _: i < 300, lambda i, t: (i + 1, t @ t), (0, tf.eye(100)))


class Slow(Accumulator):
    """Takes its time after the look at the sum: before it adds to it, and before it uses it."""

    def add(self, clipped, variables, use):
        with tf.control_dependencies(waste()):
            return super().add(clipped, variables, use)

    def take(self, last, variables):
        with tf.control_dependencies(waste()):
            return super().take(last, variables)


class SlowWithoutLock(Slow):
    """Mutant: threads look at the sum and add to it at the same time."""

    def lock(self):
        return None


class ReadsBeforeTheLock(Slow):
    """Mutant: sums are read when another thread may still add to them."""

    def add(self, clipped, variables, use):
        with tf.control_dependencies(None):
            return Accumulator.add(self, clipped, variables, use)


def assert_whole_draws_are_added(monkeypatch, accumulator, padding="full"):
    """Every example is in every draw, and pushes by its clip: whole draws move by one a step.

    Without padding, draws are equal, so that one thread's chunk may continue another's draw.
    """
    monkeypatch.setattr("tfdp.step.private_step.Accumulator", accumulator)
    x = np.ones([32, 1], "float32")
    data = [
        tfdp.data.poisson_batches(
            (x, x[:, 0]),
            expected_batch_size=32,
            steps_per_epoch=40,
            chunk_size=20,
            padding=padding,
        )
        for _ in range(3)
    ]
    w = tf.Variable([0.0])
    optimizer = tfdp.DPSGD(1.0, 0.0, sampling=data[0].sampling, learning_rate=1.0)

    @tf.function(input_signature=data[0].element_spec)
    def step(x, y, *mask):
        with tf.GradientTape() as tape:
            losses = -1e3 * tf.linalg.matvec(x, w)
            losses *= tf.cast(mask[0], tf.float32) if mask else 1.0
        optimizer.minimize(losses, [w], tape=tape)

    def train(batches):
        for batch in batches:
            with contextlib.suppress(tf.errors.InvalidArgumentError):  # Another thread's draw.
                step(*batch)

    threads = [threading.Thread(target=train, args=[batches]) for batches in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = optimizer.iterations.numpy()
    np.testing.assert_allclose(w.numpy(), [steps], rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("padding", ["none", "full"])
def test_threads_never_mix_draws(monkeypatch, padding):
    assert_whole_draws_are_added(monkeypatch, Slow, padding)


@pytest.mark.slow
def test_a_trained_optimizer_can_be_copied():
    model = make()
    model.fit(chunks(), verbose=0)
    assert copy.deepcopy(model.optimizer).gradient_accumulation_steps == 4


class Continued(Accumulator):
    """Mutant: a copy has the sum of its original."""

    def __deepcopy__(self, memo):
        return self


def continues_in_a_copy(monkeypatch, accumulator=Accumulator):
    """Returns whether a copy completes the draw that its original has begun."""
    monkeypatch.setattr("tfdp.step.private_step.Accumulator", accumulator)
    model, parts = make(), list(chunks().take(4))
    model.train_on_batch(*parts[0])
    model.compile(copy.deepcopy(model.optimizer), loss=support.crossentropy())
    try:
        for part in parts[1:]:
            model.train_on_batch(*part)
    except tf.errors.InvalidArgumentError as error:
        assert "no unused draw" in str(error)
    return model.optimizer.iterations.numpy() == 1


def test_a_copy_does_not_continue_a_draw(monkeypatch):
    assert not continues_in_a_copy(monkeypatch)


@pytest.mark.slow
def test_a_copy_that_continues_a_draw_is_caught(monkeypatch):
    assert continues_in_a_copy(monkeypatch, Continued)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "padding"), [(SlowWithoutLock, "full"), (ReadsBeforeTheLock, "none")]
)
def test_races_of_threads_are_caught(mutant, padding, monkeypatch):
    """A trial has 4 to 12 mixed steps of 70; four in which none is are less than 1e-9 likely."""
    with pytest.raises(AssertionError):
        for _ in range(4):
            assert_whole_draws_are_added(monkeypatch, mutant, padding)
