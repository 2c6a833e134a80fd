"""The DPSUR optimizers by themselves: arguments, configs, and what they charge."""

import math

import dp_accounting
import pytest
import scipy.stats

import tfdp
from tests.front_ends import with_both
from tests.selective_support import CLASSES_OF_BOTH, front_of, optimizer
from tfdp.accounting import SelectiveReleaseDpEvent, acceptance_bounds
from tfdp.accounting.sampling import PoissonSampling


@pytest.mark.parametrize("cls", CLASSES_OF_BOTH)
def test_it_is_a_subclass_of_the_optimizer_below(cls):
    front = front_of(cls)
    below = getattr(front.tfdp, cls.__name__.replace("DPSUR", "DP"))
    assert issubclass(cls, below)
    assert f"`{below.__name__}` with selective update" in cls.__doc__
    assert f"optimizer={front.part}.{cls.__name__}(" in cls.__doc__
    assert "{" not in cls.__doc__


@pytest.mark.parametrize("cls", CLASSES_OF_BOTH)
def test_config_round_trip(cls):
    optimizers = front_of(cls).keras.optimizers
    own = optimizer(cls, validation_clip=0.5, threshold=-0.3, selective_release="per_attempt")
    copy = optimizers.deserialize(optimizers.serialize(own))
    assert type(copy) is cls
    assert copy.get_config() == own.get_config()
    assert (copy.validation_clip, copy.threshold, copy.validation_batch_size) == (0.5, -0.3, 8)
    assert copy.selective_release == "per_attempt"


@with_both
def test_an_accepted_update_is_one_event(front):
    release = optimizer(front.tfdp.DPSURSGD, noise_multiplier=2.0, threshold=-1.0).release
    assert release.event == SelectiveReleaseDpEvent(
        update=dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(2.0)),
        selection=dp_accounting.PoissonSampledDpEvent(0.125, dp_accounting.GaussianDpEvent(1.0)),
        threshold=-1.0,
    )


def test_what_the_cap_and_the_truncation_cost():
    opt = optimizer(threshold=-1.0, max_attempts=40)
    a, _ = acceptance_bounds(1.0, -1.0)
    assert a == pytest.approx(scipy.stats.norm.cdf(-1.0))
    rows = {"padding": "full", "max_truncation_probability": 1e-30}
    truncation = sum(PoissonSampling(64, size, **rows).truncation_probability for size in (16, 8))
    expected = truncation / a + (1 - a) ** 40
    assert opt.release.truncation_probability == pytest.approx(expected)
    observed = optimizer(threshold=-1.0, max_attempts=40, selective_release="per_attempt")
    assert observed.release.truncation_probability == pytest.approx(truncation)


def test_a_test_that_nothing_passes_has_no_guarantee():
    release = optimizer(threshold=-300.0, max_attempts=5).release
    ledger = tfdp.accounting.PrivacyLedger()
    ledger.record(release.event, 1, release.truncation_probability)
    assert ledger.epsilon(1e-5).epsilon == math.inf


def test_the_default_cap_is_never_reached():
    opt = optimizer(threshold=-1.0)
    a, _ = acceptance_bounds(1.0, -1.0)
    assert (1 - a) ** opt.max_attempts <= 1e-30 < (1 - a) ** (opt.max_attempts - 1)


def test_what_is_not_known_is_not_charged():
    opt = tfdp.DPSURSGD(
        1.0, 1.0, 16, validation_batch_size=8, validation_noise_multiplier=1.0, learning_rate=0.1
    )
    with pytest.raises(ValueError, match="`sampling` must be given"):
        _ = opt.ledger


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"selective_release": "published"},
            "`selective_release` must be one of .* not an upper bound",
        ),
        ({"max_attempts": 0}, "`max_attempts` must be an integer"),
        ({"max_attempts": 1.5}, "`max_attempts` must be an integer"),
        ({"threshold": -30.0}, "`max_attempts` must be given"),
        ({"threshold": -300.0}, "`max_attempts` must be given"),
        ({"sampling": PoissonSampling(64, 16, 2)}, "`gradient_accumulation_steps` must be 1"),
        ({"validation_batch_size": 65}, "at most the number of training examples, 64"),
        ({"validation_noise_multiplier": 0.0}, "`validation_noise_multiplier` must be"),
        ({"validation_clip": 1e-46}, "`validation_clip` must be"),
        ({"validation_clip": math.inf}, "`validation_clip` must be"),
        ({"l2_norm_clip": -1.0}, "`l2_norm_clip` must be"),
    ],
)
@with_both
def test_bad_arguments_are_named(front, changes, match):
    with pytest.raises(ValueError, match=match):
        optimizer(front.tfdp.DPSURSGD, **changes)
