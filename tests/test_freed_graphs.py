"""Training leaves no graph behind, once the model is gone: memory of a long session stays level."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import selective_support, support
from tfdp.base import devices
from tfdp.clipping.loss_graph import out_of_range

layers = tf.keras.layers


def graphs():
    gc.collect()
    return [value for value in gc.get_objects() if isinstance(value, tf.__internal__.FuncGraph)]


def ids_and_labels():
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, [40, 5]), rng.integers(0, 3, 40)


def train(selective=False, padding=None, **how):
    arguments = {} if padding is None else {"padding": padding}
    data = tfdp.data.poisson_batches(ids_and_labels(), expected_batch_size=20, **arguments)
    model = tf.keras.Sequential(
        [layers.Embedding(7, 4, input_length=5), layers.Flatten(), layers.Dense(3)]
    )
    if selective:
        model = tfdp.SelectiveModel(model)
        optimizer = selective_support.optimizer(data=data, noise_seed=None)
    else:
        optimizer = tfdp.DPSGD(1.0, 1.0, sampling=data.sampling)
    model.compile(optimizer, support.crossentropy("auto"), **how)
    model.fit(data, epochs=1, verbose=0)


def left_behind(**case):
    train(**case)  # What is traced once in a process, and kept.
    before = weakref.WeakSet(graphs())  # Some of them, of other tests, may go meanwhile.
    train(**case)
    return sum(graph not in before for graph in graphs())


@pytest.mark.slow
@pytest.mark.parametrize("selective", [False, True])
def test_no_graph_is_left_behind(selective):
    assert left_behind(selective=selective) == 0


@pytest.mark.slow
def test_no_graph_is_left_behind_where_batches_are_looked_up_outside(monkeypatch):
    monkeypatch.setattr(devices, "compiled_for_gpu", devices.compiled_by_xla)
    assert left_behind(jit_compile=True, padding="full") == 0


@pytest.mark.slow
def test_graphs_that_a_table_keeps_are_noticed(monkeypatch):
    kept = []
    guard = out_of_range.guard
    monkeypatch.setattr(
        out_of_range, "guard", lambda loss, known: kept.append(loss) or guard(loss, known)
    )
    assert left_behind() > 0
