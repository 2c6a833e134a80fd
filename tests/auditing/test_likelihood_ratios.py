"""Likelihood ratios: on scores of a known distribution, and on small models."""

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tests import support
from tfdp.auditing import auc, likelihood_ratios, lira

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


def test_a_model_is_not_its_own_shadow():
    """Mutant of the method: its own score would tell whether it was in."""
    random = np.random.default_rng(0)
    member = random.random([6, SIZE]).argsort(axis=0) < 3
    scores = random.normal(size=[6, SIZE])
    before = likelihood_ratios._log_ratios(scores, member)[0]
    after = likelihood_ratios._log_ratios(scores, np.vstack([~member[:1], member[1:]]))[0]
    np.testing.assert_array_equal(before, after)


def uncorrected(scores, member):
    """Mutant: ratios of densities whose means are taken for exact."""
    ratios = []
    for index, attacked in enumerate(scores):
        own, kinds = np.delete(scores, index, axis=0), np.delete(member, index, axis=0)
        inside, outside = (
            (attacked - np.ma.masked_array(own, ~kind).mean(axis=0).data) ** 2
            for kind in (kinds, ~kinds)
        )
        ratios.append(outside - inside)
    return np.array(ratios)


@pytest.mark.parametrize(("models", "least"), [(4, 0.43), (8, 0.48), (16, 0.495)])
def test_guessing_with_few_shadows_is_guessing(models, least):
    """A member's own side has one shadow fewer, and so a mean that is farther away."""
    random = np.random.default_rng(0)
    member = random.random([models, 20_000]).argsort(axis=0) < models // 2
    scores = random.normal(size=member.shape)
    ratios = likelihood_ratios._log_ratios(scores, member)
    assert auc(ratios[member], ratios[~member]) == pytest.approx(0.5, abs=0.01)
    mutant = uncorrected(scores, member)
    assert auc(mutant[member], mutant[~member]) < least


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
