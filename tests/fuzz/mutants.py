"""Takes the library's mechanisms out: the fuzzer must find what each of them prevents.

Each mutant is a list of `(module, attribute, replacement)`; for a class, the attribute is a path
with dots. A name that the library no longer has raises: the mutant must follow the code.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a check."""


def _same(first: Any, *_: Any, **__: Any) -> Any:
    """In place of what changes its first argument."""
    return first


def _all_in_table(_: Any, indices: tf.Tensor) -> tf.Tensor:
    return tf.ones(tf.shape(indices)[:1], tf.bool)


def _stock_map(function: Any, elements: Any) -> Any:
    return tf.vectorized_map(function, elements, warn=False)


def _in_order(words: tf.Tensor) -> tf.Tensor:
    return tf.range(tf.size(words) // 4)


# By the finding that comes back: what to replace, and by what.
MUTANTS: dict[str, list[tuple[str, str, Any]]] = {
    "1 underflow in norms": [
        ("tfdp.clipping.norms", "TINY", 0.0),
    ],
    "2 broadcasting products": [
        ("tfdp.clipping.vectorized.faulty_products", "check", _nothing),
        ("tfdp.clipping.vectorized.vectorized_engine", "vectorized_map", _stock_map),
    ],
    "3 ids out of range": [
        ("tfdp.clipping.one_pass.per_example_gradients", "Lookups.in_table", _all_in_table),
        ("tfdp.clipping.loss_graph.out_of_range", "guard", _same),
        # Gradients that are made for each example, whose places are those of others then.
        ("tfdp.clipping.one_pass.tied_tables", "is_cheaper", _nothing),
    ],
    "5 places in the order of the data": [
        ("tfdp.data.source", "_permutation", _in_order),
    ],
    "7 mixed before the step": [
        ("tfdp.clipping.step_check", "check_step", _nothing),
    ],
    "9 state": [
        ("tfdp.clipping.step_check", "check_graph", _nothing),
        ("tfdp.clipping.step_check", "check_types", _nothing),
        ("tfdp.clipping.step_check", "check_update", _nothing),
    ],
    "transforms": [
        ("tfdp.base.random.keyed_functions", "FORMS", {}),
    ],
    "updates": [
        ("tfdp.clipping.step_check", "update_operations", contextlib.nullcontext),
    ],
    "files": [
        ("tfdp.clipping.step_check", "keep_private", _nothing),
    ],
    "copies": [
        ("tfdp.step.known_values", "KnownValues.note", _nothing),
    ],
}


@contextlib.contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Takes the mechanism `name` out of the library meanwhile; None: leaves it as it is.

    Raises:
      AttributeError: The library has no such attribute: the mutant must follow its code.
    """
    with contextlib.ExitStack() as undo:
        for module, path, replacement in MUTANTS[name] if name else []:
            *parents, attribute = path.split(".")
            owner = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            before = getattr(owner, attribute)
            own = vars(owner).get(attribute, before)
            setattr(owner, attribute, replacement)
            undo.callback(setattr, owner, attribute, own)
        yield
