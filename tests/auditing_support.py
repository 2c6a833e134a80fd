"""Mechanisms of known epsilon, whose scores bounds are computed from."""

import functools

import numpy as np

from tfdp.auditing import epsilon_lower_bound, epsilon_of_mu

SIMULATIONS, DELTA = 1000, 1e-5


@functools.lru_cache
def mu_of(epsilon, delta=DELTA):
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of_mu(middle, delta) < epsilon else (low, middle)
    return low


# Mechanisms with an epsilon that is known: scores of n canaries, of which some are in.


def gaussian(coins, random, epsilon, delta):
    return random.normal(size=coins.size) + mu_of(epsilon, delta) * coins


def rounded_gaussian(coins, random, epsilon, delta):
    return np.round(gaussian(coins, random, epsilon, delta))


def randomized_response(coins, random, epsilon, delta):
    """The strongest of all mechanisms; with the probability delta, it tells the truth."""
    right = random.random(coins.size) < 1 / (1 + np.exp(-epsilon))
    told = random.random(coins.size) < delta
    return np.where(told, np.where(coins, 9.0, -9.0), np.where(right, coins, ~coins))


def spread_response(coins, random, epsilon, delta):
    """The same, with so many thresholds that are equally good."""
    return randomized_response(coins, random, epsilon, delta) + random.random(coins.size) / 2


def constant(coins, random, epsilon, delta):
    """Nothing is learned: the order in which canaries are listed must not tell anything."""
    return np.zeros(coins.size)


def infinite(coins, random, epsilon, delta):
    return np.where(random.random(coins.size) < 0.5, np.inf, -np.inf)


def exceeding(mechanism, method, epsilon, canaries, delta=DELTA, share=0.5):
    """In how many simulations the bound exceeds the true epsilon."""
    count = 0
    for seed in range(SIMULATIONS):
        random = np.random.default_rng(seed)
        coins = random.random(canaries) < share
        scores = mechanism(coins, random, epsilon, delta)
        found = epsilon_lower_bound(scores[coins], scores[~coins], delta, method=method)
        count += found > epsilon
    return count
