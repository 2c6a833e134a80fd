import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp.clipping import (
    AdaptiveQuantileClipping,
    AutomaticClipping,
    FlatClipping,
    PerLayerClipping,
    clipping_rules,
)
from tfdp.contrib import ImportanceSamplingClipping

RULES = [
    FlatClipping(),
    PerLayerClipping(),
    AutomaticClipping(),
    AutomaticClipping(1e-6),
    AdaptiveQuantileClipping(),
    ImportanceSamplingClipping(),
]
NAMES = ["a/kernel:0", "a/bias:0", "b/kernel:0", "c/d/kernel:0"]


def clipped_norm(rule, norms, clip):
    """What is left of a gradient whose blocks have these norms."""
    factors = rule.factors(tf.constant([norms], tf.float32), clip)[0].numpy()
    return float(np.linalg.norm(np.asarray(norms) * factors))


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    norms=st.lists(st.floats(0, 1e15), min_size=3, max_size=3),
    clip=st.floats(1e-3, 1e3),
)
def test_nothing_longer_than_the_clip_is_left(rule, norms, clip):
    blocks = max(rule.blocks(NAMES)) + 1
    assert clipped_norm(rule, norms[:blocks], clip) <= clip * (1 + 1e-5)


class PerLayerWithoutRoot(PerLayerClipping):
    """Mutant: each layer is clipped to the whole clip."""

    def factors(self, norms, clip):
        return 1 / tf.maximum(1.0, norms / clip)


def test_layers_that_are_each_clipped_to_the_whole_are_caught():
    assert clipped_norm(PerLayerWithoutRoot(), [5.0, 5.0, 5.0], 1.0) > 1.7
    assert clipped_norm(PerLayerClipping(), [5.0, 5.0, 5.0], 1.0) == pytest.approx(1.0)


def test_layers_are_those_of_the_names():
    assert PerLayerClipping().blocks(NAMES) == [0, 0, 1, 2]
    assert FlatClipping().blocks(NAMES) == [0, 0, 0, 0]


def test_short_gradients_stay_or_are_normalised():
    assert clipped_norm(FlatClipping(), [0.5], 1.0) == 0.5
    assert clipped_norm(AutomaticClipping(0.01), [0.5], 1.0) == pytest.approx(0.5 / 0.51)
    assert clipped_norm(AutomaticClipping(0.01), [0.0], 1.0) == 0


@pytest.mark.parametrize("name", [*clipping_rules.NAMED])
def test_names_and_configs_round_trip(name):
    rule = clipping_rules.get(name)
    assert clipping_rules.get(clipping_rules.serialize(rule)) == rule
    assert clipping_rules.get(rule) is rule


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match=r"`clipping_rule` must be one of .*Received.*'ghost'"):
        clipping_rules.get("ghost")
    with pytest.raises(ValueError, match=r"one of tfdp's, \[.*\], to be saved"):
        clipping_rules.serialize(PerLayerWithoutRoot())


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: AutomaticClipping(0.0), "stability"),
        (lambda: AutomaticClipping(math.inf), "stability"),
        (lambda: AdaptiveQuantileClipping(target_quantile=1.5), "target_quantile"),
        (lambda: AdaptiveQuantileClipping(learning_rate=0.0), "learning_rate"),
        (lambda: AdaptiveQuantileClipping(count_noise=-1.0), "count_noise"),
        (lambda: AdaptiveQuantileClipping(count_noise=0.5).noise(1.0, 100), "count_noise"),
    ],
)
def test_bad_arguments_are_named(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}` must .*Received: {argument}="):
        make()


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("count_noise", [None, 5.0, 100.0])
def test_sum_and_count_together_cost_what_the_ledger_counts(noise_multiplier, count_noise):
    """Two Gaussian mechanisms on one batch: squared signal-to-noise ratios add up.

    In units in which both noises are 1, an example moves the sum by 1 / s_g and the count by
    1 / (2 s_b).
    """
    rule = AdaptiveQuantileClipping(count_noise=count_noise)
    sum_noise, count = rule.noise(noise_multiplier, 1000)
    moved = math.hypot(1 / sum_noise, 1 / (2 * count))
    assert moved == pytest.approx(1 / noise_multiplier)


def test_the_clip_moves_towards_the_quantile():
    rule = AdaptiveQuantileClipping(target_quantile=0.5, learning_rate=0.2)
    assert float(rule.next_clip(tf.constant(1.0), tf.constant(1.0))) < 1
    assert float(rule.next_clip(tf.constant(1.0), tf.constant(0.0))) > 1
    assert float(rule.next_clip(tf.constant(1.0), tf.constant(0.5))) == 1


def test_rules_without_chance_need_no_numbers():
    for rule in RULES:
        assert rule.is_random == isinstance(rule, ImportanceSamplingClipping)
        if not rule.is_random:
            norms = tf.constant([[0.5]])
            assert rule.random_factors(norms, 1.0, None) == rule.factors(norms, 1.0)


@pytest.mark.parametrize("name", ["target_quantile", "learning_rate", "count_noise"])
@pytest.mark.parametrize("value", ["x", [1], math.nan, -1.0])
def test_arguments_of_the_adaptive_clip_are_named(name, value):
    with pytest.raises(ValueError, match=f"Argument `{name}` must be"):
        AdaptiveQuantileClipping(**{name: value})
