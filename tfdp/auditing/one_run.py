"""Bounds from one training: canaries that are in by coins, and guesses of these coins.

Of m canaries the attacker guesses the coins of r: "in" for the r / 2 highest scores, "out" for the
r / 2 lowest. Too many correct guesses contradict a guarantee.
"""

import functools

import numpy as np
from scipy import special

# Shares of the canaries whose coins are guessed. Few suit a strong attack, many a weak one.
_SHARES = {"one_run": (1.0, 0.5, 0.25, 0.1, 0.05), "one_run_f_dp": (1.0, 0.6, 0.3)}
_LARGEST_EPSILON, _LARGEST_MU = 50.0, 12.0


def guess_counts(canaries: int, method: str) -> list[int]:
    """Returns how many coins to guess, fixed before any score is seen; even numbers.

    Args:
      canaries: Number of canaries, m.
      method: "one_run" or "one_run_f_dp".
    """
    counts = {2 * int(share * canaries / 2 + 1e-9) for share in _SHARES[method]}
    return sorted(count for count in counts if 2 <= count <= canaries) or [1]


def correct_guesses(seen: np.ndarray, unseen: np.ndarray, count: int) -> int:
    """Counts correct guesses; among equal scores, those are guessed that are wrong.

    Args:
      seen: Scores of canaries that were in, sorted.
      unseen: Scores of canaries that were out, sorted.
      count: Number of guesses; if it is odd, one more is "in".
    """
    scores = np.concatenate([seen, unseen])
    is_in = np.concatenate([np.ones(seen.size, bool), np.zeros(unseen.size, bool)])
    low, high = count // 2, count - count // 2
    # Equal scores count as wrong: "in" comes first, where "out" is guessed, and "out" last.
    ordered = is_in[np.lexsort([~is_in, scores])]
    return int(ordered[scores.size - high :].sum() + (~ordered[:low]).sum())


@functools.lru_cache(maxsize=65536)
def pure_bound(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Returns the largest epsilon that the number of correct guesses contradicts.

    Args:
      canaries: Number of canaries, m.
      guesses: Number of guesses, r.
      correct: Number of correct ones, v.
      delta: The delta of the guarantee.
      significance: Probability that a guarantee may be contradicted that holds.
    """
    low, high = 0.0, _LARGEST_EPSILON
    if p_value(canaries, guesses, correct, low, delta) > significance:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        contradicted = p_value(canaries, guesses, correct, middle, delta) <= significance
        low, high = (middle, high) if contradicted else (low, middle)
    return low


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of so many correct guesses about an (epsilon, delta)-DP mechanism.

    Were delta 0, the number of correct guesses would be at most a binomial one, of r guesses that
    are each correct with probability e^epsilon / (1 + e^epsilon). Delta adds at most
    2 m delta max_i P[v - i <= Binomial < v] / i.

    Returns:
      The bound, at most 1.

    References:
      - Steinke, Nasr, Jagielski, 2023, Theorem 5.2 and Appendix D.
    """
    i = np.arange(0, correct + 1 if delta > 0 else 1)
    from_v_minus_i = special.bdtrc(correct - i - 1.0, guesses, special.expit(epsilon))
    found = from_v_minus_i[0]
    if i.size > 1:
        shares = (from_v_minus_i[1:] - found) / i[1:]
        found = found + 2 * canaries * delta * shares.max()
    return min(float(found), 1.0)


@functools.lru_cache(maxsize=65536)
def gaussian_bound(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Returns the largest mu that the number of correct guesses contradicts.

    Args:
      canaries: Number of canaries, m.
      guesses: Number of guesses, r.
      correct: Number of correct ones, v.
      delta: Not used: mu is that of a whole trade-off curve.
      significance: Probability that a guarantee may be contradicted that holds.
    """
    del delta
    low, high = 0.0, _LARGEST_MU
    for _ in range(3):  # Each leaves a 16th.
        tried = np.linspace(low, high, 17)
        contradicted = is_contradicted(canaries, guesses, correct, tried, significance)
        if not contradicted[0]:
            return 0.0
        last = int(np.flatnonzero(np.cumprod(contradicted))[-1])
        low, high = float(tried[last]), float(tried[min(last + 1, 16)])
    return low


def is_contradicted(
    canaries: int, guesses: int, correct: int, mu: np.ndarray, significance: float
) -> np.ndarray:
    """Returns whether so many guesses are correct with a probability below `significance`.

    Write p_j for the probability of j correct guesses, g for `f`'s inverse blow-up,
    g(x) = Phi(Phi^-1(x) - mu), and m for the number of canaries. Exchanging one canary's coin turns
    a guess that is correct into one that is not and leaves the others. Summed over canaries, by the
    concavity of the trade-off curve: for each c,

        sum_{j >= c - 1} (r - j) p_j / m >= g(sum_{j >= c} j p_j / m).

    Suppose that v or more are correct with probability `significance`. The inequalities then ask
    for a least p_{v-1}, p_{v-2}, and so on; least of all if the first probability is all of p_v. If
    all of them are more than 1, the supposition is wrong, and so for any larger probability.

    Args:
      canaries: Number of canaries, m.
      guesses: Number of guesses, r.
      correct: Number of correct ones, v.
      mu: Values to try, `[k]`.
      significance: The probability.

    Returns:
      Booleans `[k]`.

    References:
      - Mahloujifar, Melis, Chaudhuri, 2024, Theorem 3.2 and Algorithm 3. (Derived anew, for guesses
        of single coins.)
    """
    total = np.full(np.shape(mu), significance)  # Sum of the probabilities so far.
    right = total * correct / canaries  # The sum of j p_j / m.
    wrong = total * (guesses - correct) / canaries
    for j in range(correct - 1, -1, -1):
        needed = special.ndtr(special.ndtri(np.minimum(right, 1.0)) - mu)
        more = np.maximum(needed - wrong, 0.0) * canaries / (guesses - j)
        total, right = total + more, right + more * j / canaries
        wrong = wrong + more * (guesses - j) / canaries
        if (total > 1).all():
            break
    return total > 1
