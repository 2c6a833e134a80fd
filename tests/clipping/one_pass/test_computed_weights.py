import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import CLIP, VECTORS, Y, assert_equals_loop, built
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass import computed_weights

layers = tf.keras.layers


@tf.custom_gradient
def signs(w):
    return tf.sign(w), lambda gradient: 2 * gradient


COMPUTED = {
    "softmax": lambda w: tf.nn.softmax(w),
    "normalized": lambda w: w / tf.norm(w, axis=0),
    "slices": lambda w: tf.concat([w[:, 3:], 2 * w[::-1, :3]], 1),
    "rows by number": lambda w: tf.gather(w, [4, 0, 0, 1, 2]) * 3,
    "a part": lambda w: tf.split(w, 2, axis=1)[1],
    "cumulated": lambda w: tf.cumsum(tf.exp(w)),
    "a gradient of its own": signs,
}


def with_weights(function):
    class Computed(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", [shape[-1], 4])

        def call(self, x):
            return tf.tanh(x @ function(self.w))

    return lambda: tf.keras.Sequential([Computed(), layers.Dense(3)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_equal_a_loop_over_examples(name):
    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, with_weights(COMPUTED[name]), VECTORS)
    report = engine.report()
    assert report.fast_fraction == 1, str(report)
    assert "computed weights" in report.entries[0].how


@tf.RegisterGradient("TwiceIdentity")
def _twice(op, gradient):
    return 2 * gradient


def test_an_identity_whose_gradient_was_overridden_is_no_view():
    def overridden(w):
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"Identity": "TwiceIdentity"}):
            return tf.identity(w)

    sums = []
    for function in (overridden, lambda w: 2 * w - tf.stop_gradient(w)):
        model = built(with_weights(function), VECTORS)
        engine = OnePassEngine(CLIP)
        sums.append(support.ClippedSum(engine, model, VECTORS)(VECTORS, Y))
    np.testing.assert_allclose(*sums, atol=3e-6)


def test_what_has_no_gradient_adds_none():
    engine = OnePassEngine(CLIP)
    model = built(with_weights(lambda w: tf.round(3 * w)), VECTORS)
    gradients = support.ClippedSum(engine, model, VECTORS).gradients(VECTORS, Y)[0]
    assert gradients[0] is None or not np.any(gradients[0])


def test_complex_numbers_are_left_to_the_vectorised_engine():
    engine = OnePassEngine(CLIP)

    def real_part(w):
        return tf.math.real(tf.complex(w, w) * tf.complex(0.5, -1.0))

    assert_equals_loop(engine, with_weights(real_part), VECTORS)
    assert not engine.report().entries[0].fast


def test_lists_of_weights_are_left_to_the_vectorised_engine():
    engine = OnePassEngine(CLIP)

    def from_a_list(w):
        return tf.TensorArray(tf.float32, 5).unstack(w).stack()

    assert_equals_loop(engine, with_weights(from_a_list), VECTORS)
    assert not engine.report().entries[0].fast


def test_gradients_that_are_not_pulled_back_are_caught(monkeypatch):
    """The norm must be that of the variable's gradient, not of the computed weights'."""
    monkeypatch.setattr(computed_weights, "_pulled_back", lambda gradient, view, shape: gradient)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), with_weights(COMPUTED["softmax"]), VECTORS)


@pytest.mark.slow
def test_steps_that_compute_the_same_weights_are_put_together():
    def make():
        return tf.keras.Sequential(
            [layers.Reshape([5, 1]), layers.GRU(3, reset_after=False, unroll=True), layers.Dense(3)]
        )

    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, make, VECTORS)
    (how,) = [
        entry.how for entry in engine.report().entries if "recurrent_kernel" in entry.variable
    ]
    assert how.count("uses of matmul") == 2
