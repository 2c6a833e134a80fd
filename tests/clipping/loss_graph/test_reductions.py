"""Sums and means of losses are taken apart into the losses of the examples."""

import numpy as np
import pytest
import tensorflow as tf

from tests import support
from tfdp.clipping import OnePassEngine, VectorizedEngine
from tfdp.clipping.loss_graph import loss_reader, reductions

layers = tf.keras.layers
ENGINES = [OnePassEngine, VectorizedEngine]
N, CLIP = 12, 0.3
X, Y = support.small_data(N)
MASK = np.arange(N) % 3 > 0


def clipped_sum(loss, model=None, engine=VectorizedEngine, x=X, y=Y, mask=MASK, **kwargs):
    return support.ClippedSum(engine(CLIP), model or support.small_model(), x, loss, **kwargs)(
        x, y, mask
    )


def looped(example_loss, model=None, x=X, y=Y, mask=MASK):
    """The clipped sum of the examples, `example_loss(y, prediction)` one by one."""
    return support.looped_clipped_sum(
        model or support.small_model(), x[mask], y[mask], CLIP, loss=example_loss
    )


def losses_of(y, prediction):
    return support.crossentropy()(y, prediction)


def keras_mean(y, prediction, sample_weight):
    return support.crossentropy("sum_over_batch_size")(y, prediction, sample_weight)


def mean(y, prediction, sample_weight):
    return tf.reduce_mean(losses_of(y, prediction) * tf.cast(sample_weight, tf.float32))


def by_the_number_of_rows(y, prediction, sample_weight):
    losses = losses_of(y, prediction) * tf.cast(sample_weight, tf.float32)
    return tf.reduce_sum(losses) / tf.cast(tf.shape(y)[0], tf.float32)


def by_the_product_of_the_shape(y, prediction, sample_weight):
    losses = losses_of(y, prediction) * tf.cast(sample_weight, tf.float32)
    return tf.reduce_sum(losses) / tf.cast(tf.reduce_prod(tf.shape(losses)), tf.float32)


def by_the_sum_of_the_weights(y, prediction, sample_weight):
    weights = tf.cast(sample_weight, tf.float32)
    losses = losses_of(y, prediction) * weights
    return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(weights))


MEANS = [
    keras_mean,
    mean,
    by_the_number_of_rows,
    by_the_product_of_the_shape,
    by_the_sum_of_the_weights,
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", MEANS)
def test_means_are_taken_apart(loss, engine):
    np.testing.assert_allclose(clipped_sum(loss, engine=engine), looped(losses_of), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_activity_regularizers_are_taken_apart(engine):
    regularization = layers.ActivityRegularization(l1=0.3, l2=0.2)
    model = support.small_model()

    def mean(y, prediction, sample_weight):
        regularization(prediction)
        return keras_mean(y, prediction, sample_weight) + regularization.losses[-1]

    def of_one(y, prediction):
        penalty = 0.3 * tf.reduce_sum(tf.abs(prediction)) + 0.2 * tf.reduce_sum(prediction**2)
        return losses_of(y, prediction) + penalty

    everyone = np.ones(N, bool)
    found = clipped_sum(mean, model, engine, mask=everyone)
    np.testing.assert_allclose(found, looped(of_one, model, mask=everyone), atol=1e-6)


def test_public_terms_of_a_mean_are_not_losses():
    weights = tf.Variable(tf.ones([N, 2]))

    def loss(y, prediction, sample_weight):
        rows = tf.cast(tf.shape(y)[0], tf.float32)
        total = tf.reduce_sum(losses_of(y, prediction)) + tf.reduce_sum(tf.square(weights))
        return total / rows

    with pytest.raises(ValueError, match="sum or mean"):
        clipped_sum(loss)


def test_a_mean_of_means_is_caught(monkeypatch):
    """Mutant: gradients of the mean itself are N times too small to be clipped."""
    right = reductions.of_term

    def of_the_mean(term, depends_on_data):
        found = right(term, depends_on_data)
        return reductions.Reduction(found.losses / N, reductions.MEAN)

    monkeypatch.setattr(reductions, "of_term", of_the_mean)
    with pytest.raises(AssertionError):
        test_means_are_taken_apart(keras_mean, OnePassEngine)


@pytest.mark.slow
def test_with_xla():
    found = clipped_sum(keras_mean, engine=OnePassEngine, jit_compile=True)
    np.testing.assert_allclose(found, looped(losses_of), atol=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of", [keras_mean, support.crossentropy("sum")])
def test_public_factors_stay(of, engine):
    def scaled(y, prediction, sample_weight):
        return 0.2 * of(y, prediction, sample_weight)

    found = clipped_sum(scaled, engine=engine)
    np.testing.assert_allclose(found, looped(lambda y, p: 0.2 * losses_of(y, p)), atol=1e-6)


# Several losses within an example.

PIXELS = np.random.default_rng(1).normal(size=[N, 6, 5, 2]).astype("float32")


def pixel_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([layers.Conv2D(3, 3, padding="same", activation="tanh")])


def pixel_losses(y, prediction):
    target = tf.cast(y, tf.float32)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    return tf.reduce_mean(tf.square(prediction - target), axis=-1)


def weighted_pixels(y, prediction, sample_weight):
    return pixel_losses(y, prediction) * tf.cast(sample_weight, tf.float32)[:, None, None]


def number_of_rows(y):
    return tf.cast(tf.shape(y)[0], tf.float32)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("reduce", "within"),
    [
        (lambda losses, y: tf.reduce_mean(losses), tf.reduce_mean),
        (lambda losses, y: tf.reduce_sum(losses), tf.reduce_sum),
        (lambda losses, y: tf.reduce_sum(losses) / number_of_rows(y), tf.reduce_sum),
        (lambda losses, y: 3.0 * tf.reduce_mean(losses), lambda t: 3 * tf.reduce_mean(t)),
    ],
    ids=["mean", "sum", "sum per row", "factor"],
)
def test_losses_of_pixels_are_reduced_within_the_example(reduce, within, engine):
    def loss(y, prediction, sample_weight):
        return reduce(weighted_pixels(y, prediction, sample_weight), y)

    found = clipped_sum(loss, pixel_model(), engine, x=PIXELS)
    expected = looped(lambda y, p: within(pixel_losses(y, p)), pixel_model(), PIXELS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_weighted_mean_over_tokens_is_one_within_the_example(engine):
    """Masked tokens: the loss of an example is the mean over its own."""
    x = np.random.default_rng(2).normal(size=[N, 7, 3]).astype("float32")
    lengths = np.arange(N) % 7

    def model():
        tf.keras.utils.set_random_seed(0)
        return tf.keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])

    def parts(y, prediction):
        tokens = tf.cast(tf.range(7)[tf.newaxis] < tf.cast(y, tf.int32)[:, tf.newaxis], tf.float32)
        return tf.square(prediction[:, :, 0] - 1), tokens

    def loss(y, prediction, sample_weight):
        losses, tokens = parts(y, prediction)
        tokens *= tf.cast(sample_weight, tf.float32)[:, tf.newaxis]
        return tf.reduce_sum(losses * tokens) / tf.reduce_sum(tokens)

    def example(y, prediction):
        losses, tokens = parts(y, prediction)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * tokens), tf.reduce_sum(tokens))

    found = clipped_sum(loss, model(), engine, x=x, y=lengths)
    np.testing.assert_allclose(found, looped(example, model(), x, lengths), rtol=1e-5, atol=1e-6)


# Masks as Keras 3 applies them: the mean over the valid tokens of the batch.

TOKENS = np.random.default_rng(2).normal(size=[N, 7, 3]).astype("float32")
LENGTHS = np.arange(N) % 7


def token_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])


def token_losses(y, prediction):
    valid = tf.range(7)[tf.newaxis] < tf.cast(y, tf.int32)[:, tf.newaxis]
    return tf.square(prediction[:, :, 0] - 1), valid


def number_of(tensor):
    return tf.cast(tf.reduce_prod(tf.shape(tensor)), tf.float32)


def share_of(valid):
    as_numbers = tf.cast(valid, tf.float32)
    return tf.math.divide_no_nan(number_of(as_numbers), tf.reduce_sum(as_numbers))


def masked_mean(losses, valid, share, otherwise=0.0):
    losses *= tf.where(valid, share, otherwise)
    return tf.math.divide_no_nan(tf.reduce_sum(losses), number_of(losses))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_of_keras_3_is_a_mean_within_the_example(engine):
    def loss(y, prediction, sample_weight):
        losses, valid = token_losses(y, prediction)
        return masked_mean(losses, valid, share_of(valid))

    def example(y, prediction):
        losses, valid = token_losses(y, prediction)
        valid = tf.cast(valid, tf.float32)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * valid), tf.reduce_sum(valid))

    everyone = np.ones(N, bool)
    found = clipped_sum(loss, token_model(), engine, TOKENS, LENGTHS, everyone)
    expected = looped(example, token_model(), TOKENS, LENGTHS, everyone)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _share_of_another_mask(losses, valid):
    return masked_mean(losses, valid, share_of(valid & (tf.range(7) > 0)))


def _share_of_a_sum(losses, valid):
    share = tf.reduce_sum(losses) / tf.reduce_sum(tf.cast(valid, tf.float32))
    return masked_mean(losses, valid, share)


def _share_where_there_is_no_mask(losses, valid):
    return masked_mean(losses, valid, 0.0, share_of(valid))


def _share_beside_a_statistic(losses, valid):
    return masked_mean(losses, valid, share_of(valid), tf.reduce_max(losses))


def _share_of_a_masked_maximum(losses, valid):
    return masked_mean(losses, valid, tf.reduce_max(losses) * share_of(valid))


def _sum_with_shares(losses, valid):
    return tf.reduce_sum(losses * tf.where(valid, share_of(valid), 0.0))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "reduce",
    [
        _share_of_another_mask,
        _share_of_a_sum,
        _share_where_there_is_no_mask,
        _share_beside_a_statistic,
        _share_of_a_masked_maximum,
        _sum_with_shares,
    ],
)
def test_losses_of_tokens_that_mix_are_refused(reduce):
    def loss(y, prediction, sample_weight):
        return reduce(*token_losses(y, prediction))

    with pytest.raises(ValueError, match=r"mixes examples"):
        clipped_sum(loss, token_model(), OnePassEngine, TOKENS, LENGTHS, np.ones(N, bool))


@pytest.mark.slow
def test_a_share_of_another_mask_is_caught(monkeypatch):
    """Mutant: any share in a `where` counts as that of its mask."""
    monkeypatch.setattr(reductions, "_same_mask", lambda *_: True)
    with pytest.raises(pytest.fail.Exception):
        test_losses_of_tokens_that_mix_are_refused(_share_of_another_mask)


# Which rows are padding.


def scaled_by_the_number_of_examples(y, prediction, sample_weight):
    """Not zero where the mask is."""
    return losses_of(y, prediction) * tf.reduce_sum(tf.cast(sample_weight, tf.float32))


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (keras_mean, True),
        (support.crossentropy("sum"), True),
        (by_the_sum_of_the_weights, True),
        (lambda y, p, sample_weight: 2.0 * mean(y, p, sample_weight), True),
        (lambda y, p, sample_weight: tf.reduce_mean(losses_of(y, p)), False),
        (scaled_by_the_number_of_examples, False),
    ],
)
def test_the_mask_is_what_multiplies_every_loss(loss, found):
    @tf.function(input_signature=[support.open_spec(X), *map(support.open_spec, (Y, MASK))])
    def mask(x, y, mask):
        masks.append(loss_reader.read_loss(loss(y, tf.matmul(x, tf.ones([4, 3])), mask)).mask)
        return tf.zeros([])

    masks = []
    mask.get_concrete_function()
    assert (masks[0] is not None) == found


# What is neither.


def _scaled_by_a_statistic(y, prediction, sample_weight):
    losses = losses_of(y, prediction)
    return tf.reduce_sum(losses) / tf.reduce_max(losses)


def _divided_by_a_constant(y, prediction, sample_weight):
    return tf.reduce_sum(losses_of(y, prediction)) / 128.0


def _divided_by_the_number_of_classes(y, prediction, sample_weight):
    return tf.reduce_sum(losses_of(y, prediction)) / tf.cast(tf.shape(prediction)[1], tf.float32)


def _divided_by_other_weights(y, prediction, sample_weight):
    weights = tf.cast(sample_weight, tf.float32)
    return tf.reduce_sum(losses_of(y, prediction)) / tf.reduce_sum(weights)


def _largest(y, prediction, sample_weight):
    return tf.reduce_max(losses_of(y, prediction))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "loss",
    [
        _scaled_by_a_statistic,
        _divided_by_a_constant,
        _divided_by_the_number_of_classes,
        _divided_by_other_weights,
        _largest,
    ],
)
def test_other_reductions_are_refused(loss):
    with pytest.raises(ValueError, match=r"one value per example.*sum or mean"):
        clipped_sum(loss)


def test_sums_and_means_do_not_mix():
    def mixed(y, prediction, sample_weight):
        losses = losses_of(y, prediction)
        return tf.reduce_sum(losses) + tf.reduce_mean(tf.square(prediction))

    with pytest.raises(ValueError, match="some terms that are sums and some that are means"):
        clipped_sum(mixed)


# Through Keras.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", tf.keras.losses.sparse_categorical_crossentropy]
)
def test_losses_as_keras_users_give_them(loss):
    def trained(loss):
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential(
            [layers.Input([4]), layers.Dense(5), layers.Dense(3, activation="softmax")]
        )
        optimizer = support.tfdp.DPSGD(0.5, 0.0, 4, learning_rate=1.0)
        model.compile(optimizer, loss)
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), verbose=0)
        return support.flat(model.get_weights())

    none = tf.keras.losses.SparseCategoricalCrossentropy(reduction="none")
    np.testing.assert_allclose(trained(loss), trained(none), atol=1e-6)


def moved(model, loss, x, y):
    """Changes of a model's weights by a step without noise, of SGD."""
    before = model.get_weights()
    model.compile(support.tfdp.DPSGD(CLIP, 0.0, N, learning_rate=1.0), loss)
    model.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    return support.flat(b - v for b, v in zip(before, model.get_weights(), strict=True))


def square(y, p):
    return tf.reduce_sum(tf.square(tf.one_hot(tf.cast(y, tf.int32), 3) - p), axis=-1)


def overlap(y, p):
    return tf.reduce_sum(tf.abs(p), axis=-1)


def mean_of(values):
    return tf.reduce_mean(values)


# What a user's function returns, and what it is for one example.
SCALARS = {
    "mean": (lambda y, p: mean_of(square(y, p)), square),
    "sum": (lambda y, p: tf.reduce_sum(square(y, p)), square),
    "two means": (
        lambda y, p: mean_of(square(y, p)) + 0.5 * mean_of(overlap(y, p)),
        lambda y, p: square(y, p) + 0.5 * overlap(y, p),
    ),
    "difference": (
        lambda y, p: 1 - mean_of(overlap(y, p)) - mean_of(square(y, p)) / 4,
        lambda y, p: -overlap(y, p) - square(y, p) / 4,
    ),
    "factor of a sum": (
        lambda y, p: 3.0 * (mean_of(square(y, p)) - mean_of(overlap(y, p))) / 2,
        lambda y, p: 1.5 * (square(y, p) - overlap(y, p)),
    ),
    "negative sum": (lambda y, p: -tf.reduce_sum(overlap(y, p)), lambda y, p: -overlap(y, p)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCALARS)
def test_functions_that_return_a_scalar(name):
    """Keras sums the scalar, and divides it by one."""
    scalar, example = SCALARS[name]
    expected = support.looped_clipped_sum(support.small_model(), X, Y, CLIP, loss=example) / N
    found = moved(support.small_model(), scalar, X, Y)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_signs_that_are_lost_are_caught(monkeypatch):
    """Mutant: a difference is read as a sum."""
    monkeypatch.setattr(tf, "negative", tf.identity)
    with pytest.raises(AssertionError):
        test_functions_that_return_a_scalar("difference")


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.sqrt(mean_of(square(y, p))),
        lambda y, p: mean_of(square(y, p)) - tf.reduce_max(overlap(y, p)),
        lambda y, p: mean_of(square(y, p)) / mean_of(overlap(y, p)),
        lambda y, p: mean_of(square(y, p)) * mean_of(overlap(y, p)),
        lambda y, p: tf.reduce_sum(square(y, p)) / 100,
    ],
    ids=["root", "maximum", "ratio", "product", "divided sum"],
)
def test_other_scalars_are_refused(loss):
    with pytest.raises(ValueError, match=r"one value per example.*sum or mean"):
        moved(support.small_model(), loss, X, Y)


TOKENS = np.random.default_rng(3).normal(size=[N, 7, 3]).astype("float32")
TOKENS[np.arange(7)[None] > np.arange(N)[:, None] % 8] = 0  # Some have no padding.


@pytest.mark.slow
def test_tokens_that_keras_masks():
    """Keras divides by the tokens of the batch; the loss of an example is the mean of its own."""

    def model(masking):
        tf.keras.utils.set_random_seed(0)
        inputs = layers.Input([7, 3])
        hidden = layers.Dense(4, activation="tanh")(masking(inputs))
        return tf.keras.Model(inputs, layers.Dense(2)(hidden))

    def example(number, prediction):
        tokens = tf.gather(TOKENS, tf.cast(number, tf.int32))
        kept = tf.cast(tf.reduce_any(tokens != 0, axis=-1), tf.float32)
        losses = tf.keras.losses.sparse_categorical_crossentropy(
            tf.zeros_like(kept), prediction, from_logits=True
        )
        return tf.reduce_sum(losses * kept) / tf.reduce_sum(kept)

    expected = support.looped_clipped_sum(
        model(tf.identity), TOKENS, np.arange(N), CLIP, loss=example
    )
    found = moved(model(layers.Masking()), support.crossentropy("auto"), TOKENS, np.zeros([N, 7]))
    np.testing.assert_allclose(found, expected / N, rtol=1e-4, atol=1e-6)


def test_one_loss_in_a_column():
    """`add_loss` takes losses `[rows, 1]`, such as those of `ctc_batch_cost`."""
    inputs = layers.Input([4])
    model = tf.keras.Model(inputs, layers.Dense(2)(inputs))
    model.add_loss(tf.square(model.output[:, :1] - 1))
    weights = model.get_weights()
    found = moved(model, None, X, Y)
    model.set_weights(weights)
    expected = support.looped_clipped_sum(
        model, X, Y, CLIP, loss=lambda y, p: tf.square(p[:, 0] - 1)
    )
    np.testing.assert_allclose(found, expected / N, rtol=1e-5, atol=1e-6)


def test_hinge_says_what_to_write():
    with pytest.raises(ValueError, match="labels -1 and 1, the loss is"):
        moved(support.small_model(), "hinge", X, np.ones([N, 3], "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["none", "sum_over_batch_size"])
def test_several_outputs_with_weights_and_a_regulariser(reduction):
    tf.keras.utils.set_random_seed(0)
    inputs = layers.Input([4])
    regularizer = None if reduction == "none" else "l2"  # Keras adds none to vectors.
    hidden = layers.Dense(5, activation="tanh", kernel_regularizer=regularizer)(inputs)
    model = tf.keras.Model(inputs, [layers.Dense(3, name="a")(hidden), layers.Dense(2)(hidden)])
    before = [v.numpy() for v in model.trainable_variables]
    optimizer = support.tfdp.DPSGD(CLIP, 0.0, N, learning_rate=1.0)
    losses = [support.crossentropy(reduction), tf.keras.losses.MeanSquaredError(reduction)]
    model.compile(optimizer, losses, loss_weights=[1.0, 0.25])
    targets = (Y, X[:, :2])
    model.fit(tf.data.Dataset.from_tensors((X, targets)), verbose=0)
    moved = support.flat(b - v for b, v in zip(before, model.trainable_variables, strict=True))

    expected = 0.0
    for i in range(N):
        for variable, value in zip(model.trainable_variables, before, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            a, b = model(X[i : i + 1])
            loss = losses_of(Y[i : i + 1], a) + 0.25 * tf.reduce_mean(
                tf.square(b - X[i : i + 1, :2])
            )
        gradient = support.flat(tape.gradient(loss, model.trainable_variables))
        expected = expected + gradient * min(1.0, CLIP / np.linalg.norm(gradient)) / N
    if regularizer is not None:
        kernel = before[0].ravel()
        expected[: kernel.size] += 2 * 0.01 * kernel
    np.testing.assert_allclose(moved, expected, atol=1e-6)
