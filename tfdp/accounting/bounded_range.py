"""The cost of mechanisms of bounded range, such as report-noisy-min."""

import numpy as np

# The worst case is enclosed by cells of the range: each is 0.05% too dear at most.
_CELLS = 4096
# More than the absolute error of a log moment, which is near 0 for small sampling probabilities.
_ROUNDING = 1e-12


def bounded_range_rdp(width: float, q: float, order: float) -> float:
    """Computes the Renyi divergence of a bounded-range mechanism on a Poisson sample.

    It holds in both directions.

    Let M have range eta, and let P = M(S) and Q = M(S + x) for a sample S without the example x.
    By the joint convexity of exp((alpha - 1) D_alpha) it is enough to compare P with
    (1 - q) P + q Q for the worst S. For some s in [0, eta] the ratio r = Q / P is in
    [e^-s, e^(eta - s)], and has mean 1 under P. Both t^alpha and t^(1 - alpha) are convex, so that
    the means of (1 - q + q r)^alpha (an example more) and of (1 - q + q r)^(1 - alpha) (one less)
    are largest when r takes only the two ends of its interval, the upper one with probability
    (1 - e^-s) / (e^(eta - s) - e^-s). Some exponential mechanism with two candidates attains the
    worst s, so that this cost is the smallest that is valid for all of them. It is at most
    alpha eta^2 / 8 (q = 1), and at most that of randomized response with epsilon = eta.

    The worst s is enclosed: in each of many cells of [0, eta] the interval is widened to hold
    those of all s in the cell.

    Args:
      width: The range eta, at least 0.
      q: Sampling probability, in [0, 1].
      order: Renyi order alpha > 1.

    Source: for q = 1, Dong, Durfee, Rogers 2020, "Optimal Differential Privacy Composition for
    Exponential Mechanisms", section 3; here with sampling.

    Example:
      >>> import math
      >>> from tfdp.accounting.bounded_range import bounded_range_rdp
      >>> exact = math.log(1 + 0.1**2 * math.sinh(0.5) ** 2)  # At order 2.
      >>> bool(0 <= bounded_range_rdp(1.0, 0.1, 2.0) / exact - 1 < 1e-3)
      True
    """
    if width == 0 or q == 0:
        return 0.0
    s = np.linspace(0.0, width, _CELLS + 1)
    above = np.expm1(width - s[:-1])  # Upper end minus 1.
    below = -np.expm1(-s[1:])  # 1 minus the lower end.
    log_upper, log_lower = np.log(below / (above + below)), np.log(above / (above + below))
    sampled = np.log1p(q * above), np.log1p(-min(q, 1 - 1e-16) * below)
    upper, lower = sampled if q < 1 else (width - s[:-1], -s[1:])
    moments = [
        np.logaddexp(log_upper + power * upper, log_lower + power * lower).max()
        for power in (order, 1 - order)
    ]
    return float((max(0.0, *moments) + _ROUNDING) / (order - 1))
