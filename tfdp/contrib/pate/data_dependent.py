"""The data-dependent bound of GNMax, which is as private as the votes that it is computed from."""

import math
from typing import Any

import dp_accounting
import numpy as np
import scipy.special

from tfdp.accounting.accountants import DEFAULT_RDP_ORDERS
from tfdp.base.validation import between_zero_and_one
from tfdp.contrib.pate.votes import checked_stddev, vote_counts


def nonprivate_data_dependent_epsilon(
    votes: Any, *, num_classes: int, noise_stddev: float, delta: float
) -> float:
    """Returns the data-dependent epsilon of GNMax's answers: NOT private, not to be published.

    Where teachers agree, noise rarely changes the answer, and the answer tells less about a teacher
    than the ledger counts. The result is a function of private votes, without noise: to publish
    it, or anything that was chosen by it, has no guarantee at all. It is for those who may see the
    data, such as to learn what the data-independent bound gives away.

    Nor is it an epsilon of differential privacy. It bounds the divergence of the answers on these
    data from those on each neighbor, and not the other direction, which depends on the votes of
    the neighbor. For the votes (0, 6, 0), their neighbor (1, 5, 0), noise 0.7 and order 2, the
    bound is 0.0043, and the divergence in the other direction is 0.72. So no ledger and no
    statement has it, and a release of it with noise by smooth sensitivity (section 5 of the paper)
    is not part of tfdp.

    Args:
      votes: The teachers' votes on the queries, as `teacher_votes` returns them.
      num_classes: Number of classes.
      noise_stddev: That of `GNMax`.
      delta: The delta, in (0, 1).

    Raises:
      ValueError: An argument is not as described.

    References:
      - Papernot et al., 2018, Scalable Private Learning with PATE
        (https://arxiv.org/abs/1802.08908): theorem 6, propositions 7 and 10.

    Example:
      >>> votes = np.ones([250, 50], int)  # 250 teachers agree on 50 queries.
      >>> epsilon = nonprivate_data_dependent_epsilon(
      ...     votes, num_classes=2, noise_stddev=40.0, delta=1e-5
      ... )
      >>> round(epsilon, 3)
      0.163
    """
    counts = vote_counts(votes, num_classes)
    stddev = checked_stddev("noise_stddev", noise_stddev)
    delta = between_zero_and_one("delta", delta)
    orders = np.array(DEFAULT_RDP_ORDERS, np.float64)
    divergences = sum(
        (renyi_divergences(log_q, stddev, orders) for log_q in log_of_another(counts, stddev)),
        np.zeros_like(orders),
    )
    return float(dp_accounting.rdp.compute_epsilon(orders, divergences, delta)[0])


def log_of_another(counts: np.ndarray, noise_stddev: float) -> np.ndarray:
    """Returns log(q), where q bounds the probability that another class than the first wins.

    Of `counts`, `[queries, num_classes]`, the class with the largest is the first. Another one
    beats it with probability Phi(-gap / (sqrt(2) stddev)); q is their sum (proposition 7).
    """
    in_order = np.sort(counts, axis=1)
    gaps = (in_order[:, -1:] - in_order[:, :-1]) / (math.sqrt(2) * noise_stddev)
    return scipy.special.logsumexp(scipy.special.log_ndtr(-gaps), axis=1)


def renyi_divergences(log_q: float, noise_stddev: float, orders: np.ndarray) -> np.ndarray:
    """Bounds the Renyi divergence of an answer on the data from that on a neighbor.

    The smaller of order / stddev^2, which holds for any votes (proposition 8), and theorem 6 with
    the orders of proposition 10, where its conditions hold.

    Args:
      log_q: A result of `log_of_another`.
      noise_stddev: Standard deviation of the noise.
      orders: Renyi orders above 1, `[orders]`.

    Returns:
      `[orders]`.
    """
    variance = noise_stddev**2
    independent = orders / variance
    if not log_q < 0:
        return independent
    mu_2 = noise_stddev * math.sqrt(-log_q)
    mu_1 = mu_2 + 1
    epsilon_1, epsilon_2 = mu_1 / variance, mu_2 / variance
    # With q below this, the bound grows with q: it holds for an upper bound on the probability.
    if mu_2 <= 1 or log_q + epsilon_2 >= 0:
        return independent
    largest = (mu_2 - 1) * epsilon_2 - mu_2 * math.log(mu_1 / (mu_1 - 1) * mu_2 / (mu_2 - 1))
    if log_q > largest:
        return independent
    log_not_q = math.log(-math.expm1(log_q))
    exponent = (log_q + epsilon_2) * (mu_2 - 1) / mu_2
    log_a = log_not_q - math.log(-math.expm1(exponent))
    log_b = epsilon_1 - log_q / (mu_1 - 1)
    total = np.logaddexp(log_not_q + (orders - 1) * log_a, log_q + (orders - 1) * log_b)
    dependent = np.where(orders <= mu_1, np.maximum(total / (orders - 1), 0), np.inf)
    return np.minimum(independent, dependent)
