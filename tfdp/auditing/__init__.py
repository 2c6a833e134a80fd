"""Attacks on trained models and on training itself, and what they prove."""

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

__all__ = [
    "Movement",
    "SensitivityCheck",
    "SensitivityError",
    "advantage",
    "auc",
    "check_sensitivity",
    "epsilon_lower_bound",
    "epsilon_of_mu",
    "roc_curve",
    "tpr_at_fpr",
]
