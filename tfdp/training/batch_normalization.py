"""Replacement of BatchNormalization in a model, for every Keras."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdp.base.validation import one_of
from tfdp.training import front_end

_LARGEST_NUMBER_OF_GROUPS = 32
_LEAST_CHANNELS = 4  # Least number of channels in a group.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd(front_end.FrontEnd):
    """A Keras, and how its layers and models are copied.

    Attributes:
      copy: Returns a new layer, or another operation, with the config of one.
      clone: Returns a copy of a model, of which a function makes the layers; not compiled.
    """

    copy: Callable[[Any], Any]
    clone: Callable[[Any, Callable[[Any], Any]], Any]


def replace(keras: FrontEnd, model: Any, by: str) -> Any:
    """Does what `replace_batch_normalization` of each Keras says."""
    one_of("by", by, ("group", "frozen"))
    copies = _Copies(keras)
    if not copies.is_graph(model):
        raise copies.cannot_copy(model)
    if not model.built:
        raise ValueError(
            "Argument `model` must be built: call it on a batch, or let it begin with an "
            f"`{keras.name}.Input`. Received: the model '{model.name}' without weights."
        )
    new = copies.of_model(model, by)
    copies.set_weights()
    return new


def number_of_groups(channels: int, has_positions: bool) -> int:
    """Returns the number of groups of a GroupNormalization that replaces a BatchNormalization.

    Args:
      channels: Number of channels.
      has_positions: Whether the inputs have other dimensions than batch and channels.

    Example:
      >>> number_of_groups(64, has_positions=True)
      16
    """
    most = min(_LARGEST_NUMBER_OF_GROUPS, channels // _LEAST_CHANNELS) if has_positions else 1
    return max([n for n in range(1, most + 1) if channels % n == 0], default=1)


class _Copies:
    """Copies of the layers of a model, one of each."""

    def __init__(self, keras: FrontEnd) -> None:
        self._keras = keras
        self._package = keras.package
        self._copies: dict[int, tuple[Any, Any]] = {}

    def of_model(self, model: Any, by: str | None) -> Any:
        """Copies a model; with `by=None` as it is."""

        def copy_layer(layer: Any) -> Any:
            if id(layer) not in self._copies:
                self._copies[id(layer)] = (layer, self._of_layer(layer, by))
            return self._copies[id(layer)][1]

        return self._keras.clone(model, copy_layer)

    def set_weights(self) -> None:
        """Gives all copies the weights of the originals."""
        for old, new in self._copies.values():
            self._set_weights_of(old, new)

    def is_graph(self, model: Any) -> bool:
        """Returns whether a model is functional or sequential, not a subclass with its `call`."""
        functional, sequential = self._functional, self._package.Sequential
        return isinstance(model, (functional, sequential)) and type(model).call in (
            functional.call,
            sequential.call,
        )

    def cannot_copy(self, model: Any) -> ValueError:
        """Returns the error for a model with a `call` of its own."""
        return ValueError(
            "Argument `model` must be a functional or sequential model, whose layers are known. "
            f"Received: '{model.name}', a {type(model).__name__} with a `call` of its own. Use "
            f"{self._keras.name}.layers.GroupNormalization instead of BatchNormalization in its "
            "code; or, for statistics from public data, set `trainable = False` on each of its "
            "BatchNormalization layers."
        )

    def _of_layer(self, layer: Any, by: str | None) -> Any:
        if not isinstance(layer, self._package.layers.Layer):
            return self._keras.copy(layer)
        if isinstance(layer, self._package.Model):
            if self.is_graph(layer):
                asleep = self._keras.is_called_for_inference(layer)
                return self.of_model(layer, None if asleep else by)
            if any(map(self._uses_batch_statistics, layer._flatten_layers())):
                raise self.cannot_copy(layer)
            return self._keras.copy(layer)
        if by is not None and self._uses_batch_statistics(layer):
            return self._replacement(layer, by)
        if by is not None and isinstance(layer, self._package.layers.TimeDistributed):
            inner = layer.layer
            if self._uses_batch_statistics(inner):
                return type(layer)(self._replacement(inner, by), name=layer.name)
        inside = [sub for sub in layer._flatten_layers() if self._uses_batch_statistics(sub)]
        if by is not None and inside:
            raise ValueError(
                "Argument `model` must hold BatchNormalization as layers of its own. Received the "
                f"layer '{layer.name}' ({type(layer).__name__}), which makes '{inside[0].name}' "
                f"itself: use {self._keras.name}.layers.GroupNormalization in its code instead."
            )
        return self._keras.copy(layer)

    def _replacement(self, layer: Any, by: str) -> Any:
        config = layer.get_config()
        if by == "frozen":
            return type(layer).from_config({**config, "trainable": False})
        axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
        if len(axes) > 1:
            raise ValueError(
                "BatchNormalization over several axes has no GroupNormalization in its place. "
                f"Received the layer '{layer.name}' with axis={axes}: use by='frozen', or another "
                "layer."
            )
        rank = layer.input_spec.ndim
        channels = layer.input_spec.axes[axes[0]]
        if rank == 2 and channels == 1:
            raise ValueError(
                "BatchNormalization of a single number for each example has no GroupNormalization "
                "in its place: less its own mean, that number is 0 whatever it was. Received the "
                f"layer '{layer.name}', whose inputs have the shape [batch, 1]: use by='frozen', "
                "with statistics of public data, or leave the layer out and scale the input by "
                "public constants."
            )
        kinds = ("initializer", "regularizer", "constraint")
        kept = [f"{weight}_{kind}" for weight in ("beta", "gamma") for kind in kinds]
        kept += ["name", "epsilon", "center", "scale", "dtype"]
        return self._package.layers.GroupNormalization.from_config(
            {name: config[name] for name in kept}
            | {"axis": axes[0], "groups": number_of_groups(channels, has_positions=rank > 2)}
        )

    def _set_weights_of(self, old: Any, new: Any) -> None:
        layers = self._package.layers
        if not isinstance(old, layers.Layer):
            return
        if isinstance(old, self._package.Model) and self.is_graph(old):
            return  # Its layers have their own.
        if isinstance(new, layers.TimeDistributed):
            old, new = old.layer, new.layer
        if isinstance(new, layers.GroupNormalization) and self._is_normalization(old):
            new.set_weights([w.numpy() for w in (old.gamma, old.beta) if w is not None])
            return
        new.set_weights(old.get_weights())

    def _uses_batch_statistics(self, layer: Any) -> bool:
        """Returns whether a layer is a BatchNormalization that uses the batch in training."""
        return (
            self._is_normalization(layer)
            and layer.trainable
            and not self._keras.is_called_for_inference(layer)
        )

    def _is_normalization(self, layer: Any) -> bool:
        return isinstance(layer, self._keras.normalizations)

    @property
    def _functional(self) -> Any:
        """The class of functional models."""
        inputs = self._package.Input([1])
        return type(self._package.Model(inputs, inputs))
