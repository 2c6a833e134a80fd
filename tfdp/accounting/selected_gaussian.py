"""The privacy of one selected update: a sampled Gaussian that is kept if a bounded test accepts it.

Without an example x the update is, along x's gradient and in units of the sensitivity, w drawn from
P = N(0, sigma^2), and it is accepted with probability a(w). With x it is drawn from
P' = (1 - q) N(0, sigma^2) + q N(1, sigma^2) and accepted with probability
a'(w) = (1 - q_v) a(w) + q_v b(w), because x is in the test's own batch with probability q_v. The
noise in the test keeps a and b in an interval [A, B]; nothing else is known of them. The accepted
update is distributed as a P / Z without x and as a' P' / Z' with it, where Z and Z' are the masses.

The largest Renyi divergence over all such a and b is computed here, by duality. With L = dP'/dP,

  (alpha - 1) R_add = alpha log sup N^(1/alpha) Z^((alpha - 1)/alpha) / Z',
  N = E_P[L^alpha a'^alpha a^(1 - alpha)],  Z = E_P[a],  Z' = E_P[L a'].

The weighted geometric mean of N and Z is the minimum of
e^((alpha - 1) eta) N / alpha + e^(-eta) Z (alpha - 1)/alpha over all eta. Hence every eta gives an
upper bound, alpha log c, as soon as

  h(eta, c) = E_P[max over a, b of
    e^((alpha - 1) eta) L^alpha a'^alpha a^(1 - alpha) / alpha
    + e^(-eta) a (alpha - 1)/alpha - c L a'] <= 0,

and the best eta gives the supremum itself (minimax: convex in eta, linear in N, Z and Z'). What is
maximized is convex in (a, b), so that only the corners {A, B}^2 count. N, Z and Z' are proportional
to the scale of a and b, so that only B / A matters: A = 1 in this module. "Remove" is the same with
P and P', and a and a', exchanged. A search over a and b instead gives values that a better search
may exceed; what is returned here is proven by the pair (eta, c) that was found.

The bound holds for what is left out above, too. To average over the sampling of the other examples
is to average N, Z and Z', in which h is linear. In several dimensions, and for a shift shorter than
the sensitivity, the update is a noisy function of w, and given w the same maximum is a bound.
"""

import dataclasses
import functools
import math

import numpy as np
import scipy.optimize

# Densities below e^-60 of their peak do not count: all of them together are far below rounding.
_NEGLIGIBLE = 60.0
# Cells of half a standard deviation (or of sigma^2, the width over which L rises) are cut into so
# many steps. The coarse grid only chooses eta, for which every value gives a bound.
_COARSE, _FINE = 10, 50
# What the trapezoidal rule lacks at most where the slope jumps, in units of jump * step^2.
_KINK = 1 / 12
# Beyond, the quadrature is slow, and a simple bound serves: epsilon is useless anyway.
_LEAST_NOISE = 0.2
_LARGEST_LOG_SPREAD = 10.0


@functools.lru_cache(maxsize=256)
def rdp(
    q: float,
    sigma: float,
    validation_q: float,
    log_spread: float,
    orders: tuple[float, ...],
) -> np.ndarray:
    """Returns the Renyi divergence of one accepted update, at most, in the worse direction.

    Guarantees: never below the supremum over all acceptance probabilities, errors of quadrature and
    of rounding included. Above it by less than a thousandth or 1e-11, unless B / A > e^10 or
    sigma < 0.2.

    Args:
      q: Probability that an example is in the batch of the update.
      sigma: Noise multiplier of the update.
      validation_q: Probability that an example is in the batch of the test.
      log_spread: log(B / A) of the least and the largest acceptance probability.
      orders: Renyi orders > 1.

    Example:
      >>> rdp(0.01, 1.0, 0.01, 0.8, (2.0, 8.0)).round(6)
      array([0.000384, 0.0019  ])
    """
    if q == 0 and validation_q == 0:
        result = np.zeros(len(orders))
    elif not (sigma > 0 and log_spread < math.inf):
        result = np.full(len(orders), math.inf)
    else:
        # With q = 0 the noise does not matter.
        mechanism = _Mechanism(q, sigma if q > 0 else 1.0, validation_q, log_spread)
        result = np.array(
            [mechanism.rdp(order) if order < math.inf else math.inf for order in orders]
        )
    result.setflags(write=False)
    return result


@dataclasses.dataclass(frozen=True)
class _Mechanism:
    q: float
    sigma: float
    validation_q: float
    log_spread: float

    def rdp(self, order: float) -> float:
        if self.sigma < _LEAST_NOISE or self.log_spread > _LARGEST_LOG_SPREAD:
            return self._simple_rdp(order)
        log_c = max(_log_c(self, order, remove) for remove in (False, True))
        return max(0.0, log_c) * order / (order - 1)

    def _simple_rdp(self, order: float) -> float:
        """Bounds the RDP by N <= E[L^alpha] (B/A)^alpha, Z <= B/A and Z' >= 1.

        This holds for L <= (1 - q) + q L_1.

        By convexity E[L^alpha] is at most that of q = 1, exp(alpha (alpha - 1) / (2 sigma^2)).
        """
        unselected = order / (2 * self.sigma**2) if self.q > 0 else 0.0
        return unselected + (order / (order - 1) + 1) * self.log_spread

    def log_densities(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns log P(w) and log L(w)."""
        log_p = -(w**2) / (2 * self.sigma**2) - math.log(self.sigma * math.sqrt(2 * math.pi))
        log_shift = (2 * w - 1) / (2 * self.sigma**2)
        if self.q == 0:
            return log_p, np.zeros_like(w)
        if self.q == 1:
            return log_p, log_shift
        return log_p, np.logaddexp(math.log1p(-self.q), math.log(self.q) + log_shift)


class _Dual:
    """h(eta, c) of one mechanism, order and direction, on a grid of w.

    With x_i, y_i and d_i for the factors of corner i, and X, Y and W for the three densities,
    h / c = sum over w of max_i (x_i X + y_i Y - d_i W).
    """

    def __init__(self, mechanism: _Mechanism, order: float, remove: bool, steps_per_cell: int):
        w, step = _grid(mechanism, order, remove, steps_per_cell)
        logs, self.rounding = _log_terms(mechanism, order, remove, w)
        peak = logs[0].max()
        first = np.exp(logs[0] - peak) * step
        self.log_first = float(peak + math.log(first.sum()))
        self.densities = np.stack(
            [first / first.sum(), np.exp(logs[1]) * step, np.exp(logs[2]) * step]
        )
        log_a = np.array([0.0, 0.0, mechanism.log_spread, mechanism.log_spread])
        spread = math.exp(mechanism.log_spread)
        b = np.array([1.0, spread, 1.0, spread])
        log_mixed = np.log(_mixed(np.exp(log_a), b, mechanism.validation_q))
        own, other = (log_a, log_mixed) if remove else (log_mixed, log_a)
        self.order = order
        # Logs of N, Z and Z' at four constant (a, b), and at the best ones found last.
        ratios = order * own + (1 - order) * other
        self.corners = np.stack([self.log_first + ratios, other, own])
        self.last = self.corners[:, 0]

    def bracket(self) -> tuple[float, float]:
        """Returns the best eta is (log Z - log N) / alpha for the best N and Z: between these."""
        log_n, log_z, _ = self.corners
        return (
            float(log_z.min() - log_n.max()) / self.order,
            float(log_z.max() - log_n.min()) / self.order,
        )

    def log_c(self, eta: float) -> tuple[float, float]:
        """Finds the least log c proven to have h(eta, c) <= 0, and the sign of its slope in eta.

        By Newton's method (Dinkelbach's, for a ratio): h is convex and decreasing in c. The start
        is below, where known a and b lead; this also keeps all exponentials small.
        """
        known = np.column_stack([self.corners, self.last])
        log_c = float(np.max(np.logaddexp(*self._upper(eta, known)) - known[2]))
        for _ in range(100):
            masses, excess = self._at(eta, log_c)
            if abs(excess) <= max(self.rounding, 1e-13) * masses[2]:
                break
            log_c += math.log1p(excess / masses[2])
        log_first, log_second, log_divisor = np.log(np.maximum(masses, 1e-300))
        log_n = log_first + log_c - (self.order - 1) * eta + math.log(self.order)
        log_z = log_second + log_c + eta - math.log((self.order - 1) / self.order)
        self.last = np.array([log_n, log_z, log_divisor])
        # dh/dc <= -E[W] min d_i = -1: so much more of c removes what is left of the excess.
        proven = log_c + math.log1p(max(excess, 0.0))
        # The upper terms grow with eta by (alpha - 1) times the first, less the second.
        return proven, float(self.order * eta + log_n - log_z)

    def _upper(self, eta: float, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logs of the two upper terms, given those of N and Z."""
        alpha = self.order
        return (
            logs[0] + (alpha - 1) * eta - math.log(alpha),
            logs[1] - eta + math.log((alpha - 1) / alpha),
        )

    def _at(self, eta: float, log_c: float) -> tuple[np.ndarray, float]:
        """Returns both upper terms and the divisor at the best corners, h / c, and all errors."""
        first, second = (np.exp(log - log_c) for log in self._upper(eta, self.corners))
        factors = np.stack([first, second, -np.exp(self.corners[2])], axis=1)
        values = factors @ self.densities
        best = values.argmax(axis=0)
        h = values.max(axis=0)
        shares = np.array([self.densities[:, best == i].sum(axis=1) for i in range(4)])
        masses = (shares * np.abs(factors)).sum(axis=0)
        # The trapezoidal rule is exact on smooth parts (see sampled_gaussian.py). Where the best
        # corner changes, the slope jumps up. It ends at 0, where it began, so that its variation is
        # at least twice the sum of the jumps: enough for terms of higher order in the step, too.
        quadrature = _KINK * float(np.abs(np.diff(h, 2)).sum())
        return masses, float(h.sum()) + quadrature + self.rounding * float(masses.sum())


def _mixed(a: np.ndarray, b: np.ndarray, validation_q: float) -> np.ndarray:
    """Returns a', where the example is in the test's batch with probability `validation_q`."""
    return (1 - validation_q) * a + validation_q * b


def _log_c(mechanism: _Mechanism, order: float, remove: bool) -> float:
    """Returns the smallest log c that is proven, in one direction."""
    coarse = _Dual(mechanism, order, remove, _COARSE)
    low, high = coarse.bracket()
    slopes = {x: coarse.log_c(x)[1] for x in (low, high)}
    if slopes[low] < 0 < slopes[high]:
        eta = scipy.optimize.brentq(
            lambda x: slopes[x] if x in slopes else coarse.log_c(x)[1], low, high, xtol=1e-10
        )
    else:
        eta = low if slopes[low] >= 0 else high
    return _Dual(mechanism, order, remove, _FINE).log_c(eta)[0]


def _grid(
    mechanism: _Mechanism, order: float, remove: bool, steps_per_cell: int
) -> tuple[np.ndarray, float]:
    """Returns equidistant w wherever one of three densities is not negligible, and their step.

    log L^alpha P has slope (alpha p - w) / sigma^2 with p in [0, 1]: outside [0, alpha] it falls at
    least as fast as P does; likewise L^(1 - alpha) P outside [1 - alpha, 0].
    """
    tail = 14 * mechanism.sigma
    low, high = (1 - order - tail, 1 + tail) if remove else (-tail, order + tail)
    width = min(mechanism.sigma, mechanism.sigma**2) / 2
    cells = np.arange(math.floor(low / width), math.ceil(high / width) + 1)
    logs, _ = _log_terms(mechanism, order, remove, cells * width)
    keep = (logs > logs.max(axis=1, keepdims=True) - _NEGLIGIBLE).any(axis=0)
    keep[:-1] |= keep[1:]  # The cell on the left of every such point.
    cells, step = cells[keep], width / steps_per_cell
    return (
        (cells[:, np.newaxis] * steps_per_cell + np.arange(steps_per_cell)) * step
    ).ravel(), step


def _log_terms(
    mechanism: _Mechanism, order: float, remove: bool, w: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the logs of the densities X, Y and W at w, and their largest relative rounding."""
    log_p, log_l = mechanism.log_densities(w)
    largest = float((1 + order * np.abs(log_l) + np.abs(log_p)).max())
    rounding = 4 * float(np.finfo(float).eps) * largest
    if remove:
        return np.stack([(1 - order) * log_l + log_p, log_l + log_p, log_p]), rounding
    return np.stack([order * log_l + log_p, log_p, log_l + log_p]), rounding
