"""Losses with a term that is no sum over examples."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.clipping import loss_graph
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.rows import RowAnalysis
from tfdp.clipping.states import Rows, Unproven

_SIZE_TYPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})


@dataclasses.dataclass(frozen=True)
class TwoTermLoss:
    """A loss `(1/B) sum_i f(x_i) + g(X)`: a sample-wise and a batch-wise term.

    A divergence between the distribution of a batch and another one, a contrastive loss, a penalty
    on correlations are batch-wise: one example changes what all others add. (Losses that are means
    over examples need nothing of this: give them to `model.compile`.) Every optimizer of tfdp
    takes such a loss in `minimize`, in a training step of your own.

    The two functions are called while the training step is traced, and gradients of variables that
    they use are found. What they compute must follow from their arguments: any other tensor that
    depends on data is refused.

    Args:
      sample_wise: Gets the tensors of `batch`; returns the losses f of the rows, `[rows]`.
      batch_wise: Gets the tensors of some rows of the batch, `[n, ...]`, and bool `[n]`, which of
        them exist (others hold zeros); returns g of those that do, a scalar. None: g is zero.
      batch: Tensors, or nested tuples or dicts of them, first dimension the example: data, or
        random numbers that were drawn for each row.
      mask: Which rows are examples, bool `[rows]`, as `tfdp.data.poisson_batches` delivers it. None
        if all are: no epsilon can be stated then, since such batches are no Poisson samples.
      aggregation: How the gradients of the two terms are clipped and added up.
      regularizer: Returns a scalar that depends on no data, to be added to the loss, such as
        `lambda: tf.add_n(model.losses)`; its gradient is neither clipped nor noised.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> class Decorrelated(tf.keras.Sequential):
      ...     def train_step(self, data):
      ...         x, y, mask = data
      ...         def squared_errors(x, y):
      ...             return tf.reduce_sum((self(x) - y) ** 2, axis=1)
      ...         def squared_correlation(x, y, mask):
      ...             a, b = tf.unstack(self(x) * tf.cast(mask, tf.float32)[:, None], axis=1)
      ...             return tf.math.divide_no_nan(
      ...                 tf.reduce_sum(a * b) ** 2, tf.reduce_sum(a**2) * tf.reduce_sum(b**2)
      ...             )
      ...         loss = tfdp.clipping.TwoTermLoss(
      ...             squared_errors,
      ...             squared_correlation,
      ...             batch=(x, y),
      ...             mask=mask,
      ...             aggregation=tfdp.clipping.TermWiseAggregation(batch_clip=0.1, num_groups=4),
      ...         )
      ...         self.optimizer.minimize(loss, self.trainable_variables)
      ...         return {}
      >>> x, y = np.random.rand(500, 3).astype("float32"), np.ones([500, 2], "float32")
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
      >>> model = Decorrelated([tf.keras.layers.Dense(2, input_shape=[3])])
      >>> model.compile(tfdp.DPSGD(1.0, 1.1, **batches.sampling.optimizer_arguments()))
      >>> history = model.fit(batches, verbose=0)
      >>> model.optimizer.ledger.steps
      10
    """

    sample_wise: Callable[..., tf.Tensor]
    batch_wise: Callable[..., tf.Tensor] | None
    batch: Sequence[Any]
    mask: tf.Tensor | None
    aggregation: "Aggregation"
    regularizer: Callable[[], tf.Tensor] | None = None

    def clipped_sum(
        self,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        group_seed: tf.Tensor,
        expected_batch_size: int,
        expected_rows: int | None = None,
    ) -> ClippedSum:
        """Sums clipped gradients, so that `1 / expected_batch_size` of the sum is the update.

        Args:
          engine: Clips the examples.
          variables: The trainable variables.
          group_seed: Secret seed, int64 `[2]`, by which examples draw their group.
          expected_batch_size: Expected number of examples in a batch.
          expected_rows: See `ClippingEngine.clipped_sum`.

        Returns:
          The sum, with a noise scale for each variable.

        Raises:
          ValueError: An argument of the loss is not what it must be.
        """
        if engine.num_microbatches is not None:
            raise ValueError(
                "Argument `num_microbatches` must be None with a TwoTermLoss, whose aggregation "
                f"says what is clipped. Received: num_microbatches={engine.num_microbatches}."
            )
        for tensor in tf.nest.flatten(self.batch):
            _check_is_by_row(tensor)
        if self.mask is not None and (self.mask.dtype != tf.bool or self.mask.shape.rank != 1):
            raise ValueError(
                "Argument `mask` must be a bool tensor, [rows], or None. Received: "
                f"mask={self.mask}."
            )
        if self.mask is not None:
            _check_is_by_row(self.mask)
        return self.aggregation.clipped_sum(
            self, engine, variables, group_seed, expected_batch_size, expected_rows
        )

    def in_function_of_batch(self, compute: Callable[..., Any]) -> Any:
        """What `compute` makes of the sample-wise losses, in a graph whose arguments are the batch.

        Args:
          compute: Gets the total, a scalar: the sum of the losses of the rows that the mask keeps,
            plus the regulariser.
        """
        arguments = (tuple(self.batch), self.mask)
        # Any number of rows: the losses must be computable of a single one.
        specs = tf.nest.map_structure(
            lambda t: None if t is None else tf.TensorSpec([None, *t.shape[1:]], t.dtype), arguments
        )

        @tf.function(autograph=False)
        def traced(batch, mask):
            losses = self.sample_wise(*batch)
            if losses.shape.rank != 1:
                raise ValueError(
                    "Argument `sample_wise` must return one loss per row, [rows]. Received a "
                    f"tensor of shape {losses.shape}."
                )
            if mask is not None:
                losses = losses * tf.cast(mask, losses.dtype)
            check_own_data("sample_wise", losses, tf.nest.flatten([batch, mask]))
            total = tf.reduce_sum(losses)
            if self.regularizer is not None:
                total = total + self.regularizer()
            return compute(total)

        return traced.get_concrete_function(*specs)(*arguments)

    @property
    def masked(self) -> bool:
        """Whether there is a mask that comes with the data."""
        if self.mask is None or not tf.is_symbolic_tensor(self.mask):
            return False
        return self.mask.ref() in loss_graph.data_of(self.mask)[1]


class Aggregation(abc.ABC):
    """How the gradients of the terms of a `TwoTermLoss` are clipped and added up.

    Formal guarantee: with Gaussian noise of standard deviation `noise_multiplier * noise_scales[v]`
    on each coordinate of each variable v, the sum is a Gaussian mechanism with that noise
    multiplier, for neighbours under add-or-remove-one, whatever the loss and the data.
    """

    @abc.abstractmethod
    def clipped_sum(
        self,
        loss: TwoTermLoss,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        group_seed: tf.Tensor,
        expected_batch_size: int,
        expected_rows: int | None,
    ) -> ClippedSum:
        """See `TwoTermLoss.clipped_sum`."""


def check_own_data(name: str, tensor: tf.Tensor, own: Sequence[tf.Tensor]) -> None:
    """Refuses a tensor that depends on other data than the function's own arguments."""
    known = {t.ref() for t in own if t is not None}
    foreign = [ref.deref() for ref in loss_graph.data_of(tensor)[1] if ref not in known]
    if foreign:
        raise ValueError(
            f"Argument `{name}` must compute its result from its arguments: they are what clipping "
            "can take apart. Received a function that uses another tensor that depends on data, "
            f"{foreign[0].name}: pass its rows in `batch`."
        )


def _check_is_by_row(tensor: Any) -> None:
    """Refuses tensors whose rows follow from other rows of the data."""
    if not tf.is_symbolic_tensor(tensor):
        return
    batch, data = loss_graph.data_of(tensor)
    if tensor.ref() in data or not _holds_values_of(tensor, data):
        return
    needed = {op.name for op in loss_graph.cone([tensor], {t.ref() for t in batch})[0]}
    operations = [op for op in tensor.graph.get_operations() if op.name in needed]
    state = RowAnalysis(operations, batch).state(tensor)
    if state != Rows():
        why = state.reason if isinstance(state, Unproven) else f"found: {state}"
        raise ValueError(
            "Argument `batch` must hold data, or what is provably computed row by row from them. "
            f"Received: {tensor} ({why}). Compute it in `sample_wise` and `batch_wise`."
        )


def _holds_values_of(tensor: tf.Tensor, data: set) -> bool:
    """Whether more than the shapes of data gets into a tensor."""
    pending, seen = [tensor], set()
    while pending:
        found = pending.pop()
        if found.ref() in data:
            return True
        if found.op.name not in seen and found.op.type not in _SIZE_TYPES:
            seen.add(found.op.name)
            pending.extend(found.op.inputs)
    return False
