"""Random updates: schedules, callable rates, constraints and inner optimizers that read something.

They are refused if and only if a private source can reach what is written. Accepted ones train
alike on data that differ in an example whose gradient is zero.
"""

import numpy as np
import tensorflow as tf

from tests.fuzz import library
from tests.fuzz.around import start
from tests.fuzz.harness import REFUSALS, Finding, Refused

PUBLIC = (
    "n(step.optimizer.iterations)",
    "0.5",
    "n(step.kept)",
    "tf.reduce_sum(tf.square(step.kernel()))",
    "n(tf.shape(step.kernel())[0])",
    "tf.random.uniform([], seed=1)",
    "tf.random.stateless_uniform([], [1, 2])",
    "step.generator.uniform([])",
)
PRIVATE = (
    "tf.reduce_mean(step.loss)",
    "step.metric.result()",
    "n(step.metric.count)",
    "n(tf.shape(step.x)[0])",
    "tf.reduce_max(step.x)",
    "n(tf.size(step.loss))",
    "n(tf.where(step.c > 0)[0, 0])",
    "step.loss[0]",
)
# What is done with a source A and a second one, B; none drops what `v` was.
FORMS = (
    "v = v + A",
    "v = v * A + B",
    "v = tf.cond(A > 1.0, lambda: v, lambda: v + 0.5)",
    "v = tf.cond(v > 1.0, lambda: A, lambda: v * B)",
    "v = tf.where(v > A, v, B)",
    "v = tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * 0.5 + A), (0, v))[1]",
    "v = tf.while_loop(lambda v: v < A, lambda v: [v + 1.0], [v], maximum_iterations=4)[0]",
    "v = tf.function(lambda: v + A, autograph=False)()",
    "v = tf.function(lambda v: v + A * B, autograph=False)(v)",
    "v = tf.switch_case(tf.cast(v > 1.0, tf.int32), [lambda: v + A, lambda: v - B])",
    "v = tf.gather([v, v + 1.0], tf.cast(A > 1.0, tf.int32))",
    "v = tf.map_fn(lambda e: e * A, tf.stack([v, v]))[0]",
    "v = tf.scan(lambda v, e: v + e, tf.stack([A, B]), v)[1]",
    "v = v + n(tf.size(tf.zeros([tf.cast(tf.abs(A), tf.int32) % 7])))",
    "v = v + n(tf.size(tf.random.uniform([tf.cast(tf.abs(A), tf.int32) % 7])))",
    "v = v + tf.reduce_sum(tf.ones_like(tf.range(tf.abs(A) % 7.0)))",
    "v = v + n(tf.rank(tf.reshape(1.0, tf.ones([tf.cast(tf.abs(A), tf.int32) % 3], tf.int32))))",
    "v = tf.stop_gradient(v + A)",
    "v = tf.recompute_grad(lambda v: v * A)(v)",
    "v = v + tf.strings.to_number(tf.strings.as_string(A))",
    "step.scratch.assign(v + A); v = v + n(step.scratch)",
    "step.scratch.assign_add(A); v = v + 1.0",
    "v = tf.cond(A > 1.0, lambda: step.scratch.assign(v), lambda: v) + 0.0",
    "v = tf.TensorArray('float32', 1).write(0, v + A).read(0)",
    "v = v + tf.vectorized_map(lambda e: e * A, tf.ones([2]))[1]",
    "v = v + tf.reduce_sum(tf.ragged.constant([[1.0], []]).with_values(tf.reshape(A, [1])))",
    "v = v + tf.sparse.reduce_sum(tf.sparse.from_dense([A, 0.0]))",
)
WAYS = ("schedule", "callable", "constraint", "transformed", "decay", "assigned", "average")
OPTIMIZERS = ("SGD", "Adam", "SignSGD")


def draw(random, pick):
    lines = [pick.fill(form, A=PUBLIC, B=PUBLIC) for form in pick.some(FORMS, 3)]
    if random.random() < 0.6:
        private = pick.fill(pick(FORMS), A=PRIVATE, B=[*PUBLIC, *PRIVATE])
        lines.insert(int(random.integers(len(lines) + 1)), private)
    options = {"way": pick(WAYS), "optimizer": pick(OPTIMIZERS), "parts": pick([1, 1, 2])}
    # XLA takes the numbers of tf.random.uniform from entropy: two runs cannot be compared.
    jit = random.random() < 0.3 and not any("random.uniform" in line for line in lines)
    return {"lines": lines, "options": {**options, "jit": bool(jit)}}


class Step:
    """A private step, in whose update the value that the lines of a recipe make is read."""

    def __init__(self, recipe):
        keras, _ = start(recipe)
        self.options, self.lines = recipe["options"], recipe["lines"]
        way = self.options.get("way", "schedule")
        self.metric, self.generator = keras.metrics.Mean(), tf.random.Generator.from_seed(1)
        self.kept, self.scratch = (tf.Variable(v, trainable=False) for v in (0.3, 0.0))
        self.x = self.c = self.loss = None
        read = (lambda: 1.0 * self.kept) if way == "assigned" else self.value

        def shrunk(value):
            return value / (1.0 + tf.abs(read()))

        class Rate(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return shrunk(0.1)

        class Shrink(keras.constraints.Constraint):
            def __call__(self, w):
                return shrunk(w)

        constraint = Shrink() if way == "constraint" else None
        self.layer = keras.layers.Dense(4, use_bias=False, kernel_constraint=constraint)
        self.layer.build([None, 4])
        rate = {"schedule": Rate(), "decay": Rate(), "average": Rate(), "assigned": Rate()}
        arguments = {"learning_rate": rate.get(way, 0.1)}
        if way == "callable":
            arguments["learning_rate"] = lambda: shrunk(0.1)
        if way == "decay":
            arguments["weight_decay"] = 0.1
        if way == "average" and recipe.get("keras") == 3:
            arguments["use_ema"] = True
        name = self.options.get("optimizer", "SGD")
        change = shrunk if way == "transformed" else None
        self.optimizer = library.updating(recipe, name, change, arguments, self.options)

    def value(self):
        scope = {"tf": tf, "n": number, "step": self, "v": tf.constant(0.5)}
        for line in self.lines:
            exec(line, scope)
        return scope["v"]

    def kernel(self):
        return tf.convert_to_tensor(self.layer.kernel)

    def forward(self, x, c):
        """The loss of an example has no gradient where `c` is 0, whatever `x` is."""
        self.x, self.c = x, c
        outputs = self.layer(c[:, None] * tf.ones([1, 4]))
        self.loss = tf.reduce_sum(outputs, axis=1) + tf.reduce_sum(x, axis=1)
        self.metric.update_state(self.loss)
        return self.loss

    def __call__(self, x, c):
        with tf.GradientTape() as tape:
            loss = self.forward(x, c)
            if self.options.get("way") == "assigned":
                self.kept.assign(self.value())
        library.minimize(self.optimizer, loss, self.layer.trainable_variables, tape)

    def trained(self, x, c):
        """Returns what a few steps write."""
        step = compiled(self, self.options)
        for _ in range(4):
            step(x, c)
        of_optimizer = [np.asarray(v) for v in library.variables_of(self.optimizer)]
        slots = [v for v in of_optimizer if v.shape == (4, 4)]
        return [self.kernel().numpy(), self.kept.numpy(), self.scratch.numpy(), *slots]


def number(value):
    return tf.cast(tf.convert_to_tensor(value), tf.float32)


def compiled(function, options):
    signature = [tf.TensorSpec([None, 4]), tf.TensorSpec([None])]
    jit = options.get("jit", False)
    return tf.function(function, input_signature=signature, autograph=False, jit_compile=jit)


def run(recipe):
    private = [p for p in PRIVATE for line in recipe["lines"] if p in line]
    data = [np.ones([4, 4], "float32"), np.ones([4], "float32")]
    other = [np.pad(data[0], [[0, 1], [0, 0]], constant_values=1e4), np.pad(data[1], [0, 1])]
    alone = Step(recipe)
    try:
        compiled(lambda x, c: [alone.forward(x, c), alone.value()], alone.options)(*data)
    except Exception as error:
        raise Refused("invalid", f"{type(error).__name__}: {error}") from error
    try:
        first, second = Step(recipe).trained(*data), Step(recipe).trained(*other)
    except REFUSALS as error:
        if not private:
            raise Finding("refused", f"only public sources; {error}") from error
        raise Refused("refused", str(error)) from error
    moved = not same(first, second)
    if private:
        raise Finding("not refused", f"reads {private}; what is written differs: {moved}")
    if moved and not same(first, Step(recipe).trained(*data)):
        raise Refused("invalid", "two trainings on the same data differ: random numbers in loops")
    if moved:
        raise Finding("movement", f"{first} and {second}")


def same(first, second):
    """Returns whether all that two trainings have written is the same, but for rounding."""
    return all(
        np.allclose(*ab, rtol=1e-4, equal_nan=True) for ab in zip(first, second, strict=True)
    )
