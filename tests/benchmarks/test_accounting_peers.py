"""Epsilons of several libraries: what is asked, and what the table says of an answer."""

import io
import json
import re

import pytest

from benchmarks import accounting_peers
from benchmarks.accounting_peers import SETTINGS, cell


def test_settings_have_names_of_their_own():
    assert len({setting.title for setting in SETTINGS}) == len(SETTINGS) == 20


@pytest.mark.parametrize("name", ["tfdp", "dp_accounting PLD", "dp_accounting RDP"])
def test_epsilon_of_a_setting_is_at_least_the_lower_bound(name, monkeypatch, capsys):
    (setting,) = (one for one in SETTINGS if one.title == "4 noise multipliers")
    asked = json.dumps({"title": "", "phases": setting.phases, "delta": setting.delta})
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    monkeypatch.setattr("resource.setrlimit", lambda *limits: None)
    accounting_peers.serve(name, 8)
    found = json.loads(capsys.readouterr().out)
    least = accounting_peers.at_least(setting)
    assert least <= found["epsilon"] < 1.2 * least
    assert (found["version"] is None) == (name == "tfdp")


def test_cells_say_what_is_wrong():
    assert cell({"epsilon": 1.0, "seconds": 0.5}, 0.999, 1.0) == "1 (0.50 s)"
    assert cell({"epsilon": 0.9, "seconds": 0.5}, 0.999, 1.0) == "**0.9, too low** (0.50 s)"
    assert cell({"epsilon": 2.0, "seconds": 0.5}, 0.999, 1.0) == "2, 2.00× (0.50 s)"
    assert cell({"epsilon": 0.1, "seconds": 0.5}, 0.0, 0.0) == "0.1, above 0 (0.50 s)"
    assert cell({"reason": "MemoryError"}, 0.0, 0.0) == "MemoryError"


@pytest.mark.slow
def test_the_table(capsys):
    accounting_peers.main(["--only=language model"])
    _, _, row, _, last = capsys.readouterr().out.splitlines()
    assert re.search(r"\| 2\.10\d+ \| 2\.10\d+ \(\d+\.\d\d s\) \|$", row)
    assert "scipy" in last and "Peers: none" in last
