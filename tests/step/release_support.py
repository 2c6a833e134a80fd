"""Small trainings whose releases are counted."""

import tensorflow as tf

import tfdp
from tests import support

X, Y = support.small_data(64)
PARAMETERS = {
    "l2_norm_clip": 1.0,
    "noise_multiplier": 1.0,
    "expected_batch_size": 16.0,
    "num_microbatches": 0.0,
    "dataset_size": 64.0,
}


def batches(steps=3):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=steps)


def make(noise_multiplier=1.0, cls=tfdp.DPSGD):
    return cls(1.0, noise_multiplier, sampling=batches().sampling, learning_rate=0.1)


def compiled(optimizer=None, model=None, **kwargs):
    model = model or tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=[4])])
    return support.compiled(optimizer or make(), model, **kwargs)


def train(model, steps=3):
    model.fit(batches(steps), verbose=0)


def steps_of(model):
    return tfdp_ledger(model).steps


def tfdp_ledger(model):
    from tfdp.step.record.record_ledger import ledger_of_model

    return ledger_of_model(model)
