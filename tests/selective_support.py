"""Small selective models that several test modules use."""

import tensorflow as tf

import tfdp
from tests import support

layers = tf.keras.layers
X, Y = support.small_data(64)
ALWAYS, NEVER = 1e6, -1e6  # thresholds
CLASSES = [tfdp.DPSURSGD, tfdp.DPSURAdam, tfdp.DPSURSignSGD, tfdp.DPSURSignAdam]


def batches(x=X, y=Y, expected_batch_size=16, seed=7, **kwargs):
    return tfdp.data.poisson_batches(
        (x, y), expected_batch_size=expected_batch_size, seed=seed, **kwargs
    )


def optimizer(cls=tfdp.DPSURSGD, data=None, **changes):
    """A DPSUR optimizer for `batches()`, which accepts about half of what it tries."""
    arguments = {
        "l2_norm_clip": 0.5,
        "noise_multiplier": 1.1,
        "validation_batch_size": 8,
        "validation_noise_multiplier": 1.0,
        "threshold": 0.0,
        "learning_rate": 0.1,
        "noise_seed": 3,
        "sampling": (data or batches()).sampling,
        **changes,
    }
    if arguments["threshold"] == NEVER:
        arguments.setdefault("max_attempts", 3)
    return cls(**arguments)


def compiled(optimizer, base=None, diagnostics=False, **kwargs):
    model = tfdp.SelectiveModel(base or support.small_model(), diagnostics)
    kwargs.setdefault("loss", support.crossentropy())
    model.compile(optimizer, **kwargs)
    return model


def state(model):
    """By name, everything that a checkpoint would hold but the ledger's counts."""
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables()]
    return {
        f"{i} {v.name}": tf.identity(v).numpy()
        for i, v in enumerate(variables)
        if "privacy_record" not in v.name
    }


def functional():
    inputs = {"a": layers.Input([4], name="a"), "b": layers.Input([4], name="b")}
    hidden = layers.Dense(5, activation="tanh")(inputs["a"]) + layers.Dense(5)(inputs["b"])
    return tf.keras.Model(inputs, layers.Dense(3)(hidden))


@tf.keras.utils.register_keras_serializable(package="tests")
class Subclassed(tf.keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(3)

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs))


MODELS = {
    "functional": (functional, {"a": X, "b": -X}),
    "sequential": (lambda: tf.keras.Sequential([layers.Dense(5), layers.Dense(3)]), X),
    "subclassed": (Subclassed, X),
}
