"""Small selective models that several test modules use."""

import tensorflow as tf

import tfdp
from tests import support

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
        **(data or batches()).sampling.optimizer_arguments(),
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
    """Everything that a checkpoint would hold, and the optimizer's counts in this process."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables(), *optimizer._released.counters]
    return [tf.identity(variable).numpy() for variable in variables]
