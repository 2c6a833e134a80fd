"""Tells what a private training step does with each layer of `tf.keras.layers`.

python -m tests.layer_table            # prints docs/layers.md, as it should be
python -m tests.layer_table --write    # writes it
"""

import argparse
import contextlib
import dataclasses
import inspect
import logging
import os
import pathlib
import re
import traceback
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

import tfdp
from tests import support
from tests.layer_cases import ABSTRACT, CASES, EXAMPLES, Case, model_of

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "layers.md"
ONE_PASS, VECTORIZED, REFUSED, DEFECT = "one pass", "vectorized", "refused", "DEFECT"
_TOGETHER = 12  # Layers in one model.
_LIBRARY = os.path.dirname(tfdp.__file__) + os.sep
_HEADER = """# Layers

What a private training step does with each layer of `tf.keras.layers`, in a small model with
trainable weights in front of the layer and behind it:

- **one pass**: the engine proves that the layer keeps the examples apart, and has a rule for its
  weights, if it has any. Fast.
- **vectorized**: correct, but slower. Each example's gradient is computed by itself.
- **refused**: an error before the first step, because no gradient would belong to one example, or
  because the layer would keep a statistic of the batch.

`RandomCrop`, and `recurrent_dropout` or the dropout of a cell in `RNN`, draw random numbers in
loops or branches: on Poisson batches they need `padding="full"`, which `make_private` chooses.

A table that is looked up and is also the output layer (tied, as in GPT-2, Gemma, BART and BERT's
masked language model: `ReversibleEmbedding`) is clipped in one pass, too: norms follow from inner
products of lookups and output gradients, and no gradient of the size of the table is made for an
example, up to about as many positions as the table has columns. Longer texts have larger output
gradients, and texts of open length have none of a known size: there each example's gradient is
instantiated.

`print(optimizer.clipping.report(model))` says the same of your own model. This page is written by
`python -m tests.layer_table --write`; a test compares it with what happens.

| layer | engine | why |
|---|---|---|
"""
_FOOTER = """
Words after a name are settings of the layer. Not in the table, because they are not layers by
themselves: {abstract}.
Layers of `tf.keras.layers.experimental` that are not listed are those above.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a step with a layer.

    Attributes:
      engine: `ONE_PASS`, `VECTORIZED`, `REFUSED`, or `DEFECT` if it failed otherwise.
      why: The reason, if it is not the first.
    """

    engine: str
    why: str = ""


def public_classes() -> dict[str, type]:
    """The public classes of `tf.keras.layers`, by name; those of `experimental` with a prefix."""
    experimental = tf.keras.layers.experimental
    found = {}
    for prefix, module in (
        ("", tf.keras.layers),
        ("experimental.", experimental),
        ("experimental.preprocessing.", experimental.preprocessing),
    ):
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and inspect.isclass(value):
                found[prefix + name] = value
    return found


def aliases() -> dict[str, list[str]]:
    """The other names of classes, by the name under which a case is."""
    classes = public_classes()
    names: dict[str, list[str]] = {}
    for name, cls in classes.items():
        own = [case for case in CASES if classes.get(case) is cls]
        if own and name not in own and not name.startswith("experimental"):
            names.setdefault(own[0], []).append(name)
    return names


def without_case() -> list[str]:
    """The public classes that no case covers."""
    classes = public_classes()
    covered = {classes.get(name) for name in [*CASES, *ABSTRACT]}
    return [name for name, cls in classes.items() if cls not in covered]


def train_one_step(cases: Sequence[Case]) -> Result:
    """Takes a step of DPSGD on a model with the layers, and tells what happened."""
    tf.keras.backend.clear_session()  # Names in reasons depend on no other model.
    optimizer = tfdp.DPSGD(1.0, 1.0, EXAMPLES, learning_rate=0.1)
    try:
        model, x = model_of(cases)
        data = (x, np.arange(EXAMPLES) % 2)
        model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        step = tf.function(
            lambda x, y: model.train_step((x, y)),
            input_signature=support.open_spec(data),
            autograph=False,
        )
        step(*data)
        if not all(np.all(np.isfinite(v)) for v in model.trainable_variables):
            return Result(DEFECT, "non-finite weights")
    except ValueError as error:
        refused = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_LIBRARY)
        return Result(REFUSED if refused else DEFECT, _one_line(error))
    except Exception as error:
        return Result(DEFECT, f"{type(error).__name__}: {_one_line(error)}")
    report = optimizer.clipping.report()
    if report.fallback:
        return Result(VECTORIZED, _reason(report.fallback))
    slow = [f"{e.variable}: {_reason(e.how)}" for e in report.entries if not e.fast]
    return Result(VECTORIZED if slow else ONE_PASS, "; ".join(slow))


def results() -> dict[str, Result]:
    """What a step does with each layer.

    Those that the page says are worked on in one pass are so if models of several of them are,
    which takes a third of the time.
    """
    page = PAGE.read_text() if PAGE.exists() else ""
    listed = [name for name in CASES if f"| {_title(name)} | {ONE_PASS} |" in page]
    found: dict[str, Result] = {}
    with _quickly():
        for start in range(0, len(listed), _TOGETHER):
            names = listed[start : start + _TOGETHER]
            together = train_one_step([CASES[name] for name in names])
            if together.engine == ONE_PASS:
                found.update(dict.fromkeys(names, together))
        for name in CASES:
            if name not in found:
                found[name] = train_one_step([CASES[name]])
    return {name: found[name] for name in CASES}


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Turns off warnings, and what TensorFlow does for graphs that run more than once."""
    logger = logging.getLogger("tfdp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        logger.setLevel(level)
        tf.config.optimizer.set_experimental_options(options)


def _reason(text: str) -> str:
    """A reason without the name of the operation, which is Keras's own."""
    found = re.search(r"'[^']*' \((\w+)\): (.*)", text)
    return f"{found[2].rstrip('.')} (`{found[1]}`)" if found else text.rsplit(": ", 1)[-1]


def _one_line(error: Exception) -> str:
    """The message of an error, without what Keras puts around it."""
    text = str(error).split("ValueError: ")[-1].strip()
    return " ".join(text.split())


def _title(name: str) -> str:
    """The layer's names, and its settings."""
    layer, *settings = name.split(", ", 1)
    names = [layer, *aliases().get(name, [])]
    return ", ".join([*[f"`{n}`" for n in names], *settings])


def page(found: dict[str, Result]) -> str:
    """The page of the docs."""
    rows = [
        f"| {_title(name)} | {result.engine} | {result.why} |" for name, result in found.items()
    ]
    abstract = ", ".join(f"`{name}`" for name in ABSTRACT)
    return _HEADER + "\n".join(rows) + "\n" + _FOOTER.format(abstract=abstract)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.layer_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    text = page(results())
    if options.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
