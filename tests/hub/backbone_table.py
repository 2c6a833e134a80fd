"""Compares a private step of each backbone of KerasHub with a loop over examples.

python -m tests.hub.backbone_table            # prints docs/backbones.md, as it should be
python -m tests.hub.backbone_table --write    # writes it
"""

import argparse
import dataclasses
import pathlib
import re
import warnings

import tfdp  # isort: skip  # Before Keras 3: the tests' support needs Keras 2 as `tf.keras`.

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from tests import support
from tests.hub.backbones import BACKBONES, Backbone
from tests.keras3.support import crossentropy
from tfdp.data import tasks

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "backbones.md"
ROWS = 4
LARGEST_ERROR = 1e-4  # Error of a number as a share of the largest one, in float32.
ONE_PASS, VECTORIZED, REFUSED = "one pass", "vectorized", "refused"
_HEADER = """# Backbones of KerasHub

What a private training step does with the backbones of KerasHub, small and with random weights.
Texts and images go through the preprocessor of the task. Backbones that are tried without a task
have a linear head, and get random arrays. The clipped sum of gradients, at the
median norm of an example, is compared with a loop over examples: no number differs by more than
{error:g} of the largest.

- **one pass**: all variables have a rule. Fast.
- **vectorized**: correct, but slower, for the variables that are named, or for all.
- **refused**: an error before the first step.

BatchNormalization is frozen: `tfdp.replace_batch_normalization(task, by="frozen")`. Times at real
widths are in [benchmarks](benchmarks.md). This page is written by
`python -m tests.hub.backbone_table --write` (KerasHub {hub}, Keras {keras}); a test compares some
of its rows with what happens.

| backbone | trained as | engine | why |
|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a step.

    Attributes:
      engine: `ONE_PASS`, `VECTORIZED` or `REFUSED`.
      why: The reason, if it is not the first.
      error: The largest difference from the loop, as a share of the largest number.
    """

    engine: str
    why: str = ""
    error: float = 0.0


def examples_of(backbone: Backbone, model: keras.Model) -> tuple:
    """Returns the first examples, preprocessed: inputs, targets, and weights if there are any."""
    data = backbone.data
    if tasks.preprocessor_of(model) is not None:
        data = tasks.prepared(model, data, None, None, None, False).data
    return tf.nest.map_structure(lambda array: tf.constant(array[:ROWS]), data)


def looped_sum(model: keras.Model, examples: tuple) -> tuple[np.ndarray, float]:
    """Returns the sum of gradients that are clipped to their median norm, and that norm."""
    gradients = []
    for row in range(ROWS):
        x, *others = tf.nest.map_structure(lambda t, i=row: t[i : i + 1], examples)
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = keras.Model.compute_loss(model, x, others[0], outputs, *others[1:])
        taken = tape.gradient(loss, [v.value for v in model.trainable_variables])
        zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
        taken = [z if g is None else g for g, z in zip(taken, zeros, strict=True)]
        gradients.append(support.flat(tf.convert_to_tensor(g) for g in taken))
    norms = [np.linalg.norm(g) for g in gradients]
    clip = float(np.median(norms))
    return sum(g / max(1.0, n / clip) for g, n in zip(gradients, norms, strict=True)), clip


def take_one_step(name: str) -> Result:
    """Takes a step of a backbone, without noise, and compares it with the loop."""
    keras.utils.set_random_seed(0)
    backbone = BACKBONES[name]
    model = backbone.make()
    examples = examples_of(backbone, model)
    if tasks.is_task(model):
        model.preprocessor = None
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    one_hot = examples[1].dtype.is_floating
    loss = keras.losses.CategoricalCrossentropy(from_logits=True) if one_hot else crossentropy()
    keras.Model.compile(model, "sgd", loss)
    expected, clip = looped_sum(model, examples)
    optimizer = tfdp.keras3.DPSGD(clip, 0.0, 1, learning_rate=1.0)
    keras.Model.compile(model, optimizer, loss)
    before = support.flat(v.numpy() for v in model.trainable_variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The engine may be the slower one.
            data = tf.data.Dataset.from_tensor_slices(examples).batch(ROWS)
            keras.Model.fit(model, data, verbose=0)
    except ValueError as error:
        return Result(REFUSED, _first_sentences(str(error)))
    update = before - support.flat(v.numpy() for v in model.trainable_variables)
    error = float(np.max(np.abs(update - expected)) / np.max(np.abs(expected)))
    report = optimizer.clipping.report()
    if report.fallback:
        return Result(VECTORIZED, f"all variables: {_reason(report.fallback)}", error)
    slow = sorted({f"`{e.variable.partition(':')[0]}`: {_reason(e.how)}" for e in report.slow})
    return Result(VECTORIZED if slow else ONE_PASS, "; ".join(slow), error)


def _reason(text: str) -> str:
    """A reason without the name of the operation."""
    found = re.search(r"'[^']*'(?: \((\w+)\))?:? (.*)", text)
    if found is None:
        return text
    return found[2].rstrip(".") + (f" (`{found[1]}`)" if found[1] else "")


def _first_sentences(text: str) -> str:
    return re.sub(r", '[^']*',", "", text.partition(": it mixes")[0])


def page(results: dict[str, Result]) -> str:
    """Returns the page of the docs."""
    rows = [row(name, result) for name, result in results.items()]
    header = _HEADER.format(error=LARGEST_ERROR, hub=keras_hub.__version__, keras=keras.__version__)
    return header + "\n".join(rows) + "\n"


def row(name: str, result: Result) -> str:
    """Returns a row of the table."""
    return f"| {name} | {BACKBONES[name].kind} | {result.engine} | {result.why} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub.backbone_table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    results = {}
    for name in BACKBONES:
        results[name] = take_one_step(name)
        print(name, results[name], flush=True)
    wrong = [name for name, result in results.items() if not result.error < LARGEST_ERROR]
    if wrong:
        raise SystemExit(f"These differ from the loop: {wrong}.")
    if options.write:
        PAGE.write_text(page(results))
    else:
        print(page(results))


if __name__ == "__main__":
    main()
