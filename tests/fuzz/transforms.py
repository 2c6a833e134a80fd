"""Random transforms: a row is a function of its example and its secret.

Secrets are attached to the examples, as the proof does. The rows of the others must then be the
same, bit for bit, when an example is added and all seeds change: a sum moves by at most C. And
without that, two runs with the same seeds must not agree.
"""

import numpy as np
import tensorflow as tf

from tests.fuzz import library
from tests.fuzz.around import start
from tests.fuzz.harness import Finding, Refused

N, EXTRA = 40, 99
KINDS = {
    "none": {},
    "buckets": {"padding": "buckets"},
    "full": {"padding": "full"},
    "chunks": {"chunk_size": 9},
    "augmentations": {"augmentations": 2},
    "users": {"examples_per_user": 2},
}
_SEED = "tf.random.uniform([2], 0, 99, tf.int32, seed=4)"
# Numbers of the shape S, or ones that go with it; N of them.
DRAWS = (
    "tf.random.normal(S)",
    "tf.random.normal(S, seed=1)",
    "tf.random.uniform([], seed=2)",
    "tf.random.truncated_normal(S, seed=3)",
    "tf.cast(tf.random.uniform(S, 0, 9, tf.int32), 'float32')",
    "tf.random.uniform(S, dtype='float64')",
    "tf.reshape(tf.random.categorical(tf.zeros([1, 5]), N), S)",
    "tf.random.stateless_normal(S, [1, 2])",
    f"tf.random.stateless_uniform(S, {_SEED})",
    f"tf.random.experimental.stateless_shuffle(v, {_SEED})",
    f"tf.random.stateless_gamma(S, {_SEED}, 2.0)",
    "tf.random.stateless_normal(S, generator.make_seeds(1)[:, 0])",
    "tf.random.stateless_normal(S, tf.random.experimental.stateless_split([1, 2], 2)[1])",
    f"tf.random.stateless_normal(S, tf.random.fold_in({_SEED}, 3))",
    "generator.normal(S)",
    "generator.uniform_full_int([], tf.int32)",
    "generator.binomial(S, 5.0, 0.5)",
    "generator.truncated_normal(S)",
    "tf.random.get_global_generator().normal(S)",
    "tf.nn.dropout(v, 0.5, seed=1)",
    f"tf.nn.experimental.stateless_dropout(v, 0.5, {_SEED})",
    "tf.raw_ops.RandomStandardNormal(shape=S, dtype=tf.float32, seed=3, seed2=4)",
    "tf.raw_ops.RandomUniformInt(shape=S, minval=0, maxval=9, seed=1)",
    "tf.reduce_sum(tf.raw_ops.Multinomial(logits=tf.zeros([1, 3]), num_samples=2, seed=5))",
    "tf.raw_ops.ParameterizedTruncatedNormal("
    "shape=[1], means=[0.0], stdevs=[1.0], minvals=[-1.0], maxvals=[1.0])[0]",
    "tf.image.sample_distorted_bounding_box([9, 9, 1], [[[0.0, 0.0, 1.0, 1.0]]], seed=1)[0][0]",
    "tf.gather(v, tf.random.shuffle(tf.range(tf.shape(v)[0])))",
    "keras.random.normal(S, seed=1)",
    "keras.random.uniform(S, seed=seeds)",
    "layers['noise'](v, training=True)",
    "layers['dropout'](v, training=True)",
    "scale",
)
# Those that are refused, which must not hide what the others do.
REFUSED = (
    "tf.random.gamma(S, 1.0)",
    "tf.random.poisson(S, 2.0)",
    "tf.random.uniform_candidate_sampler([[1]], 1, 1, True, 9)[0][0]",
)
# The same for images.
IMAGES = (
    "tf.image.random_flip_left_right(v, seed=1)",
    "tf.image.random_brightness(v, 0.3)",
    "tf.image.random_contrast(v, 0.2, 0.9, seed=2)",
    "tf.image.random_hue(v, 0.1)",
    "tf.image.random_saturation(v, 0.2, 0.9)",
    "tf.image.random_jpeg_quality(tf.clip_by_value(v, 0.0, 1.0), 50, 95)",
    "tf.image.resize(tf.image.random_crop(v, [3, 4, 3]), S[:2])",
    f"tf.image.stateless_random_flip_up_down(v, {_SEED})",
    f"tf.image.stateless_random_crop(tf.tile(v, [2, 2, 1]), S, {_SEED})",
    *(
        f"layers['{name}'](v[None], training=True)[0]"
        for name in ("flip", "rotation", "zoom", "translation", "crop", "contrast", "brightness")
    ),
)
_COIN = (
    "tf.random.uniform([], seed=7) < 0.5",
    "generator.uniform([]) < 0.5",
    "tf.reduce_sum(v) > 0",
)
# What is done with a draw A and a second one, B. (C is a condition, and `n` makes it a number.)
FORMS = (
    "v = v + n(A)",
    "v = v + n(A) * n(B)",
    "v = tf.cond(C, lambda: v + n(A), lambda: v - n(B))",
    "v = tf.where(C, v + n(A), v)",
    "v = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + n(A)), (0, v))[1]",
    "v = tf.while_loop(lambda v: C, lambda v: [v + n(A)], [v], maximum_iterations=4)[0]",
    "v = tf.function(lambda v: v + n(A), autograph=False)(v)",
    "f = tf.function(lambda v: v + n(A), autograph=False); v = f(f(v)) + f(v)",
    "v = tf.function(lambda v: tf.cond(C, lambda: v + n(A), lambda: v), autograph=False)(v)",
    "v = tf.switch_case(tf.cast(C, tf.int32), [lambda: v + n(A), lambda: n(B) * v])",
    "v = v + tf.map_fn(lambda i: v + n(A), tf.range(2), fn_output_signature='float32')[1]",
    "v = tf.scan(lambda v, i: v + n(A), tf.range(2), v)[1]",
    "v = v + tf.vectorized_map(lambda i: v + n(A) * n(i), tf.range(3))[2]",
    "v = tf.recompute_grad(lambda v: v + n(A))(v)",
    "v = tf.custom_gradient(lambda v: (v + n(A), lambda g: g))(v)",
    "v = tf.grad_pass_through(lambda v: v + n(A))(v)",
    "v = tf.function(lambda v: v + n(A), autograph=False, jit_compile=True)(v)",
    "v = tf.case([(C, lambda: v + n(A))], default=lambda: v + n(B))",
    "v = tf.py_function(lambda v: v + n(A), [v], 'float32')",
    "generator.skip(1); v = v + n(A) + n(generator.state[1])",
    "generator.reset_from_seed(8); v = v + n(A)",
    "counter.assign_add(1); v = v + n(A)",
    "v = v + n(tf.function(lambda: A, autograph=False)())",
    "v = tf.TensorArray('float32', 1).write(0, v + n(A)).read(0)",
)


def draw(random, pick):
    image = random.random() < 0.4
    draws = [*3 * DRAWS, *REFUSED, *image * 6 * IMAGES]
    lines = [
        pick.fill(line, A=draws, B=draws, C=_COIN)
        for line in pick.some([*5 * FORMS[:8], *FORMS], 4)
    ]
    options = {"kind": pick(KINDS), "shape": [6, 5, 3] if image else pick([[4], [2, 3]])}
    return {"lines": lines, "options": options, "place": int(random.integers(N + 1))}


def run(recipe):
    shape, kind = recipe["options"].get("shape", [4]), recipe["options"].get("kind", "none")
    numbers = np.random.default_rng(recipe["place"])
    x, ids = numbers.normal(size=[N + 1, *shape]).astype("float32"), np.arange(N + 1)
    order = np.insert(np.arange(N), recipe["place"], N)  # The last example is added there.
    tables = numbers.integers(0, 2**62, [2, N + 1, 2, 3])
    alone = stock(recipe, x)

    def rows(seed, table=None, added=False):
        chosen = order if added else np.arange(N)
        arguments = dict(KINDS[kind], expected_batch_size=len(chosen))
        if kind == "users":  # Each has two examples, or is the one that is added.
            arguments |= {"privacy_unit": chosen // 2, "expected_batch_size": len(set(chosen // 2))}
        transform = made(recipe, seed)
        data, secrets = (x[chosen], ids[chosen]), None if table is None else tables[table][chosen]
        found = library.rows_of_draw(data, secrets, transform=transform, **arguments)
        return {i: [v.tobytes() for v, j in found if j == i] for i in range(N)}

    first, second, other = rows(1, 0), rows(2, 0, added=True), rows(1, 1)
    moved = [i for i in range(N) if first[i] != second[i] or not first[i]]
    if moved:
        raise Finding("movement", f"{len(moved)} of {N} examples have other rows: {moved[:5]}")
    varies = sum(first[i] != other[i] for i in range(N))
    if alone and not varies:
        raise Finding("fixed numbers", f"{alone} of {N} rows vary without tfdp")
    if varies > N / 2 and rows(1) == rows(1):  # By luck with a probability below 2 ** -20.
        raise Finding("known stream", f"two runs agree; {varies} of {N} rows follow from secrets")


def made(recipe, seed):
    """The transform, with all that draws in it, as a user would make it anew."""
    keras, _ = start({**recipe, "seed": seed})
    layers = keras.layers
    tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
    sizes = recipe["options"].get("shape", [4])
    scope = {
        "tf": tf,
        "keras": keras,
        "S": sizes,
        "N": int(np.prod(sizes)),
        "n": lambda value: tf.cast(value, "float32"),
        "generator": tf.random.Generator.from_seed(seed),
        "counter": tf.Variable(0),
        "scale": tf.Variable(2.0),
        "layers": {"noise": layers.GaussianNoise(0.5, seed=1), "dropout": layers.Dropout(0.5)},
    }
    if recipe.get("keras") == 3:
        scope["seeds"] = keras.random.SeedGenerator(seed)
    if len(sizes) == 3:
        scope["layers"] |= {
            "flip": layers.RandomFlip(seed=1),
            "rotation": layers.RandomRotation(0.2),
            "zoom": layers.RandomZoom(0.3),
            "translation": layers.RandomTranslation(0.2, 0.2),
            "crop": layers.RandomCrop(6, 5),
            "contrast": layers.RandomContrast(0.3),
            "brightness": layers.RandomBrightness(0.3, value_range=(0.0, 1.0)),
        }

    def transform(x, y):
        own = {**scope, "v": x}
        for line in recipe["lines"]:
            exec(line, own)
        return tf.ensure_shape(own["v"], sizes), y

    return transform


def stock(recipe, x):
    """Returns how many rows vary without the library; 0 if it is few."""
    transform = made(recipe, 1)
    try:
        function = tf.function(lambda v: transform(v, 0)[0], autograph=False)
        again = [np.array([function(v).numpy() for v in x[:N]]) for _ in range(2)]
    except Exception as error:
        raise Refused("invalid", f"{type(error).__name__}: {error}") from error
    varies = sum(a.tobytes() != b.tobytes() for a, b in zip(*again, strict=True))
    return varies if varies > N / 2 else 0
