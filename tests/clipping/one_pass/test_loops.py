import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.clipping.models import CLIP, SEQUENCES, TOKENS, N, Y, assert_equals_loop, built, masked
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass import loop_recordings, loops
from tfdp.clipping.one_pass.loops import Loop

layers = tf.keras.layers


def classifier(layer):
    return lambda: tf.keras.Sequential([layer(), layers.Flatten(), layers.Dense(3)])


def differences(model, x, jit_compile=False):
    """Returns the distance of the unclipped sum from TensorFlow's gradient, of the same draws."""
    loss, weights = support.crossentropy(), model.trainable_variables

    def run(x, y):
        losses = loss(y, model(x, training=True))
        ours = OnePassEngine(1e6).clipped_sum(losses, weights, tf.constant([1, 2])).gradients
        theirs = tf.gradients(losses, [losses.graph.capture(v.handle) for v in weights])
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    specs = (support.open_spec(x), tf.TensorSpec([None], tf.int64))
    function = tf.function(run, specs, jit_compile=jit_compile)
    return max(np.abs(d).max() for d in function(x, Y))


RANDOM = {
    "recurrent dropout": lambda: layers.LSTM(4, recurrent_dropout=0.5, dropout=0.5),
    "gru": lambda: layers.GRU(4, recurrent_dropout=0.5, reset_after=False, return_sequences=True),
    "simple rnn": lambda: layers.SimpleRNN(4, dropout=0.5),
    "both directions": lambda: layers.Bidirectional(layers.SimpleRNN(4, recurrent_dropout=0.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_steps_are_taken_again_with_the_same_random_numbers(name):
    assert differences(built(classifier(RANDOM[name]), SEQUENCES), SEQUENCES) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple rnn", "recurrent dropout"])
def test_random_numbers_under_xla(name):
    assert differences(built(classifier(RANDOM[name]), SEQUENCES), SEQUENCES, True) < 1e-4


def test_random_numbers_of_masked_sequences_of_any_length():
    model = built(masked(lambda: layers.SimpleRNN(4, recurrent_dropout=0.5)), TOKENS)
    assert differences(model, TOKENS) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"rows_per_pass": 3}], ids=["whole", "chunks"])
def test_random_loops_are_on_the_fast_path(options):
    engine = OnePassEngine(CLIP, **options)
    model = built(classifier(RANDOM["simple rnn"]), SEQUENCES)
    single = support.ClippedSum(engine, model, SEQUENCES)
    assert np.linalg.norm(single(SEQUENCES, Y, np.arange(N) == 2)) <= CLIP * (1 + 1e-5)
    assert engine.report().fast_fraction == 1


@pytest.mark.slow
def test_other_random_numbers_are_caught(monkeypatch):
    drawing = {"RandomUniform", "StatelessRandomUniformV2"}
    monkeypatch.setattr(loop_recordings, "REPEATABLE", loop_recordings.REPEATABLE | drawing)
    model = built(classifier(RANDOM["simple rnn"]), SEQUENCES)
    assert differences(model, SEQUENCES) > 1e-2


class Lists(layers.Layer):
    """A loop that reads and writes entries several times, in places that it computes."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], 4])

    def call(self, x):
        read = tf.TensorArray(tf.float32, 6, clear_after_read=False).unstack(
            tf.transpose(x, [1, 0, 2])
        )
        written = tf.TensorArray(tf.float32, 3, clear_after_read=False)
        written = written.unstack(tf.zeros([3, tf.shape(x)[0], 4]))

        def step(i, h, written):
            both = read.read(i) * read.read(i // 2) + read.read(5 - i)
            h = tf.tanh(both @ self.w + h)
            return i + 1, h, written.write(i // 2, h)

        start = [0, tf.zeros([tf.shape(x)[0], 4]), written]
        _, h, written = tf.while_loop(lambda i, *_: i < 6, step, start)
        return h + tf.reduce_sum(written.stack(), 0)


class Nested(layers.Layer):
    """The data that a loop reads come from a layer in front; the same weights are used before."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1], "tanh")
        self.lists = Lists()

    def call(self, x):
        return self.lists(self.dense(self.dense(x)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layer", [Lists, Nested])
def test_lists_equal_a_loop_over_examples(layer):
    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, classifier(layer), SEQUENCES)
    assert engine.report().fast_fraction == 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Lists, lambda: layers.SimpleRNN(4)])
def test_known_numbers_of_steps(layer):
    traced = []

    class Watched(Loop):
        def backward(self, *args):
            traced.append(self.steps)
            return super().backward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "Loop", Watched)
        assert_equals_loop(OnePassEngine(CLIP), classifier(layer), SEQUENCES)
    assert traced == [6]


# Mutants of the way back through a loop.


def test_entries_that_were_overwritten_get_no_gradient(monkeypatch):
    original = tf.raw_ops.TensorListSetItem

    def unchanged(input_handle, index, item, **kwargs):
        zero = item.op.type == "ZerosLike"
        return (
            input_handle
            if zero
            else original(input_handle=input_handle, index=index, item=item, **kwargs)
        )

    monkeypatch.setattr(tf.raw_ops, "TensorListSetItem", unchanged)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), classifier(Lists), SEQUENCES)


def test_gradients_of_entries_that_are_read_again_are_added(monkeypatch):
    original = tf.raw_ops.TensorListGetItem

    def zero_before(input_handle, index, element_shape, element_dtype, **kwargs):
        found = original(
            input_handle=input_handle,
            index=index,
            element_shape=element_shape,
            element_dtype=element_dtype,
            **kwargs,
        )
        return 0 * found if element_shape.op.type == "Shape" else found

    monkeypatch.setattr(tf.raw_ops, "TensorListGetItem", zero_before)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), classifier(Nested), SEQUENCES)


@pytest.mark.slow
def test_steps_in_the_wrong_order_are_caught(monkeypatch):
    original = Loop._along_steps

    def reversed_rows(self, stacked):
        return original(self, stacked[:, ::-1])

    monkeypatch.setattr(Loop, "_along_steps", reversed_rows)
    with pytest.raises(AssertionError):
        assert_equals_loop(OnePassEngine(CLIP), classifier(lambda: layers.SimpleRNN(4)), SEQUENCES)


# What cannot be taken again, or followed, is left to the vectorized engine.


class RandomCall(layers.Layer):
    """Random numbers in a function that is called."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], 4])
        self.function = tf.function(
            lambda x: tf.nn.dropout(x, 0.5) @ self.w, input_signature=[tf.TensorSpec([None, 4])]
        )

    def call(self, x):
        return self.function(x)


class ChangingWeights(layers.Layer):
    """Weights that are computed in every step of a loop."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], shape[-1]])

    def call(self, x):
        def step(i, h):
            return i + 1, tf.tanh(h @ (self.w * tf.cast(i, tf.float32)))

        return tf.while_loop(lambda i, _: i < 3, step, [0, x])[1]


class CarriedWeights(layers.Layer):
    """Weights that a loop changes."""

    def build(self, shape):
        self.w = self.add_weight("w", [shape[-1], shape[-1]])

    def call(self, x):
        def step(i, h, w):
            return i + 1, tf.tanh(h @ w), 0.5 * w

        return tf.while_loop(lambda i, *_: i < 3, step, [0, x, self.w.value()])[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layer", [ChangingWeights, CarriedWeights])
def test_other_uses_of_weights_in_loops_are_left_to_the_vectorised_engine(layer):
    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, classifier(layer), SEQUENCES[:, 0])
    assert "has a loop" in engine.report().fallback


def test_random_numbers_in_calls_are_left_to_the_vectorised_engine():
    engine = OnePassEngine(CLIP)
    model = built(classifier(RandomCall), SEQUENCES[:, 0])
    found = support.ClippedSum(engine, model, SEQUENCES[:, 0])(SEQUENCES[:, 0], Y)
    assert np.all(np.isfinite(found))
    assert not engine.report().entries[0].fast


@pytest.mark.slow
def test_calls_that_return_their_weights():
    class Returns(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight("w", [shape[-1], 4])
            self.function = tf.function(lambda x: (x @ self.w, 2 * self.w))

        def call(self, x):
            y, w = self.function(x)
            return y + tf.tanh(x @ w)

    engine = OnePassEngine(CLIP)
    assert_equals_loop(engine, classifier(Returns), SEQUENCES[:, 0])
    assert not engine.report().entries[0].fast
