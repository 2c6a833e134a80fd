"""Reader of the traced graph of a loss: what is data, one example, or a regularizer.

An optimizer that is called by `model.fit` sees one tensor, the losses of a batch. The graph that
computes it says the rest: which tensors come from the batch (their rows are the examples), which
terms do not depend on it (weight regularizers), and how to compute the loss of *other* rows.
Evaluating that graph on one row at a time makes an example's loss a function of that example
alone, whatever the layers do; this is what per-example clipping needs to be private.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdp.base import devices
from tfdp.base.tf import op_types
from tfdp.clipping.loss_graph import (
    batch_state,
    clamps,
    copying,
    data_flow,
    lookup_tables,
    out_of_range,
    random_streams,
    reductions,
    vectorizable,
)
from tfdp.clipping.loss_graph.batch_state import captured, with_called
from tfdp.clipping.loss_graph.copying import bring, cone
from tfdp.clipping.shared_tensors import constant

_HOW_TO_FIX_THE_LOSS = (
    "Pass a loss of Keras, such as `SparseCategoricalCrossentropy()`, or a function that returns "
    "one value per example, or their sum or mean. A loss over the batch, such as a contrastive "
    "one, is the `batch_wise` term of a `tfdp.clipping.TwoTermLoss`, which "
    "`optimizer.minimize` takes."
)

# Operations whose outputs are an element of a dataset. Outputs that are not dense are variants.
_ELEMENTS = data_flow.ITERATOR_TYPES - {"IteratorGetNextAsOptional"}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random numbers from a secret stream; see `random_streams`.

    Attributes:
      numbers: Numbers that an operation drew.
      shape: The tensor that holds their shape.
      of_rows: The numbers of each row, `[rows, numbers]`; None if all rows share them.
    """

    numbers: tf.Tensor
    shape: tf.Tensor
    of_rows: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class LossGraph:
    """The loss of a batch, split into examples and what is public.

    Attributes:
      terms: Tensors, `[rows]` or scalar sums over rows, that add up to the examples' losses. Of a
        mean over rows the losses are taken that it is the mean of.
      vectors: For each term the losses of the rows, `[rows]`: itself, or what it sums.
      regularizer: Scalar sum of the terms that do not depend on the batch, or None. Constants that
        the loss captures are taken to be public.
      batch: The tensors that come from the batch; the first dimension is the example.
      mask: Mask of the rows that are examples and not padding: the tensor `[rows]` of `batch`, bool
        or floating, that multiplies every loss, which is how Keras uses sample weights; or weights
        of tokens, `[rows, tokens]`. Rows where it is zero do not count. None if there is none.
      sources: For operations that were copied from another graph, by name: the originals, where
        these are calls of functions.
      drawn: The random numbers that the losses are computed from.
    """

    terms: list[tf.Tensor]
    vectors: list[tf.Tensor]
    regularizer: tf.Tensor | None
    batch: list[tf.Tensor]
    mask: tf.Tensor | None
    sources: dict[str, tf.Operation] = dataclasses.field(default_factory=dict)
    drawn: list[Drawn] = dataclasses.field(default_factory=list)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All that belongs to the rows: the batch, and the random numbers that were drawn."""
        return [*self.batch, *[d.of_rows for d in self.drawn if d.of_rows is not None]]

    def keeps(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns which rows count, bool `[rows]`.

        Args:
          rows: Number of rows.
        """
        if self.mask is None:
            return tf.ones([rows], tf.bool)
        kept = self.mask if self.mask.dtype == tf.bool else self.mask != 0
        return tf.reduce_any(kept, axis=list(range(1, kept.shape.rank)))

    def averaged(self, rows: int) -> "LossGraph":
        """Divides the terms by the rows of an example: those of its rows add up to their mean."""
        if rows == 1:
            return self
        with self.terms[0].graph.as_default():
            terms = [term / constant(rows, term.dtype) for term in self.terms]
        return dataclasses.replace(self, terms=terms)

    def evaluate(self, row: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the loss of a single row: the same computation with `row` in place of `tensors`.

        Args:
          row: As `tensors`, with a single row each: `[1, ...]`.

        Returns:
          The loss of that row, a scalar of the default graph.

        Raises:
          ValueError: The graph holds the batch's size, so that it cannot compute one row.
        """
        of_row = self.at(row, vectorizable_gradients=True)
        terms = of_row.terms
        for vector, of_all in zip(of_row.vectors, self.vectors, strict=True):
            if of_all.shape[0] is None and (vector.shape[0] or 0) > 1:
                raise ValueError(
                    "The loss must have one value for each example. Received "
                    f"{vector.shape[0]} values for one example, as of batches that are put "
                    "together: `concat([fakes, reals])`. Call the model on each batch, and add "
                    "the two losses of an example up. (Of a generative adversarial network, "
                    "`PrivateGAN` does so.)"
                )
        try:
            for vector in of_row.vectors:  # A term may be their sum.
                vector.shape.assert_is_compatible_with([1])
            return tf.add_n([tf.reduce_sum(tf.ensure_shape(t, [1] * t.shape.rank)) for t in terms])
        except ValueError as error:
            raise _holds_batch_size(error) from error

    def at(self, rows: Sequence[tf.Tensor], vectorizable_gradients: bool = False) -> "LossGraph":
        """Returns the loss of other data: the same computation with `rows` in place of `tensors`.

        Args:
          rows: As `tensors`, with another number of rows.
          vectorizable_gradients: Whether gradients must be such that `tf.vectorized_map` can
            vectorize them, even if they are slower otherwise.

        Returns:
          The loss of those rows, in the default graph; without regularizers.

        Raises:
          ValueError: The graph holds the batch's size, so that it cannot compute other rows.
        """
        target = tf.compat.v1.get_default_graph()
        of_row = {t.name: row for t, row in zip(self.tensors, rows, strict=True)}
        drawn = self._drawn_at(of_row)
        of_row |= {a.numbers.name: b.numbers for a, b in zip(self.drawn, drawn, strict=True)}
        stop = self._inputs() | {d.numbers.ref() for d in self.drawn}
        operations, boundary = cone(self.terms, stop)
        known = {t.name: of_row[t.name] if t.name in of_row else bring(t, target) for t in boundary}
        replaced = vectorizable.gradient_of if vectorizable_gradients else lambda op: None
        is_open = all(tensor.shape[0] is None for tensor in self.tensors)
        try:
            copies, originals = copying.copy(
                operations, [*self.terms, *self.vectors], known, replaced, same_shapes=is_open
            )
        except ValueError as error:
            raise _holds_batch_size(error) from error
        return LossGraph(
            terms=copies[: len(self.terms)],
            vectors=copies[len(self.terms) :],
            regularizer=None,
            batch=list(rows[: len(self.batch)]),
            mask=None if self.mask is None else of_row[self.mask.name],
            sources=originals,
            drawn=drawn,
        )

    def _drawn_at(self, of_row: dict[str, tf.Tensor]) -> list[Drawn]:
        """Returns what the rows have drawn, shaped as the computation of these rows asks for.

        Which number of a row goes where makes no difference: they are independent and alike.
        """
        target = tf.compat.v1.get_default_graph()
        of_name = {d.numbers.name: d for d in self.drawn}
        stop = self._inputs() | {d.numbers.ref() for d in self.drawn}
        made: dict[str, Drawn] = {}

        def at(tensor: tf.Tensor) -> tf.Tensor:
            if tensor.name in of_name:  # Drawn before, by a layer that this one follows.
                return drawn(of_name[tensor.name]).numbers
            return of_row[tensor.name] if tensor.name in of_row else bring(tensor, target)

        def drawn(original: Drawn) -> Drawn:
            if original.numbers.name not in made:
                made[original.numbers.name] = draw(original)
            return made[original.numbers.name]

        def draw(original: Drawn) -> Drawn:
            if original.of_rows is None:
                return Drawn(bring(original.numbers, target), original.shape, None)
            own, static = of_row[original.of_rows.name], original.numbers.shape
            if static[1:].is_fully_defined():
                shape = tf.constant([-1, *static[1:]])
            else:
                operations, boundary = cone([original.shape], stop)
                known = {t.name: at(t) for t in boundary}
                (shape,), _ = copying.copy(operations, [original.shape], known)
            numbers = tf.reshape(own, shape)
            numbers.set_shape(static)
            return Drawn(numbers, shape, own)

        return [drawn(original) for original in self.drawn]

    def regularizer_gradients(self, handles: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Returns the regularizer's gradients, or None, by variable; `handles` are its handles."""
        if self.regularizer is None:
            return [None] * len(handles)
        gradients = tf.gradients(self.regularizer, handles)
        return [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    def checked_rows(self) -> tf.Tensor:
        """Returns the number of rows, a scalar; checks that all tensors of the batch have it."""
        rows = tf.shape(self.batch[0])[0]
        if devices.compiled_by_xla():  # It drops assertions, with a line in the log for each.
            return tf.identity(rows)
        checks = [
            tf.debugging.assert_equal(
                tf.shape(tensor)[0],
                rows,
                message="The tensors of the batch and the loss must have the same number of rows. "
                f"Received: {tensor.name}, which has others. (Where `boolean_mask` or `gather` "
                "leaves examples out, multiply their losses by zeros in place of it: `loss * "
                "tf.cast(keep, loss.dtype)`. Where batches are put together, `concat([fakes, "
                "reals])`, call the model on each, and add the losses of an example up.)",
            )
            for tensor in [*self.tensors[1:], *[t for t in self.terms if t.shape.rank == 1]]
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(rows)

    def operations(self) -> list[tf.Operation]:
        """Returns the operations that compute `vectors` from the batch, inputs before outputs."""
        within = {op.name for op in cone(self.vectors, self._inputs())[0]}
        # Not in the order of the graph alone: inputs may have been replaced by later operations.
        return data_flow.in_order(
            [op for op in self.terms[0].graph.get_operations() if op.name in within]
        )

    def has_operation(self, types: frozenset[str]) -> bool:
        """Returns whether the loss, or a function in it, runs an operation of one of `types`."""
        operations, _ = cone(self.terms, self._inputs())
        return _contains(self.terms[0].graph, [op.node_def for op in operations], types)

    def _inputs(self) -> set:
        """Returns references of the batch, and of all that the graph captures from outside."""
        placeholders = {
            op.outputs[0].ref()
            for op in self.terms[0].graph.get_operations()
            if op.type == "Placeholder"
        }
        return placeholders | {t.ref() for t in self.batch}


def stateful_operations(graph: tf.Graph) -> list[tuple[str, str]]:
    """Returns types and names of the operations with a state, also in called functions."""
    nodes = with_called(graph, [op.node_def for op in graph.get_operations()])
    return [
        (n.op, n.name)
        for n in nodes
        # Python code counts as stateful, even if it is declared stateless.
        if graph.op_def_for_type(n.op).is_stateful or n.op == "PyFuncStateless"
    ]


def reads_iterator(graph: tf.Graph, itself: bool = False) -> bool:
    """Returns whether a function, or one that it calls, gets elements of a data set.

    Args:
      graph: The function's graph.
      itself: Whether elements that were got elsewhere, and are only looked at here, do not count.
    """
    types = data_flow.ITERATOR_TYPES - ({"OptionalGetValue"} if itself else set())
    return _contains(graph, [op.node_def for op in graph.get_operations()], types)


def _contains(graph: tf.Graph, nodes: Sequence, types: frozenset[str]) -> bool:
    """Returns whether nodes, or the functions that they call, are of one of `types`."""
    return any(node.op in types for node in with_called(graph, nodes))


def _holds_batch_size(error: ValueError) -> ValueError:
    return ValueError(
        "The model cannot be evaluated on one example at a time: its graph holds the size of the "
        "batch. Leave the batch dimension open: train on `tfdp.data.poisson_batches` (arrays in "
        "`fit` have a fixed batch size), or batch your dataset with `drop_remainder=False`; give "
        "no `batch_size` to `Input`; use -1 or `tf.shape` in reshapes; make sparse tensors dense. "
        "TensorFlow said: "
        f"{error}"
    )


def read_loss(loss: tf.Tensor) -> LossGraph:
    """Splits the traced loss of a batch into examples and what is public.

    Args:
      loss: Losses of the examples, `[rows]`; or a scalar that is their sum or mean (also over
        pixels, or tokens, within the examples), plus scalars that do not depend on data.

    Returns:
      The parts of the loss.

    Raises:
      ValueError: The loss is reduced in other ways, has more than one dimension, does not depend
        on the batch, or the model keeps a state that depends on the batch (BatchNormalization).
    """
    if (loss.shape.rank or 0) > 1 and loss.shape[1:].num_elements() == 1:  # `[rows, 1]`, say.
        with loss.graph.as_default():
            loss = tf.reshape(loss, [-1])
    if loss.shape.rank not in (0, 1):
        raise ValueError(
            "Argument `loss` must hold one value per example, shape [batch]. Received a loss of "
            f"shape {loss.shape}. {_HOW_TO_FIX_THE_LOSS} If an example has several losses, such "
            "as one for each time step or output, add them up per example first."
        )
    batch, data = data_of(loss)
    if not batch:
        raise ValueError(
            "Argument `loss` must depend on a batch of examples: on arguments of the tf.function "
            "being traced or on elements of a dataset. Received a loss that depends on neither."
        )
    loss = out_of_range.guard(loss, lambda tensor: depends_on(tensor, data))
    clamps.resolve([loss])
    lookup_tables.keep_shapes([loss])
    terms: list[tf.Tensor] = []
    public: list[tf.Tensor] = []
    with loss.graph.as_default():
        for addend in reductions.addends(loss, lambda tensor: depends_on(tensor, data)):
            depends = depends_on(addend, data)
            (terms if depends or addend.shape.rank != 0 else public).append(addend)
        reduced = [reductions.of_term(t, lambda tensor: depends_on(tensor, data)) for t in terms]
    for term, found in zip(terms, reduced, strict=True):
        if found is None:
            raise ValueError(
                "Argument `loss` must hold one value per example, shape [batch], or be a scalar "
                f"that is their sum or mean. Received a scalar that {_made_by(term, data)}: the "
                f"gradients of the examples cannot be clipped one by one. {_HOW_TO_FIX_THE_LOSS}"
            )
    for term, found in zip(terms, reduced, strict=True):
        if _is_over_batch(found, batch) and len({f.kind for f in reduced if f is not None}) > 1:
            raise ValueError(
                "Argument `loss` must be computed of each example alone. Received a term, "
                f"'{term.op.name}', that is computed of sums or means over the batch, as the load "
                "balance of a router is (mixture of experts): it mixes examples. Leave it out; or "
                "take a loss of each example, such as the router's z-loss, "
                "`ops.mean(ops.logsumexp(logits, axis=-1) ** 2)`; or give it to a "
                "`tfdp.clipping.TwoTermLoss` as its `batch_wise` term."
            )
    kinds = {found.kind for found in reduced if found is not None} - {None}
    if len(kinds) > 1:
        raise ValueError(
            "Argument `loss` must be a sum over examples, or a mean. Received a loss with some "
            "terms that are sums and some that are means: give all of them the same `reduction`."
        )
    vectors = [found.losses for found in reduced if found is not None]
    with loss.graph.as_default():
        terms = [
            tf.reduce_sum(found.losses) if found.kind == reductions.SUM else found.of_all_replicas()
            for found in reduced
            if found is not None
        ]
    batch_state.check(loss.graph, lambda tensor: depends_on(tensor, data))
    flow = data_flow.Flow()
    if flow.values(loss.graph)[loss.ref()].colors & data_flow.METRIC:
        raise batch_state.depends_on_metric("a loss", flow.metrics)
    operations, used = cone(terms, {t.ref() for t in batch})
    batch = [t for t in batch if t.ref() in {u.ref() for u in used}]
    if not batch:
        raise ValueError(
            "Argument `loss` must depend on a batch of examples. Received a loss whose every "
            "term is the same whatever the batch."
        )
    masks = [
        t
        for t in batch
        if (t.dtype == tf.bool or t.dtype.is_floating)
        and all(reductions.is_factor(t, vector) for vector in vectors)
    ]
    masks.sort(key=lambda mask: mask.shape.rank == 1)  # Weights of tokens if there are no others.
    with loss.graph.as_default():
        rows = tf.shape(batch[0])[0]
        drawn = [
            Drawn(
                numbers,
                random_streams.shape_of(numbers),
                None if numbers.shape.is_fully_defined() else tf.reshape(numbers, [rows, -1]),
            )
            for numbers in random_streams.drawn_in(operations)
        ]
    return LossGraph(
        terms=terms,
        vectors=vectors,
        regularizer=tf.add_n(public) if public else None,
        batch=batch,
        mask=masks[-1] if masks else None,
        drawn=drawn,
    )


def _is_over_batch(found: reductions.Reduction | None, batch: list[tf.Tensor]) -> bool:
    """Returns whether what a term reduces has a fixed number of rows, unlike the batch."""
    rows = None if found is None else found.losses.shape[0]
    return rows is not None and all(tensor.shape[0] is None for tensor in batch)


def _made_by(term: tf.Tensor, data: set) -> str:
    """Describes the operation that makes a scalar of the examples, which Keras may divide."""
    op = term.op
    while True:
        inputs = [t for t in op.inputs if depends_on(t, data)]
        if len(inputs) != 1 or inputs[0].shape.rank != 0:
            break
        op = inputs[0].op
    known = {"Sum": "sum", "Mean": "mean", "Max": "maximum", "Min": "minimum", "Prod": "product"}
    if op.type in known:
        return f"reduces the examples to their {known[op.type]}, by '{op.name}'"
    return f"is computed from several examples by '{op.name}' ({op.type})"


def data_of(loss: tf.Tensor) -> tuple[list[tf.Tensor], set]:
    """Returns the data that a tensor is computed from, in its graph.

    Args:
      loss: A tensor of a function's graph.

    Returns:
      The tensors of the batch, and references to all tensors of data: scalars, too.

    Raises:
      ValueError: A component of the dataset has no rows, or is no dense tensor.
    """
    outer = captured(loss.graph)
    in_cone = {op.name for op in cone([loss])[0]}
    batch, data = [], set()
    for op in loss.graph.get_operations():
        if op.name not in in_cone:
            continue
        for tensor in op.outputs:
            if not _is_data(tensor, outer):
                continue
            if tensor.dtype == tf.variant and op.type in _ELEMENTS:
                if not any(user.name in in_cone for user in tensor.consumers()):
                    continue
                raise ValueError(
                    "Every component of the dataset's batches must be a dense tensor. Received a "
                    "ragged or sparse one, whose rows cannot be told apart: make it dense in the "
                    "dataset, with `x.to_tensor()` or `tf.sparse.to_dense(x)`."
                )
            data.add(tensor.ref())
            if tensor.shape.rank is None:
                raise ValueError(
                    f"Every tensor of the batch must have a known rank. Received: {tensor}."
                )
            if tensor.shape.rank > 0:
                batch.append(tensor)
            elif op.type in data_flow.ITERATOR_TYPES:
                raise ValueError(
                    "Every component of the dataset's batches must have a first dimension, the "
                    f"example. Received the scalar {tensor}, which may depend on all of them."
                )
    return batch, data


def _is_data(tensor: tf.Tensor, outside: dict) -> bool:
    """Returns whether a tensor comes from outside as data, rather than state or a constant."""
    if tensor.ref() in outside:  # Any type counts: a TensorArray of data is data.
        outer = outside[tensor.ref()]
        if not tf.is_symbolic_tensor(outer):
            return False  # A constant or a variable.
        further = captured(outer.graph)
        return any(_is_data(t, further) for op in cone([outer])[0] for t in op.outputs)
    if tensor.op.type in _ELEMENTS:
        return True
    if tensor.dtype in (tf.resource, tf.variant):
        return False
    if tensor.op.type in data_flow.ITERATOR_TYPES:
        return True
    if tensor.op.type in op_types.BRANCHES:  # Distribution strategies read a batch, or none.
        return _contains(tensor.graph, [tensor.op.node_def], data_flow.ITERATOR_TYPES)
    return tensor.op.type == "Placeholder"  # An argument of the function being traced.


def depends_on(tensor: tf.Tensor, data: set) -> bool:
    """Returns whether a tensor is computed from one of those that `data` refers to."""
    return any(output.ref() in data for op in cone([tensor])[0] for output in op.outputs)
