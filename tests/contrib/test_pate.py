"""PATE: parts of the data, sensitivity of votes, noise, ledger, and the data-dependent bound.

What is drawn follows from the names of the tests (`tests/conftest.py`). The limits of random
numbers are 6 standard deviations and more: chances below 1e-8 for a hundred of them.
"""

import copy
import itertools
import math
import os
import pickle
import threading

import dp_accounting
import ml_dtypes
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

import tfdp
from tfdp.accounting import PrivacyLedger
from tfdp.contrib import pate
from tfdp.contrib.pate import data_dependent

# Parts of the data.


def assigned(num_examples, num_teachers, users=None):
    return pate.random_partition(num_examples, num_teachers, users).teacher_of


def split_evenly(num_examples, num_teachers, users=None):
    """Mutant: shuffled, and split into equal parts."""
    seed = int.from_bytes(os.urandom(8), "little")
    order = np.random.default_rng(seed).permutation(num_examples)
    return order % num_teachers


def all_together(num_examples, num_teachers, users=None):
    """Mutant: one number for all."""
    return np.full(num_examples, assigned(1, num_teachers)[0])


def assert_assigns_independently_and_uniformly(assign):
    for examples, teachers in ((3, 2), (2, 3)):
        draws, outcomes = 1500, teachers**examples
        found = np.stack([assign(examples, teachers) for _ in range(draws)])
        counts = np.bincount(found @ teachers ** np.arange(examples), minlength=outcomes)
        limit = 6 * math.sqrt(draws / outcomes)
        assert np.all(np.abs(counts - draws / outcomes) < limit)


def assert_an_example_more_moves_no_other(assign, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: np.random.default_rng(5).bytes(n))
    for teachers in (2, 7):
        before, after = (assign(n, teachers) for n in (50, 51))
        np.testing.assert_array_equal(before, after[:50])
    users = np.arange(50) % 20
    before, after = (assign(n, 7, np.append(users, 99)[:n]) for n in (50, 51))
    np.testing.assert_array_equal(before, after[:50])


def test_examples_are_assigned_independently():
    assert_assigns_independently_and_uniformly(assigned)


def test_an_example_or_a_user_more_moves_no_other(monkeypatch):
    assert_an_example_more_moves_no_other(assigned, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [split_evenly, all_together])
def test_parts_that_depend_on_each_other_are_caught(mutant):
    with pytest.raises(AssertionError):
        assert_assigns_independently_and_uniformly(mutant)


def test_an_even_split_is_caught(monkeypatch):
    with pytest.raises(AssertionError):
        assert_an_example_more_moves_no_other(split_evenly, monkeypatch)


@pytest.mark.parametrize(
    "users", [np.arange(60) % 9, [f"user {i % 9}" for i in range(60)], np.full(60, 2**62)]
)
def test_a_user_has_one_teacher(users):
    partition = pate.random_partition(60, 4, users)
    for user in set(users):
        mine = [i for i in range(60) if users[i] == user]
        assert len(set(partition.teacher_of[mine])) == 1
    assert partition.unit == "user" and partition.num_units == len(set(users))
    again = pate.Partition(partition.teacher_of, 4, partition.users)
    assert again.num_units == partition.num_units
    indices = np.concatenate([partition.indices(teacher) for teacher in range(4)])
    np.testing.assert_array_equal(np.sort(indices), np.arange(60))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"users": ["a", "a", "b"]}, "`users` must be such .* 1 users with examples of several"),
        ({"users": [0.0, 1.0, 2.0]}, "`users` must hold the user .* type float64"),
        ({"users": [0, 1]}, r"`users` must hold the user .* shape \(2,\)"),
        ({"teacher_of": [0, 1, 2]}, r"`teacher_of` must be in .* \[0, 2\)\. .* values in \[0, 2\]"),
        ({"teacher_of": [0, -1]}, r"`teacher_of` .* values in \[-1, 0\]"),
        ({"teacher_of": [0.0]}, "`teacher_of` must hold one integer .* float64"),
        ({"teacher_of": np.ma.array([0, 1], mask=[0, 1])}, "`teacher_of` must have no masked"),
        ({"users": np.ma.array([5, 6, 7], mask=[0, 1, 0])}, "`users` must have no masked"),
        ({"teacher_of": []}, "`teacher_of` must hold one integer"),
        ({"num_teachers": 0}, "`num_teachers` must be a positive integer"),
    ],
)
def test_errors_of_partitions(kwargs, words):
    with pytest.raises(ValueError, match=words):
        pate.Partition(**{"teacher_of": [0, 1, 0], "num_teachers": 2, **kwargs})


def test_other_errors_of_partitions():
    with pytest.raises(ValueError, match="`num_examples` must be a positive integer"):
        pate.random_partition(0, 2)
    for teacher in (-1, 2, True, 0.0):
        with pytest.raises(ValueError, match=r"`teacher` must be an integer in \[0, 2\)"):
            pate.Partition([0, 1], 2).indices(teacher)
    partition = pate.Partition(np.array([0, 1]), 2)
    with pytest.raises(ValueError, match="read-only"):
        partition.teacher_of[0] = 1
    assert "[" not in repr(partition)  # It shows nothing of the data.


# Votes.

NAN, INF = math.nan, math.inf


def test_votes_of_outputs_of_all_kinds():
    outputs = [[0.1, 0.7, 0.2], [3.0, 3.0, -1.0], [NAN, 9.0, 0.0], [-INF, 0.0, INF], [NAN] * 3]
    expected = [1, 0, -1, 2, -1]
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        np.testing.assert_array_equal(pate.teacher_votes([np.array(outputs, dtype)], 3), [expected])
    np.testing.assert_array_equal(pate.teacher_votes([tf.constant(outputs)], 3), [expected])
    labels = np.array([2, 0, 3, -7, 1])
    for dtype in (np.int8, np.int32, np.int64):
        votes = pate.teacher_votes([labels.astype(dtype), expected], 3)
        np.testing.assert_array_equal(votes, [[2, 0, -1, -1, 1], expected])
    far = np.array([2**64 - 1, 1, 2**63], np.uint64)
    np.testing.assert_array_equal(pate.teacher_votes([far], 3), [[-1, 1, -1]])
    assert pate.teacher_votes(iter([labels, labels]), 3).dtype == np.int64


@pytest.mark.parametrize(
    ("outputs", "received"),
    [
        ([np.zeros([5, 1])], r"shape \[5, 1\]"),
        ([np.zeros([5, 4])], r"shape \[5, 4\]"),
        ([np.zeros([5, 3], int)], "dtype int64"),
        ([np.zeros([5])], "dtype float64"),
        ([np.zeros([5, 3], bool)], "dtype bool"),
        ([["a"]], "dtype <U1"),
        ([np.zeros([5, 3], [("a", float)])], "dtype"),
        ([0], r"shape \[\]"),
        ([], "0 teachers"),
        ([np.zeros(3, int), np.zeros(4, int)], r"for \[3, 4\] queries"),
    ],
)
def test_outputs_that_are_no_votes(outputs, received):
    with pytest.raises(ValueError, match=f"`outputs` must hold, for each teacher.*{received}"):
        pate.teacher_votes(outputs, 3)


# What one teacher can do: any class, no class, or nothing that makes sense.
CHOICES = [[9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0], [NAN] * 3, [INF] * 3, [1.0, NAN, -INF]]


def assert_one_teacher_moves_one_vote(count):
    farthest, highest = 0.0, 0.0
    for others in itertools.product(CHOICES, repeat=2):
        found = np.stack([count([[one] for one in (*others, mine)], 3)[0] for mine in CHOICES])
        distances = np.linalg.norm(found[:, np.newaxis] - found, axis=2)
        peaks = found.max(axis=1)
        farthest = max(farthest, distances.max())
        highest = max(highest, np.abs(peaks[:, np.newaxis] - peaks).max())
    assert farthest == pytest.approx(math.sqrt(2)) and highest == 1


def test_one_teacher_moves_one_vote():
    assert_one_teacher_moves_one_vote(pate.vote_counts)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda outputs, num_classes: np.nan_to_num(outputs, posinf=9, neginf=0).sum(axis=0),
        lambda outputs, num_classes: np.sum(
            [one == np.max(one, axis=1, keepdims=True) for one in np.array(outputs)], axis=0
        ),
    ],
    ids=["outputs are added", "a vote for each of those that are equal"],
)
def test_other_counts_are_caught(mutant):
    with pytest.raises(AssertionError):
        assert_one_teacher_moves_one_vote(mutant)


# Noise.

N = 20_000
PARTS = pate.Partition(np.arange(10), 10)


def gnmax(cls=pate.GNMax, noise_stddev=3.0):
    return cls(PARTS, num_classes=2, noise_stddev=noise_stddev)


def confident(cls=pate.ConfidentGNMax, max_answers=2 * N, **kwargs):
    values = {"noise_stddev": 3.0, "threshold": 8.0, "threshold_noise_stddev": 2.0, **kwargs}
    return cls(PARTS, num_classes=2, max_answers=max_answers, **values)


def queries(number, ones=3):
    """Votes of ten teachers, of which `ones` say 1 in every query."""
    return np.tile((np.arange(10) < ones)[:, np.newaxis].astype(int), number)


def assert_rate(found, probability):
    deviation = math.sqrt(probability * (1 - probability) / len(found))
    assert abs(found.mean() - probability) < 6 * deviation


FLIPPED = scipy.stats.norm.cdf(-4 / (3 * math.sqrt(2)))  # Counts of 7 and 3.
PASSED = scipy.stats.norm.cdf(-1 / 2)


def assert_noise_is_what_it_should_be(of_votes, of_tests):
    aggregator = gnmax(of_votes)
    first, second = aggregator.answer(queries(N)), aggregator.answer(queries(N))
    assert_rate(first, FLIPPED)
    assert_rate((first == 1) & (second == 1), FLIPPED**2)  # Independent of each other.
    assert_rate((first[1:] == 1) & (first[:-1] == 1), FLIPPED**2)
    answers = confident(of_tests).answer(queries(N))
    assert_rate(answers >= 0, PASSED)
    assert_rate(answers[answers >= 0], FLIPPED)


def test_noise():
    assert_noise_is_what_it_should_be(pate.GNMax, pate.ConfidentGNMax)


def mutant_of(cls, **methods):
    return type(f"Mutant of {cls.__name__}", (cls,), methods)


def scaled(factor):
    def _gaussian(self, shape, stddev):
        return pate.GNMax._gaussian(self, shape, factor * stddev)

    return _gaussian


def of_one_key(self, shape, stddev):
    key, self._noise.next_key = self._noise.next_key(), lambda: key
    return pate.GNMax._gaussian(self, shape, stddev)


def one_for_all_queries(self, shape, stddev):
    return pate.GNMax._gaussian(self, (1, *shape[1:]), stddev)


def of_a_seed(self, shape, stddev):
    return np.random.default_rng(0).normal(0, stddev, shape)


@pytest.mark.parametrize(
    ("place", "gaussian"),
    [
        *((0, g) for g in (scaled(2 / 3), scaled(3 / 2), of_one_key, of_a_seed)),
        *((place, one_for_all_queries) for place in (0, 1)),
        *((1, scaled(factor)) for factor in (2 / 3, 3 / 2)),
    ],
)
def test_wrong_noise_is_caught(place, gaussian):
    classes = [pate.GNMax, pate.ConfidentGNMax]
    classes[place] = mutant_of(classes[place], _gaussian=gaussian)
    with pytest.raises(AssertionError):
        assert_noise_is_what_it_should_be(*classes)


def test_noise_follows_from_no_seed():
    found = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(1)
        found.append(gnmax().answer(queries(200, ones=5)))
    assert (found[0] != found[1]).any()


# The ledger, against exact distributions.


def exact_epsilon(p, q, delta):
    """The smallest epsilon at delta of two distributions, both ways."""
    found = 0.0
    for a, b in ((p, q), (q, p)):
        for epsilon in np.linspace(0, 30, 6001):
            if np.maximum(a - np.exp(epsilon) * b, 0).sum() <= delta:
                break
        found = max(found, epsilon)
    return found


def ones_in(number, counts, noise_stddev):
    """Distribution of the number of queries, all with the same counts, whose answer is 1."""
    gap = (counts[1] - counts[0]) / (noise_stddev * math.sqrt(2))
    return scipy.stats.binom.pmf(np.arange(number + 1), number, scipy.stats.norm.cdf(gap))


def first_answer(number, counts, noise_stddev, threshold, threshold_noise_stddev):
    """Distribution of the place of the only answer, and of the answer."""
    passed = scipy.stats.norm.sf((threshold - max(counts)) / threshold_noise_stddev)
    one = scipy.stats.norm.cdf((counts[1] - counts[0]) / (noise_stddev * math.sqrt(2)))
    places = passed * (1 - passed) ** np.arange(number)
    return np.concatenate([places * one, places * (1 - one), [(1 - passed) ** number]])


DELTA = 1e-3


def assert_epsilon_holds(of_votes, of_tests):
    aggregator = gnmax(of_votes, noise_stddev=4.0)
    aggregator.answer(queries(60))
    exact = exact_epsilon(ones_in(60, (5, 5), 4.0), ones_in(60, (6, 4), 4.0), DELTA)
    assert aggregator.ledger.epsilon(DELTA).epsilon >= exact
    for kwargs in (
        {"noise_stddev": 0.5, "threshold": 5.0, "threshold_noise_stddev": 30.0},
        {"noise_stddev": 30.0, "threshold": 9.0, "threshold_noise_stddev": 1.2},
    ):
        aggregator = confident(of_tests, max_answers=1, **kwargs)
        aggregator.answer(queries(60))
        found = aggregator.ledger.epsilon(DELTA).epsilon
        distributions = [first_answer(60, counts, **kwargs) for counts in ((5, 5), (6, 4), (7, 3))]
        for p, q in itertools.pairwise(distributions):
            assert found >= exact_epsilon(p, q, DELTA)


def test_epsilon_holds_for_the_exact_distributions_of_neighbours():
    assert_epsilon_holds(pate.GNMax, pate.ConfidentGNMax)
    aggregator = confident(noise_stddev=5.0, threshold_noise_stddev=7.0)
    aggregator.answer(queries(3))
    test, vote = aggregator.ledger.releases
    assert (test.count, test.event.noise_multiplier) == (3, 7.0)
    assert (vote.count, vote.event.noise_multiplier) == (3, 5.0 / math.sqrt(2))


def with_half_the_sensitivity(self, queries):
    self._ledger.record(
        dp_accounting.GaussianDpEvent(self._noise_stddev * math.sqrt(2)),
        queries,
    )


def only(name):
    def _record(self, queries):
        self._ledger.record(getattr(self, name), queries if name == "_test" else 1)

    return _record


@pytest.mark.parametrize(
    ("place", "record"), [(0, with_half_the_sensitivity), (1, only("_test")), (1, only("_vote"))]
)
def test_too_small_costs_are_caught(place, record):
    classes = [pate.GNMax, pate.ConfidentGNMax]
    classes[place] = mutant_of(classes[place], _record=record)
    with pytest.raises(AssertionError):
        assert_epsilon_holds(*classes)


CANARIES, ANSWERS = 4000, 20


def assert_audit_is_below_epsilon(cls, least=0.0):
    """Each canary is an example of a data set of its own, which moves a vote of each query."""
    coins = np.random.default_rng(1).random(CANARIES) < 0.5
    ones = np.repeat(np.where(coins, 6, 5), ANSWERS)
    answers = gnmax(cls).answer((np.arange(10)[:, np.newaxis] < ones).astype(int))
    scores = answers.reshape(CANARIES, ANSWERS).sum(axis=1)
    of_one = gnmax(cls)
    of_one.answer(queries(ANSWERS))
    bounds = [
        tfdp.auditing.epsilon_lower_bound(scores[coins], scores[~coins], DELTA, method=method)
        for method in ("clopper_pearson", "gaussian", "one_run")
    ]
    epsilon = of_one.ledger.epsilon(DELTA).epsilon
    assert least * epsilon <= max(bounds) <= epsilon


def test_an_audit_of_the_answers():
    assert_audit_is_below_epsilon(pate.GNMax, least=0.5)


def test_an_audit_finds_little_noise():
    with pytest.raises(AssertionError):
        assert_audit_is_below_epsilon(mutant_of(pate.GNMax, _gaussian=scaled(1 / 2)))


def assert_cost_does_not_follow_from_the_votes(cls):
    ledgers = []
    for ones in (0, 5):  # Teachers agree, or do not.
        aggregator = confident(cls, max_answers=30, threshold=9.0, threshold_noise_stddev=0.1)
        answers = [aggregator.answer(queries(number, ones)) for number in (20, 20, 5)]
        given = [int((one >= 0).sum()) for one in answers]
        assert given == ([20, 10, 0] if ones == 0 else [0, 0, 0])  # The first ones.
        assert ones or np.all(answers[1][:10] >= 0)
        ledgers.append(aggregator.ledger.to_dict())
    assert ledgers[0] == ledgers[1]
    counts = {}
    for release in aggregator.ledger.releases:
        multiplier = release.event.noise_multiplier
        counts[multiplier] = counts.get(multiplier, 0) + release.count
    assert sorted(counts.values()) == [30, 45]


def test_the_cost_of_confident_answers_does_not_follow_from_the_votes():
    assert_cost_does_not_follow_from_the_votes(pate.ConfidentGNMax)


class CountsWhatWasAnswered(pate.ConfidentGNMax):
    """Mutant: the ledger has the votes of the queries that were answered."""

    def _record(self, queries):
        self._ledger.record(self._test, queries)

    def _release(self, counts):
        answers = super()._release(counts)
        if (answers >= 0).any():
            self._ledger.record(self._vote, int((answers >= 0).sum()))
        return answers


def test_a_cost_by_the_number_of_answers_is_caught():
    with pytest.raises(AssertionError):
        assert_cost_does_not_follow_from_the_votes(CountsWhatWasAnswered)


def assert_counted_before_the_answer(cls):
    class Fails(cls):
        def _gaussian(self, shape, stddev):
            raise MemoryError

    aggregator = gnmax(Fails)
    with pytest.raises(MemoryError):
        aggregator.answer(queries(7))
    assert aggregator.ledger.steps == 7


class CountsLater(pate.GNMax):
    """Mutant: counts after the answer was made."""

    def _record(self, queries):
        pass

    def _release(self, counts):
        answers = super()._release(counts)
        super()._record(len(counts))
        return answers


def test_queries_are_counted_before_they_are_answered():
    assert_counted_before_the_answer(pate.GNMax)
    with pytest.raises(AssertionError):
        assert_counted_before_the_answer(CountsLater)


def test_what_is_refused_costs_nothing_and_what_is_asked_twice_costs_twice():
    def failing():
        yield np.zeros(4, int)
        raise KeyboardInterrupt

    aggregator = gnmax()
    with pytest.raises(ValueError, match=r"each of the 10 teachers\. Received: outputs of 9"):
        aggregator.answer(queries(4)[:9])
    with pytest.raises(KeyboardInterrupt):
        aggregator.answer(failing())
    assert aggregator.answer(np.zeros([10, 0], int)).shape == (0,)
    assert aggregator.ledger.steps == 0
    for asked in (4, 8):
        aggregator.answer(queries(4))
        assert aggregator.ledger.steps == asked


def test_threads_count_all_that_they_ask():
    aggregator = confident(max_answers=100, threshold=0.0)
    answers = []

    def ask():
        for _ in range(5):
            answers.append(aggregator.answer(queries(4, ones=0)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert aggregator.ledger.steps == 160 + 100
    assert np.sum(np.concatenate(answers) >= 0) == 100


def test_copies_and_changes_are_refused():
    for aggregator in (gnmax(), confident()):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="must not be copied or pickled"):
                copied(aggregator)
        with pytest.raises(TypeError, match="can only be read"):
            aggregator.ledger.record(aggregator.ledger.event)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"partition": [0, 1]}, "`partition` must be a Partition"),
        ({"num_classes": 1}, r"`num_classes` must be an integer in \[2, 2\^20\]"),
        ({"noise_stddev": 0}, "`noise_stddev` must be a positive finite number"),
        ({"noise_stddev": NAN}, "`noise_stddev` must be a positive finite number"),
        ({"threshold": INF}, "`threshold` must be a finite number"),
        ({"threshold_noise_stddev": 0.0}, "`threshold_noise_stddev` must be a positive finite"),
        ({"max_answers": 0}, "`max_answers` must be a positive integer"),
        ({"max_answers": None}, "`max_answers` must be a positive integer"),
    ],
)
def test_errors_of_aggregators(kwargs, words):
    values = {"partition": PARTS, "num_classes": 2, "noise_stddev": 1.0, "threshold": 5.0}
    values |= {"threshold_noise_stddev": 1.0, "max_answers": 5}
    with pytest.raises(ValueError, match=words):
        pate.ConfidentGNMax(**{**values, **kwargs})


def test_statement_names_the_unit_and_what_is_released():
    users = pate.random_partition(60, 10, np.arange(60) // 3)
    statements = []
    for partition in (PARTS, users):
        aggregator = pate.GNMax(partition, num_classes=2, noise_stddev=4.0)
        aggregator.answer(queries(5))
        text = tfdp.privacy_statement(aggregator, delta=1e-3)
        statements.append(" ".join(text.split()))
        assert "The teachers, their votes and their accuracy are not covered." in statements[-1]
    assert "Unit of privacy: one training example." in statements[0]
    assert "Unit of privacy: one user." in statements[1]
    assert aggregator.ledger.dataset_sizes == (20,)
    restored = PrivacyLedger.from_dict(aggregator.ledger.to_dict())
    both = tfdp.privacy_statement(aggregator, delta=1e-3, prior=restored)
    assert "10 steps" in both


def test_one_teacher_and_empty_parts():
    one = pate.GNMax(pate.random_partition(5, 1), num_classes=3, noise_stddev=0.01)
    np.testing.assert_array_equal(one.answer([[2, 0, 1]]), [2, 0, 1])
    empty = pate.random_partition(2, 50)
    assert sum(len(empty.indices(teacher)) == 0 for teacher in range(50)) >= 48
    votes = np.full([50, 2], -1)  # A teacher without examples that has no vote.
    votes[empty.teacher_of] = 1
    answers = pate.GNMax(empty, num_classes=3, noise_stddev=0.01).answer(votes)
    np.testing.assert_array_equal(answers, [1, 1])


# The data-dependent bound.

TEACHERS, ORDERS = 6, np.array([1.5, 2.0, 3.0, 5.0, 9.0])


def answer_probabilities(counts, noise_stddev):
    x = np.linspace(-12, 12, 2401)
    gaps = (np.array(counts)[:, np.newaxis] - counts) / noise_stddev
    others = scipy.stats.norm.logcdf(x + gaps[..., np.newaxis])
    others = others.sum(axis=1) - scipy.stats.norm.logcdf(x)
    return np.exp(others + scipy.stats.norm.logpdf(x)).sum(axis=1) * (x[1] - x[0])


def neighbours_of(counts):
    """Counts after one teacher has changed: of three classes, and of those without a vote."""
    whole = [*counts, TEACHERS - sum(counts)]
    for a, b in itertools.permutations(range(4), 2):
        if whole[a]:
            moved = list(whole)
            moved[a] -= 1
            moved[b] += 1
            yield tuple(moved[:3])


def assert_data_dependent_bound_holds(log_of_another, renyi_divergences):
    """On all counts of a few teachers, by exact divergences from all neighbors."""
    below = 0
    every = [c for c in itertools.product(range(TEACHERS + 1), repeat=3) if sum(c) <= TEACHERS]
    for stddev in (0.7, 1.0, 1.5):
        exact = {counts: answer_probabilities(counts, stddev) for counts in every}
        for counts, p in exact.items():
            log_q = log_of_another(np.array([counts]), stddev)[0]
            assert log_q >= math.log(p.sum() - p[np.argmax(counts)]) - 1e-9
            bound = renyi_divergences(log_q, stddev, ORDERS)
            below += np.sum(bound < 0.9 * ORDERS / stddev**2)
            for other in neighbours_of(counts):
                powers = ORDERS[:, np.newaxis] * np.log(p / exact[other]) + np.log(exact[other])
                divergences = scipy.special.logsumexp(powers, axis=1) / (ORDERS - 1)
                assert np.all(divergences <= bound + 1e-9)
    assert below > 50


def test_data_dependent_bound_holds_for_all_small_counts():
    assert_data_dependent_bound_holds(
        data_dependent.log_of_another, data_dependent.renyi_divergences
    )


@pytest.mark.parametrize(
    ("log_of_another", "renyi_divergences"),
    [
        (
            lambda counts, stddev: data_dependent.log_of_another(counts, stddev) - math.log(2),
            data_dependent.renyi_divergences,
        ),
        (
            data_dependent.log_of_another,
            lambda log_q, stddev, orders: data_dependent.renyi_divergences(
                log_q, 2 * stddev, orders
            ),
        ),
    ],
    ids=["half the probability", "half the sensitivity"],
)
def test_wrong_data_dependent_bounds_are_caught(log_of_another, renyi_divergences):
    with pytest.raises(AssertionError):
        assert_data_dependent_bound_holds(log_of_another, renyi_divergences)


def test_data_dependent_bound_is_of_one_direction():
    """It is no epsilon of differential privacy, for which the other direction must hold, too."""
    p, q = (answer_probabilities(counts, 0.7) for counts in ((0, 6, 0), (1, 5, 0)))
    log_q = data_dependent.log_of_another(np.array([[0, 6, 0]]), 0.7)[0]
    bound = data_dependent.renyi_divergences(log_q, 0.7, np.array([2.0]))[0]
    assert math.log((p**2 / q).sum()) <= bound < 0.01 * math.log((q**2 / p).sum())


def test_data_dependent_epsilon_adds_queries_and_is_at_most_the_ledgers():
    for ones, at_most in ((0, 0.5), (5, 1.0)):
        votes = np.repeat(queries(4, ones), 20, axis=0)
        aggregator = pate.GNMax(
            pate.Partition(np.arange(200), 200), num_classes=2, noise_stddev=25.0
        )
        aggregator.answer(votes)
        by_ledger = aggregator.ledger.epsilon(1e-5).by_accountant["RDP"]
        found = pate.nonprivate_data_dependent_epsilon(
            votes, num_classes=2, noise_stddev=25.0, delta=1e-5
        )
        assert 0 <= found <= at_most * by_ledger * (1 + 1e-9)
    assert found == pytest.approx(by_ledger, rel=0.02)  # No class has the most votes.
