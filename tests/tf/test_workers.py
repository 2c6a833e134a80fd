"""Several processes take one step, and must have been given the same."""

import contextlib
import json
import subprocess
import sys

import pytest

from experiments import workers

PROGRAM = """
import json, sys
import numpy as np
import tfdp
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
given = {"noise_multiplier": 1.0, **json.loads(sys.argv[1])}
x = np.arange(360, dtype="float32").reshape([90, 4]) / 360
batches = tfdp.data.distributed_poisson_batches(
    strategy,
    lambda index, count: (x[index::count], x[index::count, 0]),
    dataset_size=90,
    expected_batch_size=30,
)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
    optimizer = tfdp.DPSGD(1.0, given["noise_multiplier"], sampling=batches.sampling)
    model.compile(optimizer, "mse")
model.fit(batches, steps_per_epoch=6, verbose=0)
print(json.dumps([optimizer.released_steps(), float(tf.reduce_sum(model.weights[0]))]))
"""


def run(*differences):
    """Runs one worker for each of the differences from what workers are given."""
    commands = [[sys.executable, "-c", PROGRAM, json.dumps(given)] for given in differences]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        started = workers.start(commands, [pipes] * len(commands))
        for worker in started:
            stack.callback(worker.kill)
        return [(*worker.communicate(timeout=300), worker.returncode) for worker in started]


@pytest.mark.slow
def test_all_workers_have_one_model_and_one_count():
    (first, _, _), (second, _, _) = run({}, {})
    assert first == second
    assert json.loads(first)[0] == [6, 0]


@pytest.mark.slow
def test_a_worker_that_was_given_something_else_is_an_error_in_all():
    for output, errors, status in run({}, {"noise_multiplier": 0.1}):
        assert status and not output
        assert "must give the optimizer the same arguments" in errors
