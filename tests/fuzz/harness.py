"""Runs one case: the private step without noise on neighboring batches, and what must hold."""

import itertools
import logging
import re
import warnings

import numpy as np
import tensorflow as tf

from tests.fuzz import library

# ---- Everything above this line is left out of scripts, which hold this text and library.py.

MOVEMENT = 1 + 1e-5
REFUSALS = (ValueError, RuntimeError)
tf.get_logger().setLevel("ERROR")
logging.getLogger("tfdp").setLevel("ERROR")
warnings.simplefilter("ignore")


class Finding(Exception):
    """Something that must not happen: `kind` and what was seen."""

    def __init__(self, kind, detail):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Refused(Exception):
    """The library refused the case, or the case makes no sense without the library either."""

    def __init__(self, outcome, reason):
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


class Program:
    """A model, its weights, and the traced private step."""

    def __init__(self, case, build, step):
        keras, _ = library.front_ends(case)
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        self.case, self.used = case, False
        self.loss, variables, self.saved = build()
        self.spec = [tf.TensorSpec([None, *shape], dtype) for shape, dtype in case["spec"]]
        plain = tf.function(self.plain, autograph=False, jit_compile=case["jit"])
        self.variables = None
        self.get_variables = variables
        try:
            self.gradients = plain.get_concrete_function(*self.spec)
            self.variables = self.get_variables()
            self.gradients = plain.get_concrete_function(*self.spec)
        except Exception as error:
            raise Refused("invalid", f"{type(error).__name__}: {error}") from error
        if not self.variables:
            raise Refused("invalid", "no weights")
        random = np.random.default_rng(case["seed"])
        scale = case.get("weight_scale", 0.5)
        values = [random.normal(size=v.shape) * scale for v in self.variables]
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self.initial = [v.numpy() for v in self.variables]
        self.optimizer = library.noise_free(case)
        self.step = self.traced(step)
        # Only what the library accepts: TensorFlow's products that it refuses break the heap.
        try:
            self.run(self.gradients, self.batch(np.zeros))
        except tf.errors.OpError as error:
            raise Refused("invalid", f"{type(error).__name__}: {error}") from error

    def batch(self, make):
        rows = rows_of(self.case)
        return [make([rows, *shape]).astype(tf.as_dtype(t).as_numpy_dtype)
                for shape, t in self.case["spec"]]  # fmt: skip

    def plain(self, x, y, m):
        """The gradients without privacy: what fails here is no business of the library."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y, m)
        if self.variables is None:
            return loss
        return tape.gradient(loss, self.variables)

    def inner(self, x, y, m, factor=None):
        """A private step on what it is given; steps call it in the ways that users do."""
        with tf.GradientTape() as tape:
            loss = self.loss(x, y, m)
            if factor is not None:
                loss = loss * tf.cast(factor, loss.dtype)
        library.minimize(self.optimizer, loss, self.variables, tape)

    def traced(self, step):
        try:
            function = tf.function(
                lambda x, y, m: step(self.inner, x, y, m),
                autograph=False,
                jit_compile=self.case["jit"],
            )
            return function.get_concrete_function(*self.spec)
        except REFUSALS as error:
            text = str(error).strip()
            if len(text) < 20:
                raise Finding("message", f"{type(error).__name__}: {text!r}") from error
            raise Refused("refused", text) from error
        except Exception as error:
            raise Finding("exception", f"{type(error).__name__}: {error}") from error

    def run(self, function, batch):
        return function(*[tf.constant(a, s.dtype) for a, s in zip(batch, self.spec, strict=True)])

    def clipped_sum(self, *batches):
        """How far the last of some steps from the same weights goes, in units of C."""
        self.used = True
        for batch in batches:
            self.reset()
            try:
                self.run(self.step, batch)
            except tf.errors.OpError as error:
                self.explain(error, batch)
        return self.flat(self.initial) - self.flat([v.numpy() for v in self.variables])

    def reset(self):
        for variable, value in zip(self.variables, self.initial, strict=True):
            variable.assign(value)

    def explain(self, error, batch):
        """Operations that fail without the library too are for the user to avoid."""
        text = f"{type(error).__name__}: {str(error)[:300]}"
        if self.case["jit"] and re.search("XLA|compil|jit", str(error)):
            raise Refused("refused", "XLA: " + text) from error
        try:
            self.reset()
            self.run(self.gradients, batch)
        except tf.errors.OpError:
            raise Refused("refused", "an operation fails: " + text) from error
        raise Finding("exception", text) from error

    def flat(self, values):
        return np.concatenate([np.ravel(np.asarray(v, "float64")) for v in values])

    def reference(self, batch):
        """The sum by a loop over examples, in units of C."""
        case, rule = self.case, library.clipping_rule(self.optimizer)
        spec = [tf.TensorSpec([1, *s.shape[1:]], s.dtype) for s in self.spec]
        alone = tf.function(self.plain, autograph=False).get_concrete_function(*spec)
        blocks = rule.blocks([v.name for v in self.variables])
        total = [np.zeros(v.shape) for v in self.variables]
        self.reset()
        each = case.get("each", 1)
        for start in range(0, len(batch[2]), each):
            found = [np.zeros(v.shape) for v in self.variables]
            for i in start + np.flatnonzero(batch[2][start : start + each]):
                row = [tf.constant(a[i : i + 1], s.dtype) for a, s in zip(batch, spec, strict=True)]
                for j, (g, v) in enumerate(zip(alone(*row), self.variables, strict=True)):
                    if g is not None:
                        g = np.asarray(tf.convert_to_tensor(g), "float64")
                        found[j] = found[j] + g.reshape(v.shape) / each
            has = [g for g, f in zip(blocks, alone.structured_outputs, strict=True)
                   if f is not None]  # fmt: skip
            count = max(blocks) + 1 if len(set(has)) == len(set(blocks)) else None
            if count is None:
                raise Refused("no reference", "a layer without gradients")
            norms = np.zeros(count)
            for gradient, block in zip(found, blocks, strict=True):
                norms[block] = np.hypot(norms[block], np.linalg.norm(gradient))
            if not np.all(np.isfinite(norms)):
                continue
            factors = rule.factors(tf.constant(norms[None], tf.float64), case["clip"])[0].numpy()
            for j, block in enumerate(blocks):
                total[j] = total[j] + factors[block] * found[j] / case["clip"]
        return self.flat(total)


def special(kind, shape, random):
    """Values of an example of the kind asked for, `shape`."""
    name, exponent = kind
    if name == "normal":
        return random.normal(size=shape)
    if name == "constant":
        return np.full(shape, 10.0**exponent)
    if name == "scaled":
        return random.normal(size=shape) * 10.0**exponent
    if name == "mixed":
        powers = 10.0 ** random.uniform(-45, 38, size=shape)
        return np.where(random.random(shape) < 0.3, 0, powers * random.choice([-1, 1], size=shape))
    return np.full(shape, {"inf": np.inf, "nan": np.nan, "zero": 0.0, "same": 0.0}[name])


def rows_of(case):
    """The rows of a batch: of whole examples."""
    each = case.get("each", 1)
    return max(1, case["rows"] // each) * each


def batches_of(case, trial):
    """A batch and its neighbor: one example is left out, or masked off with arbitrary values."""
    random = np.random.default_rng(trial["seed"])
    rows, each = rows_of(case), case.get("each", 1)
    victim = trial["victim"] % rows
    own = slice(victim // each * each, (victim // each + 1) * each)  # The rows of its example.
    data, other = [], []
    for (shape, dtype), kind in zip(case["spec"][:2], trial["kinds"], strict=True):
        dtype = tf.as_dtype(dtype)
        if dtype.is_integer:
            values = random.integers(0, case["ids"], [rows, *shape])
            values[victim] = random.choice(trial["ids"], size=shape)
            rest = random.integers(0, case["ids"], shape)
        else:
            values = random.normal(size=[rows, *shape])
            with np.errstate(all="ignore"):
                values[victim] = special(kind, shape, random)
                rest = special(trial["rest"], shape, random)
        with np.errstate(all="ignore"):
            data.append(values.astype(dtype.as_numpy_dtype))
            changed = data[-1].copy()
            if trial["rest"][0] != "same":
                changed[victim] = np.asarray(rest).astype(dtype.as_numpy_dtype)
        other.append(changed)
    mask = random.random(rows) < 0.8 if trial.get("padding") else np.ones(rows, bool)
    mask[victim] = True
    without = mask.copy()
    without[own] = False
    first, second = [*data, mask], [*other, without]
    if trial.get("dropped") and case.get("drops"):
        second = [np.delete(a, own, axis=0) for a in first]
    if case.get("dataset_order"):
        # Random layers with a known stream: an example is taken out of the data set.
        second = [np.zeros_like(a) for a in first]
        if library.places_tell_the_order():
            for b, a in zip(second, first, strict=True):
                left = a[without]
                b[: len(left)] = left
        else:
            for b, a in zip(second, first, strict=True):
                b[without] = a[without]
    return first, second


def check(case, build, step):
    """Checks one case; returns its outcome, with `kind` and `detail` of a finding."""
    result = {"outcome": "ok", "fallback": False, "reference": False}
    try:
        program = Program(case, build, step)
        result["fallback"] = bool(library.fallback(program.optimizer))
        for trial in case["trials"]:
            program = check_trial(program, case, trial, build, step, result)
    except Refused as refused:
        result.update(outcome=refused.outcome, reason=refused.reason)
    except Finding as finding:
        result.update(outcome="finding", kind=finding.kind, detail=finding.detail)
    return result


def check_trial(program, case, trial, build, step, result):
    first, second = batches_of(case, trial)
    later = [batches_of(case, {**trial, "seed": trial["seed"] + 1})[0]] if trial["before"] else []
    if case["fresh"] and program.used:  # Streams and state begin anew.
        program = Program(case, build, step)
    a = program.clipped_sum(first, *later)
    kept = [np.array(v) for v in program.saved()]
    if case["fresh"]:
        program = Program(case, build, step)
    b = program.clipped_sum(second, *later)
    where = f"trial {trial}, clip {case['clip']}"
    for values in (a, b):
        if not np.all(np.isfinite(values)):
            raise Finding("non-finite", where)
    for before, after in itertools.zip_longest(kept, program.saved()):
        if not np.array_equal(before, np.array(after), equal_nan=True):
            raise Finding("saved state", f"{before} against {np.array(after)}, {where}")
    least = min(v.dtype.size for v in program.variables)
    epsilon = {2: 2.0**-8, 4: 2.0**-23, 8: 2.0**-23}[least]
    sizes = [np.linalg.norm(v) for v in (a, b, program.flat(program.initial))]
    moved, allowed = np.linalg.norm(a - b), MOVEMENT + epsilon * (sizes[0] + sizes[1] + sizes[2])
    if not moved <= allowed:
        raise Finding("movement", f"{moved:.6g} C, allowed {allowed:.6g} C, {where}")
    if case["reference"] and trial["moderate"] and not later:
        check_reference(program, case, first, a, where, result)
    return program


def check_reference(program, case, batch, found, where, result):
    try:
        expected = program.reference(batch)
    except Exception:
        return  # The loss of an example alone is not defined, or refused.
    result["reference"] = True
    count = np.sum(batch[2].reshape(-1, case.get("each", 1)).any(axis=1))
    distance = np.linalg.norm(found - expected)
    if not distance <= case["tolerance"] * count:
        raise Finding(
            "reference",
            f"{distance:.3g} C from the loop over {count} examples, whose sum has the norm "
            f"{np.linalg.norm(expected):.3g} C, {where}",
        )


def unique(variables):
    """Each variable once, in the order given."""
    variables = map(library.tf_variable, variables)
    return list({v.ref(): v for v in variables}.values())
