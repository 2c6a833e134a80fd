"""The whole training step is checked: no example reaches another's gradient, or gets out."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.clipping.private_steps import (
    CLIP,
    SIDE_EFFECTS,
    SPEC,
    STATISTIC,
    Training,
    assert_leaks,
    model_and_batches,
    movement,
    none,
    refused,
    side,
    update,
)
from tfdp.clipping import step_check
from tfdp.clipping.loss_graph import data_flow
from tfdp.training.selective.rollback import check_randomness

layers, metrics = tf.keras.layers, tf.keras.metrics


def test_an_ordinary_step_is_accepted_and_within_its_clip():
    assert movement(lambda: (Training(), None)) <= CLIP * 1.0001


# Operations that keep something.


def remember_in_python(x, mask, stateful=True):
    """-1 for every row that comes after one that is not an example."""
    seen = [False]

    def remember(mask):
        seen[0] = seen[0] or not mask.all()
        return np.full(mask.shape, -1.0 if seen[0] else 1.0, "float32")

    kept = tf.numpy_function(remember, [mask], tf.float32, stateful=stateful)
    return tf.ensure_shape(kept, [None])


def remember_in_python_without_saying_so(x, mask):
    return remember_in_python(x, mask, stateful=False)


def count_in_a_table(x, mask):
    with tf.init_scope():
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    zero = tf.constant([0], tf.int64)
    table.insert(zero, side(mask)[tf.newaxis])
    return tf.reshape(tf.function(lambda: table.lookup(zero))(), [])


def count_in_a_queue(x, mask):
    with tf.init_scope():
        queue = tf.queue.FIFOQueue(9, [tf.float32], [[]])
    queue.enqueue(side(mask))
    return tf.reshape(queue.dequeue(), [])


def remember_in_another_function(x, mask):
    return tf.function(remember_in_python)(x, mask)


def print_rows(x, mask):
    tf.print(x)
    return 1.0


def learn_candidates(x, mask):
    ids = tf.cast(x[:, :1], tf.int64)
    tf.random.learned_unigram_candidate_sampler(ids, 1, 1, True, 9)
    return 1.0


STATEFUL = [
    remember_in_python,
    remember_in_python_without_saying_so,
    count_in_a_table,
    count_in_a_queue,
    remember_in_another_function,
    print_rows,
    learn_candidates,
]


@pytest.mark.parametrize("factor", STATEFUL)
def test_operations_with_a_state_are_refused(factor):
    refused(SIDE_EFFECTS, lambda: (Training(factor), None))


@pytest.mark.parametrize("factor", [count_in_a_table, remember_in_another_function])
def test_they_are_refused_beside_the_loss(factor):
    def make():
        training = Training()

        def call(x, mask):
            training.step(x, mask)
            factor(x, mask)

        return training, call

    refused(SIDE_EFFECTS, make)


def test_the_line_is_named():
    refused(r"'.*PyFunc.* made at .*test_step_check.py:\d+. Compute it with", traced_in_python)


def traced_in_python():
    return Training(remember_in_python), None


def test_printing_is_said_to_show_private_data():
    refused("shows private data: remove `tf.print`", lambda: (Training(print_rows), None))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [remember_in_python, remember_in_python_without_saying_so])
def test_a_list_without_python_code_is_caught(factor, monkeypatch):
    monkeypatch.setattr(step_check, "check_type", lambda op: None)
    assert_leaks(lambda: (Training(factor), None))


def test_a_refused_step_stays_refused():
    """Also a nested function that is not traced again, and whoever calls it."""
    training = Training()
    inner = tf.function(training.step, autograph=False)

    def call(x, mask):
        remember_in_python(x, mask)
        inner(x, mask)

    refused(SIDE_EFFECTS, lambda: (training, call))
    with pytest.raises(TypeError, match="may_be_called_from_one_outer_function_only"):
        update(training, call)
    with pytest.raises(TypeError, match="may_be_called_from_one_outer_function_only"):
        update(training, lambda x, mask: tf.cond(mask[0], lambda: inner(x, mask), lambda: None))
    assert np.all(training.weights.numpy() == 0)


def test_a_step_is_checked_while_an_error_is_handled():
    try:
        raise KeyError("anything")
    except KeyError:
        refused(SIDE_EFFECTS, traced_in_python)


def test_a_graph_that_is_entered_again_is_checked_when_it_is_finished():
    """As distribution strategies do, which run the step in a thread."""

    def make():
        training = Training()

        def call(x, mask):
            with tf.compat.v1.get_default_graph().as_default():
                training.step(x, mask)
            remember_in_python(x, mask)

        return training, call

    refused(SIDE_EFFECTS, make)


def test_an_error_in_tracing_is_shown_as_it_is():
    def make():
        training = Training()

        def call(x, mask):
            training.step(x, mask)
            remember_in_python(x, mask)
            raise KeyError("mine")

        return training, call

    with pytest.raises(KeyError, match="mine"):
        update(*make())


# Writes into variables.


def assigned(how):
    """A step that writes into a variable, and the variable."""
    training, kept = Training(), tf.Variable(0.0, name="kept")

    def call(x, mask):
        training.step(x, mask)
        how(kept, x, mask)

    return training, call, kept


WRITES = {
    "unread": lambda kept, x, mask: none(kept.assign_add(tf.reduce_sum(x), read_value=False)),
    "read": lambda kept, x, mask: kept.assign_add(tf.reduce_sum(x)),
    "called": lambda kept, x, mask: tf.function(WRITES["unread"])(kept, x, mask),
    "called twice": lambda kept, x, mask: tf.function(WRITES["called"])(kept, x, mask),
    "captured": lambda kept, x, mask: tf.function(lambda: WRITES["unread"](kept, x, mask))(),
    "looped": lambda kept, x, mask: tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + one(kept, y), y), [0, tf.reduce_sum(x)]
    ),
    "looped late": lambda kept, x, mask: tf.while_loop(
        lambda i, y: i < 3,
        lambda i, y: (i + one(kept, y), tf.reduce_sum(x)),
        [0, tf.constant(0.0)],
    ),
    "as long as": lambda kept, x, mask: tf.while_loop(
        lambda i: i < tf.math.count_nonzero(mask, dtype=tf.int32),
        lambda i: [i + one(kept, tf.constant(1.0))],
        [0],
    ),
    "branch": lambda kept, x, mask: tf.cond(
        mask[0], lambda: one(kept, tf.constant(1.0)), lambda: 0
    ),
    "by a gradient": lambda kept, x, mask: kept.assign_add(
        tf.reduce_sum(tf.gradients(x * kept.read_value(), kept.handle)[0])
    ),
    "rows": lambda kept, x, mask: kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32)),
    "from a metric": lambda kept, x, mask: kept.assign(METRIC(x)),
}
METRIC = metrics.Sum()


def one(kept, value):
    kept.assign_add(value)
    return 1


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", WRITES)
def test_no_statistic_may_be_written(name):
    training, call, _ = assigned(WRITES[name])
    refused(STATISTIC.format("kept:0"), lambda: (training, call))


def drawing(count):
    """A step that draws as many numbers as `count` says, and so advances a saved state."""
    training, generator = Training(), tf.random.Generator.from_seed(1)

    def call(x, mask):
        training.step(x, mask)
        generator.uniform([tf.cast(count(x), tf.int32)])

    return training, call


COUNTS = {
    "data": lambda x: x[0, 0],
    "metric": lambda x: METRIC(x),
    "shape of data": lambda x: tf.size(tf.random.uniform([tf.cast(x[0, 0], tf.int32)])),
    "shape of a metric": lambda x: tf.size(tf.zeros([tf.cast(METRIC(x), tf.int32)])),
}
GENERATOR = STATISTIC.format("StateVar:0")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", COUNTS)
def test_no_statistic_may_decide_how_many_numbers_are_drawn(name):
    refused(GENERATOR, lambda: drawing(COUNTS[name]))


def test_mutant_that_lets_shapes_of_metrics_pass_is_caught(monkeypatch):
    update(*drawing(lambda x: tf.shape(x)[0]))  # As many as there are rows, which are public here.
    monkeypatch.setattr(data_flow, "_of_shape", lambda colors: 0)
    update(*drawing(COUNTS["shape of a metric"]))


class Remembers(layers.Layer):
    """Keeps the sum of what it has seen, to be saved with the model."""

    def build(self, shape):
        self.total = self.add_weight(name="total", shape=shape[1:], trainable=False)

    def call(self, x, training=None):
        if training:
            self.total.assign_add(tf.reduce_sum(x, 0), read_value=False)
        return x


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_layer_that_remembers_is_refused_by_name(jit_compile):
    model, batches = model_and_batches(Remembers(), jit_compile=jit_compile)
    before = model.layers[0].total.numpy()
    with pytest.raises(ValueError, match=STATISTIC.format("remembers.*/total:0")):
        model.fit(batches, verbose=0)
    np.testing.assert_array_equal(model.layers[0].total, before)


def test_batch_normalization_keeps_its_message():
    model, batches = model_and_batches(layers.BatchNormalization())
    with pytest.raises(ValueError, match="Replace BatchNormalization by GroupNormalization"):
        model.fit(batches, verbose=0)


@pytest.mark.parametrize("name", ["called", "looped", "branch"])
def test_writes_that_are_not_looked_for_in_functions_are_caught(name, monkeypatch):
    def blind(self, op, name, inputs, control):
        return [data_flow.Value()] * len(op.outputs)

    monkeypatch.setattr(data_flow.Flow, "_call", blind)
    training, call, kept = assigned(WRITES[name])
    update(training, call)
    assert kept.numpy() != 0


def test_branches_chosen_by_data_that_are_not_told_apart_are_caught(monkeypatch):
    monkeypatch.setattr(data_flow, "PRIVATE", 0)
    training, call, kept = assigned(WRITES["branch"])
    update(training, call)
    assert kept.numpy() == 1


PUBLIC_WRITES = {
    "count": lambda kept, x, mask: kept.assign_add(1.0),
    "of weights": lambda kept, x, mask: kept.assign(0.9 * kept + 0.1),
    "public loop": lambda kept, x, mask: tf.while_loop(
        lambda i: i < 3, lambda i: [i + one(kept, tf.constant(1.0))], [0]
    ),
    "public branch": lambda kept, x, mask: tf.cond(
        kept > 5.0, lambda: one(kept, tf.constant(1.0)), lambda: 0
    ),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PUBLIC_WRITES)
def test_what_does_not_depend_on_data_may_be_written(name):
    training, call, _ = assigned(PUBLIC_WRITES[name])
    assert np.any(update(training, call))


def test_averages_of_the_weights_may_be_kept():
    training, average = Training(), tf.Variable(tf.zeros([3]))

    def call(x, mask):
        training.step(x, mask)
        average.assign(0.5 * average + 0.5 * training.weights)

    update(training, call)
    np.testing.assert_allclose(average, 0.5 * training.weights)


# What must stay possible.


class WithGenerator(layers.Layer):
    def build(self, shape):
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x, training=None):
        return x + self.generator.normal(tf.shape(x))


def adapted():
    layer = layers.Normalization()
    layer.adapt(support.small_data()[0])
    return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: layers.GaussianNoise(0.1), WithGenerator, adapted],
    ids=["noise", "generator", "normalization"],
)
def test_layers_that_keep_nothing_of_the_data(make):
    kinds = ["accuracy", metrics.SparseTopKCategoricalAccuracy(2), support.crossentropy_metric()]
    model, batches = model_and_batches(make(), metrics=kinds, weighted_metrics=["accuracy"])
    model.fit(batches, verbose=0)
    assert model.optimizer.released_steps() == (5, 0)


@pytest.mark.slow
def test_compiled_metrics_of_all_kinds():
    x, y = support.small_data()
    y = (y > 0).astype("float32")[:, None]
    kinds = [metrics.AUC(), metrics.Precision(), metrics.MeanIoU(2), metrics.F1Score(threshold=0.5)]
    model = tf.keras.Sequential([layers.Input([4]), layers.Dense(1, activation="sigmoid")])
    loss = tf.keras.losses.BinaryCrossentropy(reduction="none")
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=12)
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
    model.compile(optimizer, loss, metrics=kinds, weighted_metrics=[metrics.AUC(name="weighted")])
    model.fit(batches, verbose=0)
    assert model.optimizer.released_steps() == (5, 0)


def test_texts_are_looked_up():
    words = tf.keras.layers.StringLookup(vocabulary=["a", "b"])
    inputs = tf.keras.Input([1], dtype="string")
    embedded = layers.Flatten()(layers.Embedding(3, 2)(words(inputs)))
    model = tf.keras.Model(inputs, layers.Dense(3)(embedded))
    x = np.array([["a"], ["b"], ["c"]] * 20)
    batches = tfdp.data.poisson_batches((x, np.arange(60) % 3), expected_batch_size=12)
    support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling), model)
    model.fit(batches, verbose=0)
    assert model.optimizer.released_steps() == (5, 0)


# Attempts of DPSUR: the same list.


def sampled(x, mask):
    ids = tf.constant([[0]], tf.int64)
    return tf.random.log_uniform_candidate_sampler(ids, 1, 4, True, 1000, seed=1)[0]


def distorted(x, mask):
    return tf.image.sample_distorted_bounding_box([32, 32, 3], tf.zeros([1, 1, 4]), seed=3)[0]


@pytest.mark.parametrize("function", [sampled, distorted])
def test_every_stream_of_a_fixed_seed_is_refused_in_attempts(function, monkeypatch):
    traced = tf.function(function).get_concrete_function(*SPEC)
    with pytest.raises(ValueError, match="random numbers of a fixed seed"):
        check_randomness(traced)
    known = step_check.RANDOM_STREAMS - {op.type for op in traced.graph.get_operations()}
    monkeypatch.setattr(step_check, "RANDOM_STREAMS", known)
    check_randomness(traced)


@pytest.mark.parametrize("function", STATEFUL)
def test_attempts_have_no_other_states(function):
    with pytest.raises(ValueError, match=SIDE_EFFECTS):
        check_randomness(tf.function(function).get_concrete_function(*SPEC))


def test_every_stream_may_be_in_a_step():
    assert all(map(step_check.is_allowed, step_check.RANDOM_STREAMS))
