"""Privacy accounting: what was released, what it costs, and how to stay within a budget."""

from tfdp.accounting.accountants import PldAccountant, RdpAccountant
from tfdp.accounting.bounds import EpsilonBound, EpsilonInterval
from tfdp.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_noise_schedule,
    calibrate_steps,
)
from tfdp.accounting.ledger import PrivacyLedger, PrivacyParametersChangedError
from tfdp.accounting.privacy_filter import BoundedRangeDpEvent, BudgetExceededError, RdpFilter
from tfdp.accounting.repetitions import Repetitions
from tfdp.accounting.run_selection import calibrate_private_selection, private_selection
from tfdp.accounting.sampling import PoissonSampling
from tfdp.accounting.selective_calibration import calibrate_selective_release
from tfdp.accounting.selective_release import (
    SelectiveReleaseDpEvent,
    acceptance_bounds,
    parameters_for_acceptance,
)
from tfdp.accounting.statement import epsilon_interval, privacy_statement

__all__ = [
    "BoundedRangeDpEvent",
    "BudgetExceededError",
    "EpsilonBound",
    "EpsilonInterval",
    "PldAccountant",
    "PoissonSampling",
    "PrivacyLedger",
    "PrivacyParametersChangedError",
    "RdpAccountant",
    "RdpFilter",
    "Repetitions",
    "SelectiveReleaseDpEvent",
    "acceptance_bounds",
    "calibrate_noise_multiplier",
    "calibrate_noise_schedule",
    "calibrate_private_selection",
    "calibrate_selective_release",
    "calibrate_steps",
    "epsilon_interval",
    "parameters_for_acceptance",
    "privacy_statement",
    "private_selection",
]
