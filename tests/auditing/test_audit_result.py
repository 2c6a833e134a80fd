"""Results of audits say what they are."""

import dataclasses

import matplotlib.image
import numpy as np
import pytest

from tfdp.accounting import PrivacyLedger
from tfdp.auditing import AuditError, AuditResult, Check

RANDOM = np.random.default_rng(0)
BOUNDS = {"clopper_pearson": 1.0, "gaussian": 2.5, "one_run": 1.25, "one_run_f_dp": 1.5}
FINE, BAD = Check("noise", True, "1.0"), Check("independence", False, "p = 0")
RESULT = AuditResult(
    RANDOM.normal(1, 1, 200), RANDOM.normal(0, 1, 300), 40, 1e-5, 0.05, BOUNDS, 4.0, (FINE,)
)


def test_text():
    text = str(RESULT)
    assert "Audit of 40 steps by 200 canaries that were in and 300 that were out" in text
    assert "epsilon of the ledger (upper bound): 4" in text
    assert "lower bounds on epsilon, each at 95% confidence:" in text
    assert "gaussian         2.5" in text and "ok: noise: 1.0" in text
    assert RESULT.lower_bound == 2.5 and RESULT.passed
    RESULT.check()


def test_what_failed_is_an_error_that_says_it():
    result = dataclasses.replace(RESULT, checks=(FINE, BAD))
    assert not result.passed
    with pytest.raises(AuditError, match=r"\n- independence: p = 0\n[\s\S]*FAILED: independence"):
        result.check()
    assert "| independence | NO | p = 0 |" in result.report()


def test_the_report_says_what_the_numbers_are():
    report = RESULT.report()
    assert "| ledger | 4 | upper bound, proven |" in report
    assert "| gaussian | 2.5 | lower bound at 95% confidence |" in report
    assert "| TPR at 1% FPR |" in report and "no proof" in report
    none_out = dataclasses.replace(RESULT, out_scores=np.zeros(0), epsilon=None)
    assert "| ledger | none |" in none_out.report()


def test_pictures(tmp_path):
    import dp_accounting

    RESULT.plot(tmp_path / "roc.png")
    ledger = PrivacyLedger()
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0))
    ledger.record(step, 40)
    both = dataclasses.replace(RESULT, history=((20, 1.0), (40, 2.5)), ledger=ledger)
    assert both._upper(20) < both._upper(40) == ledger.epsilon(1e-5).epsilon
    both.plot(tmp_path / "both.png")
    narrow, wide = (matplotlib.image.imread(tmp_path / f"{n}.png") for n in ("roc", "both"))
    assert wide.shape[1] > 1.5 * narrow.shape[1] and wide.std() > 0.01
