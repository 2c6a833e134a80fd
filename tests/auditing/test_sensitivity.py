"""The sensitivity check passes sound models, finds unsound ones, and leaves no trace."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support, vae_support
from tfdp.auditing import SensitivityError, check_sensitivity
from tfdp.clipping import OnePassEngine
from tfdp.clipping.one_pass.per_example_gradients import OuterProducts

layers = tf.keras.layers
X, Y = support.small_data(40)


def private(cls=tfdp.DPSGD, clip=0.1, **kwargs):
    return cls(clip, 1.0, expected_batch_size=10, learning_rate=0.1, **kwargs)


def checked(model=None, optimizer=None, data=(X, Y), **kwargs):
    model = support.compiled(optimizer or private(), model)
    return check_sensitivity(model, data, examples=5, verbose=False, **kwargs)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: private(),
        lambda: private(tfdp.DPSignAdam, engine="vectorized"),
        lambda: private(clip=1e4),
        lambda: private(clipping_rule="per_layer"),
        lambda: private(clipping_rule="automatic"),
        lambda: private(num_microbatches=2),
        lambda: private(clipping_rule=tfdp.clipping.AdaptiveQuantileClipping(target_quantile=0.5)),
    ],
)
def test_the_bound_holds(optimizer):
    found = checked(optimizer=optimizer())
    assert len(found.movements) == 5 and not found.broken
    assert all(m.removed > 0 and m.replaced > 0 for m in found.movements)


def test_a_longer_gradient_moves_the_sum_by_the_clip_exactly():
    found = checked(optimizer=private(clip=1e-4))
    assert [m.removed for m in found.movements] == pytest.approx([1.0] * 5, abs=1e-5)
    assert found.sensitivity == 1e-4


def test_movements_are_those_of_a_loop_over_examples():
    model = support.small_model()
    found = checked(model, private(clip=0.7))
    for m in found.movements:
        one = slice(m.example, m.example + 1)
        expected = np.linalg.norm(support.looped_clipped_sum(model, X[one], Y[one], 0.7)) / 0.7
        assert [m.removed, m.masked] == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.slow
def test_random_layers_draw_the_same_for_the_others():
    model = tf.keras.Sequential(
        [layers.Dense(8), layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.Dense(3)]
    )
    found = checked(model, private(clip=1e-3))
    assert [m.removed for m in found.movements] == pytest.approx([1.0] * 5, abs=1e-4)
    again = checked(model, private(clip=1e-3))
    for one, other in zip(again.movements, found.movements, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), abs=1e-9)


@pytest.mark.slow
def test_examples_of_several_rows():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10, augmentations=3)
    model = tf.keras.Sequential([layers.Dense(8), layers.Dropout(0.5), layers.Dense(3)])
    found = checked(model, tfdp.DPSGD(1e-3, 1.0, sampling=batches.sampling))
    assert [m.removed for m in found.movements] == pytest.approx([1.0] * 5, abs=1e-4)


def test_weights_of_examples_and_nested_inputs():
    inputs = {"a": layers.Input([4], name="a"), "b": layers.Input([4], name="b")}
    model = tf.keras.Model(inputs, layers.Dense(3)(inputs["a"] + inputs["b"]))
    weights = np.linspace(0, 2, len(Y)).astype("float32")
    found = checked(model, private(clip=50.0), ({"a": X, "b": X}, Y, weights))
    assert max(m.removed for m in found.movements) <= 1 + 1e-5
    assert len({round(m.removed, 6) for m in found.movements}) == 5


@pytest.mark.slow
def test_losses_with_a_batch_wise_term():
    model = vae_support.compiled(vae_support.vae())
    data = vae_support.X, vae_support.X
    found = check_sensitivity(model, data, examples=6, verbose=False)
    assert all(0 < m.removed <= 1 + 1e-3 for m in found.movements)


def test_selective_models():
    batches = selective_support.batches()
    model = selective_support.compiled(selective_support.optimizer(data=batches))
    found = check_sensitivity(model, (X, Y), examples=5, verbose=False)
    assert 0 < max(m.removed for m in found.movements) <= 1 + 1e-5


class ByHand(tf.keras.Model):
    """Has a step of its own, and a gradient from elsewhere if it is told to."""

    def __init__(self, minimizes):
        super().__init__()
        self.minimizes, self.layer = minimizes, layers.Dense(3)

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            losses = support.crossentropy()(y, self(x), sample_weight=weights)
        if self.minimizes:
            self.optimizer.minimize(losses, self.trainable_variables, tape=tape)
        else:
            gradients = tape.gradient(losses, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"steps": self.optimizer.iterations}


def test_models_with_a_step_of_their_own():
    assert not checked(ByHand(True)).broken
    with pytest.raises(RuntimeError, match="minimize must be called"):
        checked(ByHand(False))


@pytest.mark.slow
def test_nothing_is_left_behind():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    model = support.compiled(
        private_with(batches), support.small_model(), metrics=[support.crossentropy_metric()]
    )
    model.fit(batches, epochs=1, verbose=0)
    before = [v.numpy() for v in model.variables]
    kept, optimizer = model.optimizer.ledger.steps, model.optimizer
    metrics = [v.numpy() for m in model.metrics for v in m.variables]
    check_sensitivity(model, (X, Y), examples=4, verbose=False)
    assert model.optimizer is optimizer and model.optimizer.ledger.steps == kept
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(metrics, [v for m in model.metrics for v in m.variables], strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(batches, epochs=1, verbose=0)
    assert model.optimizer.ledger.steps == 2 * kept


def private_with(batches):
    return tfdp.DPSGD(0.1, 1.0, learning_rate=0.1, sampling=batches.sampling)


# Mutants.


class Unclipped(OnePassEngine):
    @property
    def clips(self):
        return False


class ClippedTooLate(OnePassEngine):
    """Clips the sum, not its terms: an example turns the direction of all of it."""

    def clipped_sum(self, loss, variables, seed, clip=None, most_rows=None):
        self.l2_norm_clip, clip = math.inf, self.l2_norm_clip
        found = super().clipped_sum(loss, variables, seed, None, most_rows)
        self.l2_norm_clip = clip
        norm = tf.linalg.global_norm([g for g in found.gradients if g is not None])
        for i, gradient in enumerate(found.gradients):
            found.gradients[i] = gradient * 3 * clip / norm
        return found


@pytest.mark.parametrize("engine", [Unclipped, ClippedTooLate])
def test_engines_that_do_not_clip_each_example_are_found(engine):
    optimizer = private(clip=1e-3)
    optimizer._clipping = engine(1e-3)
    with pytest.raises(SensitivityError, match=r"TOO FAR[\s\S]*Epsilon does not hold"):
        checked(optimizer=optimizer)


def test_a_wrong_rule_of_an_operation_is_found(monkeypatch):
    """Squared norms of a dense layer's gradients are a hundredth of what they are."""
    correct = OuterProducts.squares
    monkeypatch.setattr(OuterProducts, "squares", lambda self, t: correct(self, t) / 100)
    with pytest.raises(SensitivityError):
        checked(optimizer=private(clip=1e-3))


def test_the_table(capsys):
    model = support.compiled(private())
    found = check_sensitivity(model, (X, Y), examples=12)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    assert "... and 2 that move it less." in printed and "sensitivity: 0.1" in printed


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"examples": 1}, "`examples` must be between 2 and the 40"),
        ({"examples": 41}, "`examples` must be between 2"),
        ({"data": (X, Y, Y, Y)}, "`data` must be"),
        ({"data": (X, Y[:-1])}, "`data` must be"),
        ({"data": (X.astype(str), Y)}, "`data` must be with numbers as inputs"),
        ({"optimizer": tfdp.DPSGD(math.inf, 0.0, 10)}, "finite `l2_norm_clip`"),
        ({"optimizer": "adam"}, "`optimizer` must be a private optimizer"),
    ],
)
def test_errors_name_the_argument(kwargs, message):
    model = support.compiled(private())
    with pytest.raises(ValueError, match=message):
        check_sensitivity(model, **{"data": (X, Y), **kwargs}, verbose=False)
