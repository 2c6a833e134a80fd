"""Replacement of BatchNormalization, which mixes examples, in a model of Keras 3."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdp.base.validation import one_of
from tfdp.data.tasks import is_task
from tfdp.keras3.front_end import KERAS_3
from tfdp.keras3.keras_3 import check_is_model
from tfdp.training import batch_normalization


def replace_batch_normalization(model: keras.Model, by: str = "group") -> keras.Model:
    """Returns a copy of a model without statistics of the batch.

    It does for models of Keras 3 what `tfdp.keras2.replace_batch_normalization` does for those of
    Keras 2. The copy has the weights of the model and is not compiled. Layers with
    `trainable=False`, which use their moving statistics in training, are left unchanged. Those that
    a functional model calls with `training=False` are not: `fit` of Keras 3 overrides it.

    Args:
      model: A functional or sequential model; models nested in it must be of these kinds as well.
        A task of KerasHub gives a task with the same preprocessor, compiled as its class does it.
      by: "group": GroupNormalization, whose number of groups is the largest divisor of the number
        of channels that is at most 32 and leaves 4 channels to a group; 1 where the inputs are
        `[batch, channels]` or there is no such divisor. Scale and shift are kept, and moving
        statistics are dropped: a trained model must be trained further. "frozen":
        BatchNormalization with `trainable=False`, which uses its moving statistics and trains
        neither them nor scale and shift. Epsilon does not cover these numbers: they must come from
        public data.

    Returns:
      The new model.

    Raises:
      ValueError: An argument is out of its range, or a layer cannot be replaced.

    Example:
      >>> import keras, tfdp.keras3
      >>> from keras import layers
      >>> model = keras.Sequential(
      ...     [keras.Input([8, 8, 1]), layers.Conv2D(16, 3), layers.BatchNormalization()])
      >>> tfdp.keras3.replace_batch_normalization(model).layers[1].groups
      4

    References:
      - Wu and He, 2018, Group Normalization (https://arxiv.org/abs/1803.08494).
    """
    check_is_model(model)
    if is_task(model):
        return _of_task(model, by)
    return batch_normalization.replace(_FRONT_END, model, by)


def _of_task(task: Any, by: str) -> Any:
    """Returns a copy of a task of KerasHub, whose class makes its layers."""
    one_of("by", by, ("group", "frozen"))
    if by == "group":
        backbone = batch_normalization.replace(_FRONT_END, task.backbone, by)
    else:
        backbone = _same(task.backbone, type(task.backbone).from_config(_config(task.backbone)))
    parts = {"backbone": backbone, "preprocessor": task.preprocessor}
    copy = type(task).from_config({**_config(task), **parts})
    heads = [[layer for layer in t.layers if layer is not t.backbone] for t in (task, copy)]
    for old, new in zip(*heads, strict=True):
        _same(old, new)
    for layer in copy._flatten_layers() if by == "frozen" else []:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return copy


def _config(model: Any) -> dict[str, Any]:
    return dict(model.get_config())


def _same(old: Any, new: Any) -> Any:
    """Gives a layer the weights of another of its kind, and has the same parts trained."""
    shapes = [[tuple(w.shape) for w in layer.weights] for layer in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "Argument `model` must have the weights that its class makes of its config: call this "
            "before `enable_lora` and `quantize`. Received the "
            f"{type(old).__name__} '{old.name}', whose weights have other shapes. (Or set "
            "`trainable = False` on each of its BatchNormalization layers, and compile the task.)"
        )
    new.set_weights(old.get_weights())
    for one, other in zip(old._flatten_layers(), new._flatten_layers(), strict=True):
        other.trainable = one.trainable
    return new


def _copy(layer: Any) -> Any:
    if type(layer) is keras.layers.Lambda:  # A config may hold no function of Python.
        return keras.layers.Lambda(
            layer.function,
            layer._output_shape,
            layer.mask,
            layer.arguments,
            name=layer.name,
            dtype=layer.dtype_policy,
        )
    return type(layer).from_config(layer.get_config())


def _clone(model: Any, copy_layer: Callable[[Any], Any]) -> Any:
    call = None if isinstance(model, keras.Sequential) else _call
    with _uncompiled(model):
        return keras.models.clone_model(model, clone_function=copy_layer, call_function=call)


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(layer, keras.layers.GroupNormalization):  # Has no mask and no training mode.
        kwargs = {name: kwargs[name] for name in kwargs if name not in ("mask", "training")}
    return layer(*args, **kwargs)


@contextlib.contextmanager
def _uncompiled(model: Any) -> Iterator[None]:
    """Lets Keras not compile the copy, as it does if the model is compiled."""
    compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = compiled


_FRONT_END = KERAS_3.with_parts(batch_normalization.FrontEnd, copy=_copy, clone=_clone)
