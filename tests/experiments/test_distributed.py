"""Workers that die and are started again resume from what was saved."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_killed_worker_stops_all_and_they_resume(tmp_path):
    command = [sys.executable, "-m", "experiments.distributed", "--workers=2", "--epochs=3"]
    command += [f"--output_dir={tmp_path}", "--kill_at_step=15", "--restarts=1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "A worker died. All are started again." in ended.stdout
    assert ended.stdout.count("Epoch 2/3") == 1  # Saved before the other one died, at step 15.
    epsilon = float(re.search(r"epsilon = ([\d.]+) at delta = 1e-05, 18 steps", ended.stdout)[1])
    assert 2.9 < epsilon <= 3.0
