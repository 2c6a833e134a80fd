"""What the functions of a TwoTermLoss could see but their arguments: each is refused."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tests.two_term_support import SEED, Codes, data
from tfdp.clipping import (
    OnePassEngine,
    TermWiseAggregation,
    TwoTermLoss,
)
from tfdp.clipping.batch_losses import function_checks
from tfdp.clipping.engine import LEAST_CLIP
from tfdp.contrib import BatchAggregation, MicroAggregation

layers = tf.keras.layers

TERMS = ["sample_wise", "batch_wise", "regularizer"]
FUNCTIONS = TERMS[:2]
AGGREGATIONS = [TermWiseAggregation(0.1, 4), MicroAggregation(), BatchAggregation()]

NOT_BY_ROW = "Argument `batch` must hold data, or what is (provably )?computed|mixes exam"
OF_THE_DATA = "Argument `regularizer` must return a scalar that depends on no data"
KEEPS_A_STATISTIC = "writes a statistic of the batch into its variable"
SIDE_EFFECTS = "must have no side effects, by which examples could get into each other's losses"


def of_outside(term):
    if term == "regularizer":
        return OF_THE_DATA
    return f"Argument `{term}` must compute its result from its arguments, variables and constants"


def clipped_in_graph(changes, model, x, y, mask):
    """The clipped sum, and the gradient of the regulariser, with a changed loss."""
    arguments = {
        "sample_wise": model.sample_wise,
        "batch_wise": model.batch_wise,
        "batch": (x, y),
        "mask": mask,
        "aggregation": AGGREGATIONS[0],
        **changes(model, x, y, mask),
    }
    variables = model.trainable_variables
    found = TwoTermLoss(**arguments).clipped_sum(
        OnePassEngine(0.5), variables, tf.constant(SEED, tf.int64), 32
    )
    return [
        tf.concat([tf.reshape(tf.zeros_like(v) if g is None else g, [-1]) for g, v in pairs], 0)
        for pairs in (
            list(zip(found.gradients, variables, strict=True)),
            list(zip(found.regularizer_gradients, variables, strict=True)),
        )
    ]


def clipped(changes=lambda *_: {}, arrays=None, step=clipped_in_graph):
    """As `clipped_in_graph`, of a batch, in a step of its own."""
    model, arrays = Codes(), arrays or data()

    def run(x, y, mask):
        return step(changes, model, x, y, mask)

    traced = tf.function(run, input_signature=support.open_spec(arrays), autograph=False)
    return [np.array(part) for part in traced(*arrays)]


def refused(message, changes, **kwargs):
    with pytest.raises(ValueError, match=message):
        clipped(changes, **kwargs)


def same(changes, expected=lambda *_: {}, **kwargs):
    """Whether a loss is accepted, and its sum that of another one."""
    for found, other in zip(clipped(changes, **kwargs), clipped(expected), strict=True):
        np.testing.assert_allclose(found, other, atol=1e-5)
        assert np.any(found) or not np.any(other)


def using(term, model, number):
    """A loss of which a term uses the number that `number` returns."""
    return {
        term: {
            "sample_wise": lambda *rows: number() * model.sample_wise(*rows),
            "batch_wise": lambda *rows: number() * model.batch_wise(*rows),
            "regularizer": lambda: number() * tf.reduce_sum(model.head.kernel),
        }[term]
    }


# The batch: what looks like rows and is none.


def repeated(number, x):
    """A number that may depend on anything, once for each row."""
    return tf.fill([tf.shape(x)[0]], tf.cast(number, tf.float32))


@pytest.mark.parametrize(
    "column",
    [
        lambda x, mask: repeated(tf.shape(tf.where(x[:, 0] > 1))[0], x),
        lambda x, mask: repeated(tf.shape(tf.boolean_mask(x, mask))[0], x),
        lambda x, mask: repeated(tf.size(tf.unique(tf.cast(x[:, 0], tf.int32))[0]), x),
        lambda x, mask: repeated(tf.size(tf.zeros([tf.cast(tf.reduce_max(x), tf.int32)])), x),
        lambda x, mask: repeated(tf.reduce_max(x), x),
        lambda x, mask: tf.reduce_max(x) * tf.ones_like(x),
        lambda x, mask: x + tf.cast(tf.math.count_nonzero(mask), tf.float32),
    ],
    ids=["where", "boolean_mask", "unique", "zeros", "fill", "ones_like", "count"],
)
def test_a_number_of_the_data_is_no_row(column):
    refused(NOT_BY_ROW, lambda model, x, y, mask: {"batch": (x, column(x, mask))})


@pytest.mark.parametrize(
    "column",
    [
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: tf.random.stateless_normal([tf.shape(x)[0]], [1, 2]),
        lambda x: tf.random.stateless_normal([tf.shape(x)[0], 3], [1, 2]) * x,
        lambda x: tf.constant(np.arange(40, dtype="float32")),
        lambda x: tf.cumsum(tf.ones_like(x)),
    ],
    ids=["range", "stateless_normal", "times rows", "constant", "cumsum"],
)
def test_the_place_of_a_row_is_no_row(column):
    """To remove an example moves others to other places."""
    refused(NOT_BY_ROW, lambda model, x, y, mask: {"batch": (x, column(x))})


def test_a_number_is_no_row():
    refused(
        "Argument `batch` must hold tensors of the batch, first dimension the example",
        lambda model, x, y, mask: {"batch": (x, tf.reduce_max(y))},
    )


@pytest.mark.slow
def test_rows_computed_by_their_own_shapes_are_rows():
    def by_row(model, x, y, mask):
        x = tf.reshape(tf.reshape(x, [tf.shape(x)[0], 1, 3]), [-1, x.shape[1]])
        return {"batch": (x * tf.ones_like(x), tf.where(y > 0, y, tf.zeros_like(y) + y))}

    same(by_row)


def in_function(get):
    """The step calls a function, in which the loss is; `get` says what that captures."""

    def step(changes, model, x, y, mask):
        captured = get(x)

        @tf.function(autograph=False)
        def inner():
            rows = {"batch": (tf.identity(captured), y)}
            return clipped_in_graph(lambda *_: rows, model, x, y, mask)

        return inner()

    return step


def in_branch(get):
    def step(changes, model, x, y, mask):
        captured = get(x)

        def branch():
            rows = {"batch": (1 * captured, y)}
            return clipped_in_graph(lambda *_: rows, model, x, y, mask)

        zeros = tf.zeros([model.count_params()])
        return tf.cond(tf.reduce_sum(model.head.kernel) < 99, branch, lambda: [zeros, zeros])

    return step


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("within", [in_function, in_branch])
def test_rows_mixed_in_an_enclosing_function(within):
    for mixed in (lambda x: x - tf.reduce_mean(x, 0), lambda x: tf.reduce_max(x) * tf.ones_like(x)):
        refused("mixes examples", None, step=within(mixed))
    same(None, step=within(lambda x: tf.identity(x)))


# Tensors of elsewhere.


def of_tensor(x, y):
    largest = tf.reduce_max(x)
    return lambda: largest


def of_size(x, y):
    found = tf.shape(tf.where(x > 1))[0]
    return lambda: tf.cast(found, tf.float32)


def of_branch(x, y):
    number = tf.cond(tf.reduce_max(x) > 1, lambda: 1.0, lambda: -1.0)
    return lambda: tf.stop_gradient(number)


def of_tensor_array(x, y):
    array = tf.TensorArray(tf.float32, 1, clear_after_read=False).write(0, tf.reduce_max(x))
    return lambda: array.read(0)


def of_dataset(x, y):
    rows = tf.data.Dataset.from_tensor_slices(x)
    return lambda: rows.reduce(0.0, lambda total, row: total + row[0])


OUTSIDE = [of_tensor, of_size, of_branch, of_tensor_array, of_dataset]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("number", OUTSIDE)
def test_tensors_of_the_step_are_refused(number, term):
    refused(of_outside(term), lambda model, x, y, mask: using(term, model, number(x, y)))


@pytest.mark.parametrize("term", FUNCTIONS)
def test_functions_that_a_term_calls_may_not_see_the_step(term):
    axes = None if term == "batch_wise" else [1]  # Also what keeps the rows apart.

    def changes(model, x, y, mask):
        called = tf.function(lambda loss: tf.reduce_max(x, axes) * loss, autograph=False)
        return {term: lambda *rows: called(getattr(model, term)(*rows))}

    refused(of_outside(term), changes)


def test_functions_that_a_term_calls_may_not_mix_the_step():
    def changes(model, x, y, mask):
        called = tf.function(lambda loss: tf.reduce_max(x) * loss, autograph=False)
        return {"sample_wise": lambda *rows: called(model.sample_wise(*rows))}

    refused("mixes examples", changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("term", FUNCTIONS)
def test_terms_may_call_functions(term):
    called = tf.function(lambda loss: 2.0 * loss, autograph=False)

    def changes(model, x, y, mask):
        return {term: lambda *rows: called(getattr(model, term)(*rows))}

    same(changes, lambda model, *_: using(term, model, lambda: 2.0))


def test_random_distributions_that_follow_the_data_are_refused():
    def changes(model, x, y, mask):
        mean = tf.reduce_mean(x)
        normal = tfdp.models.priors.tfd.Normal
        return {"draws": lambda: (normal(mean, 1.0),)}

    refused(of_outside("draws"), changes)


@pytest.mark.parametrize("kept", ["rows", "number"])
def test_tensors_of_the_other_term_are_refused(kept):
    def changes(model, x, y, mask):
        seen = []

        def sample_wise(x, y):
            seen.append(y if kept == "rows" else tf.reduce_max(y))
            return model.sample_wise(x, y)

        def batch_wise(*rows):
            return tf.reduce_sum(seen[0]) * model.batch_wise(*rows)

        return {"sample_wise": sample_wise, "batch_wise": batch_wise}

    refused(of_outside("batch_wise"), changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("term", TERMS)
def test_schedules_may_be_computed_outside(term):
    step = tf.Variable(3.0)

    def changes(model, x, y, mask):
        rate = tf.exp(-step) * tf.where(step > 2, tf.constant([2.0]), 1.0)[0]
        return using(term, model, lambda: rate)

    same(changes, lambda model, *_: using(term, model, lambda: 2 * np.float32(np.exp(-3))))


# Variables and metrics: what they hold of the batch.


def with_function(write):
    return lambda variable, x: tf.function(lambda x: write(variable, x), autograph=False)(x)


def assign(variable, x):
    return variable.assign(tf.reduce_max(x))


def in_a_branch(variable, x):
    """Only the choice of the branch depends on the data."""
    return tf.cond(
        tf.reduce_max(x) > 10, lambda: variable.assign(50.0), lambda: variable.assign(1.0)
    )


def in_a_loop(variable, x):
    return tf.while_loop(
        lambda i: i < tf.cast(tf.reduce_max(x), tf.int32),
        lambda i: (i + 1 + 0 * tf.cast(variable.assign_add(1.0), tf.int32),),
        [0],
    )


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    "write",
    [
        assign,
        lambda variable, x: variable.assign_add(tf.reduce_max(x)),
        with_function(assign),
        with_function(with_function(assign)),
        lambda variable, x: variable.assign(tf.reduce_max(x), read_value=False),
        in_a_branch,
        in_a_loop,
    ],
    ids=["assign", "assign_add", "function", "nested function", "not read", "branch", "loop"],
)
def test_variables_that_the_step_writes_the_data_into(write, term):
    variable = tf.Variable(0.0)

    def changes(model, x, y, mask):
        write(variable, x)
        return using(term, model, lambda: variable)

    refused(KEEPS_A_STATISTIC, changes)


@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize("write", [assign, with_function(assign)], ids=["assign", "function"])
def test_variables_that_a_term_writes_the_data_into(write, term):
    variable = tf.Variable(0.0)

    def changes(model, x, y, mask):
        def writes(x, *rest):
            write(variable, x)
            return getattr(model, term)(x, *rest)

        return {term: writes}

    refused(KEEPS_A_STATISTIC, changes)


def test_variables_may_count_steps():
    step = tf.Variable(2.0)

    def changes(model, x, y, mask):
        step.assign_add(1.0)
        return using("batch_wise", model, lambda: step)

    same(changes, lambda model, *_: using("batch_wise", model, lambda: 3.0))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("writer", ["step", "sample_wise"])
def test_metrics_may_not_be_read(writer, called, term):
    metric = tf.keras.metrics.Mean()
    read = tf.function(metric.result) if called else metric.result

    def changes(model, x, y, mask):
        changed = using(term, model, read)
        if writer == "step":
            metric.update_state(x)
            return changed
        sample_wise = changed.get("sample_wise", model.sample_wise)

        def updates(x, y):
            metric.update_state(x)
            return sample_wise(x, y)

        return {**changed, "sample_wise": updates}

    refused("must (use|depend on) no metric, which holds statistics of the", changes)


def test_an_ordinary_loss_may_not_depend_on_a_metric_either():
    metric, engine = tf.keras.metrics.Mean(), OnePassEngine(0.5)

    def step(changes, model, x, y, mask):
        metric.update_state(x)
        losses = metric.total * model.sample_wise(x, y) * tf.cast(mask, tf.float32)
        engine.clipped_sum(losses, model.trainable_variables, tf.constant(SEED, tf.int64))
        return []

    with pytest.raises(ValueError, match="The loss must depend on no metric"):
        clipped(step=step)


def test_variables_that_an_enclosing_function_writes_the_data_into():
    variable = tf.Variable(0.0)

    def step(changes, model, x, y, mask):
        assign(variable, x)
        inner = tf.function(
            lambda x, y, mask: clipped_in_graph(changes, model, x, y, mask), autograph=False
        )
        return inner(x, y, mask)

    def changes(model, x, y, mask):
        return using("sample_wise", model, lambda: variable)

    refused(KEEPS_A_STATISTIC, changes, step=step)


def test_metrics_read_by_the_step_may_not_be_used():
    metric = tf.keras.metrics.Mean()

    def changes(model, x, y, mask):
        metric.update_state(x)
        mean = metric.result()
        return using("sample_wise", model, lambda: mean)

    refused("The loss must depend on no metric", changes)


def test_metrics_may_be_written():
    metric = tf.keras.metrics.Mean()

    def changes(model, x, y, mask):
        metric.update_state(x)
        return {}

    same(changes)
    assert metric.result() != 0


# Side effects.


def by_table(x):
    with tf.init_scope():
        table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    table.insert(0, tf.reduce_max(x))
    return lambda x: tf.reshape(table.lookup(0), [])


def by_queue(x):
    with tf.init_scope():
        queue = tf.queue.FIFOQueue(100, [tf.float32], [[]])
    queue.enqueue(tf.reduce_max(x))
    return lambda x: tf.reshape(queue.dequeue(), [])


def by_numpy(x):
    return lambda x: tf.reshape(tf.numpy_function(np.max, [x], tf.float32), [])


def by_numpy_that_claims_no_state(x):
    return lambda x: tf.reshape(tf.numpy_function(np.max, [x], tf.float32, stateful=False), [])


def by_python(x):
    return lambda x: tf.reshape(tf.py_function(tf.reduce_max, [x], tf.float32), [])


def by_print(x):
    def number(x):
        with tf.control_dependencies([tf.print(x)]):
            return tf.constant(1.0)

    return number


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize(
    "make",
    [by_table, by_queue, by_numpy, by_numpy_that_claims_no_state, by_python, by_print],
)
def test_side_effects_are_refused(make, term):
    def changes(model, x, y, mask):
        number = make(x)
        return {term: lambda x, *rest: number(x) * getattr(model, term)(x, *rest)}

    refused(SIDE_EFFECTS, changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("term", FUNCTIONS)
def test_assertions_are_no_side_effects(term):
    def changes(model, x, y, mask):
        def checked(x, *rest):
            check = tf.debugging.Assert(model.head.kernel[0, 0] < 99, ["too large"])
            with tf.control_dependencies([check]):
                return getattr(model, term)(x, *rest)

        return {term: checked}

    same(changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_dropout_and_random_numbers_inside(aggregation):
    dropout = layers.Dropout(0.5)

    def changes(model, x, y, mask):
        def noisy(x):
            return dropout(x, training=True) + tf.random.normal(tf.shape(x))

        return {
            "sample_wise": lambda x, y: model.sample_wise(noisy(x), y),
            "batch_wise": lambda x, *rest: model.batch_wise(noisy(x), *rest),
            "aggregation": aggregation,
        }

    (noisy, _), (plain, _) = clipped(changes), clipped(lambda *_: {"aggregation": aggregation})
    assert np.all(np.isfinite(noisy)) and np.all(np.abs(noisy - plain) > 1e-4)


# Gradients of one's own.


def custom(factor):
    """An identity whose gradient is multiplied by a number."""

    @tf.custom_gradient
    def identity(value):
        return tf.identity(value), lambda gradient: gradient * factor()

    return identity


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("term", FUNCTIONS)
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_custom_gradients_that_use_the_step(aggregation, called, term):
    def changes(model, x, y, mask):
        identity = custom(lambda: tf.reduce_max(x))
        identity = tf.function(identity, autograph=False) if called else identity
        function = getattr(model, term)
        return {term: lambda *rows: identity(function(*rows)), "aggregation": aggregation}

    name = "batch_wise" if isinstance(aggregation, BatchAggregation) else term
    refused(of_outside(name), changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
def test_custom_gradients_of_constants_are_their_gradients(called):
    def changes(model, x, y, mask):
        identity = custom(lambda: tf.constant(3.0))
        identity = tf.function(identity, autograph=False) if called else identity
        functions = [(term, getattr(model, term)) for term in FUNCTIONS]
        return {term: lambda *rows, f=f: identity(f(*rows)) for term, f in functions}

    def expected(model, *_):
        return {term: using(term, model, lambda: 3.0)[term] for term in FUNCTIONS}

    same(changes, expected)


# Regularisers and layers.


class Activity(layers.Layer):
    """Adds what it is made with to the losses of a model."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


def of_step(model, x, y):
    return {"regularizer": lambda: tf.reduce_mean(model.sample_wise(x, y))}


def of_rows_of_step(model, x, y):
    return {"regularizer": lambda: tf.reduce_sum(x, 1) * model.head.kernel[0, 0]}


def of_layer(layer):
    def changes(model, x, y):
        def sample_wise(x, y):
            return model.sample_wise(layer(x), y)

        return {"sample_wise": sample_wise, "regularizer": lambda: tf.add_n([0.0, *layer.losses])}

    return changes


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda: of_step,
        lambda: of_rows_of_step,
        lambda: of_layer(Activity(tf.reduce_sum)),
        lambda: of_layer(Activity(tf.reduce_mean)),
        lambda: of_layer(layers.Dense(3, activity_regularizer="l2")),
    ],
    ids=["mean of losses", "rows", "add_loss sum", "add_loss mean", "activity_regularizer"],
)
def test_regularizers_that_depend_on_data(make, aggregation):
    def changes(model, x, y, mask):
        return {**make()(model, x, y), "aggregation": aggregation}

    refused(OF_THE_DATA, changes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
def test_regularizers_of_weights_are_public(aggregation):
    def changes(model, x, y, mask):
        square = tf.reduce_sum
        return {"regularizer": lambda: square(model.head.kernel**2), "aggregation": aggregation}

    (found, public), model = clipped(changes), Codes()
    without, _ = clipped(lambda *_: {"aggregation": aggregation})
    np.testing.assert_allclose(found, without, atol=1e-5)
    of_head = [2 * v if v is model.head.kernel else 0 * v for v in model.trainable_variables]
    np.testing.assert_allclose(public, support.flat(of_head), rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("term", FUNCTIONS)
def test_batch_normalization(term, aggregation):
    def normalized(training):
        layer = layers.BatchNormalization(epsilon=0.0)
        layer.build([None, 3])

        def changes(model, x, y, mask):
            function = getattr(model, term)
            return {
                term: lambda x, *rest: function(layer(x, training=training), *rest),
                "aggregation": aggregation,
            }

        return changes

    refused(KEEPS_A_STATISTIC, normalized(training=True))
    same(normalized(training=False), lambda *_: {"aggregation": aggregation})


# Masks, variables and clips.


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:2], ids=lambda a: type(a).__name__)
def test_a_mask_must_apply_to_all_of_the_loss(aggregation):
    def changes(model, x, y, mask):
        def finds_the_mask(x, y):
            operations = tf.compat.v1.get_default_graph().get_operations()
            found = next(op.outputs[0] for op in operations if op.outputs[0].dtype == tf.bool)
            return model.sample_wise(x, y) * (2 - tf.cast(found, tf.float32))

        return {"sample_wise": finds_the_mask, "aggregation": aggregation}

    refused("must return all that depends on the rows, so that `mask` applies to it", changes)


def test_rows_that_the_mask_excludes_do_not_matter():
    x, y, mask = data()
    other = np.where(mask[:, None], x, 100 + x), np.where(mask, y, -y), mask
    same(lambda *_: {}, arrays=other)


@pytest.mark.parametrize("two_terms", [False, True])
def test_complex_variables_are_refused(two_terms):
    """Only the real part would get noise."""
    weight = tf.Variable(tf.zeros([3], tf.complex64))
    optimizer = tfdp.DPSGD(1.0, 1.0, expected_batch_size=32)

    def sample_wise(x, y):
        return tf.linalg.matvec(x, tf.math.imag(weight)) - y

    @tf.function(input_signature=support.open_spec(data()))
    def step(x, y, mask):
        if two_terms:
            loss = TwoTermLoss(sample_wise, None, (x, y), AGGREGATIONS[0], mask)
            optimizer.minimize(loss, [weight])
        else:
            losses = sample_wise(x, y) * tf.cast(mask, tf.float32)
            optimizer.minimize(losses, [weight], tape=tf.GradientTape())

    with pytest.raises(ValueError, match=r"`var_list` must hold real floating-point .*complex64"):
        step(*data())


@pytest.mark.parametrize("clip", [0.0, -1.0, LEAST_CLIP / 2])
def test_clips_whose_squares_vanish_are_refused(clip):
    """Norms below them would be found to be zero, and not be clipped."""
    message = f"must be a positive number, at least {LEAST_CLIP}. Received: .*={clip}"
    with pytest.raises(ValueError, match="`l2_norm_clip` " + message):
        tfdp.DPSGD(clip, 1.0, expected_batch_size=32)
    with pytest.raises(ValueError, match="`batch_clip` " + message):
        TermWiseAggregation(clip)


def test_engines_refuse_such_clips_too():
    with pytest.raises(ValueError, match="`l2_norm_clip` must be a positive number, at least"):
        OnePassEngine(LEAST_CLIP / 2)


def test_the_least_clip_clips():
    def changes(model, *_):
        return {"aggregation": TermWiseAggregation(LEAST_CLIP, 1), **zero_and(model)}

    def zero_and(model):
        return {"sample_wise": lambda x, y: 0.0 * model.sample_wise(x, y)}

    found, _ = clipped(changes)
    assert np.linalg.norm(found.astype("float64")) == pytest.approx(32 * LEAST_CLIP, rel=1e-4)


# Mutants: without a check, one example moves the sum further than its clip.


def scaled_by_the_largest(model, x, y, mask):
    largest = tf.reduce_max(x)

    def sample_wise(x, y):
        return 1e3 * (25 - largest) * model(tf.ones_like(x))

    return {"sample_wise": sample_wise, "batch_wise": None}


def rows_of_the_largest(model, x, y, mask):
    def sample_wise(x, y):
        return 1e3 * (25 - y) * model(tf.ones_like(x))

    rows = (x, tf.reduce_max(x) * tf.ones_like(y))
    return {"sample_wise": sample_wise, "batch_wise": None, "batch": rows}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("check", "attack"),
    [("_is_public", scaled_by_the_largest), ("check_is_by_row", rows_of_the_largest)],
)
def test_without_a_check_the_data_would_leak(check, attack, monkeypatch):
    x, y, mask = data()
    mask[0], x[0] = True, 50
    absent, zeros = mask & (np.arange(len(y)) > 0), np.where(x == 50, 0, x)
    refused("must compute its result from its arguments|mixes examples", attack)
    monkeypatch.setattr(function_checks, check, lambda *_: True)
    (with_it, _), (without, _) = (
        clipped(attack, arrays=arrays) for arrays in ((x, y, mask), (zeros, y, absent))
    )
    assert np.linalg.norm(with_it - without) > 2 * 0.5
