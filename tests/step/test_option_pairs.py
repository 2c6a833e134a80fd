"""What is counted is what is drawn, whatever two options a training has."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.front_ends import FRONT_ENDS, with_both
from tests.step.option_pairs import (
    ADAPTIVE,
    CLIP,
    NOISE,
    OPTIONS,
    STEPS,
    Measured,
    Training,
    assert_as_stated,
    front_of,
    measured,
    pairs,
    sets_of,
)
from tfdp.step import adaptive_clip, noise, private_step
from tfdp.step.accumulator import Accumulator
from tfdp.step.adaptive_clip import AdaptiveClip
from tfdp.step.record.release_count import ReleaseRecord

# Pairs that are refused before anything is released, and by what.
REFUSED = {
    ("schedule", "correlated"): "Received: a schedule",
    ("schedule", "selective"): "`noise_multiplier` must be a number with selective release",
    ("schedule", "AdamBC"): "`noise_multiplier` must be a number",
    ("cycles", "replicas"): "unexpected keyword argument 'cycle_length'",
    ("cycles", "selective"): "`cycle_length` must be 1",
    ("correlated", "adaptive"): "Received: clipping_rule",
    ("correlated", "secure"): "Received: secure_noise",
    ("correlated", "replicas"): "unexpected keyword argument 'cycle_length'",
    ("correlated", "selective"): "`cycle_length` must be 1",
    ("correlated", "masks"): "each step trains other coordinates",
    ("correlated", "groups"): "Received: noise_correlation",
    ("correlated", "AdamBC"): "`noise_correlation` must be None",
    ("adaptive", "microbatches"): "`num_microbatches` must be None",
    ("adaptive", "groups"): "must have a fixed clip with a TwoTermLoss",
    ("adaptive", "AdamBC"): "`clipping_rule` must be one with a constant clip",
    ("chunks", "buckets"): "`padding` must be .* with `chunk_size`",
    ("chunks", "selective"): "`gradient_accumulation_steps` must be 1",
    ("chunks", "microbatches"): "`num_microbatches` must be None with gradient accumulation",
    ("chunks", "groups"): "`gradient_accumulation_steps` must be 1 with a TwoTermLoss",
    ("users", "replicas"): "unexpected keyword argument 'privacy_unit'",
    ("users", "microbatches"): "`num_microbatches` must be None where examples have several rows",
    ("users", "selective"): "must hold one row for each example",
    ("augmentations", "selective"): "must hold one row for each example",
    ("users", "groups"): "one row for each example",
    ("augmentations", "replicas"): "unexpected keyword argument 'augmentations'",
    ("augmentations", "microbatches"): "`num_microbatches` must be None where examples have",
    ("augmentations", "groups"): "one row for each example",
    ("secure", "unpadded"): "Received: sampling.padding='none'",
    ("secure", "buckets"): "Received: sampling.padding='buckets'",
    ("secure", "groups"): "`secure_noise` must be False with a TwoTermLoss",
    ("unpadded", "xla"): "whose number of rows varies",
    ("buckets", "replicas"): "`padding` must be one of",
    ("replicas", "selective"): "must be trained on one replica",
    ("replicas", "microbatches"): "`num_microbatches` must be None under a distribution strategy",
    ("replicas", "xla"): "must not be compiled by XLA",
    ("selective", "groups"): "Received a model with a `train_step` of its own",
    ("selective", "AdamBC"): "no attribute 'DPSURAdamBC'",
    ("top k", "AdamBC"): "`compression` must be None",
    ("masks", "groups"): "must be trained without masks",
    ("masks", "AdamBC"): "`compression` must be None",
    ("microbatches", "groups"): "`num_microbatches` must be None",
    ("groups", "AdamBC"): "must not be given a TwoTermLoss",
}


def assert_refused(names: tuple[str, ...], message: str) -> None:
    """The pair is refused when batches and optimizer are made, or by the step that is traced."""
    training = None
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        training = Training(front_of(names), [OPTIONS[name] for name in names])
        training.fit()
    assert training is None or not any(training.optimizer.released_steps())


MEASURED = [pair for pair in pairs() if pair not in REFUSED]
# Those that mutants train with, alone; and all pairs.
ALONE = [("schedule",), ("cycles",), ("adaptive",), ("chunks",)]
TOGETHER = sets_of(MEASURED)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [*ALONE, *TOGETHER], ids=" and ".join)
def test_the_noise_of_options_together_is_as_stated(names):
    # XLA compiles a step for each size of a batch.
    steps = 2 if {"buckets", "xla"} <= set(names) else STEPS
    assert_as_stated(measured(names, steps=steps), steps)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", REFUSED, ids=" and ".join)
def test_pairs_that_do_not_go_together_are_refused(names):
    assert_refused(names, REFUSED[names])


def test_each_pair_is_measured_or_refused():
    found = {pair for names in TOGETHER for pair in itertools.combinations(names, 2)}
    assert found == set(MEASURED) and found.isdisjoint(REFUSED)
    assert found | set(REFUSED) == set(pairs())


@with_both
def test_a_cycle_has_the_noise_that_it_is_counted_with(front):
    found = measured(("schedule", "cycles"), front)
    assert_as_stated(found)
    noise = [(r.event.event.noise_multiplier, r.count) for r in found.optimizer.ledger.releases]
    assert noise == [(2.0, 1), (1.4, 1)]
    assert found.optimizer.noise_stddev == 1.0 * CLIP


# State that is restored in the middle of a logical batch, or of a cycle.


def chunks_with_another_clip(front) -> Measured:
    """Noise and clip of a step, of which an older clip is restored between two chunks."""
    training = Training(front, [OPTIONS["adaptive"], OPTIONS["chunks"]], steps=4)
    optimizer, parts = training.optimizer, training.batches.sampling.gradient_accumulation_steps
    optimizer.build(training.model.trainable_variables)
    clip = optimizer._adaptive._clip
    read = []

    class Restored(front.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch % parts == 0:
                clip.assign(0.5)
            read.append(optimizer.current_l2_norm_clip)
            if batch % parts == parts - 1:
                clip.assign(0.01)

    training.model.fit(training.batches, callbacks=[Restored()], verbose=0)
    value = training.recorded[1].numpy()
    stddevs = 0.5 / np.sqrt(NOISE**-2 - (2 * ADAPTIVE.count_noise) ** -2)
    return Measured(value[np.newaxis], np.array([stddevs]), optimizer)


@with_both
def test_all_chunks_and_the_noise_are_of_one_clip(front):
    assert_as_stated(chunks_with_another_clip(front), steps=1)


def test_cycles_that_are_broken_off_carry_no_noise_to_others():
    """Two sources in turns, draws that are skipped, and an older checkpoint."""
    training = Training(FRONT_ENDS[0], [OPTIONS["schedule"], OPTIONS["cycles"]], steps=16)
    other = Training(FRONT_ENDS[0], [OPTIONS["schedule"], OPTIONS["cycles"]], steps=16)
    model, optimizer = training.model, training.optimizer
    draws = [iter(training.batches), iter(other.batches)]
    found = []
    for source, skipped in [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (1, 0), (1, 0)]:
        for _ in range(skipped):
            next(draws[source])
        before = sum(optimizer.released_steps()) if optimizer._released.created else 0
        model.train_on_batch(*next(draws[source]))
        begun = sum(optimizer.released_steps()) - before
        found.append((begun, training.recorded[1].numpy().std() / CLIP))
    assert [begun for begun, _ in found] == [1, 0, 1, 1, 0, 1, 0, 0]
    expected = [2.0, 2.0, 1.4, 1.0, 1.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose([noise for _, noise in found], expected, rtol=0.03)
    noise = [(r.event.event.noise_multiplier, r.count) for r in optimizer.ledger.releases]
    assert noise == [(2.0, 1), (1.4, 1), (1.0, 2)]


# Mutants.


_stage, _step, _add_gaussian_noise = (
    ReleaseRecord.stage,
    AdaptiveClip.step,
    noise.add_gaussian_noise,
)


def stage_of_each_step(self, begins, costs=True, held=None):
    """Mutant: a step within a cycle has the stage of the next cycle."""
    return _stage(self, begins)


def clip_read_again(self, sums, within_clip, clip, *others, **more):
    """Mutant: the noise is of the clip that there is now."""
    return _step(self, sums, within_clip, self.value(), *others, **more)


def halved(tensors, stddev, *others, **more):
    """Mutant: half of the noise."""
    halves = [s / 2 for s in stddev] if isinstance(stddev, list) else stddev / 2
    return _add_gaussian_noise(tensors, halves, *others, **more)


def too_much(tensors, stddev, *others, **more):
    """Mutant: 5% more noise."""
    return _add_gaussian_noise(tensors, 1.05 * stddev, *others, **more)


class NoiseInEachChunk(Accumulator):
    """Mutant: every chunk gets noise."""

    def add(self, clipped, variables, use):
        for variable, gradient in zip(variables, clipped.gradients, strict=True):
            drawn = tf.random.normal(gradient.shape, stddev=NOISE * CLIP)
            self._sums[variable.ref()].assign_add(drawn)
        return super().add(clipped, variables, use)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "mutant", "names"),
    [
        (ReleaseRecord, "stage", stage_of_each_step, ("schedule", "cycles")),
        (private_step, "add_gaussian_noise", halved, ("schedule",)),
        (private_step, "add_gaussian_noise", too_much, ("cycles",)),
        (adaptive_clip, "add_gaussian_noise", halved, ("adaptive",)),
        (private_step, "Accumulator", NoiseInEachChunk, ("chunks",)),
    ],
)
def test_noise_other_than_counted_is_caught(place, name, mutant, names, monkeypatch):
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        assert_as_stated(measured(names))


def test_a_clip_that_is_read_again_for_the_noise_is_caught(monkeypatch):
    monkeypatch.setattr(AdaptiveClip, "step", clip_read_again)
    with pytest.raises(AssertionError):
        assert_as_stated(chunks_with_another_clip(FRONT_ENDS[0]), steps=1)
