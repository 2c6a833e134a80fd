import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.training import private_training

layers = tf.keras.layers
X, Y = support.small_data(300)
KERAS = tf.keras.optimizers


def model(optimizer=None, **kwargs):
    built = support.small_model()
    if optimizer is not None:
        kwargs.setdefault("loss", support.crossentropy("auto"))
        built.compile(optimizer, **kwargs)
    return built


def make(built, **kwargs):
    kwargs = {"epochs": 2, "target_epsilon": 2.0, "batch_size": 50, "verbose": False} | kwargs
    return tfdp.make_private(built, (X, Y), **kwargs)


def calibrated(**kwargs):
    """The noise of the explicit way."""
    return tfdp.calibrate_noise_multiplier(
        target_epsilon=2.0, steps=12, dataset_size=300, expected_batch_size=50, **kwargs
    )


def test_training_for_the_epochs_costs_the_budget(capsys):
    trained, batches, budget = make(model("adam", metrics=["accuracy"]), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"Privacy: epsilon <= 2 at delta = {budget.delta:g} after 2 epochs")
    history = trained.fit(batches, epochs=2, callbacks=[budget], verbose=0).history
    assert "accuracy" in history and len(history["loss"]) == 2
    epsilon = trained.optimizer.ledger.epsilon(budget.delta).epsilon
    assert 1.98 < epsilon <= 2.0
    assert trained.optimizer.ledger.steps == 12
    assert "epsilon = " in tfdp.privacy_statement(trained, delta=budget.delta)
    assert trained.optimizer.noise_multiplier == calibrated(delta=budget.delta)
    assert "PrivacyBudget" not in capsys.readouterr().out  # All epochs were trained.
    with pytest.raises(ValueError, match="allows no further step"):
        trained.fit(batches, epochs=1, callbacks=[budget], verbose=0)


def test_a_schedule_of_the_noise_is_scaled_to_the_budget(capsys):
    schedule = tfdp.schedules.PiecewiseConstantNoise([6], [2.0, 1.0])
    trained, batches, budget = make(model("sgd"), noise_schedule=schedule, verbose=True)
    noise = trained.optimizer.noise_multiplier
    assert noise(0) == 2 * noise(6) and noise(6) > 0.5
    assert "which changes 1 times, at last to" in capsys.readouterr().out
    trained.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert 1.98 < trained.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
    with pytest.raises(ValueError, match=r"`noise_schedule` must be a schedule of"):
        make(model("sgd"), noise_schedule=1.5)


@pytest.mark.slow
def test_the_mutant_that_forgets_an_epoch_overspends(monkeypatch):
    real = private_training.calibrate_noise_multiplier
    monkeypatch.setattr(
        private_training,
        "calibrate_noise_multiplier",
        lambda **kwargs: real(**{**kwargs, "steps": kwargs["steps"] // 2}),
    )
    trained, batches, budget = make(model("adam"))
    trained.fit(batches, epochs=2, verbose=0)
    assert trained.optimizer.ledger.epsilon(budget.delta).epsilon > 2.0


@pytest.mark.slow
def test_what_the_weights_have_cost_is_part_of_the_budget():
    first, batches, budget = make(model("sgd"), target_epsilon=1.0)
    first.fit(batches, epochs=2, verbose=0)
    second, batches, budget = make(first, optimizer="sgd")
    second.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert second.optimizer.ledger.steps == 24
    assert 1.9 < second.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
    prior = tfdp.accounting.PrivacyLedger()
    prior.record(second.optimizer.release.event, 1)
    assert make(model("sgd"), prior=prior).model.optimizer.noise_multiplier > calibrated(
        delta=budget.delta
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("adam", [KERAS.Adam, KERAS.legacy.Adam])
def test_parameters_of_adam_are_taken_over(adam):
    private = make(model(adam(0.02, beta_1=0.8, amsgrad=True))).model.optimizer
    config = private.get_config()
    assert isinstance(private, tfdp.DPAdam)
    assert config["learning_rate"] == pytest.approx(0.02) and config["amsgrad"]
    assert config["beta_1"] == pytest.approx(0.8)


def test_parameters_of_sgd_are_taken_over():
    schedule = KERAS.schedules.ExponentialDecay(0.5, 10, 0.9)
    private = make(model(KERAS.SGD(schedule, momentum=0.7, nesterov=True))).model.optimizer
    assert isinstance(private, tfdp.DPSGD)
    assert private.get_config()["momentum"] == pytest.approx(0.7) and private.nesterov
    assert float(private._decayed_lr(tf.float32)) == pytest.approx(0.5)


def test_a_compiled_model_need_not_be_built():
    unbuilt = tf.keras.Sequential([layers.Dense(3)])
    unbuilt.compile(KERAS.AdamW(0.02, weight_decay=0.3), support.crossentropy("auto"))
    private = make(unbuilt).model.optimizer
    assert all(private._weight_decay.shrinks(v) for v in unbuilt.trainable_variables)


@pytest.mark.parametrize(
    ("plain", "cls", "expected"),
    [
        (KERAS.AdamW(0.02, weight_decay=0.3), tfdp.DPAdam, 0.3),
        (KERAS.Adam(0.02, weight_decay=0.2), tfdp.DPAdam, 0.2),
        (KERAS.SGD(0.02, weight_decay=0.1), tfdp.DPSGD, 0.1),
        (KERAS.legacy.SGD(0.02), tfdp.DPSGD, None),
    ],
)
def test_weight_decay_is_taken_over(plain, cls, expected):
    built = model(None)
    if expected:
        plain.exclude_from_weight_decay(built.trainable_variables[:1], var_names=["bias"])
    built.compile(plain, "mse")
    private = make(built).model.optimizer
    assert type(private) is cls and private.weight_decay == expected
    assert float(private._decayed_lr(tf.float32)) == pytest.approx(0.02)
    if expected:
        decay = private._weight_decay
        shrinks = [decay.shrinks(v) for v in built.trainable_variables]
        assert shrinks == [plain._use_weight_decay(v) for v in built.trainable_variables]
        assert True in shrinks and False in shrinks


def test_adamw_by_its_name():
    private = make(model("sgd"), optimizer="adamw").model.optimizer
    assert type(private) is tfdp.DPAdam and private.weight_decay == 0.004


def test_arguments_go_before_what_is_taken_over():
    built = model("adam", loss="mse", loss_weights=0.5)
    new = make(
        built,
        optimizer=tfdp.DPSignSGD,
        learning_rate=0.01,
        l2_norm_clip=0.5,
        loss=support.crossentropy(),
        metrics=["accuracy"],
        clipping_rule="automatic",
    ).model
    assert new is built and isinstance(new.optimizer, tfdp.DPSignSGD)
    assert new.optimizer.l2_norm_clip == 0.5
    assert type(new.optimizer.clipping.clipping_rule).__name__ == "AutomaticClipping"
    assert new.compiled_loss._user_loss_weights == 0.5


def test_all_problems_of_the_model_are_in_one_error():
    built = tf.keras.Sequential(
        [
            layers.Dense(4, input_shape=[4]),
            layers.BatchNormalization(name="first"),
            layers.BatchNormalization(name="second"),
        ]
    )
    with pytest.raises(ValueError, match=r"(?s)'first'.*'second'.*the loss"):
        make(built, loss=lambda y, p: tf.reduce_max(p))


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        ("rmsprop", {}, "Received: RMSprop, with which the model was compiled"),
        (None, {}, "`loss` must be given"),
        (KERAS.Adam(clipnorm=1.0), {}, "must not use `clipnorm`"),
        ("adam", {"batch_size": 301}, "`batch_size` must be an integer .* at most 300"),
        ("adam", {"batch_size": 2.5}, "`batch_size` must be a positive integer"),
        ("adam", {"epochs": 0}, "`epochs` must be a positive integer"),
        ("adam", {"epochs": 10**400}, "`epochs` must be so few that there are at most 100000000"),
        ("adam", {"target_epsilon": -1.0}, "`target_epsilon`"),
        ("adam", {"optimizer": tfdp.DPSURSGD}, "must not be selective"),
        ("adam", {"optimizer": tfdp.DPSGD(1.0, 1.0, 5)}, "Pass optimizer=tfdp.DPSGD"),
        (tfdp.DPSGD(1.0, 1.0, 5), {}, "pass its class"),
        ("adam", {"optimizer": KERAS.Adam}, "Received: the class Adam; pass an instance"),
        (
            tf.keras.mixed_precision.LossScaleOptimizer(KERAS.Adam()),
            {},
            "Use the policy mixed_bfloat16",
        ),
        ("adam", {"optimizer": "adadelta"}, "Known: adam, adamw, sgd, signadam, signsgd"),
    ],
)
def test_refused_arguments(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(model(optimizer), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "expected"), [(40, 4), (1, 1)])
def test_a_small_data_set_needs_no_batch_size(capsys, examples, expected):
    built = model("adam")
    trained, batches, budget = tfdp.make_private(
        built, (X[:examples], Y[:examples]), epochs=2, target_epsilon=3.0
    )
    assert f"{expected} examples expected" in capsys.readouterr().out
    trained.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    assert trained.optimizer.ledger.steps == 2 * examples // expected
    assert trained.optimizer.ledger.epsilon(budget.delta).epsilon <= 3.0


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1), (9, 1), (25, 2), (2559, 255), (2560, 256), (10**6, 256)]
)
def test_the_default_batch_is_a_tenth_of_few_examples(size, expected):
    data = np.zeros([size, 1], "float32"), np.zeros([size], "int64")
    assert tfdp.data.poisson_batches(data).sampling.expected_batch_size == expected


@pytest.mark.slow
def test_a_rate_that_nobody_chose_is_replaced():
    def rates(by_compile, **kwargs):
        rate = make(model(by_compile), **kwargs).model.optimizer.get_config()["learning_rate"]
        if isinstance(rate, dict):
            return tuple(rate["config"][f"{name}_learning_rate"] for name in ("initial", "end"))
        return pytest.approx(rate)

    assert rates("adam") == rates("sgd", optimizer="adam") == (0.04, 0.0)
    assert rates(KERAS.SGD(momentum=0.9)) == (0.4, 0.0)
    assert rates("adam", learning_rate=0.3) == 0.3
    assert rates(KERAS.Adam(0.002)) == 0.002
    assert rates("sgd", optimizer=KERAS.Adam()) == 0.001  # An argument is a choice.


def test_two_arguments():
    with pytest.raises(TypeError, match=r"one pair, `\(x, y\)`, in parentheses"):
        tfdp.make_private(model("adam"), X, Y, epochs=2, target_epsilon=2.0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("jit_compile", "chunk_size"), [(False, None), (True, 20)])
def test_secure_noise_gets_batches_of_one_size(jit_compile, chunk_size):
    built = model("adam", jit_compile=jit_compile)
    trained, batches, budget = make(built, secure_noise=True, chunk_size=chunk_size)
    assert batches.sampling.padding == "full"
    trained.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert trained.optimizer.secure_noise
    sizes = {len(y) for _, y, _ in batches}
    assert max(sizes) - min(sizes) <= (chunk_size is not None)


def drawing(*stack):
    return tf.keras.Sequential([layers.Input([8, 8, 1]), *stack, layers.Flatten(), layers.Dense(3)])


DRAWING = {
    "outside of branches": (lambda: [layers.Dropout(0.2)], "none"),
    "in a branch": (lambda: [layers.RandomCrop(6, 6)], "full"),
    "in a loop": (lambda: [layers.Reshape([8, 8]), layers.LSTM(2, recurrent_dropout=0.2)], "full"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["one_pass", "vectorized"])
@pytest.mark.parametrize("where", DRAWING)
def test_batches_are_padded_where_random_numbers_are_drawn_in_loops_and_branches(where, engine):
    make_layers, padding = DRAWING[where]
    x = np.random.default_rng(0).random([40, 8, 8, 1]).astype("float32")
    trained, batches, budget = tfdp.make_private(
        drawing(*make_layers()),
        (x, np.arange(40) % 3),
        epochs=1,
        target_epsilon=2.0,
        batch_size=20,
        loss=support.crossentropy("auto"),
        metrics=["accuracy"],
        verbose=False,
        engine=engine,
    )
    assert batches.sampling.padding == padding
    history = trained.fit(batches, epochs=1, callbacks=[budget], verbose=0).history
    assert np.isfinite(history["loss"]).all() and "accuracy" in history
    assert trained.optimizer.ledger.steps == 2


def test_what_is_refused_on_padded_batches_as_well_is_refused_for_its_own_reason():
    stack = [layers.RandomCrop(6, 6), layers.BatchNormalization()]
    with pytest.raises(ValueError, match="BatchNormalization"):
        tfdp.make_private(
            drawing(*stack),
            (np.zeros([40, 8, 8, 1], "float32"), np.zeros(40, int)),
            epochs=1,
            target_epsilon=2.0,
            loss=support.crossentropy("auto"),
        )
