"""Cases that are whole trainings: batches that are not fresh draws, and clips that follow norms."""

import numpy as np
import tensorflow as tf

from tests.fuzz import library
from tests.fuzz.harness import MOVEMENT, REFUSALS, Finding, Refused

# ---- Everything above this line is left out of scripts, which hold this text and the harness.

# How batches get to the step; of each, the draws that it uses when it takes `steps` steps.
USES = {
    "fresh": lambda steps: steps,
    "prefetch": lambda steps: steps,
    "iterate": lambda steps: steps,
    "take": lambda steps: min(steps, 2),
    "train_on_batch": lambda steps: 1,
    "cache": lambda steps: 1,
    "take_cache_repeat": lambda steps: 1,
    "list": lambda steps: 1,
    "while_loop": lambda steps: 1,
    "unrolled": lambda steps: 1,
    "map_mixup": lambda steps: 0,
    "map_rows": lambda steps: steps,
    "map_mask": lambda steps: 0,
    "fixed_mask": lambda steps: 0,
    "rebatched": lambda steps: 0,
    "interleaved": lambda steps: 0,
    "changed_rows": lambda steps: 0,
    "mixed_in_step": lambda steps: 0,
}
# Those by `train_on_batch`.
BY_HAND = ("iterate", "train_on_batch", "list", "changed_rows")


def draw_data(random):
    """A training on batches that reach the optimizer in one of the ways of `USES`."""
    return {
        "use": str(random.choice(list(USES))),
        "steps": int(random.integers(2, 7)),
        "rows": int(random.integers(20, 60)),
        "batch": int(random.integers(2, 10)),
        "features": int(random.integers(1, 4)),
        "jit": bool(random.random() < 0.25),
        "padding": str(random.choice(["none", "none", "buckets", "full"])),
        "engine": str(random.choice(["one_pass", "vectorized"])),
        "execution": int(random.choice([1, 1, 2])),
    }


def draw_adaptive(random):
    """A clip that goes to its floor, or ceiling, before a gradient that is out of its scale."""
    return {
        "first": float(10.0 ** random.uniform(-12, 6)),
        "rate": float(random.choice([0.2, 1.0, 5.0])),
        "steps": int(random.integers(20, 300)),
        "before": float(random.choice([0.0, 1e30])),
        "last": float(10.0 ** random.uniform(-24, 12)),
        "features": int(random.choice([1, 50, 3000])),
        "engine": str(random.choice(["one_pass", "vectorized"])),
    }


DRAW = {"data": draw_data, "adaptive": draw_adaptive}


class LoopModel(tf.keras.Sequential):
    """Steps more than once on a batch, or on what it makes of it."""

    use, steps = "", 1

    def train_step(self, data):
        x, y, m = tf.keras.utils.unpack_x_y_sample_weight(data)
        if self.use == "mixed_in_step":
            x = x * tf.cos(3.14159265 * tf.reduce_sum(x))

        def update(index):
            with tf.GradientTape() as tape:
                loss = self.loss(y, self(x, training=True), sample_weight=m)
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            return index + 1

        if self.use == "while_loop":
            tf.while_loop(lambda i: i < self.steps, update, [0])
        else:
            for index in range(self.steps if self.use == "unrolled" else 1):
                update(index)
        return {}


def run_data(recipe):
    random = np.random.default_rng(0)
    rows, batch, steps, use = (recipe[k] for k in ("rows", "batch", "steps", "use"))
    x = random.normal(size=[rows, recipe["features"]]).astype("float32")
    y = random.integers(0, 2, rows)
    per_epoch = steps if use in ("fresh", "prefetch", "iterate", "take", "map_rows") else 1
    b = library.poisson(
        (x, y),
        expected_batch_size=batch,
        steps_per_epoch=per_epoch,
        padding="buckets" if recipe["jit"] else recipe["padding"],
    )
    optimizer = library.sampled(b, recipe["engine"])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = LoopModel([tf.keras.layers.Dense(2, input_shape=x.shape[1:])])
    if use not in ("while_loop", "unrolled", "mixed_in_step"):
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=x.shape[1:])])
    model.use, model.steps = use, steps
    # (Keras's own `train_on_batch` works for one step at a time alone.)
    execution = 1 if use in BY_HAND else recipe["execution"]
    model.compile(optimizer, loss, jit_compile=recipe["jit"], steps_per_execution=execution)
    feed(recipe, model, b, x, y)
    counted, other = library.released(optimizer)
    fresh = USES[use](steps)
    if counted > fresh:
        raise Finding(
            "poisson", f"{counted} steps count as Poisson, {other} do not; fresh draws: {fresh}"
        )
    if use in ("fresh", "prefetch", "iterate") and counted < fresh:
        raise Finding("not counted", f"{counted} of {fresh} steps on fresh draws count")


def feed(recipe, model, b, x, y):
    use, steps, epochs = recipe["use"], recipe["steps"], 1
    size = b.sampling.padded_batch_size
    whole = np.arange(len(x))[np.arange(size) % len(x)]
    if use == "iterate":
        for batch in b:
            model.train_on_batch(*batch)
        return
    if use in ("train_on_batch", "list"):
        batches = list(b)
        for _ in range(steps):
            model.train_on_batch(*batches[0])
        return
    if use == "changed_rows":
        for rows, *rest in b:
            model.train_on_batch(rows * tf.reduce_sum(rows), *rest)
        return
    if use == "cache":
        d, epochs = b.cache(), steps
    else:
        d = {
            "prefetch": lambda: b.prefetch(1),
            "take": lambda: b.take(2),
            "take_cache_repeat": lambda: b.take(1).cache().repeat(steps),
            "map_mixup": lambda: b.map(lambda x, y, m: (0.5 * x + 0.5 * x[::-1], y, m)),
            "map_rows": lambda: b.map(lambda x, y, m: (2 * x, y, m)),
            "map_mask": lambda: b.map(lambda x, y, m: (x, y, tf.ones_like(m))),
            "fixed_mask": lambda: tf.data.Dataset.from_tensors(
                (x[whole], y[whole], np.ones(size, bool))[: len(b.element_spec)]
            ).repeat(steps),
            "rebatched": lambda: b.unbatch().batch(size, drop_remainder=True),
            "interleaved": lambda: tf.data.Dataset.zip((b, b)).map(
                lambda a, c: (a[0] + c[0], *a[1:])
            ),
        }.get(use, lambda: b)()
    model.fit(d, epochs=epochs, verbose=0)


def run_adaptive(recipe):
    size, rows = recipe["features"], 4
    weights = tf.Variable(tf.zeros([size]))
    optimizer = library.adaptive(recipe, recipe["first"], recipe["rate"])

    def step(x, m):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, weights) * tf.cast(m, tf.float32)
        optimizer.minimize(loss, [weights], tape=tape)

    spec = [tf.TensorSpec([None, size]), tf.TensorSpec([None], tf.bool)]
    step = tf.function(step, input_signature=spec, autograph=False)
    x, m = np.full([rows, size], recipe["before"], "float32"), np.ones(rows, bool)
    for _ in range(recipe["steps"]):
        step(x, m)
    clip = optimizer.current_l2_norm_clip
    m[1:] = False  # Without the first example, the sum is zero.
    x[0] = np.float32(recipe["last"])
    weights.assign(tf.zeros([size]))
    step(x, m)
    distance = 2 * np.linalg.norm(weights.numpy().astype("float64"))
    if not distance <= clip * MOVEMENT:
        raise Finding("movement", f"{distance:.6g} with an adaptive clip of {clip:.6g}")


def run_scenario(recipe):
    """Runs a case of `DRAW`; returns its outcome."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    result = {"outcome": "ok", "fallback": False, "reference": False}
    try:
        {"data": run_data, "adaptive": run_adaptive}[recipe["family"]](recipe)
    except Finding as finding:
        result.update(outcome="finding", kind=finding.kind, detail=finding.detail)
    except Refused as refused:
        result.update(outcome=refused.outcome, reason=refused.reason)
    except (*REFUSALS, tf.errors.InvalidArgumentError) as error:
        result.update(outcome="refused", reason=f"{type(error).__name__}: {error}")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if "must not be used on Poisson batches" in text:  # `map`, `cache` and their like.
            result.update(outcome="refused", reason=text)
        else:
            result.update(outcome="finding", kind="exception", detail=text)
    return result
