"""A rejected attempt leaves no trace."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both, with_one
from tests.selective_support import ALWAYS, NEVER, batches, compiled, optimizer, state
from tfdp.step.selective import SelectiveUpdateMixin


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


def remembers(front):
    """A layer with a count and a moving average of a weight, which are not of the batch."""

    class Remembers(front.keras.layers.Layer):
        def build(self, shape):
            weight = functools.partial(self.add_weight, shape=shape[-1:], initializer="ones")
            self.scale = weight(name="scale")
            self.calls = weight(name="calls", trainable=False)
            self.average = weight(name="average", trainable=False)

        def call(self, inputs, training=None):
            if training:
                self.calls.assign_add(tf.ones_like(self.calls))
                self.average.assign(0.9 * self.average + 0.1 * self.scale)
            return inputs * self.scale

    return Remembers()


def with_states(front):
    """A model whose layers have states, of random generators as well."""
    layers = front.keras.layers
    tf.keras.backend.experimental.enable_tf_random_generator()
    try:
        tf.keras.utils.set_random_seed(1)
        return front.keras.Sequential(
            [
                layers.Input([4]),
                layers.Dense(5),
                remembers(front),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )
    finally:
        tf.keras.backend.experimental.disable_tf_random_generator()


def generator_state(model):
    dropout = model.base_model.layers[2]
    if model._front_end.package is tf.keras:
        return dropout._random_generator._generator.state.numpy()
    return dropout.seed_generator.state.numpy()


KINDS = {
    "sgd": ("DPSURSGD", {"momentum": 0.9}),
    "adam": ("DPSURAdam", {"amsgrad": True}),
    "sign_sgd": ("DPSURSignSGD", {"momentum": 0.9}),
    "sign_adam": ("DPSURSignAdam", {}),
    "adaptive": ("DPSURSGD", {"clipping_rule": "adaptive_quantile"}),
}


def reject(front, kind, selective_release="conditional", threshold=NEVER):
    """A model before and after attempts that are all rejected, trained a little before."""
    name, more = KINDS[kind]
    cls, data = getattr(front.tfdp, name), batches(padding="full")  # Layers draw by their states.
    more = {**more, "noise_seed": None, "selective_release": selective_release}
    model = compiled(optimizer(cls, data, threshold=0.0, **more), with_states(front))
    model.fit(data, steps_per_epoch=3, verbose=0)
    twin = compiled(optimizer(cls, data, threshold=threshold, **more), model.base_model)
    twin.optimizer.build(twin.trainable_variables)
    states = (one.optimizer._state_variables() for one in (twin, model))
    for own, other in zip(*states, strict=True):
        if "privacy" not in own.name:
            own.assign(other)
    before = {**state(twin), "generator": generator_state(twin)}
    if selective_release == "conditional":
        with pytest.raises(tfdp.TooManyAttemptsError, match="max_attempts=3"):
            twin.fit(data, steps_per_epoch=1, verbose=0)
    else:
        twin.fit(data, steps_per_epoch=3, verbose=0)
    return twin, before, {**state(twin), "generator": generator_state(twin)}


# What is kept of an optimizer is known to the classes of Keras 2, all of which are tried.
REJECTED = [(FRONT_ENDS[-1], "sgd"), *((FRONT_ENDS[0], kind) for kind in KINDS)]
REJECTED += [(FRONT_ENDS[-1], "sign_adam")]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("front", "kind"), REJECTED)
def test_a_rejected_attempt_leaves_no_trace_bit_for_bit(front, kind):
    model, before, after = reject(front, kind)
    assert_same(before, after)
    # That it ended is seen, and charged; before came the three steps of the other optimizer.
    assert model.optimizer.released_steps() == (3 + 1, 0)


@with_one
@pytest.mark.slow
def test_observed_attempts_leave_only_their_count(front):
    model, before, after = reject(front, "sgd", "per_attempt")
    assert_same(before, after)
    assert model.optimizer.released_steps() == (3 + 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("front", "kept"), [(FRONT_ENDS[0], "momentum"), (FRONT_ENDS[-1], "iter")])
def test_a_slot_that_keeps_the_rejected_update_is_caught(front, kept, monkeypatch):
    """Mutant: momentum keeps the rejected update, as in the paper's public code."""
    right = SelectiveUpdateMixin.kept_variables

    def wrong(self):
        return [*right(self), *(v for v in self._state_variables() if kept in v.name)]

    monkeypatch.setattr(SelectiveUpdateMixin, "kept_variables", wrong)
    _, before, after = reject(front, "sgd")
    with pytest.raises(AssertionError):
        assert_same(before, after)


@with_both
@pytest.mark.slow
def test_an_accepted_update_stays(front):
    _, before, after = reject(front, "sgd", "per_attempt", threshold=ALWAYS)
    changed = [name for name in before if np.any(before[name] != after[name])]
    for part in ("momentum", "iter", "calls", "average", "generator"):
        assert any(part in name for name in changed), part
