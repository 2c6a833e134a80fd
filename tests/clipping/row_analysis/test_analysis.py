"""The proof of which rows belong to which example, against what the rows do.

Whatever is proven must hold when the traced graph is evaluated: the entries of an example do not
change when another example is changed, taken away, or moved; what is public never changes.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.clipping.row_checks import Disproved, I, M, T, Traced, V, integers, keeps
from tfdp.clipping.row_analysis import analysis, transfer_functions
from tfdp.clipping.row_analysis.states import Public, RowList, Rows, Unproven

layers, raw = tf.keras.layers, tf.raw_ops
FIRST = Rows()
ROW = tf.Variable(tf.ones([6]))
STEP = tf.Variable(3)
GENERATOR = tf.random.Generator.from_seed(1)


def size(x):
    return tf.shape(x)[0]


def steps(x, body, *first, again=lambda i: i < 3):
    """Takes steps of a loop; returns the last variables but the counter."""
    variables = [tf.constant(0), *first]
    found = tf.while_loop(
        lambda i, *_: again(i), lambda i, *v: [i + 1, *body(i, *v)], variables, maximum_iterations=5
    )
    return found[1:]


def list_of(x, axis=1):
    """The slices of a tensor in a `TensorArray`."""
    order = [axis, *[a for a in range(x.shape.rank) if a != axis]]
    return tf.TensorArray(tf.float32, tf.shape(x)[axis]).unstack(tf.transpose(x, order))


def sums_of_steps(x):
    """A loop over time that reads and writes lists."""
    read, written = list_of(x), tf.TensorArray(tf.float32, 2)
    first = tf.zeros([size(x), 3])

    def step(i, h, written):
        h = tf.tanh(h + read.read(i))
        return h, written.write(i, h * tf.cast(i, tf.float32))

    h, written = steps(x, step, first, written, again=lambda i: i < 2)
    return written.stack() + h


def size_f(x):
    return tf.cast(size(x), tf.float32)


def whole_numbers(x, seed, low=0):
    """Two numbers for each row, drawn below 100."""
    shape = [size(x), 2]
    drawn = tf.random.stateless_uniform(shape, seed, minval=low, maxval=100, dtype=tf.int64)
    return tf.cast(drawn, tf.float32)


KERNEL = tf.constant(np.random.default_rng(0).normal(size=[2, 2, 2, 3]), tf.float32)


def inner_gradient(function):
    """The gradient of the sum of what a function makes of a batch."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = function(x)
        return tape.gradient(found, x)

    return gradient


def as_complex(x):
    return tf.cast(x, tf.complex64)


def largest_shape(x, y):
    """The shape that both are broadcast to, as Keras 3 computes it."""
    return [tf.maximum(tf.shape(x)[i], tf.shape(y)[i]) for i in range(x.shape.rank)]


COLUMNS = [[0, 0], [1, 2]]
PLACES = np.eye(3, dtype="float32") * np.arange(1, 5, dtype="float32")[:, None, None]


def square(x):
    return tf.stack([x[:, :3], x[:, 3:], x[:, ::2]], 1)


def systems(x):
    """A matrix for each example, of full rank."""
    own = tf.matmul(x, x, transpose_a=True)
    return own + tf.eye(own.shape[-1])


def padding_to(length, x):
    """Zeros behind the time steps of sequences, up to a length."""
    return [[0, 0], [0, length - tf.shape(x)[1]], [0, 0]]


def summed_as_shared(x):
    """The gradient of a row that was added to each example, as TensorFlow computes it."""
    return tf.reduce_sum(x, raw.BroadcastGradientArgs(s0=[1, 6], s1=tf.shape(x))[0], True)


def activations(x):
    functions = (tf.nn.elu, tf.nn.selu, tf.nn.softplus, tf.nn.softsign, tf.nn.relu6)
    found = tf.add_n([function(x) for function in functions])
    return tf.sqrt(tf.sigmoid(found)) + tf.math.rsqrt(9 + found) + tf.math.reciprocal(9 + found)


def layer_norm(x, **kwargs):
    """Keras's: the rows are the channels of a batch norm."""
    ones, zeros = tf.ones([size(x)]), tf.zeros([size(x)])
    rows = tf.reshape(x, [1, size(x), tf.shape(x)[1], 1])
    normal = tf.compat.v1.nn.fused_batch_norm(rows, ones, zeros, data_format="NCHW", **kwargs)[0]
    return tf.square(tf.reshape(normal, tf.shape(x)))


def batch_norm(x, **kwargs):
    return tf.compat.v1.nn.fused_batch_norm(x, tf.ones([2]), tf.zeros([2]), **kwargs)[0]


PROVEN = {
    # Elementwise, reductions.
    "public row": (V, lambda x: x * tf.range(6.0), FIRST),
    "public scalar": (V, lambda x: 2 * x, FIRST),
    "same constant for all rows": ((4, 6), lambda x: x * tf.ones([4, 1]), FIRST),
    "two axes in front": (V, lambda x: x + tf.ones([2, 3, 1, 6]), Rows(2)),
    "mean of features": (V, lambda x: tf.reduce_mean(x, -1), FIRST),
    "mean before the rows": (M, lambda x: tf.reduce_mean(tf.transpose(x, [1, 0, 2]), 0), FIRST),
    "keep dims": (M, lambda x: tf.reduce_mean(tf.transpose(x), [0, 1], keepdims=True), Rows(2)),
    "axes of a range": (T, lambda x: tf.reduce_sum(x, tf.range(1, tf.rank(x))), FIRST),
    "argmax": (M, lambda x: tf.argmax(tf.transpose(x, [1, 0, 2]), 0), FIRST),
    "softmax": (V, tf.nn.softmax, FIRST),
    "top k": (V, lambda x: tf.math.top_k(x, 2)[0], FIRST),
    "cumsum": (V, lambda x: tf.cumsum(x, -1), FIRST),
    "roll": (M, lambda x: tf.roll(x, [1, -2], [-1, 1]), FIRST),
    "roll before rows": (M, lambda x: tf.roll(tf.transpose(x, [1, 0, 2]), 1, 0), Rows(1)),
    "gradient of roll": (
        M,
        inner_gradient(lambda x: tf.square(x * tf.roll(x, [1, -2], [-1, 1]))),
        FIRST,
    ),
    "select": (V, lambda x: tf.where(x > 0, x, 0.0), FIRST),
    "Fourier transform": (M, lambda x: tf.math.real(tf.signal.fft2d(as_complex(x))), FIRST),
    "there and back": (
        V,
        lambda x: tf.signal.irfft(tf.math.conj(tf.signal.rfft(x)) * tf.complex(0.0, 1.0)),
        FIRST,
    ),
    "Fourier transform before rows": (
        (None, 2, 3, 4),
        lambda x: tf.math.imag(tf.signal.ifft(as_complex(tf.transpose(x, [1, 0, 2, 3])))),
        Rows(1),
    ),
    "gradient of a Fourier transform": (
        M,
        inner_gradient(lambda x: tf.abs(tf.signal.fft2d(tf.complex(x, x * x)))),
        FIRST,
    ),
    # Shapes.
    "flatten": (M, lambda x: tf.reshape(x, [-1, 6]), FIRST),
    "rows of rows": (M, lambda x: tf.reshape(x, [-1, 3]), Rows(0, 2)),
    "all in one": (M, lambda x: tf.reshape(x, [-1]), Rows(0, 6)),
    "other rows of rows": (V, lambda x: tf.reshape(x, [3 * size(x), 2]), Rows(0, 3)),
    "static batch": ((4, 6), lambda x: tf.reshape(x, [8, 3]), Rows(0, 2)),
    "batch in front": ((4, 6), lambda x: tf.reshape(x, [1, 24]), Rows(1, 6)),
    "of any length": (T, lambda x: tf.reshape(x, [-1, 6]), Rows(0, None)),
    "LayerNormalization's": (
        T,
        lambda x: tf.reshape(x, tf.stack([1, size(x) * tf.shape(x)[1], 6, 1])),
        Rows(1, None),
    ),
    "heads": (T, lambda x: tf.reshape(x, [size(x), -1, 2, 3]), FIRST),
    "and back": (T, lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)), FIRST),
    "one row": ((1, 6), lambda x: tf.reshape(x, [2, 3]), Rows(0, 2)),
    "axes before the rows": (
        (None, 4, 3),
        lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [2, 2, -1, 3]),
        Rows(2),
    ),
    "axes before rows of rows": (
        (None, 4, 3),
        lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [1, 4, -1]),
        Rows(2, 3),
    ),
    "new axis": (V, lambda x: x[tf.newaxis, ..., tf.newaxis], Rows(1)),
    "new axis, negative": (V, lambda x: tf.expand_dims(x, -3), Rows(1)),
    "squeeze": (V, lambda x: tf.squeeze(x[tf.newaxis, :, tf.newaxis], [0, -2]), FIRST),
    "transpose": (M, lambda x: tf.transpose(x, [2, 0, 1]), Rows(1)),
    "computed order": (
        T,
        lambda x: tf.transpose(x, tf.concat([[1, 0], tf.range(2, tf.rank(x))], 0)),
        Rows(1),
    ),
    "stack": (V, lambda x: tf.stack([x, -x], 0), Rows(1)),
    "stack behind": (V, lambda x: tf.stack([x, -x], -1), FIRST),
    "unstack": (V, lambda x: tf.unstack(x, axis=-1)[3], FIRST),
    "split": (V, lambda x: tf.split(x, 3, axis=1)[1], FIRST),
    "concatenate": (V, lambda x: tf.concat([x, tf.square(x)], -1), FIRST),
    "class token": (
        T,
        lambda x: tf.concat([tf.broadcast_to(ROW, [size(x), 1, 6]), x], 1),
        FIRST,
    ),
    "tiled class token": (
        T,
        lambda x: tf.concat([tf.tile(ROW[None, None], [size(x), 1, 1]), x], 1),
        FIRST,
    ),
    "slice": (M, lambda x: x[:, 1, ::-1], FIRST),
    "ellipsis": (M, lambda x: x[..., 1], FIRST),
    "ellipsis first": (M, lambda x: tf.transpose(x)[..., :], Rows(2)),
    "dots and new axes": (M, lambda x: tf.transpose(x)[0, tf.newaxis, ..., tf.newaxis], Rows(2)),
    "whole batch": (V, lambda x: x[: size(x), 1:], FIRST),
    "tf.slice": (V, lambda x: tf.slice(x, [0, 1], [size(x), 2]), FIRST),
    "bits": (
        V,
        lambda x: tf.bitwise.right_shift(tf.bitwise.left_shift(integers(x), 3), 2),
        FIRST,
    ),
    "equations": (T, lambda x: tf.linalg.solve(systems(x), tf.transpose(x, [0, 2, 1])), FIRST),
    "pad": (V, lambda x: tf.pad(x, [[0, 0], [1, 2]]), FIRST),
    "tile": (V, lambda x: tf.tile(x, [1, 3]), FIRST),
    "broadcast": (V, lambda x: tf.broadcast_to(x[:, :1], tf.shape(x)), FIRST),
    "one hot": (V, lambda x: tf.one_hot(integers(x), 3, axis=0), Rows(1)),
    "gather of a table": (V, lambda x: tf.gather(tf.ones([2, 5]), integers(x), axis=1), Rows(1)),
    "gather of features": (V, lambda x: tf.gather(x, [5, 0], axis=1), FIRST),
    "gather before rows": (
        M,
        lambda x: tf.gather(tf.transpose(x, [1, 0, 2]), [[1, 0]], axis=0),
        Rows(2),
    ),
    "gather where axes agree": (
        M,
        lambda x: tf.gather(
            tf.reshape(tf.broadcast_to(x, largest_shape(x, x)), [-1, 3]),
            tf.reshape(tf.broadcast_to(integers(x), largest_shape(x, x)), [-1, 3]),
            batch_dims=1,
        ),
        Rows(0, 2),
    ),
    "gather within rows": (M, lambda x: tf.gather(x, integers(x)[:, 0], batch_dims=1), FIRST),
    "positions": (T, lambda x: x + tf.gather(tf.ones([9, 6]), tf.range(tf.shape(x)[1])), FIRST),
    "pixels as rows": (
        I,
        lambda x: raw.SpaceToBatchND(input=x, block_shape=[2, 2], paddings=[[0, 0], [0, 0]]),
        Rows(0, 4, True),
    ),
    # Products.
    "matmul": (V, lambda x: x @ tf.ones([6, 2]), FIRST),
    "matmul from the left": (V, lambda x: tf.matmul(tf.ones([2, 6]), x, transpose_b=True), Rows(1)),
    "own matrices": (M, lambda x: tf.matmul(x, x, transpose_a=True), FIRST),
    "sparse matrix": (
        V,
        lambda x: tf.sparse.sparse_dense_matmul(
            tf.sparse.from_dense(tf.eye(3, 6)), x, adjoint_b=True
        ),
        Rows(1),
    ),
    "product for sparse matrices": (
        V,
        lambda x: raw.SparseMatMul(a=tf.ones([2, 6]), b=x, transpose_b=True),
        Rows(1),
    ),
    "einsum": (M, lambda x: tf.einsum("bij,jk->kbi", x, tf.ones([3, 2])), Rows(1)),
    "own einsum": (M, lambda x: tf.einsum("...ij,...kj->...ik", x, x), FIRST),
    # Filled for each row.
    "zeros": (V, lambda x: x + tf.zeros([size(x), 1]), FIRST),
    "zeros of time": (T, lambda x: tf.zeros([3, size(x), 2]), Rows(1)),
    "dropout": (T, lambda x: tf.nn.dropout(x, 0.5), FIRST),
    # Functions and loops.
    "loop": (
        V,
        lambda x: tf.while_loop(lambda y: True, lambda y: [y], [x], maximum_iterations=1)[0],
        FIRST,
    ),
    "steps": (V, lambda x: steps(x, lambda i, y: [tf.tanh(y) + 1], x)[0], FIRST),
    "steps on another axis": (
        M,
        lambda x: steps(x, lambda i, y: [2 * y], tf.transpose(x, [1, 0, 2]))[0],
        Rows(1),
    ),
    "from a public start": (
        V,
        lambda x: steps(x, lambda i, y: [y + x], tf.zeros([1, 6]) + 0 * x[:, :1])[0],
        FIRST,
    ),
    "lists": (M, sums_of_steps, Rows(1)),
    "a list that is stacked again": (M, lambda x: list_of(x, 2).stack(), Rows(1)),
    "an entry": (M, lambda x: list_of(x).read(1), FIRST),
    "so many entries": (M, lambda x: x * tf.cast(list_of(x).size(), tf.float32), FIRST),
    "call": (V, lambda x: tf.function(lambda y: tf.nn.softmax(y))(x), FIRST),
    "call in a loop": (
        V,
        lambda x: steps(x, lambda i, y: [tf.function(lambda z: z + tf.range(6.0))(y)], x)[0],
        FIRST,
    ),
    # Layers.
    "convolution": (I, lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"), FIRST),
    "dilated": (I, lambda x: tf.nn.convolution(x, KERNEL, padding="SAME", dilations=2), FIRST),
    "transposed convolution": (
        I,
        lambda x: tf.nn.conv2d_transpose(
            x, tf.transpose(KERNEL, [0, 1, 3, 2]), tf.stack([size(x), 8, 8, 3]), 2
        ),
        FIRST,
    ),
    "max pool": (I, lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), FIRST),
    "cross entropy": (
        V,
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(integers(x[:, 0]), x),
        FIRST,
    ),
    "soft cross entropy": (
        V,
        lambda x: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.square(x))[1],
        FIRST,
    ),
    # Gradients in the loss.
    "gradient of activations": (V, inner_gradient(activations), FIRST),
    "gradient of a perceptron": (
        V,
        inner_gradient(lambda x: tf.nn.leaky_relu(tf.tanh(x @ tf.ones([6, 2]))) @ tf.ones([2, 1])),
        FIRST,
    ),
    "gradient of a convolution": (
        I,
        inner_gradient(lambda x: tf.nn.relu(tf.nn.conv2d(x, KERNEL, 1, "SAME"))),
        FIRST,
    ),
    "gradient of pooling": (
        I,
        inner_gradient(
            lambda x: tf.nn.avg_pool2d(tf.nn.max_pool2d(tf.square(x), 2, 1, "SAME"), 2, 2, "SAME")
        ),
        FIRST,
    ),
    "gradient of a layer norm": (V, inner_gradient(layer_norm), FIRST),
    "gradient of frozen batch norm": (
        I,
        inner_gradient(
            lambda x: batch_norm(
                tf.square(x), mean=tf.zeros([2]), variance=tf.ones([2]), is_training=False
            )
        ),
        FIRST,
    ),
    "gradient of means": (
        T,
        inner_gradient(
            lambda x: (
                tf.square(tf.reduce_mean(tf.exp(x), 1)) + tf.reduce_mean(x, [1, 2], True)[:, 0]
            )
        ),
        FIRST,
    ),
    "gradient of the sum": (V, inner_gradient(lambda x: tf.reduce_sum(tf.square(x))), FIRST),
    "gradient of broadcast entries": (
        V,
        inner_gradient(lambda x: x[:, :1] * x + ROW / (1 + tf.square(x[:, 1:2]))),
        FIRST,
    ),
    "gradient of a concatenation": (
        V,
        inner_gradient(lambda x: tf.square(tf.concat([tf.tanh(x), ROW * x, x], -1))),
        FIRST,
    ),
    "gradient of slices": (M, inner_gradient(lambda x: tf.square(x)[:, 1, 1:]), FIRST),
    "gradient of tf.slice": (
        M,
        inner_gradient(lambda x: tf.square(tf.slice(x, [0, 1, 0], [size(x), -1, 1]))),
        FIRST,
    ),
    "gradient of padding": (
        V,
        inner_gradient(
            lambda x: tf.square(tf.pad(x, [[0, 0], [1, 2]]) + tf.pad(x, COLUMNS, "SYMMETRIC"))
        ),
        FIRST,
    ),
    "gradient of padding with a value": (
        M,
        inner_gradient(
            lambda x: tf.square(tf.pad(x, [[0, 0], [1, 2], [0, 1]], constant_values=2.0))
        ),
        FIRST,
    ),
    "padded to twice the length": (
        T,
        lambda x: tf.pad(x, padding_to(2 * tf.shape(x)[1], x)),
        FIRST,
    ),
}

UNPROVEN = {
    # What depends on how many examples there are.
    "divided by the batch": (V, lambda x: x / size_f(x)),
    "filled with its inverse": (V, lambda x: x * tf.fill([size(x), 1], 1 / size_f(x))),
    "a row of that length": (V, lambda x: tf.reduce_sum(x[:, :1] * tf.ones([1, size(x)]), 1)),
    "a square of that length": (V, lambda x: x[:, 0] * tf.reduce_sum(tf.ones([size(x)] * 2), 1)),
    "concatenated": (V, lambda x: tf.concat([x, tf.ones([size(x), size(x)])], 1)),
    "in a kernel": (I, lambda x: tf.nn.conv2d(x, KERNEL / size_f(x), 1, "SAME")),
    "in a bias": (V, lambda x: tf.nn.bias_add(x, tf.ones([6]) / size_f(x))),
    "in a product": (V, lambda x: x @ (tf.ones([6, 6]) / size_f(x))),
    "in an einsum": (V, lambda x: tf.einsum("bi,ij->bj", x, tf.ones([6, 6]) / size_f(x))),
    "resized to it": (I, lambda x: tf.image.resize(x, [size(x), 2])),
    "so many of the top": (V, lambda x: tf.math.top_k(x, size(x))[0]),
    "so many classes": (V, lambda x: tf.one_hot(integers(x), size(x))),
    "it is one": (V, lambda x: tf.one_hot(integers(x), 2, size_f(x), 0.0)),
    "padded with it": (V, lambda x: tf.pad(x, [[0, 0], [1, 1]], constant_values=size_f(x))),
    "padded so often": (V, lambda x: tf.pad(x, [[0, 0], [0, size(x)]])),
    "rows of padding, as many as there are": (
        V,
        lambda x: tf.pad(x, [[2 * size(x) - size(x), 0], [0, 0]]),
    ),
    "equations that differ by place": (
        (4, 3, 3),
        lambda x: tf.linalg.solve(tf.constant(PLACES), x),
    ),
    "so many columns": (V, lambda x: x[:, : size(x)]),
    "rolled by it": (V, lambda x: tf.roll(x, size(x), 1)),
    "rolled along it": (V, lambda x: tf.roll(x, 1, size(x) % 2)),
    "so many columns, tf.slice": (V, lambda x: tf.slice(x, [0, 1], [size(x), size(x)])),
    "that column": (V, lambda x: x[:, size(x)]),
    "that column, tf.gather": (V, lambda x: tf.gather(x, size(x), axis=1)),
    "half of the rows": (V, lambda x: x[: size(x) // 2]),
    "half of the rows, tf.slice": (V, lambda x: tf.slice(x, [0, 0], [size(x) // 2, 6])),
    "broadcast to it": (V, lambda x: tf.broadcast_to(x[:, :1], [size(x), size(x)])),
    "tiled so often": (V, lambda x: tf.tile(x, [1, size(x)])),
    "split there": (V, lambda x: tf.split(x, [size(x), 6 - size(x)], axis=1)[0]),
    "shifted pixels": (
        I,
        lambda x: raw.SpaceToBatchND(
            input=x, block_shape=[2, 2], paddings=tf.stack([[0, 2 * size(x)], [0, 0]])
        ),
    ),
    "the transposed convolution's height": (
        I,
        lambda x: tf.nn.conv2d_transpose(
            x, tf.ones([1, 1, 3, 2]), tf.stack([size(x), 4 + size(x) // 8, 4, 3]), 1
        ),
    ),
    # What depends on the place in the batch.
    "place": (V, lambda x: x[:, 0] * tf.cast(tf.range(size(x)), tf.float32)),
    "public rows": ((4, 6), lambda x: x * tf.range(4.0)[:, None]),
    "rows of a constant": ((4, 6), lambda x: tf.concat([x, tf.eye(4)], 1)),
    "public labels": (
        (4, 6),
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2, 3], x),
    ),
    "places as labels": (
        V,
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(size(x)), x),
    ),
    "public targets": (
        (4, 6),
        lambda x: raw.InTopKV2(predictions=x, targets=tf.constant([0, 1, 2, 3]), k=3),
    ),
    "public tables of rows": (
        (4, 6),
        lambda x: tf.gather(tf.eye(4), integers(x[:, 0]), axis=1, batch_dims=1),
    ),
    "public choice": ((4, 6), lambda x: tf.where([[True], [False], [True], [False]], x, -x)),
    "chosen rows": ((4, 6), lambda x: raw.Select(condition=[True, False] * 2, x=x, y=-x)),
    "public matrices": ((4, 2, 3), lambda x: x @ tf.reshape(tf.range(36.0), [4, 3, 3])),
    "public einsum": (
        (4, 6),
        lambda x: tf.einsum("bi,bi->bi", x, tf.reshape(tf.range(24.0), [4, 6])),
    ),
    "constant seed": (V, lambda x: x[:, 0] * tf.random.stateless_uniform([size(x)], [1, 2])),
    "constant seed, static": ((4, 6), lambda x: x * tf.random.stateless_uniform([4, 1], [1, 2])),
    "constant seed, whole numbers": (V, lambda x: x[:, 0] + whole_numbers(x, [1, 2])[:, 0]),
    "constant seed, limits that change": (
        V,
        lambda x: x[:, 0] + whole_numbers(x, [1, 2], tf.cast(STEP, tf.int64))[:, 0],
    ),
    "permuted": (V, lambda x: tf.gather(x, tf.random.shuffle(tf.range(size(x))))),
    "shuffled": (V, tf.random.shuffle),
    # What meets other examples.
    "differences of all": (V, lambda x: tf.reduce_sum(x[:, :1] - x[:, 0], 1)),
    "plus its transpose": ((4, 4), lambda x: x + tf.transpose(x)),
    "stacked with its transpose": ((4, 4), lambda x: tf.stack([x, tf.transpose(x)])),
    "parts of several": ((4, 6), lambda x: tf.reshape(x, [6, 4])),
    "pairs": ((4, 6), lambda x: tf.reshape(x, [2, 12])),
    "computed pairs": (V, lambda x: tf.reshape(x, tf.stack([12 * tf.shape(x)[1] // 6, -1]))),
    "a batch of one": (M, lambda x: tf.reshape(x + x + x, tf.concat([[1], tf.shape(x)[1:]], 0))),
    "a batch of two": (V, lambda x: tf.reshape(x, [4, 3])),
    "other axes before the rows": (
        (6, 4),
        lambda x: tf.reshape(tf.transpose(x), [2, 12]),
    ),
    "not one after the other": (M, lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6])),
    "other lengths": (T, lambda x: tf.reshape(x, [-1, 5, 6])),
    "behind each other": (V, lambda x: tf.concat([x, x], 0)),
    "repeated": (V, lambda x: tf.tile(x, [2, 1])),
    "rows of padding": (V, lambda x: tf.pad(x, [[1, 0], [0, 0]])),
    "gradient of mirrored rows": (
        V,
        lambda x: raw.MirrorPadGrad(input=x, paddings=[[1, 0], [0, 0]], mode="SYMMETRIC"),
    ),
    "gather by other rows": (
        (4, 4),
        lambda x: tf.gather(x, integers(tf.transpose(x)), axis=1, batch_dims=1),
    ),
    "cumulative": (V, lambda x: tf.scan(lambda a, b: a + b, x)),
    "as many steps as examples": (
        V,
        lambda x: steps(x, lambda i, y: [y + 1], x, again=lambda i: i < size(x))[0],
    ),
    "until examples are large": (
        (None,),
        lambda x: tf.while_loop(
            lambda y: tf.math.equal(tf.size(tf.where(y > 9)), 0), lambda y: [y + 1], [x]
        )[0],
    ),
    "swapped in a loop": (
        (4, 4),
        lambda x: steps(x, lambda i, y: [tf.transpose(y)], x)[0],
    ),
    "public places in a loop": (
        (4, 6),
        lambda x: steps(x, lambda i, y: [y + x], tf.reshape(tf.range(24.0), [4, 6]))[0],
    ),
    "the number of examples in a loop": (
        V,
        lambda x: steps(x, lambda i, y, n: [y * n, n + 1], x, size_f(x))[0],
    ),
    "examples of a list": (M, lambda x: list_of(x, 0).read(0)),
    "the entry of that number": (M, lambda x: list_of(x).read(size(x) // 9)),
    "an entry that is not written": (M, lambda x: x + tf.TensorArray(tf.float32, 2).read(0)),
    "public entries of a list": (
        (4, 2, 6),
        lambda x: list_of(tf.reshape(tf.range(48.0), [4, 2, 6])).write(0, x[:, 0]).read(1),
    ),
    "entries on different axes": (
        (4, 2, 4),
        lambda x: list_of(x).write(0, tf.transpose(x[:, 0])).read(1),
    ),
    "sums of lists": (
        M,
        lambda x: raw.TensorListStack(
            input_handle=raw.AddN(inputs=[list_of(x).flow] * 2),
            element_shape=-1,
            element_dtype=tf.float32,
        ),
    ),
    "divided in a call": (V, lambda x: tf.function(lambda y: y / size_f(y))(x)),
    "chosen by examples": (V, lambda x: tf.boolean_mask(x, x[:, 0] > 0)),
    "without its axis": ((1, 6), lambda x: tf.squeeze(x, 0)),
    "more rows than one": ((1, 6), lambda x: x * tf.ones([3, 6])),
    "rows that fit by chance": (V, lambda x: x * tf.ones([4, 1])),
    "empty": ((None, 0), lambda x: tf.reshape(x, [-1, 0])),
    # Gradients in the loss.
    "gradient of the mean": (V, inner_gradient(lambda x: tf.reduce_mean(tf.square(x)))),
    "gradient in another shape": (
        (2, 4, 3),
        lambda x: raw.TanhGrad(y=tf.transpose(x, [1, 0, 2]), dy=tf.transpose(x, [2, 0, 1])),
    ),
    "summed by the shapes of others": (
        V,
        lambda x: tf.reduce_sum(
            x, raw.BroadcastGradientArgs(s0=[1, 2], s1=tf.shape(x[:, tf.newaxis])[1:])[0], True
        ),
    ),
    "put back elsewhere": (
        (4, 4),
        lambda x: raw.StridedSliceGrad(
            shape=[5, 4], begin=[1, 0], end=[5, 4], strides=[1, 1], dy=x
        ),
    ),
    "an axis of the axes": (
        V,
        lambda x: x * tf.cast(raw.BroadcastGradientArgs(s0=[1], s1=tf.shape(x))[0], tf.float32),
    ),
    "its statistics": (
        V,
        lambda x: (
            raw.FusedBatchNormV3(
                x=tf.reshape(x, [1, size(x), -1, 1]),
                scale=tf.ones([size(x)]),
                offset=tf.zeros([size(x)]),
                mean=[],
                variance=[],
                data_format="NCHW",
            )[4]
            * 2.0
        ),
    ),
}

MIXES = {
    "mean": (V, lambda x: x - tf.reduce_mean(x, 0)),
    "mean of all": (V, lambda x: x - tf.reduce_mean(x)),
    "largest of all": (V, lambda x: x / tf.reduce_max(tf.abs(x), -2, keepdims=True)),
    "argmax": (V, lambda x: tf.argmax(x, -2)),
    "softmax": (V, lambda x: tf.nn.softmax(tf.transpose(x))),
    "sort": (V, lambda x: tf.sort(x, 0)),
    "gather in order": (V, lambda x: tf.gather(x, tf.argsort(x[:, 0]))),
    "cumsum": (V, lambda x: tf.cumsum(x, -2)),
    "reversed": (V, lambda x: tf.reverse(x, [0])),
    "rolled": (V, lambda x: tf.roll(x, 1, 0)),
    "rolled, counted from the end": (V, lambda x: tf.roll(x, [1, 1], [-1, -2])),
    "rolled after a transpose": (M, lambda x: tf.roll(tf.transpose(x, [1, 0, 2]), 1, 1)),
    "rolled, parts as rows": (M, lambda x: tf.roll(tf.reshape(x, [-1, x.shape[-1]]), 1, 0)),
    "Fourier transform": ((None, 4), lambda x: tf.signal.fft2d(as_complex(x))),
    "Fourier transform of columns": (V, lambda x: tf.signal.fft(as_complex(tf.transpose(x)))),
    "similarity": (V, lambda x: tf.matmul(x, x, transpose_b=True)),
    "equations of examples": (
        (4, 4),
        lambda x: tf.linalg.solve(tf.exp(x), x),
    ),
    "covariance": (V, lambda x: tf.matmul(x, x, transpose_a=True)),
    "einsum over the batch": (V, lambda x: tf.einsum("bi,ij->j", x, tf.eye(6))),
    "einsum of all with all": (V, lambda x: tf.einsum("bi,ci->bc", x, x)),
    "einsum of all with all, static": ((4, 4), lambda x: tf.einsum("ab,ba->ab", x, x)),
    "first example": (V, lambda x: x - x[0]),
    "last examples": (V, lambda x: x[-2:]),
    "every other": (V, lambda x: x[::2]),
    "rows that padding had added": (
        V,
        lambda x: tf.slice(
            x, tf.reshape(tf.slice([[1, 0], [0, 0]], [0, 0], [2, 1]), [-1]), [-1, 6]
        ),
    ),
    "first example, tf.slice": (V, lambda x: x - tf.slice(x, [1, 0], [1, 6])),
    "gathered": (V, lambda x: tf.gather(x, [0, 1])),
    "taken apart": ((4, 6), lambda x: tf.unstack(x)[1]),
    "mean in a loop": (V, lambda x: steps(x, lambda i, y: [y - tf.reduce_mean(y, 0)], x)[0]),
    "mean that ends a loop": (
        V,
        lambda x: tf.while_loop(lambda y: tf.reduce_mean(y) < 9, lambda y: [y + 1], [x])[0],
    ),
    "mean in a call": (V, lambda x: tf.function(lambda y: y - tf.reduce_mean(y, 0))(x)),
    "sparse product over the batch": (
        (4, 6),
        lambda x: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(tf.eye(4)), x),
    ),
    "halves": ((4, 6), lambda x: tf.split(x, 2)[1]),
    "pooled": (
        I,
        lambda x: raw.MaxPool(input=x, ksize=[2, 1, 1, 1], strides=[1] * 4, padding="SAME"),
    ),
    "averaged": (
        I,
        lambda x: raw.AvgPool(value=x, ksize=[2, 1, 1, 1], strides=[1] * 4, padding="SAME"),
    ),
    "batch norm": (
        I,
        lambda x: tf.compat.v1.nn.fused_batch_norm(x, tf.ones([2]), tf.zeros([2]))[0],
    ),
    "batch norm of volumes": (
        (None, 2, 2, 2, 3),
        lambda x: raw.FusedBatchNormV3(
            x=tf.transpose(x, [1, 2, 3, 0, 4]),
            scale=[1.0] * 3,
            offset=[0.0] * 3,
            mean=[],
            variance=[],
            data_format="NDHWC",
        )[0],
    ),
    "gradient by what all share": (V, summed_as_shared),
    "gradient by a matrix": (
        V,
        lambda x: tf.matmul(x, inner_gradient(lambda x: tf.square(x))(x), transpose_a=True),
    ),
    "gradient of batch norm": (
        I,
        lambda x: raw.FusedBatchNormGradV3(
            y_backprop=x,
            x=x,
            scale=tf.ones([2]),
            reserve_space_1=tf.zeros([2]),
            reserve_space_2=tf.ones([2]),
            reserve_space_3=tf.zeros([]),
        )[0],
    ),
    "norm of all gradients": (
        V,
        lambda x: x - tf.norm(inner_gradient(lambda x: tf.tanh(x) ** 2)(x)),
    ),
}


@pytest.mark.quick_cases(29)
@pytest.mark.parametrize("name", PROVEN)
def test_proven(name):
    shape, function, expected = PROVEN[name]
    traced = Traced(function, shape)
    assert traced.state == expected
    traced.check()
    if shape[0] is None:
        traced.check(count=1)


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven(name):
    shape, function = UNPROVEN[name]
    assert isinstance(Traced(function, shape).state, Unproven)


@pytest.mark.parametrize("name", MIXES)
def test_mixes(name):
    shape, function = MIXES[name]
    with pytest.raises(ValueError, match="mixes examples"):
        Traced(function, shape)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.random.normal(tf.shape(x)),
        lambda x: tf.random.stateless_uniform([size(x), 2], tf.stack([1, STEP])),
        lambda x: GENERATOR.uniform([size(x), 2]),
        lambda x: whole_numbers(x, tf.stack([1, STEP])),
    ],
)
def test_random_numbers_that_differ_from_step_to_step(draw):
    assert Traced(lambda x: x[:, 0] + draw(x)[..., 0], (None, 1)).state == FIRST


@tf.custom_gradient
def batch_gradient(x):
    return 2 * x, lambda gradient: gradient - tf.reduce_mean(gradient, 0)


def test_gradients_that_were_replaced_must_keep_examples_apart_too():
    assert Traced(tf.nn.swish, V).state == Rows()
    with pytest.raises(ValueError, match="mixes examples"):
        Traced(batch_gradient, V)

    def overridden(x):
        y = tf.nn.relu(x)
        y.op._set_attr("_gradient_op_type", tf.compat.v1.AttrValue(s=b"Mixed"))
        return y

    assert isinstance(Traced(overridden, V).state, Unproven)


def test_what_examples_may_have_stored_is_not_public():
    def through_a_queue(x):
        queue = tf.queue.FIFOQueue(1, [tf.float32], [[6]])
        with tf.control_dependencies([queue.enqueue(tf.reduce_sum(x, 0))]):
            return x + queue.dequeue()

    assert isinstance(Traced(through_a_queue, V).state, Unproven)


# Mutants: transfer functions that claim too much.


def unchecked_aligned(op, inputs, rank):
    """The rows of the first input, wherever the others have theirs, and whatever is public."""
    return next(
        Rows(state.axis + rank - tensor.shape.rank, state.each, state.interleaved)
        for tensor, state in zip(op.inputs, inputs, strict=False)
        if isinstance(state, Rows)
    )


DECLARED_ROW_WISE = {
    "Mean": [lambda x: x - tf.reduce_mean(x, 0, keepdims=True)],
    "Softmax": [lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x)))],
    "Cumsum": [lambda x: tf.cumsum(x, 0)],
    "ReverseV2": [lambda x: tf.reverse(x, [0])],
    "MatMul": [lambda x: x @ tf.matmul(x, x, transpose_a=True)],
    "Einsum": [lambda x: tf.einsum("bi,ci->bc", x, x)],
    "MatrixSolve": [lambda x: tf.linalg.solve(tf.constant(PLACES), square(x))],
    "StridedSlice": [lambda x: x[:1], lambda x: x[:, : size(x)]],
    "Pad": [lambda x: tf.pad(x, [[1, 0], [0, 0]])],
    "PadV2": [lambda x: tf.pad(x, [[0, 0], [1, 1]], constant_values=size_f(x))],
    "MirrorPadGrad": [
        lambda x: raw.MirrorPadGrad(input=x, paddings=[[1, 0], [0, 0]], mode="SYMMETRIC")
    ],
    "Slice": [lambda x: tf.slice(x, [1, 0], [-1, 6])],
    "Tile": [lambda x: tf.tile(x, [2, 1]), lambda x: tf.tile(x, [1, size(x)])],
    "BroadcastTo": [lambda x: tf.broadcast_to(x[:, :1], [size(x), size(x)])],
    "ConcatV2": [lambda x: tf.concat([x, x], 0)],
    "Transpose": [lambda x: tf.transpose(x)],
    "Reshape": [lambda x: tf.reshape(x, [-1, 3]), lambda x: tf.reshape(tf.transpose(x), [-1, 6])],
    "GatherV2": [lambda x: tf.gather(x, [0, 0, 1], axis=0)],
    "FFT2D": [lambda x: tf.math.real(tf.signal.fft2d(as_complex(x)))],
    "Roll": [lambda x: tf.roll(x, 1, 0)],
    "BiasAdd": [lambda x: tf.nn.bias_add(x, tf.ones([6]) / size_f(x))],
    "TopKV2": [lambda x: tf.math.top_k(x, size(x))[0]],
    "OneHot": [lambda x: tf.one_hot(integers(x), 2, size_f(x), 0.0)],
    "RealDiv": [lambda x: x / size_f(x)],
    "Mul": [lambda x: x * tf.cast(tf.range(size(x)), tf.float32)[:, None]],
    "StridedSliceGrad": [
        lambda x: raw.StridedSliceGrad(
            shape=tf.shape(x),
            begin=[0, 0],
            end=[0, 0],
            strides=[-1, 1],
            dy=x,
            begin_mask=3,
            end_mask=3,
        )
    ],
    "SparseSoftmaxCrossEntropyWithLogits": [
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(size(x)), x)
    ],
}
MUTANTS = [
    (op_type, function) for op_type, found in DECLARED_ROW_WISE.items() for function in found
]


@pytest.mark.parametrize(("op_type", "function"), MUTANTS)
def test_what_is_wrongly_declared_row_wise_is_caught(op_type, function, monkeypatch):
    monkeypatch.setitem(analysis._TRANSFERS, op_type, keeps)
    traced = Traced(function, V)
    with pytest.raises(Disproved):
        traced.check()


def claims_rows(op, inputs):
    """The entries of any list are the examples' own."""
    return RowList(Rows())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: list_of(x, 0).read(0) + 0 * x[:, 0],
        lambda x: list_of(x, 0).stack()[0] + 0 * x[:, 0],
    ],
)
def test_lists_that_are_taken_for_lists_of_rows_are_caught(function, monkeypatch):
    monkeypatch.setitem(analysis._TRANSFERS, "TensorListFromTensor", claims_rows)
    traced = Traced(function, (2, 2, 6))
    with pytest.raises(Disproved):
        traced.check()


def test_loops_that_look_at_the_first_step_only_are_caught(monkeypatch):
    monkeypatch.setattr(
        transfer_functions.functions, "_joined", lambda op, t, before, u, after: before
    )
    traced = Traced(lambda x: steps(x, lambda i, y: [tf.transpose(y)], x)[0], (4, 4))
    with pytest.raises(Disproved):
        traced.check()


def test_axes_that_are_taken_for_those_before_the_rows_are_caught(monkeypatch):
    monkeypatch.setattr(transfer_functions.shapes, "_after_as_many", lambda lead, dims: 0)
    with pytest.raises(Disproved):
        Traced(lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 3]), M).check()


@pytest.mark.parametrize(
    ("shape", "function"),
    [
        ((4, 4), lambda x: x + tf.transpose(x)),
        (V, lambda x: x[:, :1] - x[:, 0]),
        ((4, 6), lambda x: x * tf.range(4.0)[:, None]),
        (V, lambda x: x * size_f(x)),
    ],
)
def test_operands_that_are_not_aligned_are_caught(shape, function, monkeypatch):
    monkeypatch.setattr(transfer_functions.elementwise, "aligned", unchecked_aligned)
    with pytest.raises(Disproved):
        Traced(function, shape).check()


def test_gradients_of_what_all_share_that_are_taken_for_rows_are_caught(monkeypatch):
    monkeypatch.setattr(
        transfer_functions.elementwise, "_sum_of_repeated", lambda op, rows, _: rows
    )
    with pytest.raises(Disproved):
        Traced(summed_as_shared, V).check()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: tf.random.stateless_uniform([size(x)], [1, 2]),
        lambda x: whole_numbers(x, [1, 2])[:, 0],
    ],
)
def test_a_constant_seed_is_caught(draw, monkeypatch):
    monkeypatch.setattr(analysis, "_is_drawn", lambda tensor: True)
    traced = Traced(lambda x: x[:, 0] * draw(x), V)
    with pytest.raises(Disproved):
        traced.check()


def test_a_fill_with_the_size_of_the_batch_is_caught(monkeypatch):
    monkeypatch.setattr(analysis, "_repeated", lambda op, _: FIRST if op.type == "Fill" else None)
    with pytest.raises(Disproved):
        Traced(lambda x: x * tf.fill([size(x), 1], 1 / size_f(x)), V).check()


def test_public_values_that_are_not_are_caught(monkeypatch):
    monkeypatch.setitem(analysis._TRANSFERS, "Sum", lambda op, inputs: Public())
    with pytest.raises(Disproved):
        Traced(lambda x: x - tf.reduce_sum(x, 0), V).check()


def test_a_transfer_function_is_registered_once():
    with pytest.raises(ValueError, match="'Mean'"):
        analysis.transfers("Mean")(keeps)
