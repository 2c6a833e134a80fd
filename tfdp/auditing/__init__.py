"""Attacks on trained models and on training itself, and what they prove."""

from typing import TYPE_CHECKING

from tfdp.base import compat, lazy

compat.prepare_tensorflow()

from tfdp.auditing.audit_result import AuditError, AuditResult, Check
from tfdp.auditing.black_box import (
    BlackBoxAudit,
    confidence_scores,
    loss_scores,
    mislabelled,
)
from tfdp.auditing.likelihood_ratios import AttackResult, lira
from tfdp.auditing.sensitivity import (
    Movement,
    SensitivityCheck,
    SensitivityError,
    check_sensitivity,
)
from tfdp.auditing.statistics import (
    advantage,
    auc,
    epsilon_lower_bound,
    epsilon_of_mu,
    roc_curve,
    tpr_at_fpr,
)

if TYPE_CHECKING:
    from tfdp.auditing.canaries import CanaryAudit

__all__ = [
    "AttackResult",
    "AuditError",
    "AuditResult",
    "BlackBoxAudit",
    "CanaryAudit",
    "Check",
    "Movement",
    "SensitivityCheck",
    "SensitivityError",
    "advantage",
    "auc",
    "check_sensitivity",
    "confidence_scores",
    "epsilon_lower_bound",
    "epsilon_of_mu",
    "lira",
    "loss_scores",
    "mislabelled",
    "roc_curve",
    "tpr_at_fpr",
]

_OF_KERAS_2 = {"CanaryAudit": "tfdp.auditing.canaries"}
__getattr__, __dir__ = lazy.attributes(
    __name__,
    _OF_KERAS_2,
    check=lambda name: compat.check_keras_2(f"tfdp.auditing.{name}"),
    unlisted=lambda: _OF_KERAS_2 if compat.missing_for_keras_2() else (),
)
