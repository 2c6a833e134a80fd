"""Both front ends are one implementation: they accept the same updates."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.front_ends import FRONT_ENDS
from tests.selective_support import batches, compiled, optimizer
from tfdp.step import noisy_acceptance
from tfdp.step.selective import SelectiveUpdateMixin


def flat(model):
    return support.flat(model.get_weights())


def trajectory(front, name, monkeypatch, **changes):
    """Returns each attempt's decision, the weights after each update, and the ledger."""
    decided, weights, right = [], [], SelectiveUpdateMixin.accepts

    def accepts(self, *arguments):
        accepted = right(self, *arguments)
        tf.numpy_function(lambda value: decided.append(bool(value)), [accepted], [])
        return accepted

    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", accepts)
    more = {"momentum": 0.9, "nesterov": True} if name.endswith("SGD") else {}
    more |= {"learning_rate": 0.02, **changes}
    data = batches(padding="full") if more.get("secure_noise") else batches()
    model = compiled(optimizer(getattr(front.tfdp, name), data, **more))

    def note(*_, **__):
        weights.append(flat(model))

    callback = front.keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(data, epochs=2, steps_per_epoch=4, verbose=0, callbacks=[callback])
    monkeypatch.setattr(SelectiveUpdateMixin, "accepts", right)
    return decided, np.array(weights), model.optimizer.ledger.to_dict()


def check_front_ends_agree(name, monkeypatch, **changes):
    (decided, weights, ledger), *others = (
        trajectory(front, name, monkeypatch, **changes) for front in FRONT_ENDS
    )
    assert True in decided and False in decided
    for other in others:
        assert other[0] == decided
        np.testing.assert_allclose(other[1], weights, rtol=1e-4, atol=2e-6)
        assert other[2] == ledger
    assert np.abs(weights[0] - weights[-1]).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DPSURSGD", {}),
        ("DPSURAdam", {"secure_noise": True}),
        ("DPSURSignSGD", {"selective_release": "per_attempt"}),
        ("DPSURSignAdam", {}),
    ],
)
def test_keras_2_and_3_accept_the_same_updates(name, changes, monkeypatch):
    """The same weights, data and keys: one sequence of decisions, and the same weights."""
    check_front_ends_agree(name, monkeypatch, **changes)


@pytest.mark.slow
def test_a_front_end_that_differs_is_caught(monkeypatch):
    """Mutant: one of them tests without noise."""
    noise, calls = noisy_acceptance.add_gaussian_noise, []

    def only_once(sums, *arguments):
        calls.append(sums)
        return noise(sums, *arguments) if len(calls) == 1 else sums

    monkeypatch.setattr(noisy_acceptance, "add_gaussian_noise", only_once)
    with pytest.raises(AssertionError):
        check_front_ends_agree("DPSURSGD", monkeypatch)
