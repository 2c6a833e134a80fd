"""Keras's own tests, of one optimizer. `python -m tests.keras3.private_keras` runs all of them."""

import pytest

from tests.keras3 import private_keras


@pytest.mark.slow
def test_tests_of_an_optimizer_pass_with_private_steps():
    results, output = private_keras.run(["optimizers/sgd_test.py"])
    assert {outcome for _, outcome, _ in results} == {"passed"}, output
    private = [name for name, _, steps in results if steps]
    assert "SGDTest::test_correctness_with_golden" in private and len(private) >= 3


def test_reasons_are_given_for_tests_by_name():
    assert private_keras.reason_of("OptimizerTest::test_gradient_accumulation").startswith("accum")
    assert private_keras.reason_of("SGDTest::test_single_step") is None
