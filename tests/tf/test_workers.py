"""Several processes take one step, and must have been given the same."""

import json

import pytest

from experiments import workers
from tests import forks

PROGRAM = """
import json, os, sys
import numpy as np
import tfdp
import tensorflow as tf
from tfdp.step import replicas

strategy = tf.distribute.MultiWorkerMirroredStrategy()
given = {"noise_multiplier": 1.0, "restored_on": [], **json.loads(sys.argv[1])}
folder = sys.argv[2]
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if given.pop("blind", False):  # Mutant: nothing is compared.
    total = replicas.total
    replicas.total = lambda tensors, digest=None: total(tensors)
x = np.arange(360, dtype="float32").reshape([90, 4]) / 360
batches = tfdp.data.distributed_poisson_batches(
    strategy,
    lambda index, count: (x[index::count], x[index::count, 0]),
    dataset_size=90,
    expected_batch_size=30,
    padding="full",
)
restored_on = given.pop("restored_on")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(4,))])
    optimizer = tfdp.DPSGD(1.0, sampling=batches.sampling, **given)
    model.compile(optimizer, "mse")
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
model.fit(batches, steps_per_epoch=2, verbose=0)
checkpoint.write(f"{folder}/{worker}")
model.fit(batches, steps_per_epoch=2, verbose=0)
if worker in restored_on:
    checkpoint.read(f"{folder}/0")
model.fit(batches, steps_per_epoch=2, verbose=0)
steps = int(optimizer.iterations.numpy())
print(json.dumps([optimizer.released_steps(), steps, float(tf.reduce_sum(model.weights[0]))]))
"""

ONE, ALL = [1], [0, 1]
CLUSTERS = {
    "alike": [{}] * 2,
    "other noise": [{}, {"noise_multiplier": 0.1}],
    "restored on all": [{"restored_on": ALL, "clipping_rule": "adaptive_quantile"}] * 2,
    "restored on one": [{"restored_on": ONE, "clipping_rule": "adaptive_quantile"}] * 2,
    "restored on one, secure": [{"restored_on": ONE, "secure_noise": True}] * 2,
    "mutant": [{"restored_on": ONE, "blind": True}] * 2,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The two workers of each cluster."""
    found = {}
    for name, given in CLUSTERS.items():
        folder = tmp_path_factory.mktemp("workers")
        found[name] = forks.run_each(
            PROGRAM,
            [[json.dumps(changes), folder] for changes in given],
            environments=[{workers.CLUSTER: cluster} for cluster in workers.clusters(2)],
            together=True,
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "iterations"), [("alike", 6), ("restored on all", 4)])
def test_all_workers_have_one_model_and_one_count(name, iterations, ended):
    first, second = ended[name]
    assert first.status == second.status == 0, first.errors + second.errors
    assert first.output == second.output
    assert json.loads(first.output)[:2] == [[6, 0], iterations]


@pytest.mark.slow
def test_a_worker_that_was_given_something_else_is_an_error_in_all(ended):
    for worker in ended["other noise"]:
        assert worker.status and not worker.output
        assert "must give the optimizer the same arguments" in worker.errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["restored on one", "restored on one, secure"])
def test_a_checkpoint_that_one_worker_restored_is_an_error_in_all(name, ended):
    for worker in ended[name]:
        assert worker.status and not worker.output
        assert "restored on some of the workers alone" in worker.errors


@pytest.mark.slow
def test_workers_that_do_not_compare_are_caught(ended):
    """Mutant."""
    first, second = ended["mutant"]
    assert first.status == second.status == 0, first.errors + second.errors
    assert first.output != second.output
