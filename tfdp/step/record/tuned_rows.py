"""Rows of the runs of a private selection: each costs what the whole selection costs.

A row counts the steps of one run, and says of what selection it is one. Whatever has the values of
a run has its row, so that nothing states the cost of the run alone.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import dp_accounting
import numpy as np

from tfdp.accounting import run_selection
from tfdp.accounting.bounds import Release
from tfdp.accounting.repetitions import Repetitions
from tfdp.step.record.record_table import STEPS, parameters_of

# Where a row has what: steps of a run have no test, no attempts and no schedule of their own.
_MEAN, _SHAPE = "threshold", "validation_batch_size"
_SCORE_NOISE, _KIND_OF_STEP = "validation_noise_multiplier", "max_attempts"
_ID = "noise_schedule"
# Whether scores are of held-out examples alone. It is 0 in older rows, and an older version takes
# the row for one that costs more.
_HELD_OUT = "selective_release"


class RunSelection(NamedTuple):
    """A private selection, as the rows of its runs state it.

    Attributes:
      repetitions: Distribution of the number of runs; not "poisson".
      score_noise_multiplier: Noise of each run's score, in units of its sensitivity; 0: the score
        reads no private data.
      held_out: Whether no example (or user) is both trained on and scored.
    """

    repetitions: Repetitions
    score_noise_multiplier: float
    held_out: bool = False

    @property
    def score(self) -> dp_accounting.DpEvent | None:
        """Release of a run's score; None if it reads no private data."""
        noise = self.score_noise_multiplier
        return dp_accounting.GaussianDpEvent(noise) if noise else None

    def release(self, step: Release, steps: int) -> Release:
        """Returns what the best run releases, of runs that take some steps each."""
        score, held_out = (None, self.score) if self.held_out else (self.score, None)
        run = (dp_accounting.SelfComposedDpEvent(step.event, steps), score)
        event = dp_accounting.ComposedDpEvent([one for one in run if one is not None])
        truncation = steps * step.truncation_probability
        return run_selection.release_of(event, self.repetitions, truncation, held_out)

    def parameters(self, kind: float) -> dict[str, float]:
        """Returns the parameters of the rows of a run.

        Args:
          kind: Kind of its steps, as `record_table` has them.
        """
        return {
            _MEAN: float(self.repetitions.mean),
            _SHAPE: float(self.repetitions.eta),
            _SCORE_NOISE: float(self.score_noise_multiplier),
            _KIND_OF_STEP: float(kind),
            _HELD_OUT: float(self.held_out),
            # Rows of equal parameters would be added up, as if two runs were one of more steps.
            _ID: random.SystemRandom().random(),
        }


def release_of(row: np.ndarray, step_of: Callable[[float, dict[str, float]], Release]) -> Release:
    """Returns what the selection releases that the run of a row is one of.

    Args:
      row: `[COLUMNS]`.
      step_of: Returns what a step releases, of its kind and its parameters.
    """
    parameters = parameters_of(row)
    repetitions = Repetitions.of_shape(parameters[_MEAN], parameters[_SHAPE])
    held_out = parameters[_HELD_OUT] == 1.0
    selection = RunSelection(repetitions, parameters[_SCORE_NOISE], held_out)
    return selection.release(step_of(parameters[_KIND_OF_STEP], parameters), int(row[STEPS]))
