"""What others see of attempts while they are made."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS, with_both, with_one
from tests.selective_support import ALWAYS, NEVER, X, batches, compiled, optimizer
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training.selective.shadows import Shadows

layers = tf.keras.layers


def counts(front):
    """A layer that counts its calls, those for a test as well, and has a private metric."""

    class Counts(front.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = front.keras.metrics.Mean(name="mean")

        def build(self, shape):
            weight = functools.partial(self.add_weight, shape=[], initializer="zeros")
            self.calls = weight(name="calls", trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1.0)
            self.mean.update_state(inputs)
            return inputs

    return Counts()


def live_variables(model):
    """Everything that the training may change, but for counters of noise."""
    model.optimizer.build(model.trainable_variables)
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    metrics = [v if isinstance(v, tf.Variable) else v.value for v in metrics]
    own = model._front_end.variables(model)
    own = [v for v in own if all(v is not metric for metric in metrics)]
    return [*own, *model.optimizer._state_variables(), *metrics]


def watched_fit(front, monkeypatch, steps, **changes):
    """Trains, and reads all live variables just before each attempt is accepted or rejected.

    Returns:
      The values that were read; and those after each step, the first before them all.
    """
    layers = front.keras.layers
    base = front.keras.Sequential(
        [layers.Input([4]), layers.Dense(5), layers.Dropout(0.1), counts(front), layers.Dense(3)]
    )
    own = optimizer(front.tfdp.DPSURSGD, noise_seed=None, momentum=0.9, **changes)
    model = compiled(own, base, weighted_metrics=["accuracy"])
    model.evaluate(X, np.zeros(len(X)), verbose=0)  # Makes the metrics.
    model.reset_metrics()
    variables = live_variables(model)
    during, after = [], [[v.numpy() for v in variables]]
    right = SelectiveUpdateMixin.accepts

    def accepts(self, old, new, *others):
        with tf.control_dependencies([old.rows, new.rows]):
            values = [v.read_value() for v in variables]
        with tf.control_dependencies([tf.py_function(note_values, values, [])]):
            return right(self, old, new, *others)

    def note_values(*values):
        during.append([v.numpy() for v in values])

    def note(*_, **__):
        after.append([v.numpy() for v in variables])

    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", accepts)
    callback = front.keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(batches(), steps_per_epoch=steps, verbose=0, callbacks=[callback])
    return during, after


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def check_only_released_values(during, after):
    assert all(any(same(values, released) for released in after[:-1]) for values in during)


@pytest.fixture(scope="module", params=FRONT_ENDS, ids=lambda front: front.part)
def accepted(request):
    """Watches a training of four updates that are all accepted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return watched_fit(request.param, monkeypatch, 4, threshold=ALWAYS)


def check_live_variables(during, after):
    assert len(during) >= 4 and len(after) == 5
    assert not any(same(after[i], after[i - 1]) for i in range(1, 5))
    check_only_released_values(during, after)


def test_live_variables_hold_released_values_only(accepted):
    check_live_variables(*accepted)


@with_one
@pytest.mark.slow
def test_live_variables_hold_released_values_only_where_some_are_rejected(front, monkeypatch):
    check_live_variables(*watched_fit(front, monkeypatch, 4, threshold=0.0))


@with_one
@pytest.mark.slow
def test_live_variables_that_hold_attempts_are_caught(front, monkeypatch):
    """Mutant: attempts are made in the variables, and rejected ones are set back."""
    right_init, right_handle = Shadows.__init__, Shadows.handle

    def init(self, function, kept=(), of=None):
        right_init(self, function, kept, of)
        self._live = of is None

    def handle(self, handle):
        return handle if self._live else right_handle(self, handle)

    monkeypatch.setattr(Shadows, "__init__", init)
    monkeypatch.setattr(Shadows, "handle", handle)
    monkeypatch.setattr(Shadows, "commit", lambda self, **_: None)
    during, after = watched_fit(front, monkeypatch, 3, threshold=ALWAYS)
    with pytest.raises(AssertionError):
        check_only_released_values(during, after)


def test_metrics_never_hold_a_private_loss(accepted):
    check_metrics(*accepted)


def check_metrics(during, after):
    metrics = 6  # The totals and counts of the loss, the accuracy and the mean of inputs.
    for values in (*during, *after):
        assert all(np.all(value == 0) for value in values[-metrics:])


@with_one
@pytest.mark.slow
def test_metrics_that_are_released_are_caught(front, monkeypatch):
    """Mutant: a commit sets metrics, too."""
    right = Shadows.commit
    monkeypatch.setattr(Shadows, "commit", lambda self, last, without: right(self, last))
    watched = watched_fit(front, monkeypatch, 3, threshold=ALWAYS)
    with pytest.raises(AssertionError):
        check_metrics(*watched)


def test_a_test_leaves_no_trace_in_states_of_layers(accepted):
    """An accepted update counts one call, although two tests of it called the layer as well."""
    _, after = accepted
    calls = [next(float(v) for v in values if np.ndim(v) == 0) for values in after]
    assert calls == [calls[0] + i for i in range(5)]


def fails_in_tests(front):
    """A layer that fails on large values where it does not train."""

    class FailsInTests(front.keras.layers.Layer):
        def call(self, inputs, training=None):
            small = [] if training else [tf.debugging.assert_less(tf.reduce_max(inputs), 1e3)]
            with tf.control_dependencies([op for op in small if op is not None]):
                return tf.identity(inputs)

    return FailsInTests()


@with_both
@pytest.mark.slow
def test_an_attempt_that_fails_leaves_no_trace(front):
    """An operation fails after the update, in the test of it."""
    layers = front.keras.layers
    base = front.keras.Sequential([layers.Input([4]), fails_in_tests(front), layers.Dense(3)])
    model = compiled(optimizer(front.tfdp.DPSURSGD, threshold=ALWAYS), base)
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    # It is counted, in the record alone.
    variables = [v for v in live_variables(model) if "privacy_record" not in v.name]
    before = [v.numpy() for v in variables]
    data = batches(1e4 + X)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(data, steps_per_epoch=1, verbose=0)
    names = [v.name for v in variables]
    for name, value, old in zip(names, [v.numpy() for v in variables], before, strict=True):
        np.testing.assert_array_equal(value, old, name)
    assert model.optimizer.ledger.steps == 2


# Several threads.


def fit_within_fit(first, second, other_thread=True):
    """Calls `second.fit` in the middle of `first.fit`; returns what it raised."""
    raised = []

    def fit():
        try:
            second.fit(batches(), steps_per_epoch=1, verbose=0)
        except Exception as error:
            raised.append(error)

    def once(*_, **__):
        if other_thread:
            thread = threading.Thread(target=fit)
            thread.start()
            thread.join()
        else:
            fit()

    callback = first._front_end.package.callbacks.LambdaCallback(on_train_batch_end=once)
    first.fit(batches(), steps_per_epoch=1, verbose=0, callbacks=[callback])
    return raised


def pair(front, shared):
    """Two models that share something."""
    layers, cls = front.keras.layers, front.tfdp.DPSURSGD
    one, two = optimizer(cls, threshold=ALWAYS), optimizer(cls, threshold=ALWAYS)
    if shared == "model":
        model = compiled(one)
        model.fit(batches(), steps_per_epoch=1, verbose=0)
        return model, model
    if shared == "optimizer":
        return compiled(one), compiled(one)
    dense = layers.Dense(3, name="shared")
    bases = [front.keras.Sequential([layers.Input([4]), dense]) for _ in range(2)]
    return compiled(one, bases[0]), compiled(two, bases[1])


SHARED = [(FRONT_ENDS[0], "model")]  # What a model is made of, each front end knows.
SHARED += [(front, kind) for front in FRONT_ENDS for kind in ("optimizer", "layer")]


@pytest.mark.slow
@pytest.mark.parametrize(("front", "kind"), SHARED)
def test_two_threads_that_train_the_same_are_refused(front, kind):
    first, second = pair(front, kind)
    (error,) = fit_within_fit(first, second)
    assert isinstance(error, RuntimeError) and "another thread is training" in str(error)
    if kind == "optimizer" and front.part != "tfdp":  # One of Keras 3 keeps its first variables.
        return
    second.fit(batches(), steps_per_epoch=1, verbose=0)  # The first has ended.


@with_one
@pytest.mark.slow
def test_threads_may_train_models_that_share_nothing(front):
    cls = front.tfdp.DPSURSGD
    first, second = (compiled(optimizer(cls, threshold=ALWAYS)) for _ in range(2))
    assert not fit_within_fit(first, second)
    assert first.optimizer.ledger.steps == second.optimizer.ledger.steps == 1


@pytest.mark.slow
def test_a_fit_that_failed_lets_others_train():
    model = compiled(optimizer(threshold=NEVER))
    with pytest.raises(tfdp.TooManyAttemptsError):
        model.fit(batches(), steps_per_epoch=1, verbose=0)
    thread = threading.Thread(target=lambda: model.compile(optimizer(threshold=ALWAYS), model.loss))
    thread.start()
    thread.join()
    assert not fit_within_fit(compiled(optimizer(threshold=ALWAYS)), model)
