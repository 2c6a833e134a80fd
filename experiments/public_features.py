"""Features of examples by networks with public weights, computed once in parts and kept in files.

Each row is a function of one example and of public weights: features cost no privacy.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import convert_to_constants

from experiments import public_weights
from tfdp.data import cached_features

_BATCH = 20  # Few: their numbers stay near the CPU.
_FORMAT = 1  # To be changed with what is computed.


def trunk_outputs(
    images: np.ndarray, trunk: Any, image_size: int, features_dir: str | os.PathLike[str]
) -> np.ndarray:
    """Returns outputs of EfficientNet-Lite0 before its last block.

    Args:
      images: Images `[N, height, width, 3]` in [0, 1].
      trunk: The first part of `public_weights.efficientnet_lite0`.
      image_size: Height and width that images are enlarged to.
      features_dir: Folder that keeps the outputs.

    Returns:
      A memory map `[N, image_size / 32, image_size / 32, 192]`.
    """

    def outputs(batch: tf.Tensor) -> tf.Tensor:
        return trunk(tf.image.resize(batch, [image_size, image_size]), training=False)

    description = {"trunk": _sha256("efficientnet_lite0"), "image_size": image_size}
    return _kept(images, trunk.output_shape[1:], outputs, description, "images", features_dir)


def top_outputs(outputs: np.ndarray, top: Any, features_dir: str | os.PathLike[str]) -> np.ndarray:
    """Returns the features of EfficientNet-Lite0, a memory map `[N, 1280]`.

    Args:
      outputs: Those of `trunk_outputs`.
      top: The second part of `public_weights.efficientnet_lite0`.
      features_dir: Folder that keeps the features.
    """
    return _kept(
        outputs,
        top.output_shape[1:],
        lambda batch: top(batch, training=False),
        {"top": _sha256("efficientnet_lite0")},
        "images",
        features_dir,
    )


def token_ids(texts: Sequence[bytes], tokenizer: Any, length: int) -> np.ndarray:
    """Returns the ids of the last tokens of each text, int32 `[N, length]`.

    Reviews end with their verdict. Each row begins with [CLS], ends with [SEP], and is padded
    behind.

    Args:
      texts: Texts in UTF-8.
      tokenizer: KerasHub's `BertTokenizer`.
      length: Number of tokens.
    """
    found = np.full([len(texts), length], tokenizer.pad_token_id, np.int32)
    for start in range(0, len(texts), _BATCH):
        batch = [text.decode().replace("<br />", " ") for text in texts[start : start + _BATCH]]
        for row, ids in enumerate(tokenizer(batch), start):
            ids = [tokenizer.cls_token_id, *ids[max(0, len(ids) - length + 2) :]]
            found[row, : len(ids) + 1] = [*ids, tokenizer.sep_token_id]
    return found


def token_outputs(
    ids: np.ndarray, encoder: Any, layers: int, features_dir: str | os.PathLike[str]
) -> np.ndarray:
    """Returns the outputs of MiniLM, or of its first layers, for each token.

    Args:
      ids: Those of `token_ids`.
      encoder: KerasHub's `BertBackbone`, or a part of it: a model with the same inputs, and an
        output `"sequence_output"`.
      layers: Number of its layers.
      features_dir: Folder that keeps the outputs.

    Returns:
      A memory map `[N, length, 384]`, float16, with zeros where a text is padded.
    """

    def outputs(batch: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(batch != 0, tf.int32)
        inputs = {"token_ids": batch, "segment_ids": tf.zeros_like(batch), "padding_mask": mask}
        found = encoder(inputs, training=False)["sequence_output"]
        return tf.cast(found * tf.cast(mask, found.dtype)[..., tf.newaxis], tf.float16)

    shape = (ids.shape[1], encoder.output["sequence_output"].shape[-1])
    description = {"outputs": _sha256("minilm"), "layers": layers}
    return _kept(ids, shape, outputs, description, "texts", features_dir, np.float16)


def means_over_tokens(outputs: np.ndarray, features_dir: str | os.PathLike[str]) -> np.ndarray:
    """Returns the mean over the tokens of each text, `[N, 384]`.

    Args:
      outputs: Those of `token_outputs`.
      features_dir: Folder that keeps the means.
    """

    def means(batch: tf.Tensor) -> tf.Tensor:
        tokens = tf.reduce_sum(tf.cast(tf.reduce_any(batch != 0, 2), tf.float32), 1)
        return tf.reduce_sum(tf.cast(batch, tf.float32), 1) / tokens[:, tf.newaxis]

    return _kept(outputs, outputs.shape[2:], means, {"of": "means"}, "texts", features_dir)


def _sha256(name: str) -> str:
    return public_weights.PACKAGES[name].sha256


def _kept(
    examples: np.ndarray,
    shape: tuple[int, ...],
    compute: Callable[[tf.Tensor], tf.Tensor],
    description: dict[str, Any],
    unit: str,
    features_dir: str | os.PathLike[str],
    dtype: type[np.floating] = np.float32,
) -> np.ndarray:
    """Returns what is computed of examples, from a file if it is there."""

    def batches(done: int) -> Iterator[np.ndarray]:
        of_batch = _with_constants(compute, examples)
        with cached_features.progress_bar("public features", len(examples), done, unit) as advance:
            for start in range(done, len(examples), _BATCH):
                batch = examples[start : start + _BATCH]
                yield of_batch(tf.constant(batch))[0].numpy()
                advance(len(batch))

    key = cached_features.key(examples, {"format": _FORMAT, **description})
    path = Path(features_dir) / f"public-{key}.npy"
    return cached_features.features_of(examples, shape, batches, _BATCH, path, dtype)


def _with_constants(
    compute: Callable[[tf.Tensor], tf.Tensor], examples: np.ndarray
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Returns a function with constants for variables, so that TensorFlow folds normalization.

    EfficientNet-Lite0 then takes less than half of the time on a CPU.
    """
    batch = tf.TensorSpec([None, *examples.shape[1:]], examples.dtype)
    concrete = tf.function(compute).get_concrete_function(batch)
    return convert_to_constants.convert_variables_to_constants_v2(concrete)
