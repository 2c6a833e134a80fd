import dataclasses
import importlib

import numpy as np
import pytest
import tensorflow as tf

from tfdp.clipping.one_pass.recurrent import RecurrentCall, recognize

LAYERS = {"lstm": tf.keras.layers.LSTM, "gru": tf.keras.layers.GRU}
BATCH, TIME, FEATURES, UNITS = 5, 6, 3, 4
# Right-padded, with holes, starting late, nothing, and all.
ROWS = ("111000", "101101", "001100", "000000", "111111")
MASK = np.array([[step == "1" for step in row] for row in ROWS])
HOLES = 1


@pytest.fixture(autouse=True)
def no_cudnn(monkeypatch):
    """Spares the tracing of the functions that Keras would use instead on a GPU."""
    module = importlib.import_module("tf_keras.src.layers.rnn.gru_lstm_utils")
    monkeypatch.setattr(module, "function_register", lambda *args, **kwargs: None)


@dataclasses.dataclass
class Outcome:
    """What a layer's call is taken for; its gradients as TensorFlow has them, and as ours are."""

    call: RecurrentCall
    expected: dict[int, np.ndarray]
    inputs: dict[int, np.ndarray]
    uses: dict[int, tuple[np.ndarray | None, np.ndarray]]

    def example_gradients(self, index: int) -> np.ndarray:
        a, g = self.uses[index]
        gradients = g.sum(axis=1) if a is None else np.einsum("btp,btd->bpd", a, g)
        return gradients.reshape(len(g), *self.expected[index].shape)

    def largest_error(self) -> float:
        ours = self.inputs | {i: self.example_gradients(i).sum(axis=0) for i in self.uses}
        assert ours.keys() == self.expected.keys()
        return max(np.abs(ours[i] - self.expected[i]).max() for i in ours)


def calls() -> list[tf.Operation]:
    operations = tf.compat.v1.get_default_graph().get_operations()
    return [op for op in operations if "PartitionedCall" in op.type]


def make(kind: str, **options) -> tf.keras.layers.Layer:
    tf.keras.utils.set_random_seed(7)
    bias = tf.keras.initializers.RandomNormal(stddev=0.5, seed=8)
    layer = LAYERS[kind](UNITS, bias_initializer=bias, return_state=True, **options)
    layer.build((None, None, FEATURES))
    return layer


def differentiate(
    layer, time=TIME, mask=None, num_states=0, rows=slice(None), change=(), jit_compile=False
) -> Outcome:
    """Traces a layer, and takes both gradients for rows that all three kinds of output reach."""
    random = np.random.default_rng(1)
    dtype = layer.compute_dtype
    x = random.normal(size=(BATCH, TIME, FEATURES))[rows]
    states = [random.normal(size=(BATCH, UNITS))[rows] for _ in range(num_states)]
    shape = [None, time, FEATURES]
    if layer.time_major:
        x, shape = x.swapaxes(0, 1), [time, None, FEATURES]
        mask = None if mask is None else mask.T
    found = []

    def gradients(x, states, mask=None):
        layer(x, mask=mask, initial_state=states or None)
        (op,) = calls()
        found.append(recognize(op))
        known = found[0].num_outputs - 1
        upstream = [tf.cos(3 * y + i) for i, y in enumerate(op.outputs[:known])]
        weights = [i for i, t in enumerate(op.inputs) if t.dtype != tf.bool]
        expected = tf.gradients(op.outputs[:known], [op.inputs[i] for i in weights], upstream)
        call = dataclasses.replace(found[0], **dict(change))
        ours, uses = call.backward(op.inputs, [*upstream, *[None] * (len(op.outputs) - known)])
        return (
            dict(zip(weights, expected, strict=True)),
            {i: gradient for i, gradient in enumerate(ours) if gradient is not None},
            {i: (g,) if a is None else (a, g) for i, (a, g) in uses.items()},
        )

    signature = [tf.TensorSpec(shape, dtype), [tf.TensorSpec([None, UNITS], dtype) for _ in states]]
    arguments = [tf.constant(x, dtype), [tf.constant(state, dtype) for state in states]]
    if mask is not None:
        signature.append(tf.TensorSpec(shape[:2], tf.bool))
        arguments.append(tf.constant(mask[:, rows] if layer.time_major else mask[rows]))
    function = tf.function(gradients, signature, autograph=False, jit_compile=jit_compile)
    results = function(*arguments)
    expected, ours, uses = tf.nest.map_structure(lambda t: np.float64(t), results)
    return Outcome(found[0], expected, ours, {i: (None, *u)[-2:] for i, u in uses.items()})


# Any three of `backwards`, `sequences`, `masked` and `time` take all their values together.
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients(kind, backwards, sequences, masked):
    time = TIME if (masked + sequences + backwards) % 2 == 0 else None
    layer = make(kind, go_backwards=backwards, return_sequences=sequences)
    num_states = (1 if kind == "gru" else 2) if time is None else 0
    outcome = differentiate(layer, time, MASK if masked else None, num_states)
    index = {"lstm": 6, "gru": 5}[kind] if masked else None
    assert outcome.call.kind == kind and outcome.call.mask == index
    assert outcome.call.go_backwards == backwards
    assert outcome.call.return_sequences == sequences
    assert not outcome.call.time_major and not outcome.call.zero_output_for_mask
    assert outcome.largest_error() < 1e-5
    if masked:
        g = outcome.uses[outcome.call.kernel][1]
        assert np.all(g[~MASK] == 0) and np.all(np.abs(g[MASK]).max(axis=-1) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"time_major": True},
        {"zero_output_for_mask": True},
        {"zero_output_for_mask": True, "time_major": True, "go_backwards": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", LAYERS)
def test_other_options(kind, options):
    outcome = differentiate(make(kind, return_sequences=True, **options), mask=MASK)
    for name, value in options.items():
        assert getattr(outcome.call, name) == value
    assert outcome.largest_error() < 1e-5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", LAYERS)
def test_each_example_has_the_gradient_that_it_has_alone(kind):
    layer = make(kind, return_sequences=True, go_backwards=True)
    outcome = differentiate(layer, mask=MASK)
    for row in (0, HOLES):
        alone = differentiate(layer, mask=MASK, rows=[row])
        for index in outcome.uses:
            np.testing.assert_allclose(
                outcome.example_gradients(index)[row], alone.expected[index], atol=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("mixed_bfloat16", 0.2), ("mixed_float16", 0.02)]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_other_types(kind, dtype, tolerance):
    layer = make(kind, dtype=dtype, return_sequences=True)
    outcome = differentiate(layer, mask=MASK)
    assert outcome.call.kind == kind and outcome.call.return_sequences
    assert outcome.largest_error() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_xla(kind):
    layer = make(kind, return_sequences=True, go_backwards=True)
    assert differentiate(layer, mask=MASK, jit_compile=True).largest_error() < 1e-5


MUTANTS = [
    {"go_backwards": True},
    {"mask": None},
    {"zero_output_for_mask": True},
    {"return_sequences": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("change", MUTANTS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_mutants_are_caught(kind, change):
    layer = make(kind, return_sequences=True)
    outcome = differentiate(layer, mask=MASK, rows=[HOLES], change=change)
    assert outcome.largest_error() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_within_a_model(kind):
    """Both directions, with a mask of the model's own, as replaced gradients of their calls."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Embedding(7, FEATURES, mask_zero=True),
            tf.keras.layers.Bidirectional(LAYERS[kind](UNITS, return_sequences=True)),
            tf.keras.layers.Dense(1),
        ]
    )
    tokens = tf.constant([[1, 2, 3, 0, 0], [4, 0, 5, 6, 0], [0, 0, 1, 2, 0]])
    model(tokens)
    weights = model.layers[0].trainable_variables

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
    def gradients(tokens):
        loss = tf.reduce_sum(tf.sin(model(tokens)))
        handles = [loss.graph.capture(v.handle) for v in weights]
        found = [(op, recognize(op)) for op in calls()]
        for op, call in found:
            op._gradient_function = lambda op, *g, call=call: call.backward(op.inputs, g)[0]
        ours = tf.gradients(loss, handles)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(model(tokens)))
        recognised.extend(call for _, call in found)
        return [tf.convert_to_tensor(g) for g in (*ours, *tape.gradient(loss, weights))]

    recognised = []
    ours, theirs = gradients(tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert [call.go_backwards for call in recognised] == [False, True]
    assert all(call.return_sequences and call.mask is not None for call in recognised)


def lstm(inputs, init_h, init_c, kernel, recurrent_kernel, bias, forget_bias, carry_limit):
    """An LSTM written as Keras's is, but for two constants."""

    def step(position, h, c):
        z = inputs[:, position] @ kernel + h @ recurrent_kernel + bias
        i, f, g, o = tf.split(z, 4, axis=1)
        c = tf.sigmoid(f + forget_bias) * c + tf.sigmoid(i) * tf.tanh(g)
        c = tf.clip_by_value(c, -carry_limit, carry_limit)
        return position + 1, tf.sigmoid(o) * tf.tanh(c), c

    _, h, c = tf.while_loop(lambda t, *_: t < tf.shape(inputs)[1], step, [0, init_h, init_c])
    return h, h[:, tf.newaxis], h, c, tf.constant(0.0)


@pytest.mark.parametrize(
    ("forget_bias", "carry_limit", "recognised"),
    [(0.0, 1e9, True), (0.01, 1e9, False), (0.0, 4.0, False)],
)
def test_only_what_computes_the_same_is_recognised(forget_bias, carry_limit, recognised):
    def function(*tensors):
        return lstm(*tensors, forget_bias, carry_limit)

    marked = tf.function(
        function, autograph=False, experimental_attributes={"api_implements": "lstm_1"}
    )
    unmarked = tf.function(function, autograph=False)
    shapes = [[None, TIME, FEATURES], [None, UNITS], [None, UNITS]]
    shapes += [[FEATURES, 4 * UNITS], [UNITS, 4 * UNITS], [4 * UNITS]]

    @tf.function(input_signature=[tf.TensorSpec(s) for s in shapes], autograph=False)
    def trace(*tensors):
        marked(*tensors)
        unmarked(*tensors)
        first, second = calls()
        assert (recognize(first) is not None) == recognised
        assert recognize(second) is None
        assert recognize(tensors[0].op) is None
        return tf.constant(0)

    trace.get_concrete_function()


def test_gradients_of_unknown_outputs_are_refused():
    layer = make("gru")

    @tf.function(input_signature=[tf.TensorSpec([None, TIME, FEATURES])], autograph=False)
    def trace(x):
        y, _ = layer(x)
        (op,) = calls()
        call = recognize(op)
        tf.gradients(y, x)  # Gives the call more outputs.
        extra = op.outputs[call.num_outputs]
        zeros = [None] * call.num_outputs
        with pytest.raises(ValueError, match="of others"):
            call.backward(op.inputs, [*zeros, tf.ones_like(extra)])
        gradients, _ = call.backward(op.inputs, [*zeros, tf.zeros_like(extra)])
        return gradients[0]

    assert not np.any(trace(tf.ones([2, TIME, FEATURES])))
