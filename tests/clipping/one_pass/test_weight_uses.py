"""Views of variables as weights."""

import pytest
import tensorflow as tf

from tfdp.clipping.one_pass import weight_uses
from tfdp.clipping.one_pass.weight_uses import View


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ([4, 2, 3], [4, 6], [[0], [1, 2]]),
        ([4, 2, 3], [24], [[0, 1, 2]]),
        ([4, 1, 3], [4, 3], [[0], [1, 2]]),
        ([4, 3, 1], [4, 3], [[0], [1, 2]]),
        ([4, 3], [1, 4, 3], [[], [0], [1]]),
        ([4, 6], [4, 2, 3], None),
        ([4, 2, 3], [6, 4], None),
        ([4, None], [4, 3], None),
        ([0, 3], [0], None),
    ],
)
def testmerged_axes(before, after, groups):
    assert weight_uses.merged_axes(tf.TensorShape(before), after) == groups


VIEWS = {
    "itself": ([4, 6], lambda w: w, ((0,), (1,)), False),
    "transposed": ([4, 6], lambda w: -tf.transpose(w), ((1,), (0,)), True),
    "merged": ([4, 2, 3], lambda w: tf.reshape(w, [4, 6]), ((0,), (1, 2)), False),
    "merged and transposed": (
        [4, 2, 3],
        lambda w: -tf.transpose(tf.reshape(-w, [8, 3])),
        ((2,), (0, 1)),
        False,
    ),
    "transposed and merged": (
        [4, 2, 3],
        lambda w: tf.reshape(tf.transpose(w, [1, 0, 2]), [8, 3]),
        ((1, 0), (2,)),
        False,
    ),
    "axes of one entry": (
        [4, 1, 6],
        lambda w: tf.transpose(tf.squeeze(tf.cast(w, tf.float16), 1)),
        ((2,), (0,)),
        False,
    ),
    "split": ([24], lambda w: tf.reshape(w, [4, 6]), (None, None), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_axes_of_views(name):
    shape, arrange, axes, negates = VIEWS[name]
    with tf.Graph().as_default() as graph:
        start = tf.compat.v1.placeholder(tf.float32, shape)
        end = arrange(start)
        steps = [op for op in graph.get_operations() if op.type not in ("Const", "Placeholder")]
        view = View(tuple(steps))
        assert steps == [] or steps[-1] is end.op
        assert (view.axes_of([0], shape), view.axes_of([1], shape)) == axes
        assert view.negates == negates
