import numpy as np
import pytest

from tests.front_ends import needs_keras_3

pytestmark = needs_keras_3


def test_the_area_counts_pairs_in_order():
    from benchmarks.sparse_embeddings import area

    rng = np.random.default_rng(0)
    scores, likes = rng.normal(size=40), rng.integers(0, 2, 40).astype("float32")
    pairs = scores[likes > 0.5][:, np.newaxis] > scores[likes < 0.5]
    assert area(scores, likes) == pytest.approx(pairs.mean())


def test_ratings_are_of_frequent_items_and_can_be_learned():
    from benchmarks import sparse_embeddings

    case = sparse_embeddings.Case(rows=1000, examples=20_000)
    x, y = sparse_embeddings.ratings(case)
    assert len(y) == 25_000 and max(x["item"].max(), x["user"].max()) < 1000
    counts = np.bincount(x["item"], minlength=1000)
    assert counts[0] > 20 * counts[500:].mean()
    means = np.bincount(x["item"], y, 1000)[:20] / counts[:20]
    assert means.std() > 0.15  # Chance alone would be at most 0.03.


def cells(text):
    return [[c.strip() for c in row.strip("|").split("|")] for row in text if row.startswith("| 1")]


@pytest.mark.slow
def test_steps_and_trainings_are_measured(capsys, monkeypatch):
    from benchmarks import sparse_embeddings

    monkeypatch.setattr(sparse_embeddings, "_apart", lambda function, *given: function(*given))
    sparse_embeddings.main(["--rows", "1500", "--batch", "16", "--repeats", "1"])
    rows = cells(capsys.readouterr().out.splitlines())
    assert [row[:2] for row in rows] == [["1,500", c] for c in sparse_embeddings.CONTESTANTS]
    small = ["--rows", "1500", "--batch", "64", "--examples", "512", "--epochs", "1"]
    sparse_embeddings.main([*small, "--accuracy", "--steps", "sparse", "--rates", "0.01"])
    (row,) = cells(capsys.readouterr().out.splitlines())
    assert row[:2] == ["1,500", "sparse"] and float(row[2]) > 0 and 0 < float(row[4]) < 1


def test_bad_arguments_are_errors(capsys):
    from benchmarks import sparse_embeddings

    with pytest.raises(SystemExit):
        sparse_embeddings.main(["--steps", "other"])
    assert "--steps must be of" in capsys.readouterr().err
