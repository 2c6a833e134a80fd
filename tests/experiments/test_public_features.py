"""Features of a frozen network are computed once, each of its example alone."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import public_features
from tests.front_ends import keras, needs_keras_3

pytestmark = needs_keras_3


class _Tokenizer:
    """In the place of KerasHub's: the ids of letters."""

    pad_token_id, cls_token_id, sep_token_id = 0, 101, 102

    def __call__(self, texts):
        return [[ord(letter) for letter in text] for text in texts]


class _Backbone:
    """In the place of KerasHub's: a token's output is its id, twice."""

    def __init__(self):
        self.output = {"sequence_output": np.zeros([1, 1, 2])}

    def __call__(self, inputs, training):
        assert not training
        ids, segments = inputs["token_ids"], inputs["segment_ids"]
        unmasked = tf.cast(inputs["padding_mask"] == 0, ids.dtype)
        outputs = tf.cast(ids + 1000 * unmasked + segments, tf.float32)
        return {"sequence_output": tf.stack([outputs, outputs], -1)}


class _Shape:
    """Has the shape of a model's outputs, and cannot be called."""

    def __init__(self, output_shape):
        self.output_shape = output_shape


def test_the_last_tokens():
    found = public_features.token_ids([b"", b"ab", b"abc<br />d"], _Tokenizer(), 5)
    a, b, c, d = (ord(letter) for letter in "abcd")
    assert found.tolist() == [[101, 102, 0, 0, 0], [101, a, b, 102, 0], [101, c, ord(" "), d, 102]]
    assert found.dtype == np.int32


def test_means_leave_padding_out(tmp_path):
    ids = np.array([[101, 7, 102, 0, 0], [101, 102, 0, 0, 0]], np.int32)
    outputs = public_features.token_outputs(ids, _Backbone(), 2, tmp_path)
    assert outputs.dtype == np.float16
    np.testing.assert_array_equal(outputs, np.stack([ids, ids], -1))
    found = public_features.means_over_tokens(outputs, tmp_path)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[70, 70], [101.5, 101.5]], rtol=1e-6)


def test_outputs_of_other_layers_have_files_of_their_own(tmp_path):
    ids = np.array([[101, 7, 102]], np.int32)
    for layers in (1, 2, 2):
        public_features.token_outputs(ids, _Backbone(), layers, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture(scope="module")
def trunk():
    """In the place of the first part of a network."""
    layers = [keras.layers.Conv2D(3, 2, 4), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input([8, 8, 3]), *layers])


def test_outputs_are_computed_once(trunk, tmp_path, monkeypatch):
    """In parts; other images, sizes and weights have files of their own."""
    monkeypatch.setattr(public_features, "_BATCH", 2)
    images = np.random.default_rng(0).random([5, 8, 8, 3], np.float32)
    found = public_features.trunk_outputs(images, trunk, 8, tmp_path)
    np.testing.assert_allclose(found, trunk(images), rtol=1e-4, atol=1e-5)
    again = public_features.trunk_outputs(images, _Shape(trunk.output_shape), 8, tmp_path)
    np.testing.assert_array_equal(again, found)
    assert len(list(tmp_path.iterdir())) == 1
    public_features.trunk_outputs(images[:4], trunk, 8, tmp_path)
    public_features.top_outputs(images, trunk, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
