"""Check whether the batch of a step is an unused draw of `poisson_batches`."""

import dataclasses
import logging
import weakref

import tensorflow as tf

from tfdp.accounting.sampling import NONE, PoissonSampling
from tfdp.base import devices
from tfdp.clipping import step_check
from tfdp.clipping.engine import ClippedSum
from tfdp.data import draw_record
from tfdp.data.draw_record import Use
from tfdp.step import replicas
from tfdp.step.accumulator import Accumulator

NO_EPSILON = (
    "No epsilon can be stated for this training: {0} does not know how batches are sampled. "
    "To get an epsilon, draw the batches with `batches = "
    "tfdp.data.poisson_batches((x, y), expected_batch_size=...)`, make the optimizer with "
    "`{0}(..., sampling=batches.sampling)`, and train with `model.fit(batches)`; or use "
    "`tfdp.make_private`."
)
_TAKES_NO_WEIGHTS = (
    "The loss must take the sample weights of the batch, by which rows of padding are left out. "
    "Received: sampling with padding={!r}, and a loss without weights. In a training step or a "
    "`compute_loss` of your own, take them from `x, y, sample_weight = data`, and multiply the "
    "loss of each example by its weight. Or draw batches without padding: with "
    '`poisson_batches(..., padding="none")`, or in `make_private` of a model that is compiled with '
    "`jit_compile=False`. "
    "(Arrays in `fit(x, y)`, in place of `fit(batches)`, have no such weights.)"
)
_LOGGER = logging.getLogger("tfdp")
# The attribute of an enclosing graph for what was looked up, and for which traces, by name of the
# compiled function. It holds tensors of that graph: a table of this module would keep it alive.
_FOUND = "_tfdp_draws_looked_up"


def use_of(
    clipped: ClippedSum, sampling: PoissonSampling | None, accumulator: Accumulator | None
) -> Use:
    """Looks up the batch that a clipped sum was computed from, in the graph being built.

    Args:
      clipped: The clipped sum.
      sampling: The sampling that the batch should have; None: it cannot be a draw.
      accumulator: The sum over the chunks of a logical batch, if it is delivered in chunks.

    Returns:
      The use; fresh only if the batch may be added next.

    Raises:
      ValueError: Batches are padded, and the loss takes no weights.
    """
    if sampling is not None and sampling.padding != NONE and clipped.mask is None:
        raise ValueError(_TAKES_NO_WEIGHTS.format(sampling.padding))
    if sampling is None:
        return Use.unrecorded(chunk=None if accumulator is None else accumulator.next[1])
    if devices.compiled_for_gpu():
        use = _of_batch_outside(clipped, sampling, accumulator)
    else:
        mask = None if sampling.padding == NONE else clipped.mask
        others = [tensor for tensor in clipped.batch if tensor is not mask]
        following = None if accumulator is None else accumulator.next
        use = draw_record.RECORD.take(sampling, mask, others, following, replicas.index())
    if sampling.padding != NONE:
        use = dataclasses.replace(use, empty=None)  # The weights of its rows say so.
    if accumulator is None:
        return use
    return dataclasses.replace(use, fresh=tf.logical_and(use.fresh, accumulator.fits(use)))


def _of_batch_outside(
    clipped: ClippedSum, sampling: PoissonSampling, accumulator: Accumulator | None
) -> Use:
    """Looks the batch up where the compiled function is called.

    The record of draws is on the CPU, which functions compiled for a GPU cannot read.
    """
    here = tf.compat.v1.get_default_graph()
    graph, use = here.outer_graph, None
    if isinstance(graph, tf.__internal__.FuncGraph):
        # A function that makes variables is traced twice, and must not take the batch twice.
        if not hasattr(graph, _FOUND):
            setattr(graph, _FOUND, {})
        looked_up = getattr(graph, _FOUND)
        found, traces = looked_up.get(here.name, (None, []))
        if found is None or any(trace() is here for trace in traces):
            with graph.as_default(), step_check.own_operations():
                following = None if accumulator is None else accumulator.next
                found, traces = draw_record.RECORD.take_drawn(sampling, following), []
        looked_up[here.name] = found, [*traces, weakref.ref(here)]
        if found is not None:
            drawn, prints = found
            use = draw_record.RECORD.compare(drawn, prints, clipped.batch)
    if use is None:
        _LOGGER.warning(
            "No epsilon can be stated for this training: a function compiled by XLA for a GPU "
            "cannot see whether its batch is a fresh draw, unless a tf.function around it reads "
            "the batch, as `model.fit` does. Call it in one, or use jit_compile=False."
        )
        return Use.unrecorded()
    return use
