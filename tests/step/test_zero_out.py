"""Zero-out of one example or user: what a step moves, for each kind of draw.

Two runs on the same places, constants and draws, without noise: in one of them the unit is left out
of each draw that it is in. docs/relation.md names the mechanisms. Where an example that is left out
moves others to other rows, only models without random numbers are compared.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.support import layers
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping import AdaptiveQuantileClipping, OnePassEngine
from tfdp.data.source import PoissonSource, Rows

N, B, CLIP = 24, 8, 0.05
# One class but for one example, whose gradient is opposite to those of all others.
UNIT = 5
X = np.ones([N, 3], "float32")
Y = (np.arange(N) == UNIT).astype("int64")
# Six users have four examples each. One user has a class of its own.
USERS = np.arange(N) // 4
USER_Y = (USERS == UNIT).astype("int64")


def examples_of(source):
    """The examples of the unit."""
    if source.users is None:
        return np.array([UNIT])
    users = source.users
    first, count = (part.numpy()[UNIT] for part in (users.starts, users.counts))
    return users.order.numpy()[first : first + count]


def rows_without_the_unit(self, key, sampling, sets=None, draw=PoissonSource.draw_rows):
    """In the place of `PoissonSource.draw_rows`: the unit is never drawn."""
    rows = draw(self, key, sampling, sets)
    out = tf.reduce_any(rows.indices[:, tf.newaxis] == examples_of(self), axis=1)
    nothing = tf.constant(self.examples, tf.int64)
    if sampling.padding == "full":
        return rows._replace(indices=tf.where(out, nothing, rows.indices))
    there = tf.logical_and(tf.logical_not(out), rows.indices < self.examples)
    missing = 0
    if sampling.padding == "buckets":
        kept = tf.math.count_nonzero(there, dtype=tf.int32)
        sizes = tf.constant(sampling.bucket_sizes) * self.rows_per_example
        missing = sizes[tf.searchsorted(sizes, kept[tf.newaxis])[0]] - kept

    def of_those_that_are_left(values, padding):
        if values is None:
            return None
        values = tf.boolean_mask(values, there)
        return tf.concat([values, tf.fill([missing, *values.shape[1:]], padding)], axis=0)

    return Rows(
        of_those_that_are_left(rows.indices, nothing),
        of_those_that_are_left(rows.weights, 0.0),
        of_those_that_are_left(rows.secrets, tf.zeros([], tf.int64)),
    )


def small_model(dropout):
    tf.keras.utils.set_random_seed(1)
    hidden = [layers.Dropout(0.5)] if dropout else []
    return tf.keras.Sequential([layers.Input([3]), *hidden, layers.Dense(2)])


def drawn(draw_rows, monkeypatch, unit=None, **kwargs):
    """Batches whose rows are drawn by a function: it is in their graph."""
    data = (X, Y if unit is None else USER_Y)
    batch = B if unit is None else 3
    with monkeypatch.context() as patch:
        patch.setattr(PoissonSource, "draw_rows", draw_rows)
        return tfdp.data.poisson_batches(
            data,
            expected_batch_size=batch,
            steps_per_epoch=10,
            privacy_unit=unit,
            seed=1,
            **kwargs,
        )


class Steps:
    """`Steps(batches, ...)(batches)`: what each step subtracts from weights that are set back."""

    def __init__(self, batches, cls=tfdp.DPSGD, dropout=False, rule="flat"):
        self.sampling = batches.sampling
        self.optimizer = cls(
            CLIP,
            0.0,
            learning_rate=1.0,
            sampling=batches.sampling,
            clipping_rule=rule,
            noise_seed=3,
        )
        self.optimizer.clipping.streams = KeyStream(3, "layers")
        self.model = support.compiled(self.optimizer, small_model(dropout))
        self.step = tf.function(self.model.train_step, input_signature=[batches.element_spec])

    def __call__(self, batches, count=10):
        chunks = self.sampling.gradient_accumulation_steps
        start, found, self.clips = self.model.get_weights(), [], []
        for number, rows in enumerate(batches.take(count * chunks), 1):
            self.step(rows)
            if number % chunks == 0:
                found.append(support.flat(start) - support.flat(self.model.get_weights()))
                self.model.set_weights(start)
                self.clips.append(float(self.optimizer.current_l2_norm_clip))
                for variable in self.optimizer.variables():
                    if "l2_norm_clip" in variable.name:
                        variable.assign(CLIP)
        return np.array(found)


def moves(monkeypatch, cls=tfdp.DPSGD, dropout=False, rule="flat", **kwargs):
    """How far zero-out moves the sums of steps, in units of the clip, and the logs of the clip."""
    batches = drawn(PoissonSource.draw_rows, monkeypatch, **kwargs)
    zeroed = drawn(rows_without_the_unit, monkeypatch, **kwargs)
    assert batches.sampling == zeroed.sampling  # Public constants.
    steps = Steps(batches, cls, dropout, rule)
    whole, clips = steps(batches), np.log(steps.clips)
    if dropout or (isinstance(rule, str) and rule != "flat"):  # The same random numbers.
        steps = Steps(batches, cls, dropout, rule)
    moved = np.linalg.norm(whole - steps(zeroed), axis=1) * steps.optimizer.expected_batch_size
    return moved / CLIP, np.abs(clips - np.log(steps.clips))


KINDS = {
    "none": {},
    "buckets": {"padding": "buckets"},
    "full": {"padding": "full"},
    "chunks": {"chunk_size": 6},
    "chunks, full": {"chunk_size": 6, "padding": "full"},
    "cycles": {"cycle_length": 2},
    "cycles, full": {"cycle_length": 3, "padding": "full"},
    "augmentations": {"augmentations": 2},
    "augmentations, buckets": {"augmentations": 2, "padding": "buckets"},
    "users": {"unit": USERS, "examples_per_user": 3},
    "users, buckets": {"unit": USERS, "examples_per_user": 3, "padding": "buckets"},
    "users, full": {"unit": USERS, "examples_per_user": 5, "padding": "full"},
    "dropout": {"dropout": True, "padding": "full"},
    "importance_sampling": {"rule": "importance_sampling", "padding": "full"},
    "perturbed": {"rule": "perturbed", "padding": "full"},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_moves_a_step_by_its_own_share_or_not_at_all(kind, monkeypatch, cls=tfdp.DPSGD):
    moved, _ = moves(monkeypatch, cls, **KINDS[kind])
    drawn = moved > 1e-3
    assert 0 < drawn.sum() < len(moved)  # Steps with and without the unit.
    assert moved.max() <= 1 + 1e-3
    assert kind in ("dropout", "importance_sampling") or moved.max() > 0.9


@pytest.mark.slow
def test_the_clip_moves_by_half_an_example(monkeypatch):
    moved, clips = moves(monkeypatch, rule=AdaptiveQuantileClipping(0.5, learning_rate=0.2))
    assert 0 < (clips > 1e-6).sum() < len(clips)
    assert clips.max() <= 0.2 * 0.5 / B * (1 + 1e-3) and moved.max() <= 1 + 1e-3


class DividesByRealisedSize(tfdp.DPSGD):
    """Mutant: the sum is divided by the number of rows, which is not the same constant."""

    def _logical_step(self, step, total, name):
        scale = self.expected_batch_size / tf.cast(tf.shape(total.batch[0])[0], tf.float32)
        scaled = dataclasses.replace(total, gradients=[s * scale for s in total.gradients])
        return super()._logical_step(step, scaled, name)


@pytest.mark.slow
def test_mutant_that_divides_by_the_size_of_the_batch_is_caught(monkeypatch):
    with pytest.raises(AssertionError):
        test_a_unit_moves_a_step_by_its_own_share_or_not_at_all(
            "none", monkeypatch, DividesByRealisedSize
        )


@pytest.mark.slow
def test_mutant_that_clips_the_rows_of_a_unit_apart_is_caught(monkeypatch):
    monkeypatch.setattr(OnePassEngine, "rows_per_example", property(lambda s: 1, lambda s, v: None))
    for kind in ("users", "augmentations"):
        with pytest.raises(AssertionError):
            test_a_unit_moves_a_step_by_its_own_share_or_not_at_all(kind, monkeypatch)
