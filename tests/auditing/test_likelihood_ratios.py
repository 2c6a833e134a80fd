"""Likelihood ratios: on scores of a known distribution, and on small models."""

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests import support
from tfdp.auditing import advantage, auc, likelihood_ratios, lira

layers = tf.keras.layers
SIZE = 300
HARDNESS = np.random.default_rng(0).normal(size=SIZE) * 10


def remembering(shift):
    """Trains models whose score of an example is its own, and higher if it was trained on."""
    noise = np.random.default_rng(1)

    def train(data):
        return set(data[0].tolist())

    def score(model, x, y):
        member = np.array([value in model for value in x])
        return HARDNESS + shift * member + noise.normal(size=SIZE)

    return lira(train, (np.arange(SIZE), np.arange(SIZE)), score=score, models=32)


def test_the_attack_is_nearly_as_good_as_with_known_means():
    result = remembering(2.0)
    assert result.in_scores.size == result.out_scores.size == SIZE * 16
    assert result.auc == pytest.approx(scipy.stats.norm.cdf(2 / np.sqrt(2)), abs=0.02)
    assert result.tpr_at_fpr(0.01) > 0.3


def test_one_threshold_for_all_examples_would_find_little():
    """Hardness differs by more than membership does, which ratios take out."""
    random = np.random.default_rng(2)
    member = random.random(SIZE) < 0.5
    scores = HARDNESS + 2.0 * member + random.normal(size=SIZE)
    assert auc(scores[member], scores[~member]) < 0.65 < remembering(2.0).auc


def test_what_is_not_remembered_is_not_found():
    result = remembering(0.0)
    assert result.auc == pytest.approx(0.5, abs=0.03)
    assert result.advantage < 0.1


def drawn_ranks(models, examples):
    return np.random.default_rng(0).random([models, examples]).argsort(axis=0)


def success(scores, ranks, ratios=likelihood_ratios._log_ratios):
    found, member = ratios(scores, ranks), ranks < len(ranks) // 2
    return auc(found[member], found[~member]), advantage(found[member], found[~member])


@pytest.mark.parametrize("models", [4, 6, 16])
def test_shadows_say_nothing_about_membership(models):
    """Were the attacked model on the other side, the shadows would be the same on both sides."""
    ranks = drawn_ranks(models, SIZE)
    scores = np.random.default_rng(0).normal(size=ranks.shape)
    before = likelihood_ratios._log_ratios(scores, ranks)[0]
    swapped = np.where(ranks == models - 1 - ranks[0], ranks[0], ranks)
    swapped[0] = models - 1 - ranks[0]
    np.testing.assert_array_equal(before, likelihood_ratios._log_ratios(scores, swapped)[0])


def with_all_others(scores, ranks, corrected=True):
    """Mutant: all other models are shadows, one fewer of them on the attacked model's side."""
    ratios, member = [], ranks < len(ranks) // 2
    for index, attacked in enumerate(scores):
        own, kinds = np.delete(scores, index, axis=0), np.delete(member, index, axis=0)
        distances = []
        for kind in (kinds, ~kinds):
            count = kind.sum(axis=0)
            mean = np.where(kind, own, 0).sum(axis=0) / count
            distances.append((attacked - mean) ** 2 / (1 + corrected / count))
        ratios.append(distances[1] - distances[0])
    return np.array(ratios)


@pytest.mark.parametrize(("models", "least"), [(4, 0.43), (8, 0.48), (16, 0.495)])
def test_guessing_with_few_shadows_is_guessing(models, least):
    """A member's own side would have one shadow fewer, and so a mean that is farther away."""
    ranks = drawn_ranks(models, 20_000)
    scores = np.random.default_rng(0).normal(size=ranks.shape)
    assert success(scores, ranks)[0] == pytest.approx(0.5, abs=0.01)
    mutant = success(scores, ranks, lambda *args: with_all_others(*args, corrected=False))
    assert mutant[0] < least


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_equal_scores_are_not_told_apart_by_rounding(share):
    """Models that are sure of an example have one and the same score: the largest there is."""
    ranks, random = drawn_ranks(16, 5000), np.random.default_rng(0)
    sure = -np.log(np.expm1(1e-7))
    scores = np.where(random.random(5000) < share, sure, random.normal(size=ranks.shape))
    area, advantage_of_ratios = success(scores, ranks)
    assert area == pytest.approx(0.5, abs=0.01) and advantage_of_ratios < 0.02
    assert success(scores, ranks, with_all_others)[1] > 0.6  # Seven sums are rounded, eight not.


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_models_that_differ_as_a_whole_do_not_tell_members(spread):
    ranks, random = drawn_ranks(8, 5000), np.random.default_rng(0)
    scores = random.standard_cauchy([8, 1]) * 10 + spread * random.normal(size=ranks.shape)
    area, advantage_of_ratios = success(scores, ranks)
    assert area == pytest.approx(0.5, abs=0.02) and advantage_of_ratios < 0.04


@pytest.mark.slow
def test_models_that_overfit_are_found():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(80, 200)).astype("float32"), random.integers(0, 2, 80)

    def train(data):
        model = tf.keras.Sequential([layers.Input([200]), layers.Dense(2)])
        support.compiled(tf.keras.optimizers.Adam(0.01), model, loss=support.crossentropy("auto"))
        model.fit(*data, epochs=60, verbose=0)
        return model

    assert lira(train, (x, y), models=6).auc > 0.8


def test_text_report_and_picture(tmp_path):
    result = remembering(2.0)
    assert "Attack on 32 models, with 4800 members and 4800 others: AUC 0.9" in str(result)
    assert "| TPR at 0.1% FPR |" in result.report() and "not a bound" in result.report()
    result.plot(tmp_path / "roc.png")
    assert matplotlib.image.imread(tmp_path / "roc.png").std() > 0.01


@pytest.mark.parametrize("models", [3, 5, 2, "x"])
def test_errors_name_the_argument(models):
    with pytest.raises(ValueError, match="`models` must be an even integer"):
        lira(lambda data: None, (HARDNESS, HARDNESS), models=models)
    with pytest.raises(ValueError, match="`data` must be"):
        lira(lambda data: None, HARDNESS)
    with pytest.raises(ValueError, match="a number for each example"):
        lira(lambda data: None, (HARDNESS, HARDNESS), score=lambda *_: [1.0])
