"""Certificate of the table of `tfdp.accounting.signed_gaussian`, and the command that makes it.

It proves, for all integers k from 2 to 1024, all margins m and all shifts d > 0 (those below 0 are
the same by symmetry), that log M_k(m, d) <= (t^2 / 2) R(t) with t = sqrt(k (k - 1)) d. The steps
are those of docs/sign_accounting.md:

- Small t: a bound in closed form, in one variable.
- Large |m|: bounds in closed form.
- Otherwise: log M_k has second derivatives of at least -min(k, 1 + 2 k d) along m, and of at least
  -k along d. So between two points it exceeds the chord by at most this times (distance)^2 / 8.
  Intervals of m are halved until this proves the bound; shifts between two of the grid follow from
  the bounds there.

Floating point: a value of G is off by at most `_ERROR` times its largest term.
"""

import argparse

import numpy as np
from scipy import special

from tfdp.accounting import signed_gaussian
from tfdp.accounting.signed_gaussian import FIRST, RATIO

_LAST = 40.0
# What the table exceeds the largest moment at its points by, so that chords are above it, too.
_MARGIN = 6e-4
# Steps of the grid of shifts between two points of the table.
_STEPS = 8
_ERROR = 1e-14
_CELLS = 32
_FARTHEST = 8.0


class NotProvenError(Exception):
    """Error of a table that is not proven."""


def _prove(holds: object, what: str) -> None:
    if not np.all(holds):
        raise NotProvenError(what)


def log_moment(k: np.ndarray, m: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Computes log M_k(m, d)."""
    left, right = (
        (1 - k) * special.log_ndtr(s * m) + k * special.log_ndtr(s * (m + d)) for s in (1, -1)
    )
    return np.logaddexp(left, right)


def _error(k: np.ndarray, m: np.ndarray, d: np.ndarray) -> np.ndarray:
    size = np.abs(special.log_ndtr(-np.abs(m))) + np.abs(special.log_ndtr(-np.abs(m + d)))
    return _ERROR * (k * size + 1)


def largest(k: float, d: float) -> float:
    """Computes the largest log M_k(m, d) over m, without proof."""
    low, high = -k * d - 3.0, 2.0
    for _ in range(6):
        m = np.linspace(low, high, 200)
        best = int(np.argmax(log_moment(k, m, d)))
        low, high = m[max(best - 1, 0)], m[min(best + 1, 199)]
    return float(log_moment(k, m, d)[best])


def made_table() -> list[int]:
    """Computes the table: that of k = 2, which is the largest, with a margin."""
    shares, t = [], FIRST
    while t < _LAST:
        shares.append(2 * largest(2.0, t / np.sqrt(2)) / t**2)
        t *= RATIO
    shares[0] = max(shares[0], small_share(FIRST) / (1 + _MARGIN) * 1.0001)
    rising = np.maximum.accumulate(np.array(shares) * (1 + _MARGIN))
    return [int(np.ceil(1e5 * min(1.0, share))) for share in rising]


def _hazards(m: np.ndarray) -> np.ndarray:
    """Lambda: the derivative of the log odds of a sign, phi / (Phi(m) Phi(-m))."""
    log_density = -(m**2) / 2 - np.log(2 * np.pi) / 2
    return np.exp(log_density - special.log_ndtr(m) - special.log_ndtr(-m))


def small_share(t: float) -> float:
    """Proves a bound on log M_k(m, d) / (t^2 / 2) for all k >= 2, m, and d <= t / sqrt(k (k - 1)).

    With the log odds theta of a sign, psi(x) = log(1 + e^x) and D = theta(m + d) - theta(m), log
    M_k is k (k - 1) D^2 / 2 times a mean of psi'' between theta(m) and theta(m) + k D. There is
    D <= d max Lambda, with Lambda even, rising in |m|, and of slope at most 1.
    """
    reach = np.sqrt(2) * t  # k d, at most.
    shift = reach / 2  # d, at most.
    width = 1e-5
    m = np.arange(-_FARTHEST, _FARTHEST, width) + width / 2
    odds = special.log_ndtr(m) - special.log_ndtr(-m)
    hazard = np.maximum(_hazards(m), _hazards(m + shift))
    nearest = np.where(m >= 0, odds, np.minimum(odds + reach * hazard, 0.0))
    found = hazard**2 * special.expit(nearest) * special.expit(-nearest)
    # The logarithm of what is maximized has a slope of at most 2 / Lambda(0) + Lambda + reach.
    slope = 2 / 1.59 + hazard + reach
    inside = float(np.max(found * np.exp(slope * width)))
    # Beyond, Lambda <= |m| + 2, and psi'' <= e^-|nearest| with |odds| >= m^2 / 2.
    far = np.arange(_FARTHEST, 1000.0, 0.1)
    outside = float(np.max((far + 2.2) ** 2 * np.exp(-(far**2) / 2 + reach * (far + 2.2))))
    _prove(outside < inside, "the largest value is at small margins")
    return inside


def certify(orders: np.ndarray, steps: int = _STEPS) -> float:
    """Proves the table for integer `orders`, or raises a NotProvenError.

    Returns:
      The smallest slack that is left, relative to the bound, at points that were looked at.
    """
    _prove(signed_gaussian.TABLE[0] / 1e5 >= small_share(FIRST), "small shifts")
    shares = np.array(signed_gaussian.TABLE) / 1e5
    _prove(np.diff(shares) >= 0, "the table rises")
    rise = np.diff(shares) / (RATIO - 1) * RATIO  # R' t, at most.
    _prove(shares[1:] + 2 * rise <= 2.2, "t^2 R(t) / 2 has a small second derivative")
    ratio = RATIO ** (1 / steps)
    count = (len(signed_gaussian.TABLE) - 1) * steps
    slack = np.inf
    k = np.asarray(orders, float)
    for t in FIRST * ratio ** np.arange(count + 1):
        bound = t**2 / 2 * float(signed_gaussian.share_of_gaussian(t * (1 - 1e-12)))
        # Between two points of the grid the bound exceeds its chord by at most 2.2 / 8, and the
        # moment its own by at most 1 / 8, times the square of their distance.
        target = bound - 0.4 * (t * (ratio - 1)) ** 2
        slack = min(slack, _certify_at(k, t / np.sqrt(k * (k - 1)), target) / bound)
    return slack


def _certify_at(k: np.ndarray, d: np.ndarray, target: float) -> float:
    """Proves log M_k(m, d) <= target for all m."""
    least = -(k * d) - np.sqrt(2 * target) - 10
    tail = (1 - k) * special.log_ndtr(least) + k * special.log_ndtr(least + d)
    _prove(least <= -k * d, "margins are decreasing to the left")
    _prove(np.exp(tail) * (1 + _error(k, least, d)) <= target, "far to the left")
    right = (1 - k) * special.log_ndtr(_FARTHEST) + special.ndtr(-_FARTHEST)
    _prove(right <= target, "far to the right")
    edges = np.linspace(least, _FARTHEST, _CELLS + 1)
    low, high = edges[:-1].ravel(), edges[1:].ravel()
    k, d = np.tile(k, _CELLS), np.tile(d, _CELLS)
    slack = np.inf
    for _ in range(40):
        ends = [log_moment(k, m, d) + _error(k, m, d) for m in (low, high)]
        value = np.maximum(*ends)
        slack = min(slack, target - float(value.max()))
        _prove(slack > 0, f"a moment of {target - slack} is above {target}")
        curvature = np.minimum(k, 1 + 2 * k * d)
        open_ = value + curvature * (high - low) ** 2 / 8 > target
        if not open_.any():
            return slack
        k, d, low, high = (x[open_] for x in (k, d, low, high))
        middle = (low + high) / 2
        k, d = np.tile(k, 2), np.tile(d, 2)
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    raise NotProvenError("too fine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest_moment", type=int, default=signed_gaussian.LARGEST_MOMENT)
    parser.add_argument("--make", action="store_true", help="print the table instead")
    arguments = parser.parse_args()
    if arguments.make:
        table = made_table()
        for i in range(0, len(table), 12):
            print("    " + ", ".join(map(str, table[i : i + 12])) + ",")
        return
    for first in range(2, arguments.largest_moment + 1, 128):
        last = min(first + 127, arguments.largest_moment)
        slack = certify(np.arange(first, last + 1))
        print(f"proven for k = {first} to {last}; smallest slack {slack:.1e}", flush=True)


if __name__ == "__main__":
    main()
