"""Trajectories of DP-SGD and DPSUR on a linear regression."""

import matplotlib.image
import numpy as np
import pytest
from absl import flags

from experiments.dpsur import trajectories


@pytest.mark.slow
def test_both_trajectories_go_from_the_start_towards_the_optimum(tmp_path, capsys):
    values = flags.FlagValues()
    trajectories.define_flags(values)
    values(["x", "--repeats=2", f"--plot={tmp_path / 'trajectories.png'}"])
    found = trajectories.run(values)
    x, y = trajectories.diabetes()
    for runs in found.values():
        assert len(runs) == 2 and runs[0].shape == (31, 2)
        np.testing.assert_array_equal(runs[0][0], trajectories._START)
        losses = trajectories.loss_of(x, y, runs[0])
        assert losses[-1] < losses[0] / 2
    assert matplotlib.image.imread(tmp_path / "trajectories.png").ndim == 3
    assert "DPSUR: excess loss" in capsys.readouterr().out
