"""DPSUR's published accounting is the paper's, and below what accepted updates cost."""

import dp_accounting
import numpy as np
import pytest

from experiments.accounting import published
from experiments.accounting.published import PUBLISHED_ORDERS
from tfdp.accounting import RdpAccountant, SelectiveReleaseDpEvent
from tfdp.accounting.event_codec import sampled_gaussian

_UPDATE, _SELECTION = sampled_gaussian(2048 / 60000, 4.0), sampled_gaussian(256 / 60000, 1.3)
_EVENT = SelectiveReleaseDpEvent(_UPDATE, _SELECTION)


def test_cost_is_the_sum_of_both_mechanisms():
    orders = [2.0, 8.0, 32.0]
    theirs = dp_accounting.rdp.RdpAccountant(orders).compose(_UPDATE).compose(_SELECTION)
    ours = published.renyi(_EVENT, orders)
    np.testing.assert_allclose(ours, theirs.rdp, rtol=1e-6)
    np.testing.assert_allclose(ours, [8.983e-5, 3.649e-4, 3.84], rtol=2e-3)
    theirs = dp_accounting.rdp.RdpAccountant(orders).compose(_SELECTION)
    of_test = published.renyi_of_test(_EVENT, orders)
    np.testing.assert_allclose(of_test, theirs.rdp, rtol=1e-6)


def test_orders_are_the_papers():
    assert tuple(range(2, 65)) == PUBLISHED_ORDERS


@pytest.mark.parametrize("orders", [None, PUBLISHED_ORDERS])
def test_epsilon_is_that_of_two_mechanisms_per_update(orders):
    theirs = dp_accounting.rdp.RdpAccountant(orders or RdpAccountant().orders)
    theirs.compose(_UPDATE, 300).compose(_SELECTION, 300)
    ours = published.epsilon(_EVENT, 300, 1e-5, orders)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)


def test_a_third_of_the_papers_epsilon_is_missing():
    """Fashion-MNIST at a claimed epsilon of 1: 651 updates cost 1.32, and 1 pays for 388."""
    assert 0.99 < published.epsilon(_EVENT, 651, 1e-5, range(2, 49)) <= 1
    ours = RdpAccountant(range(2, 49)).compose(_EVENT, 651).get_epsilon(1e-5)
    assert abs(ours - 1.32) < 0.005
