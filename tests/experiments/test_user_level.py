"""Users with several images: what a way to protect them costs, and that runs stay in the budget."""

import dp_accounting
import numpy as np
import pytest
from absl import flags

from experiments import user_level
from experiments.settings import RefusedError


def _parse(*arguments):
    values = flags.FlagValues()
    user_level.define_flags(values)
    values(["user_level", *arguments])
    return values


def _run(kind, **changes):
    given = {
        "kind": kind,
        "images_per_user": 4,
        "epsilon": 4.0,
        "delta": 1e-5,
        "epochs": 1,
        "expected_batch_size": 512,
        "validation_examples": 287,
        "split": "test",
        "learning_rate": 0.15,
        "seed": 0,
    }
    return user_level.Run(**(given | changes))


def test_divergences_of_one_image_are_those_of_a_sampled_gaussian():
    found = user_level.renyi_divergences(1.3, 0.2, 1)
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.3))
    accountant = dp_accounting.rdp.RdpAccountant(user_level._ORDERS)
    expected = accountant.compose(event)._rdp
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_divergences_of_users_who_are_always_sampled_are_those_of_a_longer_step():
    found = user_level.renyi_divergences(5.0, 1.0, 3)
    np.testing.assert_allclose(found, np.array(user_level._ORDERS) * 3**2 / (2 * 5.0**2))


def test_epsilons_of_the_kinds():
    values = _parse("--images_per_user=1,4", "--noise_multiplier=3")
    spent = user_level.epsilons(values)
    everything, one, images = (
        [spent[kind, count] for count in (1, 4)] for kind in user_level.KINDS
    )
    assert everything[1] == pytest.approx(everything[0], rel=0.01)  # q is the same, but for rests.
    assert everything[0] == one[0] == images[0]
    assert one[1] > 2 * everything[1] and images[1] > 2 * everything[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", user_level.KINDS)
def test_runs_stay_within_the_budget(kind):
    accuracy, spent = user_level.train(_run(kind))
    assert 0 <= accuracy <= 100
    assert 3.9 < spent <= 4.0


def test_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(user_level, "train", lambda run: (50.0 + run.seed, 3.95))
    values = _parse(
        *("--images_per_user=1,2", "--learning_rates=0.3", "--seeds=1", "--epochs=1"),
        f"--record={tmp_path / 'record'}",
    )
    spent, found = user_level.epsilons(values), user_level.accuracies(values)
    assert len((tmp_path / "record").read_text().splitlines()) == 8  # With one image, one kind.
    assert len(user_level.table(values, spent, found).splitlines()) == 4
    user_level.draw(values, spent, found, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flag", ["--images_per_user=1.5", "--learning_rates=x", "--expected_batch_size=5000"]
)
def test_what_cannot_be_is_refused(flag, tmp_path):
    values = _parse(flag, f"--record={tmp_path / 'record'}")
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        user_level.accuracies(values)
    assert not (tmp_path / "record").exists()
