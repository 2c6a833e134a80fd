"""The table of tuned runs is what tfdp.accounting says."""

import pytest
from absl import flags

from experiments.accounting import selection
from tfdp.accounting import PrivacyLedger, Repetitions, event_codec, private_selection
from tfdp.accounting.calibration import calibrate_noise_multiplier


def _rows(*arguments):
    values = flags.FlagValues()
    selection.define_flags(values)
    values(["selection", *arguments])
    return selection.rows(values)


@pytest.mark.slow
def test_scores_of_held_out_examples_cost_no_more_than_public_ones():
    ((epsilon, anyone, held_out, public),) = selection.held_out_rows((1.0,))
    assert epsilon == "1" and held_out == public and float(anyone) > 1.1 * float(held_out)


@pytest.mark.slow
def test_rows():
    rows = _rows("--means=3", "--epochs=1", "--batch_size=600")
    assert [row[1] for row in rows] == [
        *("logarithmic", "negative binomial, 0.5", "geometric", "poisson")
    ]
    noise = calibrate_noise_multiplier(
        target_epsilon=1.0, delta=1e-5, steps=100, sampling_probability=0.01
    )
    run = PrivacyLedger()
    run.record(event_codec.sampled_gaussian(0.01, noise), 100)
    tuned = private_selection(run, Repetitions("geometric", 3)).epsilon(1e-5)
    assert rows[2][4:6] == [f"{tuned.epsilon:.3f}", f"{tuned.by_accountant['RDP']:.3f}"]
    for row in rows:
        epsilon, by_rdp, one_run, more_noise = (float(row[i]) for i in (4, 5, 7, 8))
        assert one_run < 1 < epsilon < by_rdp and more_noise > 1
    geometric = [float(cell) for cell in rows[2][2:4]]
    assert geometric == [33.3, round(100 * (2 / 3) ** 9, 1)]
