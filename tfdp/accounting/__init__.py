"""Privacy accounting: what was released, what it costs, and how to stay within a budget."""

from typing import TYPE_CHECKING

from tfdp.base import lazy

if TYPE_CHECKING:
    from tfdp.accounting.accountants import PldAccountant, RdpAccountant
    from tfdp.accounting.bounds import EpsilonBound, EpsilonInterval
    from tfdp.accounting.calibration import (
        calibrate_noise_multiplier,
        calibrate_noise_schedule,
        calibrate_steps,
    )
    from tfdp.accounting.ledger import PrivacyLedger, PrivacyParametersChangedError
    from tfdp.accounting.parallel_composition import ParallelDpEvent
    from tfdp.accounting.planning import Plan, PlanRow, plan
    from tfdp.accounting.privacy_filter import BoundedRangeDpEvent, BudgetExceededError, RdpFilter
    from tfdp.accounting.random_allocation import RandomAllocationDpEvent
    from tfdp.accounting.repetitions import Repetitions
    from tfdp.accounting.run_selection import calibrate_private_selection, private_selection
    from tfdp.accounting.sampling import PoissonSampling
    from tfdp.accounting.selective_calibration import calibrate_selective_release
    from tfdp.accounting.selective_release import (
        SelectiveReleaseDpEvent,
        acceptance_bounds,
        parameters_for_acceptance,
    )
    from tfdp.accounting.signed_gaussian import SignedGaussianDpEvent
    from tfdp.accounting.statement import epsilon_interval, privacy_statement
    from tfdp.accounting.trade_off import GaussianDP, TradeOff

__all__ = [
    "BoundedRangeDpEvent",
    "BudgetExceededError",
    "EpsilonBound",
    "EpsilonInterval",
    "GaussianDP",
    "ParallelDpEvent",
    "Plan",
    "PlanRow",
    "PldAccountant",
    "PoissonSampling",
    "PrivacyLedger",
    "PrivacyParametersChangedError",
    "RandomAllocationDpEvent",
    "RdpAccountant",
    "RdpFilter",
    "Repetitions",
    "SelectiveReleaseDpEvent",
    "SignedGaussianDpEvent",
    "TradeOff",
    "acceptance_bounds",
    "calibrate_noise_multiplier",
    "calibrate_noise_schedule",
    "calibrate_private_selection",
    "calibrate_selective_release",
    "calibrate_steps",
    "epsilon_interval",
    "parameters_for_acceptance",
    "plan",
    "privacy_statement",
    "private_selection",
]

__getattr__, __dir__ = lazy.attributes(
    __name__,
    {
        "BoundedRangeDpEvent": "tfdp.accounting.privacy_filter",
        "BudgetExceededError": "tfdp.accounting.privacy_filter",
        "EpsilonBound": "tfdp.accounting.bounds",
        "EpsilonInterval": "tfdp.accounting.bounds",
        "GaussianDP": "tfdp.accounting.trade_off",
        "ParallelDpEvent": "tfdp.accounting.parallel_composition",
        "Plan": "tfdp.accounting.planning",
        "PlanRow": "tfdp.accounting.planning",
        "PldAccountant": "tfdp.accounting.accountants",
        "PoissonSampling": "tfdp.accounting.sampling",
        "PrivacyLedger": "tfdp.accounting.ledger",
        "PrivacyParametersChangedError": "tfdp.accounting.ledger",
        "RandomAllocationDpEvent": "tfdp.accounting.random_allocation",
        "RdpAccountant": "tfdp.accounting.accountants",
        "RdpFilter": "tfdp.accounting.privacy_filter",
        "Repetitions": "tfdp.accounting.repetitions",
        "SelectiveReleaseDpEvent": "tfdp.accounting.selective_release",
        "SignedGaussianDpEvent": "tfdp.accounting.signed_gaussian",
        "TradeOff": "tfdp.accounting.trade_off",
        "acceptance_bounds": "tfdp.accounting.selective_release",
        "calibrate_noise_multiplier": "tfdp.accounting.calibration",
        "calibrate_noise_schedule": "tfdp.accounting.calibration",
        "calibrate_private_selection": "tfdp.accounting.run_selection",
        "calibrate_selective_release": "tfdp.accounting.selective_calibration",
        "calibrate_steps": "tfdp.accounting.calibration",
        "epsilon_interval": "tfdp.accounting.statement",
        "parameters_for_acceptance": "tfdp.accounting.selective_release",
        "plan": "tfdp.accounting.planning",
        "privacy_statement": "tfdp.accounting.statement",
        "private_selection": "tfdp.accounting.run_selection",
    },
)
