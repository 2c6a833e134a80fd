"""Secret random numbers for models: for Dropout, noise layers and augmentation.

Where batches are not padded, an example that is added to the data set moves others to other rows.
With random numbers that are a known function of the row, these others would add other gradients:
the sum could move by three times the clip. So the operations of the traced loss that draw random
numbers get a secret key, a new one in each step. The numbers of the rows are then independent,
alike, and unknown, so that they can be taken to move along with the examples: whatever the numbers
of the others are, the added example changes its own term alone, by at most the clip. The
distribution of the sum is a mixture over these numbers, and hockey-stick divergences are jointly
convex: the bound for each holds for the mixture.

The numbers are those of TensorFlow's Philox generator, with a key of 64 bits and a counter whose
upper 64 bits are secret as well. They are never released.
"""

import re
import weakref
from collections.abc import Iterable

import tensorflow as tf

from tfdp.base.random import chacha
from tfdp.base.random.key_streams import KeyStream
from tfdp.clipping.loss_graph.batch_state import with_called
from tfdp.clipping.loss_graph.copying import cone

_PHILOX = 1
# Operations with a seed of their own, and those that take their place.
_OF_KEY = {
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "StatelessRandomNormal": "StatelessRandomNormalV2",
    "StatelessRandomUniform": "StatelessRandomUniformV2",
    "StatelessRandomUniformInt": "StatelessRandomUniformIntV2",
    "StatelessTruncatedNormal": "StatelessTruncatedNormalV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
# Names of operations that draw something, and of those that only make keys.
_RANDOM = re.compile(
    r"Random|Multinomial|TruncatedNormal|CandidateSampler|SampleDistorted|NonDeterministic|Stateful"
    r"(Standard|Uniform)|Rng"
)
_MAKE_KEYS = frozenset(
    {"StatelessRandomGetAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg"}
)
_WITH_KEY = frozenset(_OF_KEY.values())
# Advance of a generator's counter per step: more than any step draws.
_SKIP = 2**40

# For each graph: names of the outputs of the operations that were given a secret key.
_secret: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def make_secret(loss: tf.Tensor, stream: KeyStream) -> None:
    """Gives the operations that draw random numbers for a loss keys of a secret stream.

    Args:
      loss: A tensor of the graph being built.
      stream: Gives a new key in each step.

    Raises:
      ValueError: Random numbers are drawn in a way that no key can be given to: in a loop, a branch
        or a nested function, or by other operations than uniform and normal ones.
    """
    done = _secret.setdefault(loss.graph, set())
    drawing = [
        op
        for op in cone([loss])[0]
        if op.type in {*_OF_KEY, *_WITH_KEY} and op.outputs[0].name not in done
    ]
    if drawing:
        with loss.graph.as_default(), tf.name_scope("secret_stream"):
            keys = chacha.random_words(stream.next_key(), 4 * len(drawing))
            keys = tf.bitcast(tf.reshape(keys, [len(drawing), 2, 2]), tf.uint64)
            for op, key in zip(drawing, tf.unstack(keys, num=len(drawing)), strict=True):
                done.add(_with_key(op, key).name)
    _check(loss, done)


def drawn_in(operations: Iterable[tf.Operation]) -> list[tf.Tensor]:
    """Returns the random numbers that operations draw by secret keys."""
    return [
        op.outputs[0]
        for op in operations
        if op.outputs and op.outputs[0].name in _secret.get(op.graph, ())
    ]


def shape_of(drawn: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that holds the shape of the random numbers that are drawn."""
    return drawn.op.inputs[0]


def hide_counts(graph: tf.Graph) -> None:
    """Advances the states of random generators by a constant, whatever the number of rows.

    They are saved with a model, and would show how many examples a batch had.

    Args:
      graph: The graph being built.
    """
    for op in graph.get_operations():
        if op.type == "RngReadAndSkip" and tf.get_static_value(op.inputs[2]) is None:
            with graph.as_default():
                op._update_input(2, tf.constant(_SKIP, tf.uint64))


def _with_key(op: tf.Operation, key: tf.Tensor) -> tf.Tensor:
    """Makes an operation draw with a key, uint64 `[2]`; returns what it draws then."""
    counter = tf.stack([tf.zeros([], tf.uint64), key[1]])
    if op.type in _WITH_KEY:
        for index, tensor in enumerate((key[:1], counter, tf.constant(_PHILOX)), start=1):
            op._update_input(index, tensor)
        return op.outputs[0]
    output = op.outputs[0]
    uses = [(c, i) for c in output.consumers() for i, t in enumerate(c.inputs) if t is output]
    arguments = {"shape": op.inputs[0], "key": key[:1], "counter": counter, "alg": _PHILOX}
    if op.type.endswith("Int"):
        arguments |= {"minval": op.inputs[-2], "maxval": op.inputs[-1]}
    else:
        arguments["dtype"] = output.dtype
    drawn = getattr(tf.raw_ops, _OF_KEY[op.type])(**arguments)
    drawn.set_shape(output.shape)
    for consumer, index in uses:
        consumer._update_input(index, drawn)
    return drawn


def _check(loss: tf.Tensor, done: set[str]) -> None:
    """Refuses what is drawn for a loss without a secret key."""
    operations = cone([loss], {loss.graph.get_tensor_by_name(name).ref() for name in done})[0]
    for node in with_called(loss.graph, [op.node_def for op in operations]):
        if _RANDOM.search(node.op) and node.op not in _MAKE_KEYS:
            raise ValueError(
                "With batches that are not padded to one size, the model's random numbers must be "
                "drawn by `tf.random.uniform`, `tf.random.normal` or `tf.random.truncated_normal`, "
                "or their stateless variants, outside of loops, branches and nested functions, so "
                f"that tfdp can give them secret keys. Received: '{node.name}' ({node.op}). Use "
                '`tfdp.data.poisson_batches(..., padding="full")`, or draw them there.'
            )
