"""Poisson batches as a dataset that refuses changes which the accounting would not see."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import private_logs
from tfdp.data import draw_record, tasks
from tfdp.data.draw_record import Draws
from tfdp.data.elements import has_labels, parts_of
from tfdp.data.source import PoissonSource, in_variables
from tfdp.data.stored import Weighted

# Methods that leave every element as it was drawn, and deliver no draw twice.
_KEEPING = ("prefetch", "repeat", "skip", "take", "with_options")
# The functions by which Keras weighs classes: those of Keras 2 and 3.
_OF_CLASS_WEIGHTS = (
    "_make_class_weight_map_fn.<locals>._class_weights_map_fn",
    "make_class_weight_map_fn.<locals>.class_weights_map_fn",
)
# Members that read or describe the elements. (`for` in a `tf.function` calls no method.)
_READING = frozenset({"as_numpy_iterator", "cardinality", "element_spec", "options", "name"})
# Methods that may choose batches by their contents, or stop by them.
_CHOOSING = ("reduce", "scan", "take_while")


class _OpenIterator(OwnedIterator):
    """Iterator over batches of any number of rows, for which a `tf.function` is traced once.

    A function without `input_signature` is traced for each shape of its arguments: these tensors
    say that the number of their rows is open. Models with recurrent layers could otherwise not be
    evaluated on one example at a time, as their graph would hold the size of the batch.

    TensorFlow prepares it when it is first used: that takes a tenth of a second, and Keras drops
    one of the iterators of each `fit` unused.
    """

    _prepared: tf.Tensor | None = None

    def _create_iterator(self, dataset: tf.data.Dataset) -> None:
        self._dataset, self._element_spec = dataset, dataset.element_spec
        self._preparing = threading.RLock()

    @property
    def _iterator_resource(self) -> tf.Tensor:
        with self._preparing:
            if self._prepared is None:
                try:
                    # Beside the data set, as `iter` of TensorFlow has it.
                    device = self._dataset._variant_tensor.device
                    with tf.init_scope(), tf.device(device):
                        draw_record.RECORD.begin_iteration()
                        super()._create_iterator(self._dataset)  # It assigns, then uses it.
                except BaseException:
                    self._prepared = None
                    raise
            return self._prepared

    @_iterator_resource.setter
    def _iterator_resource(self, resource: tf.Tensor) -> None:
        self._prepared = resource

    def __next__(self) -> Any:
        """Returns the next batch."""
        return _open(super().__next__(), self.element_spec)

    def get_next(self) -> Any:
        """Returns the next batch."""
        return _open(super().get_next(), self.element_spec)


def _open(batch: Any, specs: Any) -> Any:
    """Has tensors tell TensorFlow, which asks when it looks for a trace, their spec alone."""
    for tensor, spec in zip(tf.nest.flatten(batch), tf.nest.flatten(specs), strict=True):
        tensor.__tf_tracing_type__ = functools.partial(_whatever_the_context, spec)
    return batch


def _whatever_the_context(spec: tf.TypeSpec, _: Any) -> tf.TypeSpec:
    return spec


class PoissonBatches(Draws, tf.data.Dataset):
    """Poisson batches, such as `(x, y)`, each drawn when it is requested.

    It is a `tf.data.Dataset`: `model.fit` takes it, and `for` iterates over it. Its elements must
    reach the training step as they were drawn, each once. Methods that change, repeat, mix or
    choose elements (`map`, `cache`, `shuffle`, `filter`, `unbatch`, `take_while`, `reduce`, ...)
    therefore raise an error. `take`, `skip`, `repeat` (which draws anew), `prefetch` and
    `with_options` are allowed.
    Functions that take a dataset as an argument, such as `tf.data.Dataset.zip`, cannot be refused
    here. If they change a batch or use it twice, optimizers notice that by its contents.

    `tfdp.data.poisson_batches` makes it. `model.fit(batches, class_weight=...)` multiplies the
    weights of the examples by those of their classes.

    Attributes:
      sampling: Sampling of the batches: the argument `sampling` of an optimizer.
      source: The data set. Batches can also be drawn from it inside a graph.
      preprocessor: The preprocessor of a KerasHub task that was applied to the examples, if any.
    """

    preprocessor: Any = None

    def __init__(
        self,
        dataset: tf.data.Dataset,
        sampling: PoissonSampling,
        source: PoissonSource,
        make: Callable[[PoissonSource], "PoissonBatches"],
    ):
        self._dataset, self._make = dataset, make
        self.sampling, self.source = sampling, source
        super().__init__(dataset._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Types and shapes of the elements."""
        return self._dataset.element_spec

    @property
    def input_spec(self) -> Any:
        """Types and shapes of the inputs x, whether elements are `x`, `(x,)` or `(x, y, ...)`."""
        return parts_of(self.element_spec)[0]

    @property
    def target_spec(self) -> Any:
        """Types and shapes of the targets y; None where data have no labels."""
        return parts_of(self.element_spec)[1] if has_labels(self.element_spec) else None

    def __iter__(self) -> Any:
        """Returns an iterator whose elements leave the number of rows open for tracing."""
        private_logs.check_fit()
        return _OpenIterator(self) if tf.executing_eagerly() else super().__iter__()

    def __repr__(self) -> str:
        return f"PoissonBatches(sampling={self.sampling!r})"


def _keeping(name: str) -> Callable[..., PoissonBatches]:
    original = getattr(tf.data.Dataset, name)

    def method(self: PoissonBatches, *args: Any, **kwargs: Any) -> PoissonBatches:
        def make(source: PoissonSource) -> PoissonBatches:
            return method(self._make(source), *args, **kwargs)

        dataset = original(self._dataset, *args, **kwargs)
        kept = PoissonBatches(dataset, self.sampling, self.source, make)
        kept.preprocessor, kept.is_private = self.preprocessor, self.is_private
        return kept

    method.__name__, method.__doc__ = name, f"As `tf.data.Dataset.{name}`."
    return method


def _weighing(self: PoissonBatches, map_func: Any, *args: Any, **kwargs: Any) -> PoissonBatches:
    """Handles `map` of `class_weight` in `model.fit`; raises an error for other functions.

    A task of KerasHub maps its preprocessor, which was applied to the examples before.
    """
    if tasks.unmapped(self, map_func):
        return self
    if getattr(map_func, "__qualname__", "") not in _OF_CLASS_WEIGHTS:
        return _refusing("map")(self, map_func, *args, **kwargs)
    source = self.source
    if not has_labels(self.element_spec):
        raise ValueError(
            "Argument `class_weight` must not be given with data without labels. Received batches "
            f"of {self.element_spec}."
        )
    if source.transform is not None:
        raise ValueError(
            "Argument `class_weight` must not be given with batches that have a `transform`, which "
            "may change labels. Give `poisson_batches` weights: data=(x, y, sample_weight)."
        )
    if source.stored is not None:  # A label without a weight is found when it is drawn.
        return self._make(dataclasses.replace(source, stored=Weighted(source.stored, map_func)))
    # Weighs the whole data set, so that a label without a weight is an error before training.
    try:
        with tf.device("cpu"):  # It finds labels without a weight. A GPU looks up zeros.
            weights = tf.cast(map_func(*source.tensors())[2], tf.float32)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "Argument `class_weight` must have a weight for each label. Received data with a label "
            "that has none."
        ) from error
    data = (*source.data[:2], in_variables(weights))
    return self._make(dataclasses.replace(source, data=data))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: PoissonBatches, *args: Any, **kwargs: Any) -> NoReturn:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:  # A strategy would split batches.
            raise TypeError(
                "Under a distribution strategy of several replicas, each replica must sample its "
                "own part of the data set: use `tfdp.data.distributed_poisson_batches(strategy, "
                "...)`. Received: batches of `poisson_batches`."
            )
        if name in _CHOOSING:
            raise TypeError(
                f"`{name}` must not be used on Poisson batches: what decides by the contents of "
                "batches which of them are used, or how many, reveals them. Use `take(n)` with a "
                "public number, or a `for` loop. Received: a call of "
                f"`{name}`."
            )
        function = (
            "lambda x, y: (..., y)" if has_labels(self.source.given_spec) else "lambda x: ..."
        )
        raise TypeError(
            f"`{name}` must not be used on Poisson batches: the epsilon of the training holds for "
            "batches that are used as they were drawn, each once. To change examples, give "
            "`tfdp.data.poisson_batches` a function of one example, "
            f"`transform={function}`, or change the data before, or put the change into the "
            "model. Every iteration draws new batches. (Several replicas need "
            f"`distributed_poisson_batches`.) Received: a call of `{name}`."
        )

    method.__name__, method.__doc__ = name, "Not supported: elements are used as they were drawn."
    return method


for _name in _KEEPING:
    setattr(PoissonBatches, _name, _keeping(_name))
PoissonBatches.map = _weighing
for _name in dir(tf.data.Dataset):
    _is_method = callable(getattr(tf.data.Dataset, _name)) and not isinstance(
        vars(tf.data.Dataset).get(_name, vars(tf.data.Dataset.__mro__[1]).get(_name)), staticmethod
    )
    if _is_method and not _name.startswith("_") and _name not in {*_KEEPING, *_READING, "map"}:
        setattr(PoissonBatches, _name, _refusing(_name))
