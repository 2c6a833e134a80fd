"""The only place where the fuzzer touches the API of tfdp: whoever changes it, changes this."""

import re

import numpy as np
import tensorflow as tf

import tfdp
from tfdp.data.source import PoissonSource
from tfdp.step.record import lineage, record_ledger


def front_ends(case):
    """The Keras of a case, and the part of tfdp for it."""
    if case.get("keras", 2) == 2:
        return tf.keras, tfdp
    import keras

    return keras, tfdp.keras3


def tf_variable(variable):
    """The variable of TensorFlow that one of Keras 3 holds."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def minimize(optimizer, loss, variables, tape):
    """Takes a private step."""
    of_keras_2 = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    optimizer.minimize(loss, variables, **({"tape": tape} if of_keras_2 else {}))


def noise_free(case, **more):
    """The optimizer whose step adds `-(clipped sum) / C` to the weights."""
    clip = case["clip"]
    optimizer = front_ends(case)[1].DPSGD(
        clip,
        0.0,
        1,
        learning_rate=1 / clip,
        engine=case["engine"],
        clipping_rule=case["rule"],
        noise_seed=1,
        **more,
    )
    optimizer.clipping.rows_per_example = case.get("each", 1)
    return optimizer


def adaptive(case, first_clip, learning_rate):
    """A noise-free optimizer whose clip follows the norms."""
    rule = tfdp.clipping.AdaptiveQuantileClipping(target_quantile=0.5, learning_rate=learning_rate)
    return tfdp.DPSGD(
        first_clip, 0.0, 2, learning_rate=1.0, engine=case["engine"], clipping_rule=rule
    )


def updating(case, name, change, arguments, options):
    """An optimizer whose update is made with `arguments`; `change` is applied to its gradients."""
    base = getattr(front_ends(case)[1], f"DP{name}")
    changed = {} if change is None else {"_transform_private_gradient": lambda _, g: change(g)}
    return type("Changed", (base,), changed)(
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=1,
        noise_seed=1,
        gradient_accumulation_steps=options.get("parts", 1),
        **arguments,
    )


def variables_of(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def clipping_rule(optimizer):
    return optimizer.clipping.clipping_rule


def fallback(optimizer):
    """Why the one-pass engine left a model to the vectorized one, or None."""
    if not isinstance(optimizer.clipping, tfdp.clipping.OnePassEngine):
        return None
    return optimizer.clipping.report(None).fallback


def poisson(data, **arguments):
    return tfdp.data.poisson_batches(data, **arguments)


def rows_of_draw(data, secrets, **arguments):
    """Rows (x, y) of a draw of all examples; their secrets are those given for each, or unknown."""
    draw_rows = PoissonSource.draw_rows

    def coupled(source, key, sampling, sets=None):
        rows = draw_rows(source, key, sampling, sets)
        if rows.secrets is None:
            return rows
        own = tf.gather(tf.constant(secrets), tf.minimum(rows.indices, len(secrets) - 1))
        place = tf.range(tf.size(rows.indices, tf.int64)) % source.augmentations
        return rows._replace(secrets=own + place[:, None, None])

    try:
        if secrets is not None:
            PoissonSource.draw_rows = coupled
        drawn = list(poisson(data, steps_per_epoch=1, **arguments).as_numpy_iterator())
    finally:
        PoissonSource.draw_rows = draw_rows
    whole = [(*b, np.ones(len(b[1]))) for b in drawn]  # Without padding, batches have no mask.
    return [(x, y) for x, y, m, *_ in (row for b in whole for row in zip(*b, strict=True)) if m]


def sampled(batches, engine="one_pass"):
    """A private optimizer that was told how its batches are sampled."""
    return tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling, learning_rate=0.1, engine=engine)


def counted(part, name, noise, batches):
    """A private optimizer; its noise multiplier tells its steps from those of others."""
    return getattr(part, name)(1.0, noise, sampling=batches.sampling, learning_rate=0.1)


def steps_by_noise(model):
    """Steps that the ledger of a model states, by noise multiplier."""
    ledger, found = record_ledger.ledger_of_model(model), {}
    for release in [] if ledger is None else ledger.releases:
        noise = float(re.search(r"noise_multiplier=([\d.]+)", repr(release.event))[1])
        found[noise] = found.get(noise, 0) + release.count
    return found


def tf_variables(model):
    return [tf_variable(v) for v in model.weights]


def forget():
    """Forgets what only this process knows of weights, as another one does."""
    lineage._lineages.clear()
    lineage.known.clear()


def released(optimizer):
    """Steps that count as Poisson samples, and others."""
    return optimizer.released_steps()


def places_tell_the_order():
    """Whether an added example moves those after it: rows stand in the order of the data set.

    Draws batches of all of 20 examples. Where places are secret and random, each draw has them in
    order with probability below 1 / 20!.
    """
    examples = np.arange(1, 21, dtype="float32")[:, None]
    arguments = {"expected_batch_size": 20, "steps_per_epoch": 3, "seed": 5, "padding": "full"}
    drawn = [x.numpy()[m.numpy()][:, 0] for x, _, m in poisson((examples, examples), **arguments)]
    return all(np.all(np.diff(values) > 0) for values in drawn)


def float_types():
    return {name: tf.as_dtype(name) for name in ("float16", "bfloat16", "float32", "float64")}
