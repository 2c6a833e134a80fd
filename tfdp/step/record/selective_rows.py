"""Releases that rows of selective release (DPSUR) stand for."""

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.observability import CONDITIONAL
from tfdp.accounting.sampling import FULL, TRUNCATION_PROBABILITY, PoissonSampling
from tfdp.accounting.selective_release import (
    SelectiveReleaseDpEvent,
    acceptance_bounds,
    selective_truncation_probability,
)


def release_of(parameters: dict[str, float], update: Release, observability: str) -> Release:
    """Returns what one accepted update, or one attempt, releases.

    Args:
      parameters: The privacy parameters by the names of their arguments.
      update: What the update releases that an attempt makes.
      observability: What is assumed to be seen.
    """
    test = PoissonSampling(
        int(parameters["dataset_size"]),
        int(parameters["validation_batch_size"]),
        padding=FULL,
        max_truncation_probability=TRUNCATION_PROBABILITY,
    )
    noise, threshold = parameters["validation_noise_multiplier"], parameters["threshold"]
    selection = event_codec.sampled_gaussian(test.sampling_probability, noise)
    truncation = update.truncation_probability + test.truncation_probability
    if observability == CONDITIONAL:
        truncation = selective_truncation_probability(
            update.truncation_probability,
            test.truncation_probability,
            acceptance_bounds(noise, threshold)[0],
            int(parameters["max_attempts"]),
        )
    return Release(SelectiveReleaseDpEvent(update.event, selection, threshold), 1, truncation)
