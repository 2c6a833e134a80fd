"""DPSUR's published accounting of selective release: no upper bound on epsilon.

Theorem 5.6 of Fu et al. 2023 charges an accepted update R(q_t, sigma_t) + R(q_v, sigma_v): a
sampled Gaussian for the update and one for the noisy number of its test, which Theorems 4.1 and 5.5
charge as if it had not been truncated. Rejected attempts cost nothing.
`experiments.dpsur.counterexample` has data for which epsilon is larger; docs/selective_release.md
says where the proof fails. This module is for comparisons with the paper's numbers. The accountants
of tfdp do not use it.
"""

from collections.abc import Sequence

import numpy as np

from tfdp.accounting import RdpAccountant, SelectiveReleaseDpEvent

# "We select alpha from {2, 3, ..., 64}": section 2.3 of the paper.
PUBLISHED_ORDERS = tuple(float(order) for order in range(2, 65))


def renyi(event: SelectiveReleaseDpEvent, orders: Sequence[float]) -> np.ndarray:
    """Returns the published Renyi divergence of one accepted update and its test (Theorem 5.6).

    Args:
      event: One accepted update, of (Poisson-sampled) Gaussians.
      orders: Renyi orders, each > 1.

    Returns:
      One divergence for each order, `[len(orders)]`. Not an upper bound.
    """
    return RdpAccountant(orders).compose(event.update).rdp + renyi_of_test(event, orders)


def renyi_of_test(event: SelectiveReleaseDpEvent, orders: Sequence[float]) -> np.ndarray:
    """Returns the published divergence of the test's number, given acceptance (Theorem 5.5).

    Arguments as for `renyi`. Not an upper bound, unless the test sees all examples.
    """
    return RdpAccountant(orders).compose(event.selection).rdp


def epsilon(
    event: SelectiveReleaseDpEvent,
    updates: int,
    delta: float,
    orders: Sequence[float] | None = None,
) -> float:
    """Returns the published epsilon of `updates` accepted updates. Not an upper bound.

    Args:
      event: One accepted update, of (Poisson-sampled) Gaussians.
      updates: Number of accepted updates.
      delta: The delta of the guarantee, in (0, 1).
      orders: Renyi orders, each > 1. Default: those of `tfdp.accounting.RdpAccountant`.
    """
    accountant = RdpAccountant(orders)
    accountant.compose(event.update, updates).compose(event.selection, updates)
    return accountant.get_epsilon(delta)
