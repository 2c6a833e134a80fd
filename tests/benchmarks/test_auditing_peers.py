"""Bounds on the same scores: what is simulated, and the table."""

import numpy as np
import pytest

from benchmarks import auditing_peers
from tfdp.auditing import epsilon_of_mu


def test_scores_are_those_of_a_mechanism_of_this_epsilon():
    mu = auditing_peers.mu_of(4.0)
    assert epsilon_of_mu(mu, auditing_peers.DELTA) == pytest.approx(4.0)
    (pair,) = auditing_peers.simulated(4.0, 20_000, simulations=1)
    seen, unseen = pair
    assert len(seen) + len(unseen) == 20_000
    assert abs(len(seen) - len(unseen)) < 1000
    assert np.mean(seen) - np.mean(unseen) == pytest.approx(mu, abs=0.1)


def test_the_table(capsys):
    auditing_peers.main(["--simulations=1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(auditing_peers.SETTINGS) * len(auditing_peers.METHODS)
    assert auditing_peers.cell([1.0, 2.0], 1.5) == "1.50 (50%)"
