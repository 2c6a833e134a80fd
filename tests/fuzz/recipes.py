"""Random recipes, and the scripts that they stand for."""

import json
import pathlib

import numpy as np

from tests.fuzz import around, blocks, flow_blocks, layer_blocks, raw_blocks, scenarios
from tests.fuzz.blocks import CannotUse, Code, N

__all__ = ["draw", "flow_blocks", "layer_blocks", "raw_blocks", "script"]

FAMILIES = (
    "net",
    "extreme",
    "broadcast",
    "ids",
    "streams",
    "mixing",
    "outside",
    "state",
    "data",
    "adaptive",
    *around.FAMILIES,
)
WEIGHTS = (6, 3, 1, 2, 1.5, 1.5, 1.5, 2, 1, 0.5, 1, 1, 0.5, 0.5)
# Those whose cases train models of Keras 2.
OF_KERAS_2 = ("data", "adaptive")
RULES = ("flat", "flat", "flat", "per_layer", "automatic", "importance_sampling")
# What a batch may mix with before the step begins, and values that it passes on.
STEPS = {
    "plain": "inner(x, y, m)",
    "nested": "tf.function(inner, autograph=False)(x, y, m)",
    "nested_rows": "tf.function(inner, autograph=False)(F * x, y, m)",
    "nested_scalar": "tf.function(inner, autograph=False)(x, y, m, f)",
    "nested_twice": "tf.function(lambda a: tf.function(inner, autograph=False)(a, y, m), "
    "autograph=False)(F * x)",
    "nested_mixed": "tf.function(inner, autograph=False)(.5 * x + .5 * x[::-1], y, m)",
    "cond_rows": "z = F * x; tf.cond(p, lambda: (inner(z, y, m), 0)[1], lambda: 0)",
    "cond_scalar": "tf.cond(p, lambda: (inner(x, y, m, f), 0)[1], lambda: 0)",
    "cond_two": "tf.cond(f > 0, lambda: (inner(x, y, m), 0)[1], lambda: (inner(-x, y, m), 0)[1])",
    "cond_two_signs": "tf.cond(f > 0, lambda: (inner(x, y, m, 1.), 0)[1], "
    "lambda: (inner(x, y, m, -1.), 0)[1])",
    "switch": "tf.switch_case(tf.cast(f > 0, 'int32'), [lambda: (inner(x, y, m, 1.), 0)[1], "
    "lambda: (inner(x, y, m, -1.), 0)[1]])",
    "while_captured": "z = F * x; tf.while_loop(lambda i: i < 1, "
    "lambda i: (inner(z, y, m), i + 1)[1:], [0])",
    "while_looped": "tf.while_loop(lambda i, z: i < 1, "
    "lambda i, z: (inner(z, y, m), i + 1, z)[1:], [0, F * x], shape_invariants=["
    "tf.TensorShape([]), x.shape])",
    "while_scalar": "tf.while_loop(lambda i: i < 1, lambda i: (inner(x, y, m, f), i + 1)[1:], [0])",
    "map": "tf.map_fn(lambda i: (inner(F * x, y, m), i)[1], tf.range(1))",
    "factor": "inner(x, y, m, f)",
    "rows": "inner(F * x, y, m)",
    "scalar_variable": "s.assign(f); inner(x, y, m, s)",
    "scalar_variable_nested": "tf.function(lambda: s.assign(f), autograph=False)(); "
    "inner(x, y, m, s)",
    "rows_variable": "s.assign(f); inner(x * tf.cast(s, x.dtype), y, m)",
}
TWO_ROWS = ("while_captured", "while_looped")
# Layers whose gradients are products: their norms may be products of norms.
PRODUCTS = ("dense", "matmul", "dense", "conv1d", "conv2d", "einsum", "recurrent", "matmul_left")
CLIPS = {"extreme": [1e-3, 1e-6, 1e-9, 1.0], "other": [1.0, 1.0, 0.01, 1e-6, 100]}
LOSSES = (
    "tf.reduce_sum({h} * tf.reshape(y, {y}), AXES)",
    "tf.reduce_sum(tf.square({h} - tf.reshape(y, {y})), AXES)",
    "tf.reduce_sum({h}, AXES) * y[:, 0]",
    "tf.reduce_mean(tf.abs({h} - tf.reshape(y, {y})), AXES)",
    "tf.reduce_logsumexp({h}, AXES) * y[:, 0]",
    "tf.reduce_max({h}, AXES) - y[:, 0]",
    "tf.reduce_prod({h}, AXES) * y[:, 0]",
    "tf.nn.sigmoid_cross_entropy_with_logits(tf.reshape(tf.sigmoid(y), {y}) + 0 * {h}, {h})",
)


def draw(random, families=FAMILIES):
    """A random recipe of one of `families`, plain data."""
    weights = np.array([WEIGHTS[FAMILIES.index(f)] for f in families])
    family = str(random.choice(families, p=weights / weights.sum()))
    if family in scenarios.DRAW:
        return {"family": family, **scenarios.DRAW[family](random)}
    if family in around.FAMILIES:
        return around.draw(family, random)
    while True:
        recipe = _draw(random, family)
        try:
            _code(recipe)
        except CannotUse:
            continue
        return recipe


def _draw(random, family):
    pick = lambda values: values[int(random.integers(len(values)))]  # noqa: E731
    dtype = pick(["float32"] * 8 + ["float64", "float64", "bfloat16", "float16"])
    if family in ("outside", "broadcast", "extreme"):
        dtype = pick(["float32", "float32", "float64"])
    shape = pick([[4], [3], [64], [4, 3], [5, 2], [4, 4, 2], [6, 4], [2, 1, 3]])
    ids = 0
    if family == "ids" or (family == "net" and random.random() < 0.1):
        shape, ids = pick([[2], [3], [2, 2]]), int(random.integers(2, 6))
    if family == "extreme":
        shape = pick([[64], [500], [500], [20, 10], [8, 8, 4], [4, 3]])
    if family == "broadcast":
        shape = pick([[4, 3], [5, 2], [2, 4, 3], [1, 4, 3], [4, 4, 2], [1, 4, 4]])
    size = int(random.integers(1, {"net": 7, "extreme": 2}.get(family, 3)))
    chosen = ["embedding", "lookup", "tied_lookup"] if ids else []
    own = {"mixing": "mixing", "state": "state", "streams": "streams", "broadcast": "broadcast"}
    recipe = {
        "family": family,
        "seed": int(random.integers(10**6)),
        "dtype": dtype,
        "shape": shape,
        "ids": ids,
        "id_type": pick(["int32", "int32", "int64", "int16", "uint8"]),
        "rows": int(random.integers(4, 9)),
        "engine": pick(["one_pass", "one_pass", "vectorized"]),
        "jit": bool(random.random() < (0.6 if family == "ids" else 0.04)),
        "rule": pick(RULES),
        "clip": pick(
            [1e-3, 1e-6, 1e-9, 1.0] if family == "extreme" else [1.0, 1.0, 0.01, 1e-6, 100]
        ),
        "step": pick([s for s in STEPS if s != "plain"]) if family == "outside" else "plain",
        "loss": int(random.integers(3 if family == "extreme" else len(LOSSES))),
        "masking": int(random.integers(3)),
        "blocks": [],
        "trials": [],
    }
    if dtype == "float16":  # The learning rate, 1 / clip, must be a number of this type.
        recipe["clip"] = max(recipe["clip"], 1e-3)
    if family == "net" and random.random() < 0.1:
        recipe["step"] = "nested"
    recipe["blocks"] = [_block(random, pick(chosen))] if ids else []
    code = _start(recipe)
    for b in recipe["blocks"]:
        code.apply(b)
    for i in range(30):
        if len(recipe["blocks"]) >= size:
            break
        usual = [b for b in blocks.names("net") if b not in ("embedding", "lookup")]
        op = pick(blocks.names(own[family])) if family in own and i % 2 == 0 else pick(usual)
        if family == "extreme" and not recipe["blocks"]:
            op = pick(PRODUCTS)
        elif family == "extreme" and random.random() < 0.3:
            op = "extreme_constant"
        candidate = _block(random, op)
        try:
            _replay(recipe, [*recipe["blocks"], candidate])
        except CannotUse:
            continue
        recipe["blocks"].append(candidate)
    # Draws from a generator of their own, so that the other choices stay what they were.
    other = np.random.default_rng([recipe["seed"], 1])
    recipe["each"] = 1 if family == "streams" else int(other.choice([1, 1, 1, 2, 3]))
    recipe["rows"] *= recipe["each"]
    count = {"extreme": 6, "state": 1, "streams": 1, "outside": 1}.get(family, 3)
    recipe["trials"] = [_trial(random, family, ids) for _ in range(count)]
    return recipe


def _block(random, op):
    return {"op": op, "k": [int(i) for i in random.integers(0, 1000, 3)]}


def _replay(recipe, chosen):
    code = _start(recipe)
    for b in chosen:
        code.apply(b)
    return code


def _trial(random, family, ids):
    normal = ["normal", 0]
    kinds, rest, moderate = [normal, normal], ["normal", 0], True
    if family == "extreme":
        # One factor's square is below the least number, and the product is not small.
        tiny, huge = float(random.uniform(-24, -17)), float(random.uniform(12, 19.2))
        kinds = [["constant", tiny], ["constant", huge]]
        moderate = False
        if random.random() < 0.4:
            values = ["normal", "scaled", "mixed", "inf", "nan", "zero"]
            kinds = [[str(random.choice(values)), float(random.uniform(-45, 38))] for _ in "xy"]
        kinds = kinds[:: int(random.choice([1, -1]))]
    elif family in ("mixing", "outside") or (family == "net" and random.random() < 0.3):
        kinds, moderate = [["scaled", 2.0], ["scaled", 2.0]], False
    elif family == "ids" and random.random() < 0.7:
        kinds = [normal, ["scaled", 4.0]]
        moderate = False
    if random.random() < 0.5:
        rest = [str(random.choice(["same", "zero", "nan", "inf", "scaled", "mixed"])), 20.0]
    if family in ("state", "streams"):
        rest = ["zero", 0.0]
    low, high = 0, max(1, ids)
    values = [low, high - 1]
    if family == "ids" and random.random() < 0.8:
        values, moderate = [high, high + 1, 2 * high, -1, 100][: int(random.integers(1, 6))], False
    return {
        "seed": int(random.integers(10**6)),
        "victim": int(random.integers(9)),
        "kinds": kinds,
        "rest": rest,
        "ids": values,
        "padding": bool(random.random() < 0.3 and family not in ("streams",)),
        "before": bool(family == "state" and random.random() < 0.3),
        "dropped": bool(random.random() < 0.4),
        "moderate": moderate,
    }


def _start(recipe):
    shape = [N, *recipe["shape"]]
    return Code(shape, recipe["dtype"], recipe["ids"])


def _code(recipe):
    """The model of a recipe.

    Raises:
      CannotUse: Blocks do not fit together.
    """
    code = _replay(recipe, recipe["blocks"])
    code.need(code.ids == 0)
    if not code.trainable:
        if code.shape[-1] == N:
            order = [code.rank - 1, *range(code.rank - 1)]
            code.put(f"tf.transpose({{h}}, {order})", [N, *code.shape[:-1]])
        w = code.weight([code.shape[-1]])
        code.put(f"{{h}} * {w}")
    if code.row_axis:
        order = [code.row_axis, *[i for i in range(code.rank) if i != code.row_axis]]
        code.put(f"tf.transpose({{h}}, {order})", [code.shape[i] for i in order])
    if code.rank == 1:
        code.put("{h}[:, None]", [N, 1])
    return code


def _loss_lines(recipe, code):
    axes = str(list(range(1, code.rank)))
    line = LOSSES[recipe["loss"] % len(LOSSES)]
    if "sigmoid_cross" in line:
        line = f"tf.reduce_sum({line}, AXES)"
    target = f"[-1{', 1' * (code.rank - 1)}]"
    line = line.replace("AXES", axes).format(h=code.h, y=target)
    mask = [
        "loss * tf.cast(m, loss.dtype)",
        "tf.reduce_sum(loss * tf.cast(m, loss.dtype))",
        "tf.cast(m, loss.dtype) * loss * 2",
    ][recipe["masking"] % 3]
    return [f"loss = {line}", f"return {mask}"]


def case_of(recipe, code):
    """What the harness needs to know."""
    recurs = "unstable" in code.traits or code.traits & {"random", "state"}
    dtype = recipe["dtype"]
    x_type = recipe["id_type"] if recipe["ids"] else dtype
    keys = ("engine", "rule", "clip", "rows", "seed", "trials", "ids")
    return {
        **{k: recipe[k] for k in keys},
        "keras": recipe.get("keras", 2),
        # XLA takes the numbers of tf.random.uniform from entropy: two runs cannot be compared.
        "jit": recipe["jit"] and "random" not in code.traits,
        "each": recipe.get("each", 1),
        "spec": [[recipe["shape"], x_type], [[1], dtype], [[], "bool"]],
        "fresh": bool(code.traits & {"random", "state"})
        or recipe["rule"] == "importance_sampling"
        or recipe["family"] == "outside",
        "reference": not recurs
        and recipe["family"] != "outside"
        and recipe["rule"] != "importance_sampling"
        and dtype in ("float32", "float64"),
        "tolerance": 5e-3,
        "dataset_order": recipe["family"] == "streams",
        # Without padding, others then stand in other rows. (Known random numbers follow the row.)
        "drops": not code.traits & {"random"}
        and recipe["family"] != "streams"
        and recipe["rule"] != "importance_sampling",
    }


def model(recipe):
    """The part of a script that is the case."""
    code = _code(recipe)
    call = STEPS[recipe["step"]]
    stat = ["tf.cos(3.14159265 * tf.reduce_sum(tf.cast(m, 'float32')))",
            "tf.sign(tf.reduce_mean(tf.cast(x, 'float32')))"][recipe["seed"] % 2]  # fmt: skip
    if "f > 0" in call:
        stat = "tf.cos(3.14159265 * tf.reduce_sum(tf.cast(m, 'float32')))"
    lines = [
        f"CASE = json.loads(r'''{json.dumps(case_of(recipe, code))}''')",
        "",
        "",
        "def build():",
        *[f"    {line}" for line in code.init],
        "",
        "    def loss(x, y, m):",
        "        h0 = x",
        *[f"        {line}" for line in [*code.lines, *_loss_lines(recipe, code)]],
        "",
        f"    variables = lambda: unique({' + '.join(code.variables)})",
        f"    saved = lambda: {' + '.join(code.saved) or '[]'}",
        "    return loss, variables, saved",
        "",
        "",
        "s = tf.Variable(0.0, trainable=False)",
        "",
        "",
        "def step(inner, x, y, m):",
        f"    f = {stat}",
        "    F = tf.cast(f, x.dtype)",
        "    p = tf.random.uniform([]) > -1.0",
        *[f"    {part.strip()}" for part in call.split(";")],
        "",
        "",
        "def run():",
        "    return check(CASE, build, step)",
    ]
    text = "\n".join(lines)
    return text if recipe.get("keras", 2) == 2 else text.replace("tf.keras.", "keras.")


def script(recipe):
    """A script that runs the case alone, with tfdp installed: the tests' folder is not needed."""
    if recipe["family"] in around.FAMILIES:
        return around.script(recipe)
    folder = pathlib.Path(__file__).parent
    harness = (folder / "harness.py").read_text()
    library = (folder / "library.py").read_text().split("import tfdp\n", 1)[1]
    body = harness.split("# ---- Everything above", 1)[1].split("\n", 1)[1].replace("library.", "")
    scenario = recipe["family"] in scenarios.DRAW
    if scenario:
        text = (folder / "scenarios.py").read_text()
        body += (
            text.split("# ---- Everything above", 1)[1].split("\n", 1)[1].replace("library.", "")
        )
    head = [
        f'"""Found by tests.fuzz. Recipe: {json.dumps(recipe)}"""',
        "import os",
        "",
        'os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")',
        "import inspect",
        "import itertools",
        "import json",
        "import logging",
        "import re",
        "import warnings",
        "",
        *(["import keras"] if recipe.get("keras") == 3 else []),
        "import numpy as np",
        "import tensorflow as tf",
        "",
        "import tfdp",
    ]
    rest = f"def run():\n    return run_scenario({recipe!r})" if scenario else model(recipe)
    end = 'if __name__ == "__main__":\n    print(json.dumps(run(), indent=1, default=str))\n'
    return "\n".join(head) + f"\n{library}\n\n{body}\n\n{rest}\n\n\n{end}"
