"""Losses of examples, each from that example alone."""

import tensorflow as tf

from tfdp.base.validation import error
from tfdp.clipping.loss_graph.loss_reader import read_loss
from tfdp.clipping.one_pass.plan import Plan


def per_example_losses(losses: tf.Tensor) -> tf.Tensor:
    """Returns the losses of a batch, each of which depends on its own example only.

    Use it for mechanisms that release something other than clipped gradients, such as a noisy sum
    of clipped losses. Losses whose graph is proven to keep examples apart are returned unchanged.
    Others are computed again, one example at a time.

    Args:
      losses: Losses of the examples, `[rows]`, a symbolic tensor of the graph being built, without
        terms that do not depend on data (regularizers).

    Returns:
      The losses, `[rows]`.

    Raises:
      ValueError: `losses` is not such a tensor, or the model mixes examples.
    """
    symbolic = isinstance(losses, tf.Tensor) and not tf.executing_eagerly()
    if not (symbolic and losses.dtype.is_floating and losses.shape.rank == 1):
        requirement = "a tensor `[rows]` of floats in the graph being built, one loss per example"
        raise error("losses", requirement, losses)
    graph = read_loss(losses)
    if graph.regularizer is not None:
        raise error("losses", "without terms that do not depend on data", losses)
    if Plan(graph, [], []).fallback is None:
        return losses
    return tf.map_fn(
        lambda row: graph.evaluate([tensor[tf.newaxis] for tensor in row]),
        list(graph.tensors),
        fn_output_signature=losses.dtype,
    )
