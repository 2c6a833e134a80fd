import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import CLIP, SEQUENCES, VECTORS, Y, assert_equals_loop, built
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass import computed_weights, weight_uses
from tfdp.clipping.one_pass.op_gradients import elementwise
from tfdp.clipping.row_analysis.transfer_functions import functions

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


def real_part(w):
    return tf.math.real(tf.complex(w, w) * tf.complex(0.5, -1.0))


def in_a_call(x, w):
    times = tf.function(lambda z, w: tf.math.real(z) * w * tf.math.imag(z))
    return times(tf.complex(x, tf.sin(x)), w)


COMPLEX = {
    "computed": lambda x, w: x * real_part(w),
    "of data and weights": lambda x, w: tf.math.abs(tf.complex(x, w)),
    "weights alone": lambda x, w: tf.math.imag(
        tf.complex(x, x * x) * tf.cast(w, tf.complex64) * tf.complex(1.0, 2.0)
    ),
    "in a call": in_a_call,
}


def complex_model(name):
    class Complex(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", [shape[-1]], initializer="normal")

        def call(self, x):
            return tf.tanh(COMPLEX[name](x, tf.convert_to_tensor(self.w)))

    return lambda: tf.keras.Sequential([layers.Dense(5), Complex(), layers.Dense(3)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", COMPLEX)
def test_weights_that_meet_complex_numbers_are_left_to_the_vectorised_engine(name):
    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, complex_model(name), VECTORS)
    assert not any(e.fast for e in engine.report().entries if "complex" in e.variable)


@pytest.mark.parametrize("name", ["weights alone", "in a call"])
def test_rules_for_real_numbers_are_wrong_for_complex_ones(name, monkeypatch):
    """Mutant: they are used all the same."""
    monkeypatch.setattr(weight_uses, "_is_complex", lambda op: False)
    monkeypatch.setattr(functions, "_has_complex_numbers", lambda graph: False)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        assert_equals_loop(OnePassEngine(CLIP), complex_model(name), VECTORS)


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


# Weights of open shape, such as the positions of a text of any length.


def biased_scores(x, w):
    """Scores of attention, with a bias that is looked up by how far two positions are apart."""
    positions = tf.range(tf.shape(x)[1])
    far = tf.minimum(tf.abs(positions[:, None] - positions), 5)
    bias = tf.transpose(tf.gather(w, far), [2, 0, 1])[None]
    scores = tf.einsum("btd,bsd->bts", x, x)[:, None]
    for _ in range(2):  # Layers share it.
        scores = tf.nn.softmax(scores + bias)
    return tf.einsum("bhts,bsd->btd", scores, x)


def repeated(x, w):
    return x * tf.broadcast_to(w[: tf.shape(x)[1]], tf.shape(x))


OPEN = {
    "added": lambda x, w: x + w[: tf.shape(x)[1]],
    "subtracted from": lambda x, w: w[None, : tf.shape(x)[1]] - x,
    "multiplied": lambda x, w: x * w[-tf.shape(x)[1] :, :1],
    "repeated": repeated,
    "scores": biased_scores,
    "one row": lambda x, w: x * w[: tf.shape(x)[1] // 6],
}


def open_model(name):
    class Positions(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", [9, 4])

        def call(self, x):
            return tf.tanh(OPEN[name](x, tf.convert_to_tensor(self.w)))

    return lambda: tf.keras.Sequential(
        [layers.Dense(4), Positions(), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    )


def assert_open_equals_loop(name, **kwargs):
    engine, spec = OnePassEngine(CLIP), tf.TensorSpec([None, None, 4])
    assert_equals_loop(engine, open_model(name), SEQUENCES, x_spec=spec, **kwargs)
    return engine.report()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", OPEN)
def test_weights_of_open_shape_equal_a_loop_over_examples(name):
    report = assert_open_equals_loop(name)
    assert report.fast_fraction == 1, str(report)


@pytest.mark.slow
def test_weights_of_open_shape_under_xla():
    assert_open_equals_loop("scores", jit_compile=True)


def test_axes_that_turn_out_to_be_repeated_are_summed(monkeypatch):
    """Mutant: they are not."""
    monkeypatch.setattr(elementwise, "_to_open_shape", lambda gradients, shape: gradients)
    with pytest.raises((AssertionError, tf.errors.InvalidArgumentError)):
        assert_open_equals_loop("one row")


def test_other_operations_with_weights_of_open_shape_are_left_to_the_vectorised_engine(monkeypatch):
    monkeypatch.setitem(
        OPEN, "product", lambda x, w: w[: tf.shape(x)[1]] @ tf.transpose(x, [0, 2, 1])
    )
    report = assert_open_equals_loop("product")
    assert "with weights of open shape" in str(report)
