"""One relation, in the same words: statement, ledger, what is printed, docstrings and pages."""

import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

import tfdp
from tests import support
from tfdp.accounting import PrivacyLedger, privacy_statement
from tfdp.accounting.event_codec import sampled_gaussian
from tfdp.accounting.relation import RELATION, stated_constants, stated_relation
from tfdp.data.poisson import default_batch_size

ROOT = pathlib.Path(__file__).parents[2]
# Words of other relations, none of which a guarantee may be stated in.
OTHERS = re.compile(
    r"add[- ]or[- ]remove|adding or removing|added or removed|one of which has one extra|"
    r"one of them lacks|replace[- ]special",
    re.IGNORECASE,
)
# Where other relations are explained, or have their names in dp_accounting and in calls.
EXPLAINED = {
    "docs/relation.md",
    "tfdp/accounting/relation.py",
    "tfdp/accounting/accountants.py",
    "tfdp/clipping/engine.py",
}
# What states an epsilon, and so must name the relation.
STATES = [
    "docs/accounting.md",
    "docs/correlated_noise.md",
    "docs/guarantee.md",
    "docs/label_privacy.md",
    "docs/noise_schedules.md",
    "docs/relation.md",
    "docs/results.md",
    "docs/selective_release.md",
    "docs/survey.md",
    "docs/user_level.md",
    "experiments/attacks/report.py",
    "experiments/user_level.py",
    "tfdp/accounting/accountants.py",
    "tfdp/accounting/bounds.py",
    "tfdp/accounting/calibration.py",
    "tfdp/accounting/ledger.py",
    "tfdp/accounting/privacy_filter.py",
    "tfdp/accounting/run_selection.py",
    "tfdp/accounting/selective_calibration.py",
    "tfdp/accounting/statement.py",
    "tfdp/keras2/callbacks.py",
    "tfdp/clipping/batch_losses/aggregations.py",
    "tfdp/clipping/batch_losses/two_term_loss.py",
    "tfdp/contrib/aggregations.py",
    "tfdp/contrib/pate/aggregation.py",
    "tfdp/contrib/pate/partition.py",
    "tfdp/correlated_noise.py",
    "tfdp/keras3/callbacks.py",
    "tfdp/keras3/dp_optimizer.py",
    "tfdp/keras3/private_training.py",
    "tfdp/keras2/private_gan.py",
    "tfdp/keras2/private_training.py",
    "tfdp/keras2/dp_adam.py",
    "tfdp/keras2/dp_sgd.py",
    "tfdp/keras2/dp_sign_adam.py",
    "tfdp/keras2/dp_sign_sgd.py",
    "tfdp/step/selective.py",
]


def words(text):
    return " ".join(text.split())


def pages():
    for folder, kinds in (("tfdp", "py"), ("experiments", "py"), ("docs", "md ipynb"), (".", "md")):
        for kind in kinds.split():
            files = (ROOT / folder).glob(f"*.{kind}" if folder == "." else f"**/*.{kind}")
            for path in files:
                name = path.relative_to(ROOT).as_posix()
                if not name.startswith(("docs/_build", "CHANGELOG")):
                    yield name, path.read_text()


def other_words(texts):
    """Pages that state another relation."""
    return [name for name, text in texts if name not in EXPLAINED and OTHERS.search(words(text))]


def test_no_page_and_no_docstring_states_another_relation():
    texts = dict(pages())
    assert len(texts) > 300 and set(STATES) | EXPLAINED <= set(texts)
    assert not other_words(texts.items())


@pytest.mark.parametrize("name", STATES)
def test_what_states_an_epsilon_names_the_relation(name):
    assert RELATION in (ROOT / name).read_text(), name


@pytest.mark.parametrize(
    "said",
    [
        "private, add or remove one example, with",
        "under add-or-remove-one",
        "for adding or\n  removing one example",
        "If one example is added or removed, one teacher changes",
        "two data sets, one of which has one\nextra example",
    ],
)
def test_mutant_that_states_another_relation_is_caught(said):
    assert other_words([("docs/guarantee.md", f"Neighbors: {said}.")]) == ["docs/guarantee.md"]


def without_markup(page):
    return re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", words((ROOT / page).read_text()))


def test_the_guarantee_has_the_words_of_the_statement():
    page = without_markup("docs/guarantee.md")
    compared = re.search(r"The guarantee compares .*?(?=;|\.)", stated_relation("example"))[0]
    assert f"Neighbors: {RELATION}. {compared}." in page
    assert stated_constants("example") in page


def test_the_statement_names_the_relation_and_what_is_public():
    for unit, whose in (("example", "one training example"), ("user", "one user")):
        ledger = PrivacyLedger(unit=unit)
        ledger.record(sampled_gaussian(0.1, 2.0), 7)
        text = words(privacy_statement(ledger, 1e-5, dataset_size=640))
        assert stated_relation(unit) in text and stated_constants(unit, [640]) in text
        assert f"Neighboring relation: {RELATION}. Unit of privacy: {whose}." in text
        assert f"the number of {unit}s N (640), the sampling probability q" in text
        assert not OTHERS.search(text)
        assert ledger.relation == RELATION and f"relation='{RELATION}'" in repr(ledger)
        text = words(privacy_statement(ledger, 1e-5))
        assert f"the number of {unit}s N, the sampling" in text


def test_every_size_that_optimizers_knew_is_public():
    assert "N (39 and 40)," in stated_constants("example", (39, 40))


def test_make_private_says_what_is_public(capsys):
    x, y = support.small_data(40)
    tfdp.make_private(
        support.small_model(), (x, y), epochs=1, target_epsilon=50.0, loss=support.crossentropy()
    )
    said = words(capsys.readouterr().out)
    assert f"for {RELATION} of one of 40 examples" in said
    assert stated_constants("example", [40]) in said and not OTHERS.search(said)


def test_the_noise_tells_the_number_of_examples_which_is_therefore_public():
    """Under add-or-remove-one the noise of a mean would tell neighbors apart with certainty."""
    x, y = support.small_data(40)
    batches = [
        tfdp.data.poisson_batches((x[:n], y[:n])).sampling.expected_batch_size for n in (39, 40)
    ]
    assert batches == [default_batch_size(39), default_batch_size(40)] == [3, 4]


@pytest.mark.parametrize("step", [(0.01, 1.0, 1000), (1.0, 5.0, 3), (0.1, 0.7, 50)])
def test_numbers_are_those_of_dp_accounting_for_constant_parameters(step):
    """The name of the relation changes no number; the accountants take no other relation."""
    q, noise, steps = step
    event, ledger = sampled_gaussian(q, noise), PrivacyLedger()
    ledger.record(event, steps)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    reference = dp_accounting.pld.PLDAccountant(relation).compose(event, steps).get_epsilon(1e-5)
    assert ledger.epsilon(1e-5).epsilon == pytest.approx(reference, rel=2e-3)


def test_the_pair_is_that_of_an_example_that_is_there_or_contributes_nothing():
    """Both directions of zero-out, integrated: delta of one step at the ledger's epsilon."""
    q, noise, delta = 0.2, 1.1, 1e-3
    ledger = PrivacyLedger()
    ledger.record(sampled_gaussian(q, noise))
    epsilon = ledger.epsilon(delta).epsilon
    x = np.linspace(-15, 16, 400_001)
    absent = scipy.stats.norm.pdf(x, 0, noise)
    there = (1 - q) * absent + q * scipy.stats.norm.pdf(x, 1, noise)
    found = [
        scipy.integrate.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0), x)
        for one, other in ((there, absent), (absent, there))
    ]
    assert 0.98 * delta < max(found) <= delta
