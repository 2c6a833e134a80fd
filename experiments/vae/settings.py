"""VaeSettings of a run of a variational autoencoder, and the defaults of each task."""

import dataclasses
import hashlib
import json
import math
from typing import Any

from experiments.settings import RefusedError

OPTIMIZERS = ("dpsgd", "dpadam", "dpsignsgd", "dpsignadam")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
      title: Name in figures.
      aggregation: Aggregation of `tfdp.TermWiseVAE`.
      divergence: Whether the loss has the term that does not split over examples.
    """

    title: str
    aggregation: str
    divergence: bool

    @property
    def private(self) -> bool:
        """Whether it has a privacy guarantee."""
        return self.aggregation != "none"


METHODS = {
    "term_wise": Method("term-wise", "term_wise", True),
    "no_divergence": Method("without the term", "term_wise", False),
    "micro": Method("micro aggregation", "micro", True),
    "batch": Method("batch aggregation", "batch", True),
    "non_private": Method("not private", "none", True),
    "non_private_no_divergence": Method("not private, without the term", "none", False),
}


@dataclasses.dataclass(frozen=True)
class VaeSettings:
    """All that decides what a run is; None where a method has no such thing.

    Attributes:
      task: Data set and network.
      method: One of `METHODS`.
      target_epsilon: Budget of this run; infinite where the method is not private.
      delta: The delta of the guarantee.
      seed: Seed of initial weights and of the batches of methods that are not private; neither
        noise nor the batches of the others depend on it.
      steps: Updates.
      expected_batch_size: Expected batch size of an update.
      num_samples: L, codes that are drawn for an example.
      num_groups: m, groups of a batch that the divergence is clipped in.
      alpha: Weight of the divergence.
      beta: Weight of KL(q(z|x) || p(z)).
      normal_scale: Standard deviation of a normal likelihood; None for the likelihood of the task.
      l2_norm_clip: C1, of an example's gradient, or of whatever the aggregation clips.
      batch_clip: C2, of the gradient of a group's divergence.
      learning_rate: Learning rate of the optimizer.
      optimizer: One of `OPTIMIZERS`; `adam` where the method is not private.
      eval_split: Split that is evaluated on.
      evaluation_examples: Number of these.
      importance_samples: K, of the estimate of the log-likelihood.
    """

    task: str
    method: str
    target_epsilon: float
    delta: float | None
    seed: int
    steps: int
    expected_batch_size: int
    num_samples: int
    num_groups: int | None
    alpha: float
    beta: float
    normal_scale: float | None
    l2_norm_clip: float | None
    batch_clip: float | None
    learning_rate: float
    optimizer: str
    eval_split: str
    evaluation_examples: int
    importance_samples: int

    @property
    def private(self) -> bool:
        """Whether the run has a privacy guarantee."""
        return METHODS[self.method].private

    @property
    def name(self) -> str:
        """A file name of its own."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        mark = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        epsilon = f"_eps{self.target_epsilon:g}" if self.private else ""
        return f"{self.task}_{self.method}{epsilon}_seed{self.seed}_{mark}"

    def key(self) -> dict[str, str]:
        """Returns the settings as `runs.csv` has them."""
        values = dataclasses.asdict(self).items()
        return {name: "" if value is None else str(value) for name, value in values}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of a task; for the method with the divergence where there are two.

    Attributes:
      methods: Methods that are compared.
      epochs: Epochs of training, in batches of `expected_batch_size`.
      beta_without: `beta` of the methods without the divergence.
      learning_rate: Learning rate of term-wise aggregation, with and without the divergence.
      learning_rate_whole: Learning rate of micro and batch aggregation, whose noise is larger.
      learning_rate_non_private: Learning rate of Adam without privacy.
      measure: Main measure of the task: the first panel of its figure.
    """

    methods: tuple[str, ...]
    target_epsilon: tuple[float, ...]
    epochs: int
    expected_batch_size: int
    num_samples: int
    num_groups: int
    alpha: float
    beta: float
    beta_without: float
    l2_norm_clip: float
    batch_clip: float
    learning_rate: float
    learning_rate_whole: float
    learning_rate_non_private: float
    evaluation_examples: int
    importance_samples: int
    measure: str
    delta: float = 1e-5
    seeds: int = 1
    optimizer: str = "dpsgd"


# Chosen with `--eval_split=validation`, a few runs each. The paper has a `beta` of 0 for pinwheel
# with the divergence; clusters are purer with 1. Sparsity is trained for one epoch with L = 1,
# where the paper has ten and 16 (section 5.1): what fits on two CPU cores.
DEFAULTS = {
    "digits": Defaults(
        methods=("term_wise", "no_divergence", "non_private"),
        target_epsilon=(3.0,),
        epochs=60,
        expected_batch_size=256,
        num_samples=4,
        num_groups=16,
        alpha=10.0,
        beta=1.0,
        beta_without=1.0,
        l2_norm_clip=1.0,
        batch_clip=0.01,
        learning_rate=0.01,
        learning_rate_whole=0.01,
        learning_rate_non_private=0.003,
        evaluation_examples=359,
        importance_samples=200,
        measure="accuracy",
        optimizer="dpadam",
    ),
    "mnist": Defaults(
        methods=("term_wise", "no_divergence", "non_private"),
        target_epsilon=(4.0,),
        epochs=10,
        expected_batch_size=1024,
        num_samples=1,
        num_groups=16,
        alpha=10.0,
        beta=5.0,
        beta_without=5.0,
        l2_norm_clip=1.0,
        batch_clip=0.01,
        learning_rate=0.005,
        learning_rate_whole=0.005,
        learning_rate_non_private=0.001,
        evaluation_examples=1000,
        importance_samples=50,
        measure="accuracy",
        optimizer="dpadam",
    ),
    "sparsity": Defaults(
        methods=tuple(METHODS),
        target_epsilon=(1.0,),
        epochs=1,
        expected_batch_size=256,
        num_samples=1,
        num_groups=64,
        alpha=100.0,
        beta=1.0,
        beta_without=1.0,
        l2_norm_clip=1.0,
        batch_clip=0.05,
        learning_rate=0.003,
        learning_rate_whole=0.00001,
        learning_rate_non_private=0.001,
        evaluation_examples=500,
        importance_samples=200,
        measure="sparsity",
        optimizer="dpadam",
    ),
    "pinwheel": Defaults(
        methods=tuple(METHODS),
        target_epsilon=(1.0,),
        epochs=100,
        expected_batch_size=100,
        num_samples=4,
        num_groups=32,
        alpha=100.0,
        beta=1.0,
        beta_without=1.0,
        l2_norm_clip=0.1,
        batch_clip=0.001,
        learning_rate=0.01,
        learning_rate_whole=0.003,
        learning_rate_non_private=0.01,
        evaluation_examples=400,
        importance_samples=1000,
        measure="purity",
        delta=1e-4,
        optimizer="dpadam",
    ),
}

# Flags whose value is a setting, or decides one.
_NUMBERS = (
    *("alpha", "beta", "normal_scale", "l2_norm_clip", "batch_clip", "learning_rate", "delta"),
)
_MAY_BE_ZERO = ("alpha", "beta")


def resolve(
    given: dict[str, Any], method: str, target_epsilon: float, seed: int, dataset_size: int
) -> VaeSettings:
    """Fills in what was not given, and takes away what the method does not have.

    What a method does not have is no part of a run's settings, so that, for instance, another
    `--batch_clip` does not make the runs without a divergence again.

    Args:
      given: Flags by name; None, or absent, where the default of the task holds.
      method: One of `METHODS`.
      target_epsilon: Budget, for a method that has one.
      seed: Seed of the run.
      dataset_size: Number of training examples.

    Raises:
      RefusedError: Values that do not go together, or out of their range.
    """
    task = given["task"]
    defaults, how = DEFAULTS[task], METHODS[method]
    values = {**dataclasses.asdict(defaults), "eval_split": "test", "normal_scale": None}
    values |= {name: value for name, value in given.items() if value is not None}
    _check(values, dataset_size)
    if not how.divergence and given.get("beta") is None:
        values["beta"] = defaults.beta_without
    if given.get("learning_rate") is None:
        values["learning_rate"] = _learning_rate(defaults, how)
    values["steps"] = _steps(given, defaults.epochs, values["expected_batch_size"], dataset_size)
    term_wise = how.aggregation == "term_wise" and how.divergence
    values |= {
        "method": method,
        "seed": seed,
        "target_epsilon": target_epsilon if how.private else math.inf,
        "delta": values["delta"] if how.private else None,
        "l2_norm_clip": values["l2_norm_clip"] if how.private else None,
        "optimizer": values["optimizer"] if how.private else "adam",
        "alpha": values["alpha"] if how.divergence else 0.0,
        "num_groups": values["num_groups"] if term_wise else None,
        "batch_clip": values["batch_clip"] if term_wise else None,
    }
    return VaeSettings(**{name: values[name] for name in VaeSettings.__dataclass_fields__})


def _learning_rate(defaults: Defaults, how: Method) -> float:
    if not how.private:
        return defaults.learning_rate_non_private
    whole = how.aggregation in ("micro", "batch")
    return defaults.learning_rate_whole if whole else defaults.learning_rate


def _steps(given: dict[str, Any], epochs: int, batch: int, dataset_size: int) -> int:
    if given.get("steps") is not None:
        if given.get("epochs") is not None:
            raise RefusedError(
                "--steps and --epochs exclude each other. Received: "
                f"--steps={given['steps']}, --epochs={given['epochs']}."
            )
        return given["steps"]
    if given.get("epochs") is not None:
        epochs = given["epochs"]
    return max(1, round(epochs * dataset_size / batch))


def _check(values: dict[str, Any], dataset_size: int) -> None:
    for name in _NUMBERS:
        low = "at least 0" if name in _MAY_BE_ZERO else "positive"
        value = values[name]
        if name == "normal_scale" and value is None:
            continue
        if not (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO)):
            raise RefusedError(f"--{name} must be {low} and finite. Received: --{name}={value}.")
    if values["delta"] >= 1 / dataset_size:
        raise RefusedError(
            f"--delta must be below 1/N = {1 / dataset_size:.2g}: publishing one example in the "
            f"clear would satisfy it otherwise. Received: --delta={values['delta']:g}."
        )
    if values["expected_batch_size"] > dataset_size:
        raise RefusedError(
            f"--expected_batch_size must be at most {dataset_size}, the number of training "
            f"examples. Received: --expected_batch_size={values['expected_batch_size']}."
        )
