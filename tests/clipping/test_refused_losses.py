"""Refusals of losses over the batch name a remedy, which works."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.front_ends import needs_keras_3
from tests.support import small_data

pytestmark = needs_keras_3
X, Y = small_data(64)
layers, ops = keras.layers, keras.ops


def trained(model, loss=None):
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=1)
    model.compile(tfdp.keras3.DPSGD(1.0, 1.0, sampling=batches.sampling), loss)
    model.fit(batches, verbose=0)
    return model.optimizer.ledger.steps


def network(outputs=3):
    return keras.Sequential([keras.Input([4]), layers.Dense(outputs)])


def contrastive(y, z):
    logits = ops.matmul(z, ops.transpose(z))
    labels = ops.arange(ops.shape(z)[0])
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return ops.mean(losses)


def ratio(y, z):
    return 1 - ops.sum(z) / (1 + ops.sum(z * z))


@pytest.mark.parametrize("loss", [contrastive, ratio, lambda y, z: ops.max(z)])
def test_losses_over_the_batch_name_the_two_term_loss(loss):
    with pytest.raises(
        ValueError, match=r"`batch_wise`\s+term of a `tfdp.clipping.TwoTermLoss`"
    ) as e:
        trained(network(), loss)
    assert "tf.keras" not in str(e.value)


class Contrastive(keras.Model):
    """The remedy: a contrastive loss as a term over the batch."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        def of_batch(x, y, mask):
            z = self.network(x)
            weights = tf.cast(mask, z.dtype)
            logits = z @ tf.transpose(z) - 1e9 * (1 - weights)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(z)[0]), logits
            )
            return tf.math.divide_no_nan(tf.reduce_sum(losses * weights), tf.reduce_sum(weights))

        def of_example(x, y):
            return 0.0 * tf.reduce_sum(self.network(x), axis=1)

        aggregation = tfdp.clipping.TermWiseAggregation(batch_clip=0.1, num_groups=2)
        loss = tfdp.clipping.TwoTermLoss(of_example, of_batch, data, aggregation)
        self.optimizer.minimize(loss, self.trainable_variables)
        return {"steps": self.optimizer.iterations}


@pytest.mark.slow
def test_a_contrastive_loss_trains_as_a_term_over_the_batch():
    assert trained(Contrastive()) == 1


class Experts(layers.Layer):
    """A mixture of experts, with a loss of its router."""

    def __init__(self, router_loss):
        super().__init__()
        self.router_loss = router_loss
        self.router, self.experts = layers.Dense(3), [layers.Dense(3) for _ in range(3)]

    def build(self, shape):
        for layer in (self.router, *self.experts):
            layer.build(shape)

    def call(self, x):
        logits = self.router(x)
        self.add_loss(self.router_loss(logits))
        gates = ops.softmax(logits)
        return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def load_balance(logits):
    return 3 * ops.sum(ops.mean(ops.softmax(logits), axis=0) ** 2)


def mean_load_balance(logits):
    return ops.mean(ops.mean(ops.softmax(logits), axis=0) ** 2)


def z_loss(logits):
    return ops.mean(ops.logsumexp(logits, axis=-1) ** 2)


@pytest.mark.parametrize("router_loss", [load_balance, mean_load_balance])
def test_load_balances_of_routers_mix_examples(router_loss):
    model = keras.Sequential([keras.Input([4]), Experts(router_loss)])
    with pytest.raises(ValueError, match=r"mixes examples.*(router|load balance)"):
        trained(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def test_the_z_loss_of_a_router_trains():
    model = keras.Sequential([keras.Input([4]), Experts(z_loss)])
    assert trained(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)) == 1


class Critic(keras.Model):
    """A critic of reals and fakes, whose loss a function computes."""

    def __init__(self, losses):
        super().__init__()
        self.critic, self.losses_of = network(1), losses

    def train_step(self, data):
        fakes = tf.random.normal([tf.shape(data[0])[0], 4])
        losses = self.losses_of(self.critic, data[0], fakes)
        self.optimizer.minimize(losses, self.critic.trainable_variables)
        return {"loss": tf.reduce_mean(losses)}


def concatenated(critic, reals, fakes):
    count = tf.shape(reals)[0]
    labels = tf.concat([tf.zeros([count, 1]), tf.ones([count, 1])], 0)
    logits = critic(tf.concat([fakes, reals], 0))
    return keras.losses.binary_crossentropy(labels, logits, from_logits=True)


def concatenated_alike(critic, reals, fakes):
    labels = tf.concat([tf.zeros_like(fakes[:, :1]), tf.ones_like(reals[:, :1])], 0)
    logits = critic(tf.concat([fakes, reals], 0))
    return keras.losses.binary_crossentropy(labels, logits, from_logits=True)


def two_calls(critic, reals, fakes):
    real, fake = critic(reals), critic(fakes)
    loss = keras.losses.binary_crossentropy
    return loss(tf.ones_like(real), real, True) + loss(tf.zeros_like(fake), fake, True)


@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
def test_concatenated_batches_are_refused_and_two_calls_are_the_remedy():
    with pytest.raises(ValueError, match=r"Received 2 values.*Call the model on each.*PrivateGAN"):
        trained(Critic(concatenated))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"^The tensors.*call the model on each"
    ):
        trained(Critic(concatenated_alike))  # Known when the step runs.
    assert trained(Critic(two_calls)) == 1


def left_out(critic, reals, fakes):
    return tf.boolean_mask(critic(reals)[:, 0] ** 2, reals[:, 0] > 0)


def multiplied(critic, reals, fakes):
    losses = critic(reals)[:, 0] ** 2
    return losses * tf.cast(reals[:, 0] > 0, losses.dtype)


@pytest.mark.filterwarnings("ignore::tfdp.clipping.SlowClippingWarning")
def test_examples_are_not_left_out_but_weighted():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"^The tensors.*`loss \* tf.cast"):
        trained(Critic(left_out))
    assert trained(Critic(multiplied)) == 1
