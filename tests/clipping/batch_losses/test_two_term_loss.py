import inspect
import re

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from tensorflow_probability import distributions as tfd

import tfdp
from tests.two_term_support import SEED, Codes, data
from tfdp.clipping import OnePassEngine, TermWiseAggregation, TwoTermLoss
from tfdp.clipping.batch_losses import two_term_loss
from tfdp.clipping.batch_losses.two_term_loss import split_key
from tfdp.contrib import ImportanceSamplingClipping

B = 32


def summed(make_loss, jit_compile=False):
    """The clipped sum of `make_loss(model, x, y, mask)`, in the graph of a step."""
    model = Codes()

    def run(x, y, mask):
        loss = make_loss(model, x, y, mask)
        found = loss.clipped_sum(
            OnePassEngine(1.0), model.trainable_variables, tf.constant(SEED, tf.int64), B
        )
        return found.gradients, found.mask is not None

    x, y, mask = data()
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None]), tf.TensorSpec([None], tf.bool))
    return tf.function(run, input_signature=spec, jit_compile=jit_compile)(x, y, mask)


def two_terms(model, x, y, given, **changes):
    arguments = {
        "sample_wise": model.sample_wise,
        "batch_wise": model.batch_wise,
        "batch": (x, y),
        "mask": given,
        "aggregation": TermWiseAggregation(0.1, 4),
    }
    return TwoTermLoss(**{**arguments, **changes})


def refused(message, **changes):
    def make_loss(model, x, y, mask):
        made = {name: change(model, x, y, mask) for name, change in changes.items()}
        return two_terms(model, x, y, mask, **made)

    with pytest.raises(ValueError, match=message):
        summed(make_loss)


@pytest.mark.slow
def test_it_is_the_same_under_xla():
    plain, _ = summed(two_terms)
    compiled, _ = summed(two_terms, jit_compile=True)
    for a, b in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# Other data than the functions' arguments: the leaks that they would be.


def test_a_sample_wise_loss_that_uses_a_statistic_of_the_batch_is_refused():
    def centred(model, x, y, mask):
        mean = tf.reduce_mean(x, axis=0)
        return lambda x, y: model.sample_wise(x - mean, y)

    refused("`sample_wise` must compute its result from its arguments", sample_wise=centred)


def test_a_sample_wise_loss_that_uses_a_scalar_of_the_batch_is_refused():
    def scaled(model, x, y, mask):
        scale = tf.reduce_max(x)
        return lambda x, y: model.sample_wise(x, y) / scale

    refused("`sample_wise` must compute its result from its arguments", sample_wise=scaled)


def test_a_batch_wise_loss_that_uses_other_groups_is_refused():
    def of_all(model, x, y, mask):
        return lambda one, two, three: model.batch_wise(x, y, mask)

    refused("`batch_wise` must compute its result from its arguments", batch_wise=of_all)


def test_a_batch_wise_loss_that_uses_a_scalar_of_the_batch_is_refused():
    def scaled(model, x, y, mask):
        scale = tf.reduce_max(x)
        return lambda x, y, mask: scale * model.batch_wise(x, y, mask)

    refused("`batch_wise` must compute its result from its arguments", batch_wise=scaled)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x - tf.reduce_mean(x, axis=0),
        lambda x: tf.cumsum(x, axis=0),
        lambda x: x[::-1],
        lambda x: tf.reduce_mean(x, axis=0, keepdims=True) * tf.ones_like(x),
        lambda x: tf.sort(x, axis=0),
    ],
)
def test_a_batch_whose_rows_were_mixed_before_is_refused(mixed):
    refused(
        "`batch` must hold data, or what is provably computed row by row|mixes examples",
        batch=lambda model, x, y, mask: (mixed(x), y),
    )


def test_a_mask_that_follows_from_other_examples_is_refused():
    refused(
        "`batch` must hold data|mixes examples",
        mask=lambda model, x, y, mask: tf.logical_and(mask, y <= tf.reduce_mean(y)),
    )


def test_rows_may_be_computed_row_by_row_and_get_draws_of_their_own():
    def make_loss(model, x, y, mask):
        def noisy(x, y, noise, *rest):
            return x + noise, y, *rest

        return two_terms(
            model,
            x,
            y,
            mask,
            batch=(2 * x, y),
            draws=lambda: (tfd.Normal(tf.zeros([3]), 1.0),),
            sample_wise=lambda *rows: model.sample_wise(*noisy(*rows)),
            batch_wise=lambda *rows: model.batch_wise(*noisy(*rows)),
        )

    gradients, masked = summed(make_loss)
    assert masked and all(np.isfinite(g).all() for g in gradients)


def test_draws_are_of_their_distribution_and_of_each_row_its_own():
    model, (x, y, mask) = Codes(), data(3000)
    distributions = (tfd.Normal(tf.zeros([2]), 3.0), tfd.Exponential(2.0))

    @tf.function
    def draw(x, y, mask, seed):
        return two_terms(model, x, y, mask, draws=lambda: distributions).with_draws(seed)[2:]

    normal, exponential = draw(x, y, mask, tf.constant([1, 2], tf.int64))
    assert normal.shape == (3000, 2) and exponential.shape == (3000,)
    assert scipy.stats.kstest(np.ravel(normal), scipy.stats.norm(0, 3).cdf).pvalue > 1e-4
    assert scipy.stats.kstest(exponential, scipy.stats.expon(0, 0.5).cdf).pvalue > 1e-4
    assert len(np.unique(normal)) > 5990  # Few float32 numbers are equal by chance.
    again = draw(x, y, mask, tf.constant([1, 2], tf.int64))[0]
    np.testing.assert_array_equal(normal, again)
    assert not np.any(normal == draw(x, y, mask, tf.constant([1, 3], tf.int64))[0])


def test_draws_do_not_follow_tensorflows_seed():
    """Who knows that seed would know the random numbers of a place in the batch."""
    model, (x, y, mask) = Codes(), data()
    found = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(1)
        optimizer = tfdp.DPSGD(1.0, 0.0, expected_batch_size=B, learning_rate=1.0)
        model.set_weights([np.ones_like(w) for w in model.get_weights()])

        @tf.function
        def step(x, y, mask, optimizer=optimizer):
            loss = two_terms(
                model,
                x,
                y,
                mask,
                batch_wise=None,
                draws=lambda: (tfd.Normal(tf.zeros([3]), 1.0),),
                sample_wise=lambda x, y, noise: model.sample_wise(x + noise, y),
            )
            optimizer.minimize(loss, model.trainable_variables)

        step(tf.constant(x), tf.constant(y), tf.constant(mask))
        found.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
    assert not np.any(found[0] == found[1])


# Secrecy of the draws.


class Bits:
    """A distribution whose samples are the bits of the seed that it was given."""

    def sample(self, rows, seed):
        bits = tf.bitwise.right_shift(seed[:, tf.newaxis], tf.range(32)) % 2
        return tf.tile(tf.cast(tf.reshape(bits, [1, 64]), tf.float32), [rows, 1])


def bits_of_seeds(steps=80, distributions=3):
    """The bits of the seeds that reach the distributions, `[steps, distributions * 64]`."""
    variable = tf.Variable(tf.zeros([distributions, 64]))
    optimizer = tfdp.DPSGD(1e6, 0.0, expected_batch_size=1, learning_rate=1.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def step(x):
        loss = TwoTermLoss(
            sample_wise=lambda x, *bits: tf.add_n(
                [tf.linalg.matvec(b, v) for b, v in zip(bits, tf.unstack(variable), strict=True)]
            ),
            batch_wise=None,
            batch=(x,),
            mask=None,
            aggregation=TermWiseAggregation(1.0, 2),
            draws=lambda: [Bits()] * distributions,
        )
        optimizer.minimize(loss, [variable])

    found = []
    for _ in range(steps):
        variable.assign(tf.zeros_like(variable))
        step(tf.ones([1, 1]))
        found.append(np.ravel(-variable))
    return np.round(found).astype(int)


def check_secret(bits):
    """No bit is public, and none is that of another place, or its opposite.

    Right seeds fail with a probability below (192 + 192^2) * 2^-79 < 1e-18.
    """
    assert np.all((bits == 0) | (bits == 1))
    assert np.all(bits.any(axis=0)) and not np.any(bits.all(axis=0))
    columns = {column.tobytes() for column in np.concatenate([bits, 1 - bits], axis=1).T}
    assert len(columns) == 2 * bits.shape[1]


def test_all_bits_of_the_seeds_of_draws_are_secret_and_independent():
    check_secret(bits_of_seeds())


def cast_keys(key, count, dtype=tf.int64):
    """Mutant: keys that hold their number, cut to the 32 lower bits of each word."""
    fold_in = tf.random.experimental.stateless_fold_in
    keys = [fold_in(key, tf.constant(i, tf.int64), alg="philox") for i in range(count)]
    return [tf.cast(k, dtype) for k in keys]


def one_key(key, count, dtype=tf.int64):
    """Mutant: all distributions get the same key."""
    return split_key(key, 1, dtype) * count


def related_keys(key, count, dtype=tf.int64):
    """Mutant: full keys that share a word."""
    keys = split_key(key, count, dtype)
    return [tf.stack([keys[0][0], k[1]]) for k in keys]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [cast_keys, one_key, related_keys])
def test_seeds_with_public_or_shared_bits_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(two_term_loss, "split_key", mutant)
    bits = bits_of_seeds()
    with pytest.raises(AssertionError):
        check_secret(bits)


def kept_of(seed):
    """Which of 60 equal examples a random rule keeps, told by what the variables get."""
    variable = tf.Variable(tf.zeros([60]))

    @tf.function(input_signature=[tf.TensorSpec([None, 60])])
    def run(x):
        loss = TwoTermLoss(
            lambda x: tf.linalg.matvec(x, variable), None, (x,), TermWiseAggregation(1.0, 2)
        )
        engine = OnePassEngine(1.0, clipping_rule=ImportanceSamplingClipping())
        return loss.clipped_sum(engine, [variable], tf.constant(seed, tf.int64), B).gradients[0]

    return np.array(run(0.5 * tf.eye(60))) > 0


def check_random_rule():
    kept = [kept_of([i, i]) for i in range(3)]
    assert all(5 < np.sum(k) < 55 for k in kept)
    assert not any(np.array_equal(kept[i], kept[i - 1]) for i in range(3))


def test_a_random_rule_draws_from_the_seed_of_the_step():
    check_random_rule()


def test_a_random_rule_with_a_constant_seed_is_caught(monkeypatch):
    """Mutant: the engine gets a constant seed, as for rules that draw nothing."""
    right = OnePassEngine.clipped_sum

    def wrong(self, loss, variables, seed, *args, **kwargs):
        return right(self, loss, variables, tf.constant([0, 0], tf.int64), *args, **kwargs)

    monkeypatch.setattr(OnePassEngine, "clipped_sum", wrong)
    with pytest.raises(AssertionError):
        check_random_rule()


@pytest.mark.slow
def test_a_mask_that_does_not_come_with_the_data_proves_no_poisson_sampling():
    def make_loss(model, x, y, mask):
        return two_terms(model, x, y, tf.ones_like(y, tf.bool))

    assert not summed(make_loss)[1]
    assert not summed(lambda model, x, y, mask: two_terms(model, x, y, None))[1]
    assert summed(two_terms)[1]


def test_steps_without_the_mask_have_no_epsilon():
    model, (x, y, _) = Codes(), data()
    optimizer = tfdp.DPSGD(1.0, 1.0, expected_batch_size=8)

    @tf.function
    def step(x, y):
        optimizer.minimize(two_terms(model, x, y, None), model.trainable_variables)

    step(tf.constant(x), tf.constant(y))
    assert optimizer.released_steps() == (0, 1)


# Shapes and types.


def test_losses_must_be_one_per_row():
    refused(
        r"`sample_wise` must return one loss per row.*Received a tensor of shape \(\)",
        sample_wise=lambda model, x, y, mask: lambda x, y: tf.reduce_mean(model(x) - y),
    )


def test_the_mask_must_be_boolean():
    refused(
        "`mask` must be a bool tensor",
        mask=lambda model, x, y, mask: tf.cast(mask, tf.float32),
    )


def test_the_example_of_the_docstring_is_complete():
    fields = [f.name for f in TwoTermLoss.__dataclass_fields__.values()]
    documented = re.findall(r"^  (\w+): ", inspect.getdoc(TwoTermLoss), re.MULTILINE)
    assert fields == documented
