"""Tasks of KerasHub: `make_private` applies their preprocessor to each example by itself.

The task here has the two methods by which KerasHub's tasks preprocess, and their names.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.keras3.support import crossentropy
from tfdp.data import transforms

LENGTH, N = 4, 60
WORDS = ["good", "bad", "film", "very"]
RNG = np.random.default_rng(0)
TEXTS = np.array([" ".join(RNG.choice(WORDS, RNG.integers(1, LENGTH + 1))) for _ in range(N)])
LABELS = RNG.integers(0, 2, N)


class PipelineModel(keras.Model):
    """Maps its preprocessor over batches, as KerasHub's class of this name."""

    preprocessor = None

    def preprocess_samples(self, x, y=None, sample_weight=None):
        if self.preprocessor is None:
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        return self.preprocessor(x, y, sample_weight)

    def fit(self, x=None, y=None, validation_data=None, **kwargs):
        def mapped(data):
            data = data if isinstance(data, tf.data.Dataset) else of_arrays(*data)
            return data.map(self.preprocess_samples, num_parallel_calls=2).prefetch(2)

        if validation_data is not None:
            kwargs["validation_data"] = mapped(validation_data)
        return super().fit(mapped(x if y is None else (x, y)), **kwargs)


def of_arrays(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(20)


PipelineModel.__module__ = "keras_hub.src.utils.pipeline_model"
VOCABULARY = keras.layers.StringLookup(vocabulary=WORDS)


def tokens(x):
    ids = VOCABULARY(tf.strings.split(x))
    if isinstance(ids, tf.RaggedTensor):
        return ids.to_tensor(shape=[None, LENGTH])
    return tf.pad(ids, [[0, LENGTH - tf.shape(ids)[0]]])


def classifier(preprocessor=None):
    inputs = keras.Input([LENGTH], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(inputs))
    task = PipelineModel(inputs, keras.layers.Dense(2)(hidden))

    def preprocess(x, y, weight):
        return keras.utils.pack_x_y_sample_weight(
            tf.ensure_shape(tokens(x), [*x.shape, LENGTH]), y, weight
        )

    task.preprocessor = preprocessor or preprocess
    task.compile("adam", crossentropy(), metrics=["accuracy"])
    return task


def make(task, data, **kwargs):
    arguments = {"epochs": 1, "target_epsilon": 8.0, "verbose": False, **kwargs}
    return tfdp.keras3.make_private(task, data, **arguments)


FORMS = {
    "arrays": ((TEXTS, LABELS), {}),
    "lists": ((TEXTS.tolist(), LABELS.tolist()), {}),
    "dataset": (tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)), {}),
    "dict": ({"text": TEXTS, "label": LABELS}, {"features": "text", "label": "label"}),
    "source": ([*zip(TEXTS, LABELS, strict=True)], {}),
    "padded": ((TEXTS, LABELS), {"secure_noise": True}),
    "weighted": ((TEXTS, LABELS, np.ones(N, "float32")), {}),
    "users": (
        (TEXTS, LABELS),
        {"privacy_unit": np.arange(N) // 3, "examples_per_user": 2, "batch_size": 5},
    ),
}


class Source:
    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_texts_train_a_task(form):
    data, arguments = FORMS[form]
    task = classifier()
    task, batches, budget = make(task, Source(data) if form == "source" else data, **arguments)
    history = task.fit(
        batches, callbacks=[budget], validation_data=(TEXTS, LABELS), verbose=0
    ).history
    assert task.optimizer.ledger.steps > 0 and "val_accuracy" in history
    held = np.concatenate([np.array(tf.nest.flatten(b)[0]) for b in batches.repeat(3)])
    known = {tuple(row) for row in tokens(tf.constant(TEXTS)).numpy()} | {(0,) * LENGTH}
    assert len(held) and {tuple(row) for row in held} <= known


def test_data_without_labels():
    def language_model(x, y, weight):
        ids = tf.ensure_shape(tokens(x), [*x.shape, LENGTH])
        return keras.utils.pack_x_y_sample_weight(ids, tf.cast(ids[..., 0] > 1, tf.int32))

    task, batches, budget = make(classifier(language_model), TEXTS)
    task.fit(batches, callbacks=[budget], verbose=0)
    assert task.optimizer.ledger.steps > 0


@pytest.mark.slow
def test_batches_that_were_not_preprocessed_are_refused():
    batches = tfdp.data.poisson_batches((TEXTS, LABELS), expected_batch_size=10)
    task = classifier()
    task.compile(tfdp.keras3.DPSGD(1.0, 1.0, sampling=batches.sampling), crossentropy())
    with pytest.raises(ValueError, match=r"applied to, example by example.*Give `make_private`"):
        task.fit(batches, verbose=0)
    other, prepared, _ = make(classifier(), (TEXTS, LABELS))
    with pytest.raises(ValueError, match="applied to, example by example"):
        classifier().fit(prepared, verbose=0)
    other.fit(prepared.take(1), verbose=0)
    assert other.optimizer.ledger.steps == 1


def test_without_a_preprocessor_batches_are_taken_as_they_are():
    task = classifier()
    task.preprocessor = None
    ids = tokens(tf.constant(TEXTS)).numpy()
    task, batches, budget = make(task, (ids, LABELS))
    task.fit(batches, callbacks=[budget], verbose=0)
    assert task.optimizer.ledger.steps > 0


def test_results_of_several_shapes_are_refused():
    def ragged(x, y, weight):
        return VOCABULARY(tf.strings.split(x)), y

    with pytest.raises(ValueError, match=r"one shape, which a batch can hold.*`sequence_length`"):
        make(classifier(ragged), (TEXTS, LABELS))


def test_a_preprocessor_that_keeps_a_state_is_refused():
    seen = tf.Variable(0, trainable=False, dtype=tf.int64)

    def counting(x, y, weight):
        return tokens(x) + seen.assign_add(1), y

    with pytest.raises(ValueError, match="no side effects, by which examples could get into each"):
        make(classifier(counting), (TEXTS, LABELS))


def masked(x, y, weight):
    """Draws more random numbers for a longer text, as a masked language model does."""
    ids = VOCABULARY(tf.strings.split(x))
    return tf.pad(tf.random.shuffle(ids, seed=1), [[0, LENGTH - tf.shape(ids)[0]]]), y


def moved_rows(texts, other):
    """Returns which examples are preprocessed otherwise when one is another text."""
    held = []
    for each in (texts, other):
        keras.utils.set_random_seed(1)
        examples = tf.data.Dataset.from_tensor_slices((each, LABELS))
        task = classifier(masked)
        rows = transforms.keyed_rows(lambda x, y, t=task: t.preprocess_samples(x, y), examples)
        held.append(np.array([x for x, _ in rows.as_numpy_iterator()]))
    return np.flatnonzero(np.any(held[0] != held[1], axis=1))


def test_what_is_drawn_for_an_example_depends_on_no_other(monkeypatch):
    def known():
        for row in range(N):
            yield np.array([row, 5, 7], np.int64)

    monkeypatch.setattr(transforms, "_fresh_secrets", known)
    other = TEXTS.copy()
    other[7] = "good" if len(TEXTS[7].split()) > 1 else "good bad film very"
    assert list(moved_rows(TEXTS, other)) == [7]
    # Mutant: numbers in the order of the rows, of the stream that TensorFlow's seed decides.
    for name in ("_is_drawing", "_has_side_effect"):
        monkeypatch.setattr(transforms, name, lambda library, node: False)
    assert len(moved_rows(TEXTS, other)) > 1


def test_secrets_are_new_each_time():
    examples = tf.data.Dataset.from_tensor_slices((np.full(N, "good bad film very"), LABELS))
    held = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        rows = transforms.keyed_rows(lambda x, y: masked(x, y, None), examples)
        held.append(np.array([x for x, _ in rows.as_numpy_iterator()]))
    assert np.any(held[0] != held[1])
    assert len(np.unique(held[0], axis=0)) > 10
