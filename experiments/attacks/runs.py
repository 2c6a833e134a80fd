"""One run: a target and a shadow model are trained as a row of the tables, and attacked."""

import dataclasses
import functools
import gc
import itertools
from typing import Any

import numpy as np
import sklearn
import tensorflow as tf
from sklearn.ensemble import RandomForestClassifier

from experiments import jobs
from experiments.attacks import attackers, inversion, layers
from experiments.attacks.declarations import BLACK_BOX, INVERSION, LAYERS, WHITE_BOX
from experiments.attacks.splits import split
from experiments.datasets import Data
from experiments.methods import make_training
from experiments.report import RunFolder
from experiments.settings import Settings
from experiments.tables import grid
from tfdp import auditing

LIRA = "lira"

# The seed decides the split and the target; shadow models have others, so that they begin with
# other weights.
_SHADOW_SEED = 1000
_LIRA_SEED = 2000


@dataclasses.dataclass(frozen=True)
class Job(grid.Job):
    """One run.

    Attributes:
      examples: Number of examples to use; None for all.
      lira_models: Number of models for a likelihood-ratio attack; None: the papers' attacks.
      more_attacks: Whether the attacks that the papers' tables do not have are made, too.
    """

    examples: int | None = None
    lira_models: int | None = None
    more_attacks: bool = True

    @property
    def key(self) -> str:
        """Name of its folder."""
        more = {"examples": self.examples, LIRA: self.lira_models}
        return f"attack_{super().key}" + "".join(
            f"_{name}{n}" for name, n in more.items() if n is not None
        )

    @property
    def attacks(self) -> set[str]:
        """The attacks of this run."""
        if self.lira_models is not None:
            return {LIRA}
        if not self.more_attacks:
            return {BLACK_BOX, WHITE_BOX}
        # Inversion descends on inputs: token ids have no gradient.
        images = set() if self.dataset == "imdb_reviews" else {INVERSION}
        return {BLACK_BOX, WHITE_BOX, LAYERS} | images

    def matches(self, line: dict[str, Any]) -> bool:
        """Returns whether a record's line is about this run, and has all of its attacks."""
        same = (line["examples"], line["lira_models"]) == (self.examples, self.lira_models)
        return same and super().matches(line) and self.attacks <= set(line["attacks"])


def run(job: Job, places: jobs.Places) -> dict[str, Any]:
    """Trains and attacks, from wherever an earlier attempt was interrupted.

    Args:
      job: What to do.
      places: Its folders.

    Returns:
      The line for the record: that of the target's training (of a likelihood-ratio attack, that of
      the model with the largest epsilon), `members` (their number), `accuracy_on_members`, and
      `attacks`: for each attack what `attackers.success` returns, of an inversion what
      `inversion.measure` returns. A per-layer attack adds `auc_by_layer`, an inversion
      `inversions`: an image of each class.
    """
    jobs.forget_models()
    target, shadow = _split(job, places)
    attack = _papers_attacks if job.lira_models is None else _likelihood_ratios
    result, found = attack(job, target, shadow, places)
    line = {**jobs.line(job, result), **found}
    line |= {"examples": job.examples, "lira_models": job.lira_models}
    line["versions"] |= {"scikit-learn": sklearn.__version__}
    return line


def _split(job: Job, places: jobs.Places) -> tuple[Data, Data]:
    whole = jobs.load_data(job.settings, places)
    return split(whole, job.settings.seed, job.examples)


def _papers_attacks(
    job: Job, target: Data, shadow: Data, places: jobs.Places
) -> tuple[dict[str, Any], dict[str, Any]]:
    settings, seed = job.settings, job.settings.seed
    folder = places.runs / job.key
    shadow_settings = dataclasses.replace(settings, seed=seed + _SHADOW_SEED)
    model, result = _trained(settings, target, RunFolder(folder / "target"))
    shadow_model, _ = _trained(shadow_settings, shadow, RunFolder(folder / "shadow"))

    def seen(view: attackers.View, observed: Any, data: Data) -> attackers.Observed:
        return attackers.observe(view, observed, data).balanced(seed)

    # Black box: the attacker learns from the shadow model, and guesses who is in the target.
    known = seen(attackers.posteriors, shadow_model, shadow)
    others = seen(attackers.posteriors, model, target)
    # White box: the attacker knows a part of the target's members, and guesses the rest.
    a_half, the_rest = seen(attackers.internals, model, target).halves()
    found: dict[str, Any] = {
        BLACK_BOX: attackers.success(known, others, seed),
        WHITE_BOX: attackers.success(a_half, the_rest, seed),
    }
    more: dict[str, Any] = {}
    if LAYERS in job.attacks:
        found[LAYERS], more["auc_by_layer"] = _by_layer(model, shadow_model, target, shadow, seed)
    if INVERSION in job.attacks:
        found[INVERSION], more["inversions"] = _inverted(job, model, places)
    return result, {
        "members": target.size,
        "accuracy_on_members": _accuracy(model, target),
        "attacks": found,
        **more,
    }


def _by_layer(
    model: Any, shadow_model: Any, target: Data, shadow: Data, seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the success of the attackers that combine layers, and the AUC of each layer."""
    parts = target.train_x, target.train_y, target.eval_x, target.eval_y
    names, evidence = layers.displacements(model, shadow_model, shadow, parts, seed)
    seen = attackers.Observed(*evidence).balanced(seed)
    by_layer = {
        name: auditing.auc(inside, outside)
        for name, inside, outside in zip(names, seen.inside.T, seen.outside.T, strict=True)
    }
    # As white box: half of the examples are known.
    return attackers.success(*seen.halves(), seed), by_layer


def _inverted(job: Job, model: Any, places: jobs.Places) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns what reconstructions show, and one of each class."""
    settings, seed = job.settings, job.settings.seed
    held_out = settings.validation_examples or 0
    target, prior, judge = _without_model(
        settings.dataset, settings.eval_split, held_out, seed, job.examples, places
    )
    shape, classes = target.train_x.shape[1:], model.output_shape[1]
    features = None
    if settings.features == "scattering":
        features = inversion.differentiable_scattering(shape)
    elif settings.features.startswith("patches"):
        features = inversion.differentiable_patches(settings.dataset, settings.features)
    labels = np.repeat(np.arange(classes), inversion.STARTS)
    found = inversion.reconstruct(model, labels, prior, seed, features)
    measured = inversion.measure(found, labels, target, judge, prior)
    return measured, inversion.packed(found[:: inversion.STARTS])


@functools.lru_cache(maxsize=1)
def _without_model(
    dataset: str,
    eval_split: str,
    held_out: int,
    seed: int,
    examples: int | None,
    places: jobs.Places,
) -> tuple[Data, inversion.Prior, RandomForestClassifier]:
    """Returns the target's images, the attacker's prior and the judge: the same for all rows."""
    # The same split as the models', of images where models have their features.
    whole = jobs.data_of(dataset, eval_split, held_out, "none", places)
    target, shadow = split(whole, seed, examples)
    return target, inversion.Prior.of(shadow.train_x, seed), inversion.judge_of(shadow, seed)


def _likelihood_ratios(
    job: Job, target: Data, shadow: Data, places: jobs.Places
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attacks models that are each trained on a half of the target's examples."""
    results, accuracies, sizes = [], [], []
    numbers = itertools.count()

    def train(part: tuple[np.ndarray, np.ndarray]) -> Any:
        number = next(numbers)
        settings = dataclasses.replace(job.settings, seed=job.settings.seed + _LIRA_SEED + number)
        data = Data(*part, shadow.eval_x, shadow.eval_y)
        model, result = _trained(
            settings, data, RunFolder(places.runs / job.key / f"model_{number}")
        )
        results.append(result)
        accuracies.append(_accuracy(model, data))
        sizes.append(data.size)
        return model

    x = np.concatenate([target.train_x, target.eval_x])
    y = np.concatenate([target.train_y, target.eval_y])
    attack = auditing.lira(train, (x, y), models=job.lira_models, seed=job.settings.seed)
    # A guess at the threshold that is best for these very scores.
    found = {
        "accuracy": (1 + attack.advantage) / 2,
        "auc": attack.auc,
        "tpr": attack.tpr_at_fpr(0.001),
    }
    return max(results, key=lambda result: result["epsilon"] or 0.0), {
        "members": round(np.mean(sizes)),
        "accuracy_on_members": float(np.mean(accuracies)),
        "attacks": {LIRA: {LIRA: found}},
    }


def _trained(settings: Settings, data: Data, folder: RunFolder) -> tuple[Any, dict[str, Any]]:
    """Returns a trained network, and what its run found."""
    result = folder.result()
    if result is None:
        training = make_training(settings, data, folder, progress=False, every_epoch=False)
        result = training.run()
        del training  # And its copy of the examples, which is in graphs that hold each other.
        gc.collect()
    model = tf.keras.models.load_model(folder.model, compile=False)
    network = model.base_model if settings.selective else model
    network.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network, result


def _accuracy(model: Any, data: Data) -> float:
    logits = attackers.predicted(model, data.train_x)
    return float((logits.argmax(axis=1) == data.train_y).mean())
