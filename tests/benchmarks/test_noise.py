import sys
import venv

import pytest

from benchmarks import noise, noise_peers
from benchmarks.noise import main
from tests.benchmarks.test_step import rows

PEER = """\
import benchmarks.noise_peers as peers
peers.PEERS["opacus"] = lambda size: lambda: None
peers.importlib.metadata.version = lambda name: "1.2"
peers.main()
"""


@pytest.mark.slow
def test_peers_that_are_not_installed_are_listed_with_the_reason(tmp_path, capsys):
    venv.create(tmp_path / "python", symlinks=True, with_pip=False)
    python = str(tmp_path / "python" / "bin" / "python")
    main(["--turns", "2", "--sizes", "100", "--peer_python", python])
    text = capsys.readouterr().out
    (row,) = rows(text)
    assert row["Opacus secure_mode, ms"] == row["JAX-Privacy, ms"] == "–"
    assert all(float(row[f"{name}, ms"]) >= 0 for name in noise.OWN)
    assert "Opacus secure_mode: not installed: No module named 'torch'" in text
    assert "JAX-Privacy: not installed: No module named 'jax'" in text


@pytest.mark.slow
def test_peers_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(noise, "PEERS", {"opacus": "a library"})
    python = tmp_path / "python"
    script = tmp_path / "peer.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(noise.ROOT)!r})\n" + PEER)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$3" "$4"\n')
    python.chmod(0o755)
    found, said = noise.measure(100, 3, str(python))
    assert said == {"opacus": "version 1.2"}
    assert [len(row) for row in found] == [4] * 3 and all(row[3] < row[0] for row in found)


def test_a_peer_that_dies_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    peer = noise.Peer("opacus", 3, str(python))
    peer.close()
    assert peer.reason == "failed: the process died"
    assert set(noise.PEERS) == set(noise_peers.PEERS)
