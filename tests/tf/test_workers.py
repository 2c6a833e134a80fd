"""Several processes take one step, and must have been given the same."""

import json

import pytest

from experiments import workers
from tests import forks

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


@pytest.fixture(scope="module")
def ended():
    """The workers of two clusters, of two each; in the second, one was given something else."""
    given = [{}, {}, {}, {"noise_multiplier": 0.1}]
    return forks.run_each(
        PROGRAM,
        [[json.dumps(changes)] for changes in given],
        environments=[{workers.CLUSTER: cluster} for cluster in workers.clusters(2, 2)],
        together=True,
    )


@pytest.mark.slow
def test_all_workers_have_one_model_and_one_count(ended):
    first, second = ended[:2]
    assert first.status == second.status == 0, first.errors + second.errors
    assert first.output == second.output
    assert json.loads(first.output)[0] == [6, 0]


@pytest.mark.slow
def test_a_worker_that_was_given_something_else_is_an_error_in_all(ended):
    for worker in ended[2:]:
        assert worker.status and not worker.output
        assert "must give the optimizer the same arguments" in worker.errors
