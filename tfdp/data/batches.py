"""Poisson batches as a dataset that cannot be changed behind the accounting."""

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from tfdp.accounting.sampling import PoissonSampling
from tfdp.data.source import PoissonSource

# What leaves every element as it was drawn, and no draw delivered twice.
_KEEPING = ("prefetch", "repeat", "skip", "take", "with_options")
# What reads the elements, or says something of them. (`for` in a `tf.function` reads by the last.)
_READING = frozenset(
    {"as_numpy_iterator", "cardinality", "element_spec", "options", "name"}
    | {"reduce", "scan", "take_while"}
)


class PoissonBatches(tf.data.Dataset):
    """Poisson batches `(x, y, mask)`, each drawn when it is asked for.

    A `tf.data.Dataset`: `model.fit` takes it, `for` iterates over it. Its elements must reach the
    training step as they were drawn, each once. Methods that change, repeat or mix elements (`map`,
    `cache`, `shuffle`, `filter`, `unbatch`, `batch`, ...) therefore raise an error. `take`, `skip`,
    `repeat` (which draws anew), `prefetch` and `with_options` are allowed. Functions that get a
    dataset as an argument, such as `tf.data.Dataset.zip`, cannot be refused here: optimizers find a
    batch that was changed or used before by its contents.

    Made by `tfdp.data.poisson_batches`.

    Attributes:
      sampling: How batches are sampled: the argument `sampling` of an optimizer.
      source: The data set, from which batches can be drawn inside a graph.
    """

    def __init__(self, dataset: tf.data.Dataset, sampling: PoissonSampling, source: PoissonSource):
        self._dataset = dataset
        self.sampling, self.source = sampling, source
        super().__init__(dataset._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        """Types and shapes of the elements."""
        return self._dataset.element_spec

    def __repr__(self) -> str:
        return f"PoissonBatches(sampling={self.sampling!r})"


def _keeping(name: str) -> Callable[..., PoissonBatches]:
    original = getattr(tf.data.Dataset, name)

    def method(self: PoissonBatches, *args: Any, **kwargs: Any) -> PoissonBatches:
        dataset = original(self._dataset, *args, **kwargs)
        return PoissonBatches(dataset, self.sampling, self.source)

    method.__name__, method.__doc__ = name, f"As `tf.data.Dataset.{name}`."
    return method


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: PoissonBatches, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"`{name}` must not be used on Poisson batches: the epsilon of the training holds for "
            "batches that are used as they were drawn, each once. To change examples, give "
            "`tfdp.data.poisson_batches` a function of one example, `transform=lambda x, y: "
            "(..., y)`, or change the data before, or put the change into the model. Every "
            f"iteration draws new batches. Received: a call of `{name}`."
        )

    method.__name__, method.__doc__ = name, "Not supported: elements are used as they were drawn."
    return method


for _name in _KEEPING:
    setattr(PoissonBatches, _name, _keeping(_name))
for _name in dir(tf.data.Dataset):
    _is_method = callable(getattr(tf.data.Dataset, _name)) and not isinstance(
        vars(tf.data.Dataset).get(_name, vars(tf.data.Dataset.__mro__[1]).get(_name)), staticmethod
    )
    if _is_method and not _name.startswith("_") and _name not in {*_KEEPING, *_READING}:
        setattr(PoissonBatches, _name, _refusing(_name))
