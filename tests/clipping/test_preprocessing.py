"""Models with preprocessing layers: both engines give what a loop over examples gives."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine, VectorizedEngine

layers = tf.keras.layers
N, CLIP = 8, 0.4
TEXTS = np.array(["red", "", "a green tree", "tree by the sea red", "sea", "red red red", "a", "?"])
IDS = np.random.default_rng(0).integers(0, 5, [N, 3])
IMAGES = np.random.default_rng(1).uniform(size=[N, 6, 6, 2]).astype("float32")
Y = np.arange(N) % 3
WORDS = ["red", "green", "sea"]


def with_embedding(layer, *shape, dtype):
    return tf.keras.Sequential(
        [
            layers.Input(shape, dtype=dtype),
            layer,
            layers.Embedding(8, 3),
            layers.Lambda(lambda t: tf.reduce_sum(t, 1)),
            layers.Dense(3),
        ]
    )


def encoded(layer, *shape, dtype):
    return tf.keras.Sequential([layers.Input(shape, dtype=dtype), layer, layers.Dense(3)])


def image_model(*augmentations):
    return tf.keras.Sequential(
        [
            layers.Input(IMAGES.shape[1:]),
            layers.Conv2D(2, 2),
            *augmentations,
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def vectorizer(**kwargs):
    return layers.TextVectorization(vocabulary=WORDS, **kwargs)


ONE_PASS = {
    "words": lambda: with_embedding(vectorizer(output_sequence_length=4), 1, dtype="string"),
    "pairs of words": lambda: with_embedding(
        vectorizer(output_sequence_length=4, ngrams=2), 1, dtype="string"
    ),
    "counted words": lambda: encoded(vectorizer(output_mode="count"), 1, dtype="string"),
    "weighted words": lambda: encoded(
        vectorizer(output_mode="tf_idf", idf_weights=[1.0, 2.0, 3.0]), 1, dtype="string"
    ),
    "names": lambda: with_embedding(layers.StringLookup(vocabulary=WORDS), 1, dtype="string"),
    "hashed": lambda: with_embedding(layers.Hashing(8), 1, dtype="string"),
    "numbers": lambda: with_embedding(layers.IntegerLookup(vocabulary=[1, 3]), 3, dtype="int64"),
    "categories": lambda: encoded(layers.CategoryEncoding(5), 3, dtype="int64"),
}
CROPS = {
    "middle": lambda: image_model(layers.CenterCrop(3, 3)),
    "enlarged": lambda: image_model(layers.CenterCrop(7, 9)),
    "cut to shape": lambda: image_model(layers.Resizing(3, 4, crop_to_aspect_ratio=True)),
}
VECTORIZED = {
    "of any length": lambda: with_embedding(vectorizer(), 1, dtype="string"),
    "characters": lambda: with_embedding(
        vectorizer(output_sequence_length=5, split="character"), 1, dtype="string"
    ),
}


def data_of(model):
    if model.input_shape[1:] == IMAGES.shape[1:]:
        return IMAGES
    return IDS if model.input_shape[1] == 3 else TEXTS[:, np.newaxis]


def check(engine, model):
    x = data_of(model)
    found = support.ClippedSum(engine, model, x)(x, Y)
    np.testing.assert_allclose(
        found, support.looped_clipped_sum(model, x, Y, CLIP), rtol=1e-4, atol=1e-6
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [*ONE_PASS, *CROPS])
def test_one_pass(name):
    engine, model = OnePassEngine(CLIP), {**ONE_PASS, **CROPS}[name]()
    check(engine, model)
    report = engine.report()
    assert report.fallback is None and report.fast_fraction == 1


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["words", "counted words", "names", "cut to shape"])
def test_in_parts(name):
    engine = OnePassEngine(CLIP, rows_per_pass=3)
    check(engine, {**ONE_PASS, **CROPS}[name]())
    assert engine.report().fast_fraction == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [*ONE_PASS, *CROPS, *VECTORIZED])
def test_vectorized(name):
    check(VectorizedEngine(CLIP), {**ONE_PASS, **CROPS, **VECTORIZED}[name]())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", VECTORIZED)
def test_what_is_not_proven_is_vectorized(name):
    engine = OnePassEngine(CLIP)
    check(engine, VECTORIZED[name]())
    assert engine.report().fallback


def test_a_variable_without_a_rule_behind_words():
    class Own(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=[shape[-1]])

        def call(self, x):
            return x * tf.sin(self.w)

    model = ONE_PASS["words"]()
    model = tf.keras.Sequential(
        [layers.Input([1], dtype="string"), *model.layers[:-1], Own(), model.layers[-1]]
    )
    engine = OnePassEngine(CLIP)
    check(engine, model)
    assert engine.report().fallback is None


PUBLIC = tf.Variable(1.0, trainable=False)


class Branch(layers.Layer):
    """Weights that both branches use."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=[shape[-1], 3])

    def call(self, x):
        return tf.cond(PUBLIC > 0, lambda: x @ self.w, lambda: tf.tanh(x @ self.w))


@pytest.mark.parametrize("engine", [OnePassEngine, VectorizedEngine])
def test_weights_in_branches(engine):
    model = tf.keras.Sequential([layers.Input([3]), layers.Dense(3), Branch()])
    x = np.random.default_rng(2).normal(size=[N, 3]).astype("float32")
    np.testing.assert_allclose(
        support.ClippedSum(engine(CLIP), model, x)(x, Y),
        support.looped_clipped_sum(model, x, Y, CLIP),
        rtol=1e-4,
        atol=1e-6,
    )


AUGMENTATIONS = {
    "crop": lambda: layers.RandomCrop(4, 4),
    "flip": layers.RandomFlip,
    "rotation": lambda: layers.RandomRotation(0.2),
    "zoom": lambda: layers.RandomZoom(0.2),
    "translation": lambda: layers.RandomTranslation(0.2, 0.2),
    "brightness": lambda: layers.RandomBrightness(0.2),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_random_augmentations_change_no_other_row(name):
    """One row's gradient is the same whatever the other rows are, if the stream is."""
    layer = AUGMENTATIONS[name]()
    model = image_model(layer)
    generator = layer._random_generator._generator
    sums = support.ClippedSum(OnePassEngine(CLIP), model, IMAGES)
    first = np.arange(N) == 0
    other = np.where(first[:, None, None, None], IMAGES, IMAGES[::-1])
    results = []
    for x in (IMAGES, other):
        generator.reset_from_seed(3)
        results.append(sums(x, Y, first))
    np.testing.assert_array_equal(*results)
