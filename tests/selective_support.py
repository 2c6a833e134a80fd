"""Small selective models that several test modules use."""

import tensorflow as tf

import tfdp
from tests import support
from tests.front_ends import FRONT_ENDS

layers = tf.keras.layers
X, Y = support.small_data(64)
ALWAYS, NEVER = 1e6, -1e6  # thresholds
CLASSES = [tfdp.DPSURSGD, tfdp.DPSURAdam, tfdp.DPSURSignSGD, tfdp.DPSURSignAdam]
CLASSES_OF_BOTH = [getattr(front.tfdp, cls.__name__) for front in FRONT_ENDS for cls in CLASSES]


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


def front_of(cls):
    """The front end that has an optimizer's class."""
    return next(front for front in FRONT_ENDS if getattr(front.tfdp, cls.__name__) is cls)


def small_model(front):
    """The model of `support.small_model`, with its weights, in any Keras."""
    dense = front.keras.layers.Dense
    model = front.keras.Sequential(
        [front.keras.layers.Input([4]), dense(5, activation="tanh"), dense(3)]
    )
    model.set_weights(support.small_model().get_weights())
    return model


def compiled(optimizer, base=None, diagnostics=False, **kwargs):
    """A selective model of the optimizer's Keras."""
    front = front_of(type(optimizer))
    model = front.tfdp.SelectiveModel(base or small_model(front), diagnostics)
    kwargs.setdefault("loss", front.crossentropy("none"))
    model.compile(optimizer, **kwargs)
    return model


def state(model):
    """By name, everything that a checkpoint would hold but the ledger's counts."""
    model.optimizer.build(model.trainable_variables)
    own = model._front_end.variables(model)
    return {
        f"{i} {v.name}": tf.identity(v).numpy()
        for i, v in enumerate([*own, *model.optimizer._state_variables()])
        if "privacy_record" not in v.name
    }


def functional(front):
    layers = front.keras.layers
    inputs = {"a": layers.Input([4], name="a"), "b": layers.Input([4], name="b")}
    hidden = layers.Dense(5, activation="tanh")(inputs["a"]) + layers.Dense(5)(inputs["b"])
    return front.keras.Model(inputs, layers.Dense(3)(hidden))


def sequential(front):
    layers = front.keras.layers
    return front.keras.Sequential([layers.Dense(5), layers.Dense(3)])


class Subclassed:
    """A subclassed model of any Keras."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        layers = self.front.keras.layers
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(3)

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs))


def _registered(front):
    made = type("Subclassed", (Subclassed, front.keras.Model), {"front": front})
    register = front.keras.utils.register_keras_serializable
    return register(package="tests")(made)


SUBCLASSED = {front.part: _registered(front) for front in FRONT_ENDS}
MODELS = {
    "functional": (functional, {"a": X, "b": -X}),
    "sequential": (sequential, X),
    "subclassed": (lambda front: SUBCLASSED[front.part](), X),
}
