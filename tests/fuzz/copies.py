"""Random sequences of training, copying, casting, saving, loading and deleting.

The case itself keeps count of the steps that went into weights, each compile with a noise
multiplier of its own: the ledger of a model must never say less.
"""

import copy
import gc
import pathlib
import pickle
import tempfile

import numpy as np
import tensorflow as tf

from tests.fuzz import library
from tests.fuzz.around import start
from tests.fuzz.harness import Finding

DTYPES = ("float32", "float32", "float64", "bfloat16", "float16")
# How values get from a model to another.
COPIES = (
    "set_weights",
    "assign",
    "identity",
    "array",
    "assign_add",
    "halves",
    "checkpoint",
    "layer",
    "graph",
)
FILES = ("keras", "h5", "weights.h5", "tf", "saved_model", "checkpoint")
WAYS = {"new": DTYPES, "copy": COPIES, "save": FILES, "clone": ("clone", "deepcopy", "pickle")}
WEIGHTS = {
    "new": 1,
    "train": 3,
    "compile": 1,
    "copy": 3,
    "hold": 1.5,
    "hold_within": 0.5,
    "put": 1.5,
    "clone": 1.5,
    "save": 2,
    "load": 2.5,
    "delete": 1,
    "another_process": 0.3,
    "state": 0.5,
}


def draw(random, pick):
    lines = [["new", 0, 0, "float32"], ["train", 0, 0, ""]]
    chances = np.array(list(WEIGHTS.values()))
    for _ in range(int(random.integers(4, 14))):
        op = str(random.choice(list(WEIGHTS), p=chances / chances.sum()))
        first, second = (int(i) for i in random.integers(0, 12, 2))
        lines.append([op, first, second, str(pick(WAYS.get(op, [""])))])
    options = {"optimizer": pick(["DPSGD", "DPAdam"]), "asked": pick([True, False, False])}
    return {"lines": lines, "options": options}


def run(recipe):
    with tempfile.TemporaryDirectory() as folder:
        case = Case(recipe, pathlib.Path(folder))
        for line in recipe["lines"]:
            case.do(*line)
            if recipe["options"].get("asked"):  # Whoever asks helps: values are looked at.
                case.check(line)
        case.check("all")
        for i in range(len(case.models)):
            case.do("train", i, 0, "")
            case.check("a last training")


class Case:
    """Models, arrays and files, each with the steps that went into it, by noise multiplier."""

    def __init__(self, recipe, folder):
        self.keras, self.part = start(recipe)
        self.recipe, self.folder, self.made = recipe, folder, 0
        self.models, self.held, self.files = [], [], []  # Lists of [thing, spent].
        numbers = np.random.default_rng(0)
        data = numbers.normal(size=[40, 4]).astype("float32"), numbers.integers(0, 3, 40)
        self.batches = library.poisson(data, expected_batch_size=10, steps_per_epoch=2)

    def do(self, op, first, second, way):
        """Takes one step; those for which there is nothing do nothing."""
        if op == "load" and not self.files:
            op, way = "save", FILES[first % len(FILES)]
        if op == "put" and not self.held:
            op = "hold"
        of_files, of_arrays = op == "load", op == "put"
        sources = self.files if of_files else self.held if of_arrays else self.models
        if op == "new":
            self.models.append([self.network(way), {}])
        elif op == "another_process":
            library.forget()
            self.models, self.held = [], []
        elif sources and (of_files or self.models):
            at = sources[first % len(sources)]
            other = self.models[second % len(self.models)] if self.models else None
            getattr(self, op)(at, other, way)

    def check(self, line):
        for model, spent in self.models:
            found = library.steps_by_noise(model)
            low = {noise: n for noise, n in spent.items() if found.get(noise, 0) < n}
            if low:
                raise Finding("ledger", f"after {line}: {low} are in the weights; stated: {found}")

    def network(self, dtype="float32"):
        layers = self.keras.layers
        hidden = layers.Dense(5, activation="tanh", dtype=dtype)
        return self.keras.Sequential([layers.Input([4]), hidden, layers.Dense(3, dtype=dtype)])

    def compile(self, at, other=None, way=""):
        self.made += 1
        noise = 1.0 + self.made / 64
        name = self.recipe["options"].get("optimizer", "DPSGD")
        optimizer = library.counted(self.part, name, noise, self.batches)
        loss = self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        at[0].compile(optimizer, loss)
        at[0].noise = noise

    def train(self, at, other=None, way="", callbacks=()):
        if getattr(at[0], "noise", None) is None:
            self.compile(at)
        at[0].fit(self.batches, verbose=0, callbacks=list(callbacks))
        at[1] = {**at[1], at[0].noise: at[1].get(at[0].noise, 0) + 2}

    def delete(self, at, other, way):
        self.models.remove(at)
        del at[0]
        gc.collect()

    def hold(self, at, other, way):
        self.held.append([at[0].get_weights(), at[1]])

    def hold_within(self, at, other, way):
        """The weights after one of two steps."""
        found = []
        keep = self.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: found.append(at[0].get_weights())
        )
        before = at[1]
        self.train(at, callbacks=[keep])
        steps = {at[0].noise: before.get(at[0].noise, 0) + 1}
        self.held.append([found[0], {**before, **steps}])

    def put(self, at, other, way):
        other[0].set_weights(at[0])
        other[1] = at[1]

    def copy(self, at, other, way):
        sources, targets = (library.tf_variables(m) for m in (at[0], other[0]))
        if way == "layer":
            other[0].layers[0].set_weights(at[0].layers[0].get_weights())
            other[1] = {k: max(m.get(k, 0) for m in (at[1], other[1])) for k in at[1] | other[1]}
            return
        if way == "set_weights":
            other[0].set_weights(at[0].get_weights())
        elif way == "checkpoint":
            if [v.dtype for v in sources] != [v.dtype for v in targets]:
                return
            path = tf.train.Checkpoint(v=sources).write(str(self.folder / "copied"))
            tf.train.Checkpoint(v=targets).read(path).assert_consumed()
        for source, target in zip(sources, targets, strict=True):
            kind = target.dtype
            if way == "assign":
                target.assign(tf.cast(source, kind))
            elif way == "identity":
                target.assign(tf.cast(tf.identity(source), kind))
            elif way == "array":
                target.assign(np.asarray(source).astype(kind.as_numpy_dtype))
            elif way == "assign_add" and target is not source:
                target.assign(tf.zeros_like(target))
                target.assign_add(tf.cast(source, kind))
            elif way == "halves":
                target[:2].assign(tf.cast(source[:2], kind))
                target[2:].assign(tf.cast(source[2:], kind))
            elif way == "graph":
                tf.function(lambda s=source, t=target, k=kind: t.assign(tf.cast(s, k)))()
        other[1] = at[1]
        if way == "graph":  # Documented: if the source is trained before anybody looks, it is lost.
            self.check("a copy in a graph")

    def clone(self, at, other, way):
        if way == "clone":
            model = self.keras.models.clone_model(at[0])
            model.set_weights(at[0].get_weights())
        elif way == "deepcopy":
            model = copy.deepcopy(at[0])
        else:
            model = pickle.loads(pickle.dumps(at[0]))
        self.adopt(model, getattr(at[0], "noise", None), at[1])

    def adopt(self, model, noise, spent):
        """Adds a model; one that has no private optimizer, of which tfdp warns, is compiled."""
        is_private = hasattr(getattr(model, "optimizer", None), "ledger")
        model.noise = noise if is_private else None
        self.models.append([model, spent])

    def state(self, at, other, way):
        """Trains, and comes back to the weights of before."""
        weights, spent = at[0].get_weights(), at[1]
        self.train(at)
        at[0].set_weights(weights)
        at[1] = spent

    def save(self, at, other, way):
        path = str(self.folder / f"{len(self.files)}.{way}")
        if way in ("keras", "h5"):
            at[0].save(path)
        elif way == "weights.h5" or (way == "tf" and self.keras is tf.keras):
            at[0].save_weights(path)
        elif way == "checkpoint":
            tf.train.Checkpoint(v=library.tf_variables(at[0])).write(path)
        elif way == "saved_model":
            tf.saved_model.save(tf.train.Checkpoint(v=library.tf_variables(at[0])), path)
        else:
            return
        dtypes = [str(w.dtype) for w in at[0].get_weights()]
        self.files.append([(way, path, dtypes[0], getattr(at[0], "noise", None)), at[1]])

    def load(self, at, other, way):
        (way, path, dtype, noise), spent = at
        if way in ("keras", "h5"):
            # (Keras 3 cannot train on with an optimizer from an .h5 file.)
            compiled = len(self.models) % 2 == 0 and (way == "keras" or self.keras is tf.keras)
            model = self.keras.models.load_model(path, compile=compiled)
            self.adopt(model, noise, spent)
        else:  # Into a new model, or into one that was trained.
            into = [self.network(dtype), {}] if other is None or len(self.models) % 2 else other
            self.models += [into] if into is not other else []
            variables = library.tf_variables(into[0])
            if way == "checkpoint":
                if variables[0].dtype.name != dtype:
                    return
                tf.train.Checkpoint(v=variables).read(path).assert_consumed()
            elif way == "saved_model":
                into[0].set_weights([v.numpy() for v in tf.saved_model.load(path).v])
            else:
                into[0].load_weights(path)
            into[1] = spent
