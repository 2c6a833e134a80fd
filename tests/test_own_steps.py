"""`make_private` and `validate` of models that compute their step or their loss themselves."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tests.front_ends import with_both

pytestmark = with_both
X, Y = support.small_data(200)


def own_step(front, wrong=None):
    """A model without `call`, whose step has its own loss."""
    keras = front.keras

    class OwnStep(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
            self.decoder = keras.layers.Dense(4)

        def train_step(self, data):
            x = data[0] if isinstance(data, tuple) else data
            with tf.GradientTape() as tape:
                loss = tf.square(self.decoder(self.encoder(x)) - x)
                loss = tf.reduce_mean(loss, axis=1)
                if wrong == "mixes":
                    loss -= tf.reduce_mean(loss)
                if keras is not tf.keras and wrong != "forgets":
                    loss = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            if keras is tf.keras and wrong != "forgets":
                self.optimizer.minimize(loss, variables, tape=tape)
            elif keras is tf.keras:
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            else:
                self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": tf.reduce_mean(loss)}

    return OwnStep()


def with_added_loss(front, **kwargs):
    """A model whose loss is added by a layer."""
    keras = front.keras

    class Endpoint(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(tf.square(x), axis=-1))
            return x

    return keras.Sequential([keras.Input([4]), keras.layers.Dense(3), Endpoint()], **kwargs)


def with_own_loss(front, **kwargs):
    """A model that computes its loss, and has Keras's step."""
    keras = front.keras

    class OwnLoss(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            return tf.reduce_mean(tf.square(y_pred[:, 0] - tf.cast(y, y_pred.dtype)))

    return OwnLoss([keras.Input([4]), keras.layers.Dense(3)], **kwargs)


MODELS = {"step": own_step, "added": with_added_loss, "loss": with_own_loss}


def make(front, model, **kwargs):
    kwargs = {"epochs": 2, "target_epsilon": 4.0, "batch_size": 50, "verbose": False} | kwargs
    return front.tfdp.make_private(model, (X, Y), **kwargs)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_models_with_a_loss_of_their_own_train(front, kind, compiled):
    model = MODELS[kind](front)
    if compiled:
        model.compile("adam")
    model, batches, budget = make(front, model)
    assert model.optimizer.ledger.steps == 0  # Nothing was trained to find out.
    before = [np.array(v) for v in model.trainable_variables]
    assert before
    model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 8
    assert 3.9 < model.optimizer.ledger.epsilon(budget.delta).epsilon <= 4.0
    after = [np.array(v) for v in model.trainable_variables]
    assert all(np.any(a != b) for a, b in zip(before, after[: len(before)], strict=True))


def test_what_the_step_is_refused_for_is_said_before_training(front):
    model = own_step(front, wrong="mixes")
    model.compile("adam")
    optimizer = model.optimizer
    found = front.tfdp.validate(model, data=(X, Y))
    (finding,) = [f for f in found.findings if f.refused]
    assert finding.where == "`train_step` of OwnStep" and "mixes examples" in finding.problem
    with pytest.raises(ValueError, match="mixes examples"):
        make(front, model)
    assert model.optimizer is optimizer  # It is left as it was.
    assert front.tfdp.validate(own_step(front), data=(X, Y)).ok


def test_a_step_that_keeps_its_loss_from_the_optimizer_gets_the_line_to_write(front):
    model = own_step(front, wrong="forgets")
    model.compile("adam")
    line = "optimizer.minimize(loss" if front.keras is tf.keras else "optimizer.scale_loss(loss)"
    with pytest.raises(ValueError) as caught:
        make(front, model)
    assert line in str(caught.value) and "`train_step` of OwnStep" in str(caught.value)


def test_a_step_without_the_optimizer_is_refused(front):
    class Untrained(type(own_step(front))):
        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.encoder(data[0]))}

    model = Untrained()
    model.compile("adam")
    with pytest.raises(ValueError, match="takes no step with the model's `optimizer`"):
        make(front, model)


def test_a_model_without_any_loss(front):
    model = front.keras.Sequential([front.keras.layers.Dense(3)])
    message = "`loss` must be given.*no loss of its own"
    with pytest.raises(ValueError, match=message):
        make(front, model)
    model.compile("sgd")
    with pytest.raises(ValueError, match=message):
        make(front, model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["added", "loss"])
def test_a_loss_without_weights_is_not_given_padded_batches(front, kind):
    model = MODELS[kind](front)
    model.compile("adam", jit_compile=True)  # Which needs batches of few sizes.
    with pytest.raises(ValueError, match=r"take the sample weights.*jit_compile=False"):
        make(front, model)
    model.compile("adam", jit_compile=False)
    assert make(front, model).batches.sampling.padding == "none"


def test_a_compile_of_its_own_keeps_what_it_was_given(front):
    class Distiller(type(own_step(front))):
        def compile(self, optimizer, temperature, **kwargs):
            super().compile(optimizer=optimizer, **kwargs)
            self.temperature = temperature

    model = Distiller()
    model.compile("adam", temperature=3.0)
    model, batches, budget = make(front, model)
    assert model.temperature == 3.0
    model.fit(batches, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 4


@pytest.mark.quick_cases(1)
def test_the_loss_that_is_given_reaches_a_step_that_uses_it(front):
    keras = front.keras

    class Custom(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model, batches, budget = make(
        front, Custom([keras.layers.Dense(3)]), loss=front.crossentropy(), metrics=["accuracy"]
    )
    history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0).history
    assert model.optimizer.ledger.steps == 8 and "accuracy" in history
    # What is given for the examination alone is not kept.
    plain = Custom([keras.layers.Dense(3)])
    assert front.tfdp.validate(plain, front.crossentropy(), data=(X, Y)).ok
    assert not getattr(plain, "compiled", False) and not getattr(plain, "_is_compiled", False)


def test_the_loss_that_is_given_reaches_it_by_a_compile_of_its_own(front):
    """Classes of Hugging Face are such models, and users do not compile them before."""
    keras = front.keras

    class Custom(keras.Sequential):
        def compile(self, optimizer="sgd", loss="auto", **kwargs):
            self.kind = "auto" if loss == "auto" else "given"
            super().compile(optimizer=optimizer, loss=loss, **kwargs)

        def train_step(self, data):
            assert self.kind == "given"
            return super().train_step(data)

    model, batches, budget = make(front, Custom([keras.layers.Dense(3)]), loss=front.crossentropy())
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 4
    plain = Custom([keras.layers.Dense(3)])
    assert front.tfdp.validate(plain, front.crossentropy(), data=(X, Y)).ok
    assert not hasattr(plain, "kind") and not getattr(plain, "compiled", False)


def test_layers_that_are_refused_are_named(front):
    model = with_added_loss(front)
    model.add(front.keras.layers.BatchNormalization(name="bn"))
    with pytest.raises(ValueError, match="layer 'bn'"):
        make(front, model)


def test_what_the_weights_have_cost_is_counted_once(front):
    model = own_step(front)
    model.compile("adam")
    for steps, epsilon in ((8, 2.0), (16, 4.0)):
        model, batches, budget = make(front, model, optimizer="sgd", target_epsilon=epsilon)
        model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
        front.tfdp.validate(model, data=batches).check()  # With the optimizer that it has.
        assert model.optimizer.ledger.steps == steps
        assert 0.99 * epsilon < model.optimizer.ledger.epsilon(budget.delta).epsilon <= epsilon
