"""Reviews are written by a private language model, and teach a classifier."""

import dataclasses

import numpy as np
import pytest
from absl import flags

from experiments import records, synthetic_text
from experiments.settings import RefusedError
from experiments.synthetic_text import END, FIRST_CLASS, FIRST_WORD, UNKNOWN
from tests.front_ends import keras, needs_keras_3

pytestmark = needs_keras_3
_FOLDERS = synthetic_text.Folders(None, "weights", None, False)
_WORDS = [f"w{i}" for i in range(40)]


def _parse(*arguments):
    values = flags.FlagValues()
    synthetic_text.define_flags(values)
    values(["synthetic_text", *arguments])
    return values


def _run(**changed):
    given = {
        **{"vocabulary": 40, "tokens": 6, "width": 8, "layers": 1, "reviews": 80, "guidance": 1.0},
        **{"epsilon": 8.0, "delta": 1e-5, "epochs": 1, "expected_batch_size": 100},
        **{"validation_examples": 50, "split": "test", "learning_rate": 0.02, "seed": 0},
    }
    return synthetic_text.Run(**(given | changed))


def _vectors(run):
    size = FIRST_WORD + run.vocabulary
    return np.random.default_rng(0).normal(0, 0.3, [size, run.width]).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    return synthetic_text.language_model(_run(), _vectors(_run()), keras)


def test_ids_and_texts():
    texts = [b"W1 and <br />w2, w3", b""]
    ids = synthetic_text.word_ids(texts, ["w", ",", *"123"])
    w, comma, one, two, three = range(FIRST_WORD, FIRST_WORD + 5)
    assert ids[0].tolist() == [w, one, UNKNOWN, w, two, comma, w, three]
    found = synthetic_text.sequences(ids, np.array([1, 0]), 4)
    assert found.tolist() == [[FIRST_CLASS + 1, comma, w, three, END], [FIRST_CLASS, *[END] * 4]]
    assert synthetic_text.texts_of(found[:, 1:], ["w", ",", *"123"]) == [", w 3", ""]


def test_no_word_is_seen_before_it_is_predicted(model):
    ids = np.random.default_rng(0).integers(FIRST_WORD, 40, [3, 6])
    ids[:, 0] = [2, 3, 2]
    model.get_layer("hidden").layers[-1].kernel.assign(np.eye(8))
    changed = ids.copy()
    changed[:, 4:] += 1
    found, expected = model(ids).numpy(), model(changed).numpy()
    np.testing.assert_allclose(found[:, :4], expected[:, :4], rtol=1e-4, atol=1e-5)
    assert not np.allclose(found[:, 4], expected[:, 4])


@pytest.mark.slow
def test_what_is_written(model):
    """Words of the class, and never a class or the unknown; the same with the same seed."""
    head = model.get_layer("head")
    (more_often,) = (x for x in head.layers if isinstance(x, keras.layers.Embedding))
    rates = np.zeros(more_often.embeddings.shape, np.float32)
    rates[2, FIRST_WORD : FIRST_WORD + 20] = rates[3, FIRST_WORD + 20 :] = 2.0
    more_often.embeddings.assign(rates)
    classes = np.arange(40) % 2
    found = synthetic_text.written(model, classes, 6, 3.0, 0)
    assert found.shape == (40, 6)
    assert not np.isin(found, [UNKNOWN, 2, 3]).any()
    high = found >= FIRST_WORD + 20
    assert high[classes == 1].mean() > 0.9 > 0.1 > high[classes == 0].mean()
    np.testing.assert_array_equal(found, synthetic_text.written(model, classes, 6, 3.0, 0))
    assert (found != synthetic_text.written(model, classes, 6, 3.0, 1)).any()


def test_a_classifier_of_words():
    ids = [np.array([4 + kind, 8, 8, END]) for kind in (0, 1) * 20]
    found = synthetic_text.bags(ids, 10)
    np.testing.assert_allclose(
        found[:2, [4, 5, 8]].toarray(), [[0.5**0.5, 0, 0.5**0.5], [0, 0.5**0.5, 0.5**0.5]]
    )
    classes = np.arange(40) % 2
    assert synthetic_text.accuracy_of_classifier((ids, classes), (ids, 1 - classes), 10) == 0.0


@pytest.mark.slow
def test_runs_stay_within_the_budget(monkeypatch, tmp_path):
    run = _run()
    random = np.random.default_rng(0)
    classes = random.integers(0, 2, 400)
    ids = np.empty(400, object)
    ids[:] = [FIRST_WORD + 20 * kind + random.integers(0, 20, 9) for kind in classes]
    test = (ids[:50], classes[:50])
    monkeypatch.setattr(synthetic_text, "public_words", lambda *_: (_WORDS, _vectors(run)))
    monkeypatch.setattr(synthetic_text, "_reviews", lambda *_: ((ids, classes), test))
    folders = dataclasses.replace(_FOLDERS, reviews_dir=str(tmp_path))
    accuracy, spent = synthetic_text.train(run, folders)
    assert 0 <= accuracy <= 100
    assert 7.6 < spent <= 8.0
    (kept,) = tmp_path.iterdir()
    lines = kept.read_text().splitlines()
    assert len(lines) == 80
    assert [line[:2] for line in lines[:4]] == ["0\t", "1\t", "0\t", "1\t"]
    assert sum("\tw" in line for line in lines) > 60  # A text may have no words.


def test_no_run_is_done_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_text, "train", lambda run, _: (50.0 + run.epsilon, 0.9))
    given = ("--epsilons=1,8", f"--record={tmp_path / 'record'}")
    found = synthetic_text.compare(_parse(*given))
    assert [one.mean for one in found.values()] == [51.0, 58.0]
    assert len(records.read(tmp_path / "record")) == 2  # One rate has no trial.
    values = _parse(*given, "--learning_rates=0.001,0.003")
    found = synthetic_text.compare(values)
    assert len(records.read(tmp_path / "record")) == 2 + 2 * (2 + 1)
    monkeypatch.setattr(synthetic_text, "train", None)
    assert synthetic_text.compare(values) == found


@pytest.mark.parametrize("flag", ["--width=6", "--epsilons=0", "--learning_rates=x"])
def test_what_cannot_be_is_refused(flag, tmp_path):
    values = _parse(flag, f"--record={tmp_path / 'record'}")
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        synthetic_text.compare(values)
