"""What leaves the process when a model is saved or copied, in every way, and models to try it with.

`contents` knows no name of a variable, metric or class: it reads all that is there.
"""

import copy
import io
import pickle
import re
import zipfile
from pathlib import Path

import h5py
import numpy as np
import tensorflow as tf

import tfdp
from tests.front_ends import FRONT_ENDS
from tfdp import priors
from tfdp.step.record import release_count

KERAS_2 = FRONT_ENDS[0]
N, B = 60, 30


class OtherFormat(Exception):
    """A way of saving that a model or a Keras does not support, with or without tfdp."""


def contents(front, model, folder: Path, names=None) -> dict[str, np.ndarray]:
    """Saves and copies a model in every way, and returns all tensors and texts that come out.

    Args:
      front: The model's Keras.
      model: A model that was trained.
      folder: An empty folder.
      names: Names of the ways; None: all.
    """
    found = {}
    for name, way in (WAYS if front is KERAS_2 else WAYS_OF_KERAS_3).items():
        if names is not None and name not in names:
            continue
        try:
            read = way(model, folder / name)
        except OtherFormat:
            continue
        found.update({f"{name}: {key}": np.asarray(value) for key, value in read.items()})
    return found


def differences(first: dict, second: dict) -> list[str]:
    """Returns the names of what is in one and not in the other, or not bit for bit the same."""
    other = [name for name in first if not _same(first[name], second.get(name))]
    return sorted({*other, *(second.keys() - first.keys())})


def _same(a, b) -> bool:
    if b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return list(a.flat) == list(b.flat) if a.dtype == object else a.tobytes() == b.tobytes()


# Reading files.


def written(folder: Path) -> dict:
    """Returns all that is in the files that callbacks wrote into a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        read = {".keras": _archive, ".h5": _h5, ".index": _checkpoint}.get(path.suffix)
        for key, value in (read(path) if read else {}).items():
            found[f"{path.relative_to(folder)}: {key}"] = np.asarray(value)
    return found


def _checkpoint(path) -> dict:
    reader = tf.train.load_checkpoint(str(path).removesuffix(".index"))
    # The graph has numbers of nodes alone, and no values.
    names = reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    return {name: reader.get_tensor(name) for name in names}


def _saved_model(path) -> dict:
    tensors = _checkpoint(path / "variables" / "variables")
    # Keras 3 exports variables in the order of their addresses.
    unordered = [value for name, value in tensors.items() if name.startswith("_all_variables/")]
    found = {name: value for name, value in tensors.items() if "_all_variables/" not in name}
    for i, value in enumerate(sorted(unordered, key=lambda v: (str(v.shape), v.tobytes()))):
        found[f"variable {i}"] = value
    metadata = path / "keras_metadata.pb"
    return {**found, **({"metadata": metadata.read_bytes()} if metadata.exists() else {})}


def _h5(file) -> dict:
    found = {}
    with h5py.File(file, "r") as opened:
        items = [("", opened)]
        opened.visititems(lambda name, item: items.append((name, item)))
        for name, item in items:
            found.update({f"{name}@{key}": np.asarray(v) for key, v in item.attrs.items()})
            if isinstance(item, h5py.Dataset):
                found[name] = item[()]
    return found


def _archive(path) -> dict:
    found = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            member = archive.read(name)
            if name.endswith(".h5"):
                read = _h5(io.BytesIO(member))
                found.update({f"{name}/{key}": value for key, value in read.items()})
            elif name != "metadata.json":  # It has the time.
                # Keras 3 writes addresses of objects.
                found[name] = re.sub(rb'"shared_object_id": \d+', b"", member)
    return found


def _values(variables) -> dict:
    return {str(i): v.numpy() for i, v in enumerate(variables)}


# Ways of saving and copying.


def _keras_file(model, path):
    model.save(f"{path}.keras")
    return _archive(f"{path}.keras")


def _weights_file(model, path):
    model.save_weights(f"{path}.weights.h5")
    return _h5(f"{path}.weights.h5")


def _tf_weights(model, path):
    model.save_weights(path)
    return _checkpoint(path)


def _old_weights(model, path):
    model.save_weights(f"{path}.h5")
    return _h5(f"{path}.h5")


def _old_model(model, path):
    if not isinstance(model, tf.keras.Sequential):
        raise OtherFormat
    model.save(f"{path}.h5")
    return _h5(f"{path}.h5")


def _folder(model, path):
    model.save(path)
    return _saved_model(path)


def _tf_saved_model(model, path):
    tf.saved_model.save(model, str(path))
    return _saved_model(path)


def _export(model, path):
    model.export(str(path), **({} if isinstance(model, tf.keras.Model) else {"verbose": False}))
    return _saved_model(path)


def _tf_checkpoint(model, path):
    return _checkpoint(tf.train.Checkpoint(model=model, each=list(model.metrics)).write(str(path)))


def _in_background(model, path):
    checkpoint = tf.train.Checkpoint(model=model)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    checkpoint.write(str(path), options=options)
    checkpoint.sync()
    return _checkpoint(path)


def _optimizer(model, path):
    return _checkpoint(tf.train.Checkpoint(optimizer=model.optimizer).write(str(path)))


def _weights(model, path):
    of_metrics = [v for metric in model.metrics for v in metric.variables]
    own = {f"weights {i}": value for i, value in enumerate(model.get_weights())}
    return {**own, **_values([*model.variables, *of_metrics])}


def _metrics(model, path):
    return _values(v for metric in copy.deepcopy(model.metrics) for v in metric.variables)


def _copies(model, path):
    modules = {type(layer).__module__.partition(".")[0] for layer in model._flatten_layers()}
    if not modules <= {"keras", "tf_keras", "tfdp"}:
        raise OtherFormat  # Classes of a test, which Keras does not find by their names.
    found = {}
    for name, other in {
        "copy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
    }.items():
        of_metrics = [v for metric in other.metrics for v in metric.variables]
        read = _values([*other.variables, *of_metrics])
        found.update({f"{name} {key}": value for key, value in read.items()})
    return found


def _variables(model, path):
    """Of variables themselves, of which TensorFlow's modules consist."""
    variables = [v for metric in model.metrics for v in metric.variables]
    variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    copied = _values(copy.deepcopy(v) for v in variables)
    return {**copied, **{f"array {i}": np.asarray(v) for i, v in enumerate(variables)}}


def _state_tree(model, path):
    return _values(map(tf.identity, map(np.asarray, tf.nest.flatten(model.get_state_tree()))))


_WAYS_OF_BOTH = {
    "keras": _keras_file,
    "weights_file": _weights_file,
    "checkpoint": _tf_checkpoint,
    "background": _in_background,
    "optimizer": _optimizer,
    "tf_saved_model": _tf_saved_model,
    "export": _export,
    "weights": _weights,
    "copies": _copies,
    "variables": _variables,
}
WAYS = {
    **_WAYS_OF_BOTH,
    **{"tf_weights": _tf_weights, "old_weights": _old_weights, "old_model": _old_model},
    **{"folder": _folder, "metrics": _metrics},
}
WAYS_OF_KERAS_3 = {**_WAYS_OF_BOTH, "state_tree": _state_tree}


# Models. Their losses differ, and their weights do not: the learning rate is zero.


def optimizer_of(front, batches, name="DPSGD", **changes):
    return getattr(front.tfdp, name)(
        l2_norm_clip=1.0,
        noise_multiplier=1.1,
        learning_rate=0.0,
        noise_seed=3,
        sampling=batches.sampling,
        **changes,
    )


def _dense(front, inputs, outputs):
    layers = front.keras.layers
    return front.keras.Sequential([layers.Input([inputs]), layers.Dense(outputs)])


def compiled(front, batches):
    """A model with metrics that Keras makes."""
    model = _dense(front, 4, 1)
    model.compile(optimizer_of(front, batches), "mse", metrics=["mae"])
    return model


def tracking(front, batches, listed=True):
    """A model with a metric of its own: the pattern of Keras's guides."""

    class Tracking(front.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = _dense(front, 4, 1)
            self.tracker = front.keras.metrics.Mean(name="mean_loss")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data[:2]
            losses = tf.reduce_sum(tf.square(y - self(x, training=True)), axis=-1)
            self.optimizer.minimize(losses, self.trainable_variables)
            self.tracker.update_state(losses)
            return {"loss": self.tracker.result()}

        if listed:

            @property
            def metrics(self):
                return [self.tracker]

    model = Tracking()
    model(np.zeros([1, 4], "float32"))
    model.compile(optimizer_of(front, batches))
    return model


def unlisted(front, batches):
    """A model that does not list its metric, which Keras then does not reset."""
    return tracking(front, batches, listed=False)


def in_layer(front, batches):
    """A layer with a metric, and with a variable like those of metrics."""
    like_metrics = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }

    class Watching(front.keras.layers.Layer):
        def build(self, shape):
            self.seen = front.keras.metrics.Mean(name="seen")
            if front is KERAS_2:
                self.most = self.add_weight(
                    name="most", shape=[], trainable=False, initializer="zeros", **like_metrics
                )
            else:
                self.most = tf.Variable(0.0, trainable=False, **like_metrics)
            super().build(shape)

        def call(self, inputs, training=None):
            if training:
                self.seen.update_state(inputs)
                self.most.assign(tf.reduce_max(inputs))
            return inputs

    layers = front.keras.layers
    model = front.keras.Sequential([layers.Input([4]), Watching(), layers.Dense(1)])
    model.compile(optimizer_of(front, batches), "mse")
    return model


def gan(front, batches):
    model_class = tfdp.PrivateGAN if front is KERAS_2 else front.tfdp.PrivateGAN
    model = model_class(_dense(front, 2, 4), _dense(front, 4, 1), gradient_penalty=10.0)
    model.compile(optimizer_of(front, batches), front.keras.optimizers.SGD(0.0))
    return model


def vae(front, batches):
    model = front.tfdp.TermWiseVAE(
        _dense(front, 4, 4),
        _dense(front, 2, 4),
        prior=priors.StandardNormal(2),
        likelihood="normal",
        divergence="rbf_mmd",
        batch_clip=0.1,
        num_groups=4,
    )
    model.compile(optimizer_of(front, batches))
    return model


def selective(front, batches):
    model = front.tfdp.SelectiveModel(_dense(front, 4, 1))
    own = {"validation_batch_size": 20, "validation_noise_multiplier": 1.0, "threshold": 0.0}
    model.compile(optimizer_of(front, batches, "DPSURSGD", **own), "mse", metrics=["mae"])
    return model


OWN_MODELS = (gan, vae, selective)


def _data(neighbour: bool):
    x = np.random.default_rng(2).normal(size=[N, 4]).astype("float32")
    y = x[:, :1].copy()
    if neighbour:
        x[7], y[7] = 50.0, 1e4
    return x, y


def _fix_names(front, monkeypatch):
    """Makes names of layers, and the numbers by which ledgers know an optimizer, the same."""
    numbers = np.random.default_rng(0)
    monkeypatch.setattr(release_count, "_new_uid", lambda: float(numbers.integers(1, 2**50)))
    front.keras.backend.clear_session()
    front.keras.utils.set_random_seed(1)


def batches_of(neighbour: bool, like_x: bool = False):
    """Draws of one of two data sets; of one, there is an outlier among the examples."""
    x, y = _data(neighbour)
    return tfdp.data.poisson_batches(
        (x, x if like_x else y), expected_batch_size=B, seed=4 + neighbour, steps_per_epoch=2
    )


def trained_on_replicas(front, neighbour: bool, monkeypatch):
    """Trains as `trained` does, on two replicas: metrics have parts, which are summed when read."""
    _fix_names(front, monkeypatch)
    x, y = _data(neighbour)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batches = tfdp.data.distributed_poisson_batches(
        strategy,
        lambda i, count: (x[i::count], y[i::count]),
        dataset_size=N,
        expected_batch_size=B,
        seed=4 + neighbour,
    )
    with strategy.scope():
        model = compiled(front, batches)
    return model, model.fit(batches, verbose=0, epochs=1, steps_per_epoch=2).history


def trained(front, make, neighbour: bool, monkeypatch, evaluated=False, **fit):
    """Trains a model on one of two data sets, of which one has an outlier and other draws.

    All that is released is the same for both: with a learning rate of zero, weights stay as they
    are, and the numbers by which ledgers know an optimizer are made the same.
    """
    _fix_names(front, monkeypatch)
    batches = batches_of(neighbour, like_x=make in (gan, vae))
    model = make(front, batches)
    shown = model.fit(batches, verbose=0, epochs=2, **fit).history
    if evaluated:
        shown = model.evaluate(batches, verbose=0, return_dict=True)
    return model, shown
