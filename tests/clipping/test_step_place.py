"""Where `minimize` may be traced: nowhere that examples may have been mixed."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.clipping.private_steps import (
    ALL,
    MIXED_OUTSIDE,
    NOT_IN_A_BRANCH,
    SCALAR,
    Training,
    X,
    assert_leaks,
    model_and_batches,
    none,
    refused,
    side,
    update,
)
from tfdp.clipping import function_checks, step_check

layers, metrics = tf.keras.layers, tf.keras.metrics


def scalar_argument(training):
    inner = tf.function(training.step)
    return lambda x, mask: inner(x, mask, side(mask))


def captured_scalar(training):
    def call(x, mask):
        factor = side(mask)
        tf.function(lambda x, mask: training.step(x, mask, factor))(x, mask)

    return call


def captured_rows(training):
    def call(x, mask):
        mixed = x * side(mask)
        tf.function(lambda mask: training.step(mixed, mask))(mask)

    return call


def passed_rows(training):
    inner = tf.function(training.step)
    return lambda x, mask: inner(x * side(mask), mask)


def rows_in_branch(training):
    def call(x, mask):
        mixed = x * side(mask)
        tf.cond(training.weights[0] < 9, lambda: none(training.step(mixed, mask)), lambda: 0)

    return call


def rows_in_loop(training):
    def call(x, mask):
        mixed = x * side(mask)
        tf.while_loop(lambda i: i < 1, lambda i: [i + 1 + none(training.step(mixed, mask))], [0])

    return call


def rows_through_loop(training):
    def call(x, mask):
        tf.while_loop(
            lambda i, x: i < 1,
            lambda i, x: (i + 1 + none(training.step(x, mask)), x),
            [0, x * side(mask)],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 3])],
        )

    return call


def chosen_update(training):
    def call(x, mask):
        tf.cond(
            side(mask) > 0,
            lambda: none(training.step(x, mask)),
            lambda: none(training.step(x, mask, -1.0)),
        )

    return call


def chosen_function(training):
    inner = tf.function(training.step, autograph=False)

    def call(x, mask):
        inner(x, mask)  # Traced here, and not again in the branch.
        tf.cond(side(mask) > 0, lambda: none(inner(x, mask)), lambda: 0)

    return call


PLACES = {
    scalar_argument: SCALAR,
    captured_scalar: SCALAR,
    captured_rows: MIXED_OUTSIDE,
    passed_rows: MIXED_OUTSIDE,
    rows_in_branch: NOT_IN_A_BRANCH,
    rows_in_loop: NOT_IN_A_BRANCH,
    rows_through_loop: NOT_IN_A_BRANCH,
    chosen_update: NOT_IN_A_BRANCH,
    chosen_function: "must decide whether the update is made",
}


class TwoTerms(Training):
    """Trains as `Training` does, on a `TwoTermLoss`, which holds functions and the batch."""

    def step(self, x, mask, factor=1.0):
        loss = tfdp.clipping.TwoTermLoss(
            lambda x: tf.square(tf.linalg.matvec(x, self.weights) - factor),
            None,
            batch=(x,),
            mask=mask,
            aggregation=tfdp.clipping.TermWiseAggregation(1.0, 2),
        )
        self.optimizer.minimize(loss, [self.weights])


def at(place, kind=Training):
    training = kind()
    return training, place(training)


@pytest.mark.parametrize("place", PLACES)
def test_places_where_examples_may_have_been_mixed(place):
    refused(PLACES[place], lambda: at(place))


OF_ANOTHER = "must be computed in the function, branch or loop body that calls `minimize`"
TWO_TERM_PLACES = {
    passed_rows: MIXED_OUTSIDE,
    captured_rows: OF_ANOTHER,
    rows_in_branch: OF_ANOTHER,
    rows_in_loop: OF_ANOTHER,
    rows_through_loop: NOT_IN_A_BRANCH,
    chosen_update: OF_ANOTHER,
}


@pytest.mark.parametrize("place", TWO_TERM_PLACES)
def test_places_where_examples_of_two_terms_may_have_been_mixed(place):
    refused(TWO_TERM_PLACES[place], lambda: at(place, TwoTerms))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [Training, TwoTerms])
def test_rows_that_are_mixed_and_passed_are_caught(kind, monkeypatch):
    monkeypatch.setattr(step_check, "_check_passed", lambda op, inputs: None)
    assert_leaks(lambda: at(passed_rows, kind))


def test_the_finished_graph_shows_the_branch_as_well(monkeypatch):
    monkeypatch.setattr(step_check, "_check_place", lambda graph: None)
    monkeypatch.setattr(step_check, "_check_source", lambda tensor: None)
    refused("must decide whether the update is made", lambda: at(chosen_update))


@pytest.mark.slow
def test_not_looking_for_branches_is_caught(monkeypatch):
    monkeypatch.setattr(step_check, "_is_branch_or_loop", lambda graph: False)
    monkeypatch.setattr(step_check, "check_graph", lambda graph: None)
    assert_leaks(lambda: at(chosen_update))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", [captured_rows, rows_in_branch, rows_in_loop])
def test_not_following_what_is_captured_is_caught(place, monkeypatch):
    monkeypatch.setattr(step_check, "_is_branch_or_loop", lambda graph: False)
    monkeypatch.setattr(function_checks, "check_is_by_row", lambda *_: None)
    assert_leaks(lambda: at(place))


@pytest.mark.slow
def test_a_scalar_that_is_let_in_is_caught(monkeypatch):
    monkeypatch.setattr(step_check, "_check_source", lambda tensor: None)
    monkeypatch.setattr(step_check, "_check_passed", lambda op, inputs: None)
    assert_leaks(lambda: at(scalar_argument))


def test_rows_of_an_enclosing_function_may_be_captured():
    training = Training()

    def call(x, mask):
        scaled = 2.0 * x
        tf.function(lambda mask: training.step(scaled, mask), autograph=False)(mask)

    assert np.any(update(training, call))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", ["range", "iterator", "dataset", "nested"])
def test_loops_over_fresh_batches_are_accepted(kind, jit_compile):
    training = Training()
    inner = tf.function(training.step, autograph=False, jit_compile=jit_compile)
    step = inner if kind == "nested" or jit_compile else training.step
    rows = tf.data.Dataset.from_tensor_slices((X, ALL)).batch(3)

    @tf.function
    def epoch(batches):
        if kind in ("iterator", "dataset"):
            for x, mask in batches:
                step(x, mask)
        else:
            for _ in tf.range(3):
                step(*next(batches))

    epoch(rows if kind == "dataset" else iter(rows))
    assert sum(training.optimizer.released_steps()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"jit_compile": True}])
def test_keras_runs_several_steps_and_compiles(options):
    model, batches = model_and_batches(layers.Dropout(0.2), **options)
    model.fit(batches, epochs=2, verbose=0)
    assert model.optimizer.released_steps() == (10, 0)
