"""Events of the mechanisms that the experiments account for."""

import dp_accounting


def sampled_gaussian(q: float, sigma: float) -> dp_accounting.PoissonSampledDpEvent:
    """Returns the event of a Gaussian mechanism with noise multiplier sigma on a Poisson sample."""
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
