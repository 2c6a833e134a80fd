"""Replacement of BatchNormalization, which mixes examples, in a Keras model."""

from typing import Any

import tensorflow as tf

from tfdp._validation import error

_LARGEST_NUMBER_OF_GROUPS = 32
_LEAST_CHANNELS = 4  # Of a group.
BATCH_NORMALIZATION = (
    tf.keras.layers.BatchNormalization,
    tf.keras.layers.experimental.SyncBatchNormalization,
)


def replace_batch_normalization(model: tf.keras.Model, by: str = "group") -> tf.keras.Model:
    """Returns a copy of a model without statistics of the batch.

    With BatchNormalization, each example's output depends on the other examples, so per-example
    gradients do not exist. The copy has the weights of the model and is not compiled. Layers that
    already use their moving statistics in training are left unchanged: those with
    `trainable=False`, and those that are called with `training=False`, also within a nested model.

    Args:
      model: A functional or sequential model; models nested in it must be of these kinds as well.
      by: "group": GroupNormalization, which computes statistics over the positions and a group of
        channels of one example. The number of groups is the largest divisor of the number of
        channels that is at most 32 and leaves 4 channels to a group; it is 1 where the inputs are
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
      >>> import tensorflow as tf, tfdp
      >>> layers = tf.keras.layers
      >>> model = tf.keras.Sequential([
      ...     layers.Conv2D(16, 3, input_shape=[8, 8, 1]), layers.BatchNormalization()])
      >>> tfdp.replace_batch_normalization(model).layers[1].groups
      4

    References:
      - Wu and He, 2018, Group Normalization (https://arxiv.org/abs/1803.08494).
    """
    if by not in ("group", "frozen"):
        raise error("by", "'group' or 'frozen'", by)
    if not isinstance(model, tf.keras.Model):
        raise ValueError(
            f"Argument `model` must be a model of Keras 2 (`tf.keras`). Received: {model!r}, of "
            f"{type(model).__module__}."
        )
    if not _is_graph(model):
        raise _cannot_copy(model)
    if not model.built:
        raise ValueError(
            "Argument `model` must be built: call it on a batch, or give its first layer an "
            f"`input_shape`. Received: the model '{model.name}' without weights."
        )
    copies: dict[int, tuple[Any, Any]] = {}
    new = _copy(model, by, copies)
    for old, layer in copies.values():
        _set_weights(old, layer)
    return new


def uses_batch_statistics(layer: Any) -> bool:
    """Returns whether a layer is a BatchNormalization that normalizes by the batch in training."""
    return (
        isinstance(layer, BATCH_NORMALIZATION)
        and layer.trainable
        and not _is_called_for_inference(layer)
    )


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


def _copy(model: Any, by: str | None, copies: dict[int, tuple[Any, Any]]) -> Any:
    """Copies a model; with `by=None` as it is."""

    def copy_layer(layer: Any) -> Any:
        if id(layer) not in copies:
            copies[id(layer)] = (layer, _copy_of_layer(layer, by, copies))
        return copies[id(layer)][1]

    new = tf.keras.models.clone_model(model, clone_function=copy_layer)
    new._name = model.name
    return new


def _copy_of_layer(layer: Any, by: str | None, copies: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(layer, tf.keras.Model):
        if not _is_graph(layer):
            if any(map(uses_batch_statistics, layer._flatten_layers())):
                raise _cannot_copy(layer)
            return type(layer).from_config(layer.get_config())
        new = _copy(layer, None if _is_called_for_inference(layer) else by, copies)
        return new
    if by is not None and uses_batch_statistics(layer):
        return _replacement(layer, by)
    if by is not None and isinstance(layer, tf.keras.layers.TimeDistributed):
        inner = layer.layer
        if uses_batch_statistics(inner):
            return tf.keras.layers.TimeDistributed(_replacement(inner, by), name=layer.name)
    inside = [sub for sub in layer._flatten_layers() if uses_batch_statistics(sub)]
    if by is not None and inside:
        raise ValueError(
            "Argument `model` must hold BatchNormalization as layers of its own. Received the "
            f"layer '{layer.name}' ({type(layer).__name__}), which makes '{inside[0].name}' "
            "itself: use tf.keras.layers.GroupNormalization in its code instead."
        )
    return type(layer).from_config(layer.get_config())


def _replacement(layer: Any, by: str) -> Any:
    config = layer.get_config()
    if by == "frozen":
        return type(layer).from_config({**config, "trainable": False})
    axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
    if len(axes) > 1:
        raise ValueError(
            "BatchNormalization over several axes has no GroupNormalization in its place. Received "
            f"the layer '{layer.name}' with axis={axes}: use by='frozen', or another layer."
        )
    rank = layer.input_spec.ndim
    channels = layer.input_spec.axes[axes[0]]
    kinds = ("initializer", "regularizer", "constraint")
    kept = [f"{weight}_{kind}" for weight in ("beta", "gamma") for kind in kinds]
    kept += ["name", "epsilon", "center", "scale", "dtype"]
    return tf.keras.layers.GroupNormalization.from_config(
        {name: config[name] for name in kept}
        | {"axis": axes[0], "groups": number_of_groups(channels, has_positions=rank > 2)}
    )


def _set_weights(old: Any, new: Any) -> None:
    if isinstance(old, tf.keras.Model) and _is_graph(old):
        return  # Its layers have their own.
    if isinstance(new, tf.keras.layers.TimeDistributed):
        old, new = old.layer, new.layer
    if isinstance(new, tf.keras.layers.GroupNormalization) and isinstance(old, BATCH_NORMALIZATION):
        new.set_weights([w.numpy() for w in (old.gamma, old.beta) if w is not None])
        return
    new.set_weights(old.get_weights())


def _is_graph(model: Any) -> bool:
    """Returns whether a model is functional or sequential, not a subclass with its own `call`."""
    graph = type(tf.keras.Model(tf.keras.Input([1]), []))
    return isinstance(model, graph) and type(model).call in (
        graph.call,
        tf.keras.Sequential.call,
    )


def _is_called_for_inference(layer: Any) -> bool:
    nodes = getattr(layer, "inbound_nodes", [])
    called = [node.call_kwargs.get("training") for node in nodes if node.call_args]
    return bool(called) and all(training is False for training in called)


def _cannot_copy(model: Any) -> ValueError:
    return ValueError(
        "Argument `model` must be a functional or sequential model, whose layers are known. "
        f"Received: '{model.name}', a {type(model).__name__} with a `call` of its own. Use "
        "tf.keras.layers.GroupNormalization instead of BatchNormalization in its code; or, for "
        "statistics from public data, set `trainable = False` on each of its "
        "BatchNormalization layers."
    )
