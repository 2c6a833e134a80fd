"""Tasks of KerasHub, small and with random weights, are trained as their users train them."""

import warnings

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.hub.backbones import (
    BRACKETS,
    CLASSES,
    EXAMPLES,
    IMAGES,
    LABELS,
    LENGTH,
    MASKS,
    OFF,
    PIXELS,
    SEQ2SEQ,
    TEXTS,
    _byte_pair,
    _sentence_piece,
    bart,
    bert,
    deep_lab,
    gpt2,
    resnet,
    text_task,
    vit,
)
from tests.keras3.support import crossentropy
from tfdp.base import devices
from tfdp.base.random import keyed_functions
from tfdp.data import tasks
from tfdp.step import private_fit

PAIRS = (TEXTS, LABELS)


def train(task, data, **kwargs):
    arguments = {"epochs": 1, "target_epsilon": 8.0, "batch_size": 8, "verbose": False, **kwargs}
    task, batches, budget = tfdp.keras3.make_private(task, data, **arguments)
    task.fit(batches.take(2), callbacks=[budget], verbose=0)
    assert task.optimizer.ledger.steps == 2
    return task


def epsilon_of(model):
    return float(tfdp.privacy_statement(model, delta=1e-3).split("epsilon = ")[1].split()[0])


@pytest.mark.slow
def test_batches_that_do_not_fit_come_in_chunks(monkeypatch):
    monkeypatch.setattr(devices, "memory_budget", lambda: 2**16)
    arguments = {"epochs": 1, "noise_multiplier": 1.0, "batch_size": 8, "verbose": False}
    task, batches, _ = tfdp.keras3.make_private(bert(), PAIRS, **arguments)
    chunks = batches.sampling.gradient_accumulation_steps
    assert chunks > 1
    task.fit(batches.take(2 * chunks), verbose=0)  # As they are: they are preprocessed.
    assert task.optimizer.ledger.steps == 2


FORMS = {
    "weights": (bert, (*PAIRS, np.ones(EXAMPLES, "float32")), {}),
    "two texts": (bert, ((TEXTS, TEXTS[::-1].copy()), LABELS), {}),
    "masked": (lambda: bert("MaskedLM"), TEXTS, {}),
    "users": (  # Texts alone are those of `test_a_language_model_keeps_sampler_and_metrics`.
        gpt2,
        TEXTS,
        {"privacy_unit": np.arange(EXAMPLES) // 4, "examples_per_user": 2, "batch_size": 4},
    ),
    "sequences": (bart, {name: texts.tolist() for name, texts in SEQ2SEQ.items()}, {}),
    "images": (vit, (IMAGES, LABELS), {}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_raw_data_train_a_task(form):
    make, data, arguments = FORMS[form]
    train(make(), data, **arguments)


@pytest.mark.parametrize(
    ("data", "features", "label"),
    [
        ((TEXTS.tolist(), LABELS.tolist()), None, None),
        (tf.data.Dataset.from_tensor_slices(PAIRS), None, None),
        ({"t": TEXTS, "l": LABELS}, "t", "l"),
    ],
    ids=["lists", "dataset", "names"],
)
def test_other_forms_of_the_data_are_the_same(data, features, label):
    task = bert()
    x, y = tasks.prepared(task, data, features, label, None, False).data
    expected = task.preprocessor(TEXTS.tolist())
    assert set(x) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(x[name], values)
    np.testing.assert_array_equal(y, LABELS)


@pytest.mark.slow
def test_a_language_model_keeps_sampler_and_metrics():
    task = gpt2()
    perplexity = keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=1)
    task.compile("adam", crossentropy(), weighted_metrics=[perplexity], sampler="greedy")
    before = task.generate("the cat", max_length=8)
    sampler = task.sampler
    train(task, TEXTS)
    assert task.sampler is sampler and before
    assert task.generate(["the cat"], max_length=8)[0].startswith("the cat")
    assert task.evaluate(TEXTS, verbose=0)[1] > 1


@pytest.mark.slow
def test_arrays_that_were_preprocessed():
    task = bert()
    arrays = task.preprocessor(TEXTS.tolist())
    train(task, (arrays, LABELS))
    with pytest.raises(ValueError, match=r"hold the texts .*BertTextClassifierPreprocessor"):
        train(bert(), (arrays["token_ids"], LABELS))


@pytest.mark.parametrize("data", [PAIRS, ([*TEXTS], LABELS)])
def test_a_task_is_validated_with_raw_data(data):
    assert tfdp.validate(bert(), data=data).ok
    assert tfdp.validate(gpt2(), data=data[0]).ok
    with pytest.raises(ValueError, match="`data` must"):
        tfdp.validate(bert(), data=(IMAGES, LABELS))


def test_data_that_do_not_fit():
    for data, match in (
        ((TEXTS, LABELS[:30]), r"one positive length. Received shapes: \[\(40,\), \(30,\)\]"),
        ((TEXTS[:, None], LABELS), "one text for each example"),
        (tf.data.Dataset.from_tensor_slices(PAIRS).repeat(), "infinite"),
    ):
        with pytest.raises(ValueError, match=match):
            train(bert(), data)


def test_texts_that_are_longer_than_the_positions():
    """The error names the argument and the limit, not operations of TensorFlow."""
    task = bert()
    limit = task.backbone.max_sequence_length
    arrays = {name: np.zeros([4, limit + 1], "int32") for name in task.input}
    with pytest.raises(ValueError, match=rf"of `token_ids` must be at most {limit}, .* BertBackb"):
        tfdp.keras3.make_private(task, (arrays, LABELS[:4]), epochs=1, target_epsilon=8.0)
    task.preprocessor.sequence_length = limit + 1
    with pytest.raises(ValueError, match=rf"`sequence_length` .* at most {limit}.*: {limit + 1}\."):
        tfdp.keras3.make_private(task, PAIRS, epochs=1, target_epsilon=8.0)


MASKED = {
    "DebertaV3": lambda: _sentence_piece("DebertaV3", *BRACKETS, pad="[PAD]"),
    "Roberta": lambda: _byte_pair("Roberta"),
}


def filled_in(task):
    """The preprocessed texts of a masked language model, with their words filled in again."""
    x, y, weights = tasks.prepared(task, TEXTS, None, None, None, False).data
    tokens, (rows, places) = x["token_ids"].copy(), np.nonzero(weights)
    tokens[rows, x["mask_positions"][rows, places]] = y[rows, places]
    return tokens


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MASKED)
def test_masked_language_models_of_every_tokenizer(name, monkeypatch):
    """Tokenizers may keep what they made of a word; masks follow from a secret of each text."""
    arguments = {**OFF, "bucket_size": 4} if name == "DebertaV3" else OFF
    tokenizer = MASKED[name]()
    plain = getattr(keras_hub.models, f"{name}TextClassifierPreprocessor")
    expected = plain(tokenizer, sequence_length=LENGTH)(TEXTS.tolist())["token_ids"]
    task = text_task(name, "MaskedLM", MASKED[name](), **arguments)
    np.testing.assert_array_equal(filled_in(task), expected)
    if name == "DebertaV3":
        train(task, TEXTS)
        assert not task.optimizer.clipping.report().slow
    else:  # Mutant: what was made of a word is not kept.
        monkeypatch.setattr(keyed_functions, "_ACTING", frozenset({"Assert"}))
        task = text_task(name, "MaskedLM", MASKED[name](), **arguments)
        assert np.any(filled_in(task) != expected)


def test_a_task_without_a_preprocessor_is_fine_tuned(capsys):
    """The rate of its class, 5e-5, is for gradients without noise, as that of other tasks."""
    data = (PIXELS, np.eye(CLASSES, dtype="float32")[MASKS])
    task = train(deep_lab(), data, verbose=True)
    assert task.preprocessor is None and not task.optimizer.clipping.report().slow
    assert "learning rate 0.002, which falls linearly to 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_sampler_does_not_end_privacy(monkeypatch):
    task, batches, budget = tfdp.keras3.make_private(
        gpt2(), TEXTS, epochs=1, target_epsilon=8.0, batch_size=8, verbose=False
    )
    task.compile(task.optimizer, "auto", sampler="top_k")
    task.fit(batches.take(1), callbacks=[budget], verbose=0)
    task.compile(sampler="greedy")  # It replaces the optimizer.
    arrays = task.preprocessor(TEXTS.tolist())
    own = tfdp.data.poisson_batches(arrays, expected_batch_size=8)
    for given in (batches, batches.take(1), own):
        with pytest.raises(ValueError, match="compiled with Adam, which no ledger counts"):
            task.fit(given, verbose=0)
    # Mutant: the weights are trained without privacy, and the statement says nothing of it.
    spent, before = epsilon_of(task), task.get_weights()[0]
    monkeypatch.setattr(private_fit, "_check_is_not_private", lambda model, x: None)
    task.fit(batches.take(1), verbose=0)
    assert epsilon_of(task) == spent and np.any(task.get_weights()[0] != before)


@pytest.mark.slow
def test_own_compile_with_the_preprocessor():
    task = bert()
    x = task.preprocessor(TEXTS.tolist())
    for data, match in (((x, LABELS), None), (PAIRS, "applied to, example by example")):
        batches = tfdp.data.poisson_batches(data, expected_batch_size=8)
        optimizer = tfdp.keras3.DPOptimizer(
            keras.optimizers.AdamW(1e-3), 1.0, 1.0, sampling=batches.sampling
        )
        task.compile(optimizer, crossentropy())
        if match is None:
            task.fit(batches, verbose=0)
            assert task.optimizer.ledger.steps == 5
        else:
            with pytest.raises(ValueError, match=match):
                task.fit(batches, verbose=0)
    # Mutant: names alone do not say that texts were preprocessed.
    raw = tf.nest.map_structure(lambda _: tf.TensorSpec([], tf.string), task.input)
    assert not tasks._is_preprocessed(task, (raw, tf.TensorSpec([], tf.int64)))


@pytest.mark.slow
def test_adapters_of_a_quantized_backbone():
    task = gpt2()
    task.backbone.quantize("int8")
    task.backbone.enable_lora(2)
    train(task, TEXTS)
    assert not task.optimizer.clipping.report().slow
    assert task.generate("the cat", max_length=8)


@pytest.mark.slow
def test_quantized_after_training_and_another_training():
    task = gpt2()
    task.backbone.enable_lora(2)
    spent = epsilon_of(train(task, TEXTS))
    task.backbone.quantize("int8")
    assert epsilon_of(task) == spent
    train(gpt2(), TEXTS)  # Without adapters, in the same process.


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_half_precision(policy):
    task = train(bert(dtype=policy), PAIRS)
    assert all(np.all(np.isfinite(v.numpy())) for v in task.trainable_variables)
    assert not task.optimizer.clipping.report().slow


@pytest.mark.slow
def test_a_trained_task_takes_raw_data_and_its_files_hold_what_was_spent(tmp_path):
    task = train(bert(), PAIRS)
    assert task.predict(TEXTS[:5], verbose=0).shape == (5, 3)
    assert len(task.evaluate(TEXTS, LABELS, verbose=0)) == 2
    spent = epsilon_of(task)
    task.save(tmp_path / "task.keras")
    task.save_to_preset(str(tmp_path / "preset"))
    task.save_weights(tmp_path / "task.weights.h5")

    def new_head():
        backbone = keras_hub.models.BertBackbone.from_preset(str(tmp_path / "preset"))
        preprocessor = bert().preprocessor
        return keras_hub.models.BertTextClassifier(backbone, 2, preprocessor=preprocessor)

    def of_weights():
        task = bert()
        task.load_weights(tmp_path / "task.weights.h5")
        return task

    for load, warns in (
        (lambda: keras.models.load_model(tmp_path / "task.keras"), True),
        (lambda: keras_hub.models.TextClassifier.from_preset(str(tmp_path / "preset")), True),
        (of_weights, True),
        (new_head, False),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loaded = load()
        assert any("Adam, which is not private" in str(w.message) for w in found) == warns
        assert epsilon_of(loaded) == spent
    with pytest.raises(ValueError, match="target_epsilon"):
        train(loaded, PAIRS, target_epsilon=0.1)


@pytest.mark.slow
def test_batch_normalization_of_a_task_is_frozen():
    task = resnet()  # With `by="frozen"`.
    assert isinstance(task, keras_hub.models.ResNetImageClassifier) and task.preprocessor
    again = tfdp.keras3.replace_batch_normalization(task, by="frozen")
    before = task.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(again.predict(IMAGES, verbose=0), before, rtol=1e-5)
    held = [v.numpy() for v in again.non_trainable_variables]
    assert len(held) >= 8
    train(again, (IMAGES, LABELS))
    for old, new in zip(held, again.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(task.predict(IMAGES, verbose=0), before)
    task.backbone.trainable = False
    head = tfdp.keras3.replace_batch_normalization(task, by="frozen")
    assert len(head.trainable_variables) == 2


@pytest.mark.slow
def test_groups_in_a_task():
    backbone = keras_hub.models.VGGBackbone([1], [8], image_shape=(8, 8, 3))
    task = keras_hub.models.ImageClassifier(backbone, num_classes=3)
    with pytest.raises(ValueError, match=r"one of \['group', 'frozen'\]"):
        tfdp.keras3.replace_batch_normalization(task, by="instance")
    task = tfdp.keras3.replace_batch_normalization(resnet(), by="group")
    train(task, (IMAGES, LABELS))


IMAGE_FORMS = {
    "arrays, padded": ((IMAGES, LABELS), {"secure_noise": True}),
    "dataset, augmented": (
        tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)),
        {"transform": lambda x, y: (tf.image.random_flip_left_right(x), y), "augmentations": 2},
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_many_images_are_preprocessed_as_they_are_drawn(form, monkeypatch):
    data, arguments = IMAGE_FORMS[form]
    task = vit()
    kept = tasks.prepared(task, (IMAGES, LABELS), None, None, None, False)
    monkeypatch.setattr(tasks, "_IMAGE_BYTES", 1000)
    drawn = tasks.prepared(task, (IMAGES, LABELS), None, None, None, False)
    assert kept.transform is None and drawn.data[0].shape == IMAGES.shape
    x, y = tf.function(drawn.transform)(tf.constant(IMAGES[3]), tf.constant(LABELS[3]))
    np.testing.assert_allclose(x, kept.data[0][3], rtol=1e-6)
    assert y == kept.data[1][3]
    train(task, data, **arguments)
    assert task.predict(IMAGES[:2], verbose=0).shape == (2, 3)


class OfSeveralSizes:
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return IMAGES[index, : 20 + index % 3], LABELS[index]


def test_images_of_several_sizes():
    examples = tf.data.Dataset.from_generator(
        lambda: iter([OfSeveralSizes()[i] for i in range(EXAMPLES)]),
        output_signature=(tf.TensorSpec([None, None, 3], tf.uint8), tf.TensorSpec([], tf.int64)),
    )
    forms = (OfSeveralSizes(), examples)
    (x, y), (of_dataset, _) = (
        tasks.prepared(vit(), form, None, None, None, False).data for form in forms
    )
    assert x.shape == (EXAMPLES, 32, 32, 3)
    np.testing.assert_array_equal(of_dataset, x)
    np.testing.assert_array_equal(y, LABELS)


def in_python(change):
    """A BERT whose preprocessor takes Python's strings alone, and changes each."""
    task = bert()
    of_hub = task.preprocessor
    task._preprocessor = None
    task.__dict__["_preprocessor"] = lambda text: of_hub(change(str.lower(text)))
    return task


@pytest.mark.slow
def test_a_preprocessor_in_python_runs_once(capsys):
    calls = []

    def strip(text):
        calls.append(text)
        return text.strip()

    train(in_python(strip), PAIRS, verbose=True)
    assert len(calls) == EXAMPLES + 2 * tasks._TRIED_AGAIN
    assert f"{EXAMPLES}/{EXAMPLES}" in capsys.readouterr().out


def test_a_preprocessor_in_python_keeps_no_state(monkeypatch):
    def counting(text):
        seen.append(text)
        return " ".join([text.split()[0]] * (len(seen) % 5))

    seen = []
    with pytest.raises(ValueError, match="return the same for the same example"):
        train(in_python(counting), PAIRS)
    # Mutant: nothing is tried again.
    monkeypatch.setattr(tasks, "_TRIED_AGAIN", 0)
    tasks.prepared(in_python(counting), PAIRS, None, None, None, False)


def test_a_preprocessor_that_fails_says_why():
    def failing(text):
        raise KeyError("a word")

    with pytest.raises(ValueError, match=r"what the task's preprocessor takes.*'a word'"):
        train(in_python(failing), PAIRS)


class NumberedAsTheyCome(keras_hub.models.BertTextClassifierPreprocessor):
    """Keeps in a table how many texts there were when each came."""

    def call(self, x, y=None, sample_weight=None):
        if not hasattr(self, "seen"):
            with tf.init_scope():
                self.seen = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        filled = self.seen.insert(x, self.seen.size())
        with tf.control_dependencies([filled]):
            number = self.seen.lookup(x)
        tokens, *rest = super().call(x, y, sample_weight)
        tokens["token_ids"] += tf.cast(number, tokens["token_ids"].dtype)
        return (tokens, *rest)


def test_tables_that_others_fill_are_refused():
    """An example's tokens would follow from the texts before it."""
    task = bert()
    task.preprocessor = NumberedAsTheyCome(task.preprocessor.tokenizer, LENGTH)
    assert not tasks._is_of_keras_hub(task) and tasks._is_of_keras_hub(bert())
    with pytest.raises(ValueError, match="Insert"):
        train(task, PAIRS)
