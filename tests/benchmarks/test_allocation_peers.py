"""Epsilon of random allocation by tfdp and by JAX-Privacy: what is asked, and the table."""

import sys

import numpy as np
import pytest

from benchmarks import allocation_peers
from benchmarks.allocation_peers import SETTINGS


def test_certified_bounds_are_about_the_estimate():
    for setting in SETTINGS[:1] + SETTINGS[-1:]:
        least, most = allocation_peers.bounds(setting)
        found = allocation_peers.estimate(setting, 2000)
        assert (0 if least is None else 0.98 * least) < found < 1.02 * most
    assert allocation_peers.estimate(SETTINGS[3], 10) is None


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(allocation_peers, "SETTINGS", SETTINGS[:1])
    allocation_peers.main(["--own_samples=1000"])
    _, _, row, _, last = capsys.readouterr().out.splitlines()
    assert len(row.strip("| ").split(" | ")) == 8
    assert "scipy" in last and "Peers: none" in last


def test_peer_answers(monkeypatch, tmp_path, capsys):
    """With a peer that has losses of the same distribution."""
    fake = tmp_path / "python"
    answer = '{"found": [0.93, null, 2.0], "version": "2.0.0"}'
    fake.write_text(f"#!{sys.executable}\nprint('{answer}')\n")
    fake.chmod(0o755)
    monkeypatch.setattr(allocation_peers, "SETTINGS", SETTINGS[:1])
    allocation_peers.main(["--own_samples=100", f"--peer_python={fake}"])
    out = capsys.readouterr().out
    assert "| 0.9300 (2.0 s) | – |" in out and "JAX-Privacy 2.0.0" in out


def test_least_epsilon_of_samples(monkeypatch):
    """The peer's epsilons, from losses that are known."""

    class Strategy:
        def __init__(self, iterations, cycle_length):
            self.iterations, self.cycle_length = iterations, cycle_length

    class Samples:
        @staticmethod
        def get_privacy_loss_sample(strategy, noise, column, rng, positive, count):
            assert strategy.iterations == 16 and strategy.cycle_length == 16
            return np.full(count, 0.5 if positive else 0.1), None

    class Deltas:
        @staticmethod
        def delta_from_epsilon_and_samples(epsilon, samples):
            return np.mean(np.maximum(1 - np.exp(epsilon - samples), 0))

        @staticmethod
        def get_base_delta(samples, delta):
            raise ValueError

    class Package:
        pass

    selection, monte_carlo, whole = Package(), Package(), Package()
    selection.BallsInBinsSampling = Strategy
    monte_carlo.sample_generation, monte_carlo.delta_calculation = Samples, Deltas
    whole.batch_selection = selection
    for name, module in (
        ("jax_privacy", whole),
        ("jax_privacy.experimental", Package()),
        ("jax_privacy.experimental.monte_carlo", monte_carlo),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    found, verified, _ = allocation_peers.of_jax_privacy(SETTINGS[0], [1.0], 7000)
    assert found == pytest.approx(0.5 + np.log(1 - 1e-3), abs=2e-5) and verified is None
    # Of four passes with sets drawn anew, four losses are added up.
    found, *_ = allocation_peers.of_jax_privacy(SETTINGS[3], [1.0], 10)
    assert found == pytest.approx(2.0 + np.log(1 - 1e-3), abs=2e-5)
