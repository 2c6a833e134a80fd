"""Batch-level (non-decomposable) losses: losses with a term that is not a sum over examples."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.random import chacha
from tfdp.base.validation import error, function, instance
from tfdp.clipping import function_checks
from tfdp.clipping.batch_loss import BatchLoss
from tfdp.clipping.engine import ClippedSum, ClippingEngine
from tfdp.clipping.loss_graph import batch_state, loss_reader


@dataclasses.dataclass(frozen=True)
class TwoTermLoss(BatchLoss):
    """Loss with a sample-wise and a batch-wise term, `(1/B) sum_i f(x_i) + g(X)`.

    Examples of batch-wise terms are a divergence between the distribution of a batch and another
    one, a contrastive loss, and a penalty on correlations: one example changes the contributions of
    all others. (For losses that are means over examples, use `model.compile`.) Every optimizer of
    tfdp takes such a loss in `minimize`, in a training step of your own.

    The functions are called while the training step is traced, each in a graph of its own. Their
    results must depend on their arguments, variables and constants alone, and they must have no
    side effects. Other functions are refused.

    Args:
      sample_wise: Gets the tensors of `batch` and then those of `draws`; returns the losses f of
        the rows, `[rows]`.
      batch_wise: Gets the same tensors of some rows, `[n, ...]`, and a mask, bool `[n]`, of the
        rows that exist (others hold zeros); returns g of these, a scalar. None: g is zero.
      batch: A tuple of tensors, or of nested tuples or dicts of them, whose first dimension is the
        example: data, or tensors computed from data row by row.
      aggregation: Clips and adds up the gradients of the two terms.
      mask: Mask of the rows that are examples, bool `[rows]`, as `tfdp.data.poisson_batches`
        delivers it with `padding`. None if all are.
      draws: Returns a tuple of TensorFlow Probability distributions. Every row gets a sample of
        each, `[rows, ...]`, from a secret seed of the optimizer. (If noise depended on a row's
        place in the batch, adding one example could change the noise of others.)
      regularizer: Returns a scalar that depends on no data, to be added to the loss, such as
        `lambda: tf.add_n(model.losses)`; its gradient is neither clipped nor noised.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> class Decorrelated(tf.keras.Sequential):
      ...     def train_step(self, data):
      ...         x, y = data
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
      ...             aggregation=tfdp.clipping.TermWiseAggregation(batch_clip=0.1, num_groups=4),
      ...         )
      ...         self.optimizer.minimize(loss, self.trainable_variables)
      ...         return {}
      >>> x, y = np.random.rand(500, 3).astype("float32"), np.ones([500, 2], "float32")
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=50)
      >>> model = Decorrelated([tf.keras.layers.Dense(2, input_shape=[3])])
      >>> model.compile(tfdp.DPSGD(1.0, 1.1, sampling=batches.sampling))
      >>> history = model.fit(batches, verbose=0)
      >>> model.optimizer.ledger.steps
      10
    """

    sample_wise: Callable[..., tf.Tensor]
    batch_wise: Callable[..., tf.Tensor] | None
    batch: Sequence[Any]
    aggregation: "Aggregation"
    mask: tf.Tensor | None = None
    draws: Callable[[], Sequence[Any]] | None = None
    regularizer: Callable[[], tf.Tensor] | None = None

    def __post_init__(self) -> None:
        if not callable(self.sample_wise):
            raise error("sample_wise", "a function", self.sample_wise)
        for name in ("batch_wise", "draws", "regularizer"):
            function(name, getattr(self, name))
        self._check_structure()
        instance("aggregation", self.aggregation, Aggregation, "a tfdp.clipping.Aggregation")

    def clipped_sum(
        self,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None = None,
        empty: tf.Tensor | None = None,
    ) -> ClippedSum:
        """Sums clipped gradients, so that `1 / expected_batch_size` of the sum is the update.

        Args:
          engine: Clips the examples.
          variables: The trainable variables.
          seed: Secret key, int64 `[5]` or `[2]`, by which examples draw their group.
          expected_batch_size: Expected number of examples in a batch.
          most_rows: See `ClippingEngine.clipped_sum`.
          empty: Whether the only row of the batch is not an example, a scalar bool. None if it is,
            or if the caller leaves out the sum over such a batch.

        Returns:
          The sum, with a noise scale for each variable. Under a distribution strategy, it is this
          replica's share of the sum over the examples of all replicas.

        Raises:
          ValueError: An argument of the loss is not what it must be.
        """
        if engine.num_microbatches is not None:
            raise error(
                "num_microbatches",
                "None with a TwoTermLoss, whose aggregation says what is clipped",
                engine.num_microbatches,
            )
        self._check_batch()
        graph = tf.compat.v1.get_default_graph()
        while isinstance(graph, tf.__internal__.FuncGraph):
            batch_state.check(graph, lambda t: bool(loss_reader.data_of(t)[1]), unknown=True)
            graph = graph.outer_graph
        if devices.replicas() > 1 and not self.aggregation.is_shared(self):
            raise error(
                "aggregation",
                "a TermWiseAggregation under a distribution strategy of several replicas, which "
                "share its groups out",
                self.aggregation,
            )
        loss = self
        if empty is not None:
            there = tf.fill([self.rows], tf.logical_not(empty))
            kept = there if self.mask is None else tf.logical_and(self.mask, there)
            loss = dataclasses.replace(self, mask=kept)
        clipped = self.aggregation.clipped_sum(
            loss, engine, variables, seed, expected_batch_size, most_rows
        )
        return dataclasses.replace(clipped, batch=self.data, mask=self.data_mask)

    def _check_structure(self) -> None:
        if not (isinstance(self.batch, tuple | list) and self.batch):
            raise error(
                "batch", "a tuple of tensors, or of nested tuples or dicts of them", self.batch
            )

    def _check_batch(self) -> None:
        self._check_structure()
        for tensor in tf.nest.flatten(tuple(self.batch)):
            function_checks.check_is_by_row("batch", tensor)
        if self.mask is not None:
            function_checks.check_is_by_row("mask", self.mask)
            if self.mask.dtype != tf.bool or self.mask.shape.rank != 1:
                raise error("mask", "a bool tensor, [rows], or None", self.mask)

    @property
    def rows(self) -> tf.Tensor:
        """Number of rows of the batch, a scalar."""
        return tf.shape(tf.nest.flatten(tuple(self.batch))[0])[0]

    def with_draws(self, seed: tf.Tensor) -> tuple[Any, ...]:
        """Returns the tensors of the batch, and those of `draws`.

        Args:
          seed: Secret key, int64 `[5]` or `[2]`, used for nothing else.
        """
        batch = tuple(self.batch)
        if self.draws is None:
            return batch

        make_distributions = self.draws

        def draw(rows: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
            distributions = make_distributions()
            # What TensorFlow Probability takes: 64 bits, all of them secret.
            keys = split_key(seed, len(distributions), tf.int32)
            return [
                distribution.sample(rows, seed=key)
                for distribution, key in zip(distributions, keys, strict=True)
            ]

        specs = [tf.TensorSpec([], tf.int32), tf.TensorSpec(seed.shape, tf.int64)]
        drawn = function_checks.trace("draws", draw, specs)(self.rows, seed)
        return (*batch, *drawn)

    def in_function_of_rows(
        self, rows: Sequence[Any], compute: Callable[..., Any], *others: tf.Tensor
    ) -> Any:
        """Applies `compute` to the sample-wise losses, in a graph whose arguments are the rows.

        Args:
          rows: Result of `with_draws`.
          compute: Gets the total, a scalar, and `others`. The total is the sum of the losses of the
            rows that the mask keeps, plus the regularizer.
          *others: Tensors of the graph outside.
        """

        def traced(batch: tuple, mask: tf.Tensor | None, others: tuple) -> Any:
            losses = self.sample_wise(*batch)
            if losses.shape.rank != 1:
                raise ValueError(
                    "Argument `sample_wise` must return one loss per row, [rows]. Received a "
                    f"tensor of shape {losses.shape}."
                )
            if mask is not None:
                losses = losses * tf.cast(mask, losses.dtype)
            total = tf.reduce_sum(losses)
            if self.regularizer is not None:
                total = total + self.public_regularizer()
            return compute(total, *others)

        # Any number of rows: the losses must be computable of a single one.
        specs = [
            tf.nest.map_structure(lambda t: _spec([None, *t.shape[1:]], t), tuple(rows)),
            None if self.mask is None else _spec([None], self.mask),
            tuple(_spec(t.shape, t) for t in others),
        ]
        return function_checks.trace("sample_wise", traced, specs)(tuple(rows), self.mask, others)

    def public_regularizer(self) -> tf.Tensor:
        """Returns the regularizer, a scalar; of several replicas, an equal share of it.

        Raises:
          ValueError: It is none, or depends on data.
        """
        value = tf.convert_to_tensor(0.0 if self.regularizer is None else self.regularizer())
        if value.shape.rank != 0 or loss_reader.data_of(value)[1]:
            raise ValueError(
                "Argument `regularizer` must return a scalar that depends on no data: its gradient "
                f"is not clipped. Received: {value}. (An activity regularizer is a part of the "
                "examples' losses: add it in `sample_wise`.)"
            )
        return value / devices.replicas() if devices.replicas() > 1 else value

    def batch_alone(self) -> ClippedSum:
        """Returns the batch as that of a clipped sum which is not computed yet.

        Raises:
          ValueError: `batch` or `mask` is not what it must be.
        """
        self._check_batch()
        return ClippedSum([], [], tf.constant(0.0), self.data, self.data_mask)

    @property
    def data(self) -> list[tf.Tensor]:
        """The tensors of data that `batch` and `mask` follow from."""
        found = {}
        for tensor in tf.nest.flatten((tuple(self.batch), self.mask)):
            if tf.is_symbolic_tensor(tensor):
                found.update({source.ref(): source for source in loss_reader.data_of(tensor)[0]})
        return list(found.values())

    @property
    def data_mask(self) -> tf.Tensor | None:
        """The mask, if it is a tensor of data."""
        return next((tensor for tensor in self.data if tensor is self.mask), None)


class Aggregation(abc.ABC):
    """Clipping and aggregation of the gradients of the terms of a `TwoTermLoss`.

    Formal guarantee: with Gaussian noise of standard deviation `noise_multiplier * noise_scales[v]`
    on each coordinate of each variable v, the sum is a Gaussian mechanism with that noise
    multiplier, for neighbors under zero-out, whatever the loss and the data.
    """

    def is_shared(self, loss: TwoTermLoss) -> bool:
        """Returns whether replicas can each compute a share of the sum.

        If so, `clipped_sum` returns this replica's share under a distribution strategy; the noise
        scales are those of the total, and the guarantee holds for it.
        """
        return False

    @abc.abstractmethod
    def clipped_sum(
        self,
        loss: TwoTermLoss,
        engine: ClippingEngine,
        variables: Sequence[tf.Variable],
        seed: tf.Tensor,
        expected_batch_size: int,
        most_rows: int | None,
    ) -> ClippedSum:
        """See `TwoTermLoss.clipped_sum`."""


def split_key(key: tf.Tensor, count: int, dtype: tf.DType = tf.int64) -> list[tf.Tensor]:
    """Derives independent keys from one, none of whose bits is public or shared.

    (`tf.random.experimental.stateless_fold_in` would put the number of a key into it: half of its
    bits would be public, and more than half after a cast to int32.)

    Args:
      key: Secret key, int64 `[5]` or `[2]`, used for nothing else.
      count: Number of keys.
      dtype: Their type: tf.int64, or tf.int32 where that is needed.

    Returns:
      The keys, `[2]` each.
    """
    words = chacha.random_words(key, 2 * count * dtype.size // 4)
    words = tf.bitcast(tf.reshape(words, [count, 2, *[dtype.size // 4] * (dtype.size > 4)]), dtype)
    return tf.unstack(words, num=count)


def _spec(shape: Any, tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tensor.dtype)
