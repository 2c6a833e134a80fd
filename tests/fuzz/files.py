"""Random models whose files are compared: D and D' with equal released values give equal bytes.

See `tests.saved_files`. Gradients are zero, so that what is released, with its noise from a seed,
is the same for both.
"""

import pathlib
import tempfile

import pytest
import tensorflow as tf

from tests import saved_files
from tests.front_ends import FRONT_ENDS
from tests.fuzz.harness import Finding, Refused

LAYERS = (
    "layers.Dense(4, activation='tanh')",
    "layers.Dropout(0.5)",
    "layers.GaussianNoise(0.1)",
    "layers.LayerNormalization()",
    "layers.Rescaling(0.5)",
    "keras.Sequential([layers.Dense(4), layers.Dropout(0.2)])",
    "Watching('metric')",
    "Watching('list')",
    "Watching('module')",
    "Watching('like metric')",
)
METRICS = (
    "'mae'",
    "'cosine_similarity'",
    "metrics.MeanAbsoluteError()",
    "metrics.RootMeanSquaredError(name='root')",
    "Largest()",
)
# Trackers of a model: how it has one.
TRACKERS = (
    "m = metrics.Mean(); self.tracker = m",
    "m = metrics.Sum(); self.trackers = [m]",
    "m = Largest(); self.of = {'loss': m}",
    "m = metrics.Mean(); self.module = tf.Module(); self.module.mean = m",
    "m = Largest(); self.layer = keras.layers.Layer(); self.layer.own = m",
)
CALLBACKS = (
    "ModelCheckpoint(f'{folder}/step.keras', save_freq=1)",
    "ModelCheckpoint(f'{folder}/epoch{{epoch}}.keras')",
    "ModelCheckpoint(f'{folder}/step.weights.h5', save_weights_only=True, save_freq=1)",
    "BackupAndRestore(f'{folder}/backup', save_freq=1, delete_checkpoint=False)",
)
WAYS = sorted({*saved_files.WAYS, *saved_files.WAYS_OF_KERAS_3})
KINDS = {"layer": LAYERS, "metric": METRICS, "tracker": TRACKERS, "callback": CALLBACKS}


def draw(random, pick):
    kinds = ["layer", "layer", "metric", "metric", pick(["tracker", "metric"]), pick(KINDS)]
    lines = [[kind, pick(KINDS[kind])] for kind in kinds]
    lines += [["way", way] for way in {pick(WAYS) for _ in range(3)}]
    options = {
        "optimizer": pick(["DPSGD", "DPAdam", "DPSignAdam"]),
        "functional": bool(random.random() < 0.3),
        "evaluated": bool(random.random() < 0.4),
        "listed": bool(random.random() < 0.5),
        "execution": pick([1, 1, 2]),
        "updated": pick(["[losses]", "[x]", "[x[:, 0], x[:, 1]]"]),
        "model": pick([None] * 8 + [m.__name__ for m in saved_files.OWN_MODELS]),
    }
    return {"lines": lines, "options": options}


def run(recipe):
    front = FRONT_ENDS[recipe.get("keras", 2) - 2]
    options = recipe["options"]
    own = options.get("model")
    make = getattr(saved_files, own) if own else maker(recipe)
    ways = tuple(code for kind, code in recipe["lines"] if kind == "way")
    callbacks = [code for kind, code in recipe["lines"] if kind == "callback"]
    found, shown = [], []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for neighbour in (False, True):
            here = pathlib.Path(folder) / str(neighbour)
            (here / "fit").mkdir(parents=True)
            scope = {**vars(front.keras.callbacks), "folder": here / "fit"}
            fit = {"callbacks": [eval(code, scope) for code in callbacks]}
            evaluated = bool(own) or options.get("evaluated", False)
            model, logs = saved_files.trained(front, make, neighbour, patch, evaluated, **fit)
            shown.append(logs)
            written = saved_files.written(here / "fit")
            found.append({**written, **saved_files.contents(front, model, here, ways)})
    if shown[0] == shown[1]:
        raise Refused("invalid", "nothing private was shown")
    if leaks := saved_files.differences(*found):
        raise Finding("private in a file", f"{len(leaks)} of {len(found[0])}: {leaks[:4]}")


def maker(recipe):
    """From a Keras and batches to the compiled model of a recipe."""
    options = recipe["options"]
    lines = {kind: [code for k, code in recipe["lines"] if k == kind] for kind in KINDS}

    def make(front, batches):
        keras, scope = front.keras, scope_of(front.keras)
        layers = [eval(code, scope) for code in lines["layer"]]
        layers = [keras.layers.Input([4]), *layers, keras.layers.Dense(1)]
        if lines["tracker"]:
            model = tracking(keras, layers, lines["tracker"], options, scope)
        elif options.get("functional"):
            inputs = h = layers[0] if recipe.get("keras") == 3 else keras.Input([4])
            for layer in layers[1:]:
                h = layer(h)
            model = keras.Model(inputs, h)
        else:
            model = keras.Sequential(layers)
        optimizer = saved_files.optimizer_of(front, batches, options.get("optimizer", "DPSGD"))
        metrics = [eval(code, scope) for code in dict.fromkeys(lines["metric"])]
        execution = options.get("execution", 1)
        model.compile(optimizer, scope["flat"], metrics=metrics, steps_per_execution=execution)
        return model

    return make


def tracking(keras, layers, trackers, options, scope):
    """A model with a step and metrics of its own."""

    class Tracking(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, found = keras.Sequential(layers), []
            for code in trackers:
                own = {**scope, "self": self}
                exec(code, own)
                found.append(own["m"])
            object.__setattr__(self, "found", found)

        def call(self, x, training=None):
            return self.inner(x, training=training)

        def train_step(self, data):
            x, y = data[:2]
            losses = scope["flat"](y, self(x, training=True))
            self.optimizer.minimize(losses, self.trainable_variables)
            for tracker in self.found:
                tracker.update_state(*eval(options.get("updated", "[losses]"), locals()))
            return {str(i): tracker.result() for i, tracker in enumerate(self.found)}

        if options.get("listed"):

            @property
            def metrics(self):
                return [*super().metrics, *self.found]

    model = Tracking()
    model(tf.zeros([1, 4]))
    return model


def scope_of(keras):
    """The names that lines use."""

    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest", **kwargs):
            super().__init__(name=name, **kwargs)
            self.most = self.add_weight(name="most", initializer="zeros", shape=[])

        def update_state(self, y, p=None, sample_weight=None):
            self.most.assign(tf.maximum(self.most, tf.reduce_max(y)))

        def result(self):
            return 1.0 * self.most

    class Watching(keras.layers.Layer):
        def __init__(self, how, **kwargs):
            super().__init__(**kwargs)
            self.how, seen = how, keras.metrics.Mean(name="seen")
            if how == "like metric":
                on_read = {"synchronization": tf.VariableSynchronization.ON_READ}
                sums = {"aggregation": tf.VariableAggregation.SUM, "trainable": False}
                self.most = tf.Variable(0.0, **on_read, **sums)
            elif how == "module":
                self.module = tf.Module()
                self.module.seen = seen
            else:
                self.seen = [seen] if how == "list" else seen
            object.__setattr__(self, "update", seen.update_state)

        def call(self, inputs, training=None):
            if training:
                update = self.most.assign if self.how == "like metric" else self.update
                update(tf.reduce_max(inputs))
            return inputs

        def get_config(self):
            return {**super().get_config(), "how": self.how}

    def flat(y, p):
        losses = tf.reduce_mean(tf.square(y - p), axis=-1)
        return tf.stop_gradient(losses) + 0.0 * tf.reduce_sum(p, axis=-1)

    made = {c.__name__: c for c in (Largest, Watching, flat)}
    made = {name: keras.saving.register_keras_serializable()(c) for name, c in made.items()}
    return {**made, "tf": tf, "keras": keras, "layers": keras.layers, "metrics": keras.metrics}
