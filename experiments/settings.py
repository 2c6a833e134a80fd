"""Settings of a classification run, and the defaults of each data set."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from experiments import datasets, networks
from experiments.front_ends import FrontEnd, front_end
from experiments.schedules import SCHEDULES_OF_KERAS

NON_PRIVATE_METHODS = ("sgd", "adam")
SELECTIVE_METHODS = ("dpsur_sgd", "dpsur_adam", "dpsur_signsgd", "dpsur_signadam")
_PLAIN_STEPS = ("dpsgd", "dpadam", "dpadambc", "dpsignsgd", "dpsignadam", "dpis", "dpis_adam")
# Methods that take the learning rate of another.
RATE_OF = {"dpadambc": "dpadam", "dpis": "dpsgd", "dpis_adam": "dpadam"}
METHODS = (
    *_PLAIN_STEPS,
    "dpagd",
    *SELECTIVE_METHODS,
    *NON_PRIVATE_METHODS,
)
KERAS_3_METHODS = (*_PLAIN_STEPS, *SELECTIVE_METHODS, *NON_PRIVATE_METHODS)
OBSERVABILITY = ("conditional", "per_attempt")


class RefusedError(ValueError):
    """The run cannot be done as asked; the message says why, in a sentence for the user."""


def positive_numbers(name: str, given: Sequence[str], *, may_be_empty: bool = False) -> list[float]:
    """Returns the numbers that a list flag was given.

    Args:
      name: Name of the flag.
      given: Its values.
      may_be_empty: Whether the flag may list nothing.

    Raises:
      RefusedError: There is none, or one that is not a positive, finite number.
    """
    try:
        numbers = [float(one) for one in given]
    except ValueError:
        numbers = [math.nan]
    if not (numbers or may_be_empty) or not all(0 < number < math.inf for number in numbers):
        raise RefusedError(
            f"--{name} must be positive numbers. Received: --{name}={','.join(given)}."
        )
    return numbers


SELECTIVE_FLAGS = (
    "validation_batch_size",
    "validation_noise_multiplier",
    "validation_clip",
    "threshold",
    "max_attempts",
    "selective_release",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags of `experiments.classify` that say what is trained, every default filled in."""

    dataset: str
    method: str
    features: str
    head: str | None
    activation: str
    tempered_scale: float
    tempered_temperature: float
    tempered_offset: float
    target_epsilon: float
    delta: float
    epochs: int
    expected_batch_size: int
    learning_rate: float
    learning_rate_schedule: str
    momentum: float
    l2_norm_clip: float
    num_microbatches: int | None
    chunk_size: int | None
    seed: int | None
    insecure_fixed_noise: bool
    eval_split: str
    validation_examples: int | None
    validation_batch_size: int | None = None
    validation_noise_multiplier: float | None = None
    validation_clip: float | None = None
    threshold: float | None = None
    max_attempts: int | None = None
    selective_release: str | None = None
    keras: int | None = None  # Keras 2.
    augmentations: int | None = None
    weight_decay: float | None = None  # None, not 0.0, where there is none.
    architecture: str | None = None  # The published one.
    mixed_bfloat16: bool | None = None  # None, not False, where layers compute in float32.

    @property
    def front_end(self) -> FrontEnd:
        """The version of Keras, and tfdp's part for it.

        Raises:
          RefusedError: Keras 2 is missing.
        """
        version = self.keras or 2
        try:
            return front_end(version)
        except ImportError as error:
            raise RefusedError(
                f"--keras must be 3 where Keras 2 is missing. Received: --keras={version}. {error}"
            ) from error

    @property
    def private(self) -> bool:
        """Whether the method has a privacy guarantee."""
        return self.method not in NON_PRIVATE_METHODS

    @property
    def selective(self) -> bool:
        """Whether updates are tested, and kept or rolled back."""
        return self.method in SELECTIVE_METHODS

    def steps_per_epoch(self, dataset_size: int) -> int:
        """Logical steps in an epoch over `dataset_size` examples."""
        return max(1, round(dataset_size / self.expected_batch_size))

    def check_size(self, dataset_size: int) -> None:
        """Refuses what does not fit a training set of `dataset_size` examples.

        Raises:
          RefusedError: The batch is larger than the training set, or delta says nothing.
        """
        if self.expected_batch_size > dataset_size:
            raise RefusedError(
                f"--expected_batch_size must be at most {dataset_size}, the number of training "
                f"examples. Received: --expected_batch_size={self.expected_batch_size}."
            )
        if self.selective and self.validation_batch_size > dataset_size:
            raise RefusedError(
                f"--validation_batch_size must be at most {dataset_size}, the number of training "
                f"examples. Received: --validation_batch_size={self.validation_batch_size}."
            )
        if self.private and self.delta >= 1 / dataset_size:
            raise RefusedError(
                f"--delta must be below 1/N = {1 / dataset_size:.2g}: publishing one example in "
                f"the clear would satisfy it otherwise. Received: --delta={self.delta:g}."
            )


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of a data set.

    Attributes:
      learning_rate: Learning rate by method.
      momentum: Momentum of the SGD methods; Adam's `beta_1` is 0.9 by default.
      validation_examples: Held out with `--eval_split=validation`.
    """

    target_epsilon: float
    epochs: int
    expected_batch_size: int
    l2_norm_clip: float
    momentum: float
    validation_examples: int
    learning_rate: dict[str, float]
    learning_rate_schedule: str = "constant"
    activation: str = "tanh"
    delta: float = 1e-5
    chunk_size: int | None = None
    validation_batch_size: int = 64
    validation_noise_multiplier: float = 0.5
    validation_clip: float = 0.001
    threshold: float = 1.0
    selective_release: str = "conditional"


# Chosen with `--eval_split=validation`, never on the test set: the rates of the private methods on
# digits (a few each, with 2 or 3 runs per rate), and at epsilon 1, one run each, of dpsgd (0.5, 1,
# 2, 4) and, with a cooldown, dpsignsgd (0.001, 0.002, 0.004) on mnist, and dpadam and dpsignadam
# (0.015, 0.03) on imdb_reviews. The others are values to start from.
DEFAULTS = {
    "digits": Defaults(
        target_epsilon=3.0,
        epochs=30,
        expected_batch_size=256,
        l2_norm_clip=1.0,
        momentum=0.9,
        validation_examples=287,
        learning_rate={
            "dpsgd": 0.15,
            "dpadam": 0.02,
            "dpsignsgd": 0.005,
            "dpsignadam": 0.02,
            "dpagd": 2.0,
            "sgd": 0.1,
            "adam": 0.005,
        },
    ),
    "mnist": Defaults(
        target_epsilon=1.0,
        epochs=20,
        expected_batch_size=2048,
        l2_norm_clip=0.1,
        momentum=0.9,
        validation_examples=10_000,
        learning_rate={
            "dpsgd": 4.0,
            "dpadam": 0.002,
            "dpsignsgd": 0.001,
            "dpsignadam": 0.001,
            "dpagd": 0.5,
            "sgd": 0.1,
            "adam": 0.002,
        },
    ),
    "imdb_reviews": Defaults(
        target_epsilon=2.0,
        epochs=10,
        expected_batch_size=1024,
        l2_norm_clip=0.1,
        momentum=0.9,
        learning_rate_schedule="cooldown",
        validation_examples=5_000,
        chunk_size=256,
        learning_rate={
            "dpsgd": 2.0,
            "dpadam": 0.03,
            "dpsignsgd": 0.002,
            "dpsignadam": 0.015,
            "dpagd": 0.5,
            "sgd": 0.5,
            "adam": 0.002,
        },
    ),
}
DEFAULTS["fashion_mnist"] = dataclasses.replace(DEFAULTS["mnist"])
# Values to start from.
DEFAULTS["cifar10"] = dataclasses.replace(DEFAULTS["mnist"], chunk_size=256)


def resolve(given: dict[str, Any]) -> Settings:
    """Fills in what was not given.

    Args:
      given: Values by name of a field of `Settings`; None, or absent, where the default holds.

    Returns:
      The settings, complete.

    Raises:
      RefusedError: Values that do not go together.
    """
    given = {name: value for name, value in given.items() if value is not None}
    dataset = given.setdefault("dataset", datasets.DATASETS[0])
    method = given.setdefault("method", METHODS[0])
    defaults = dataclasses.asdict(DEFAULTS[dataset])
    # A selective method starts from the rate of the method that it selects from.
    below = RATE_OF.get(method, method.replace("dpsur_", "dp"))
    _check_descent(method, given, defaults)
    defaults["learning_rate"] = defaults["learning_rate"][below]
    _check_selective(method, given, defaults)
    if "adam" in method:
        defaults["momentum"] = 0.9
    if given.get("num_microbatches") is not None:
        if given.get("chunk_size") is not None:
            raise RefusedError(
                "--num_microbatches and --chunk_size exclude each other: an example's "
                "microbatch must not depend on the chunk it is delivered in. Received: "
                f"--num_microbatches={given['num_microbatches']}, "
                f"--chunk_size={given['chunk_size']}."
            )
        defaults["chunk_size"] = None
    if given.get("insecure_fixed_noise") and given.get("seed") is None:
        raise RefusedError("--insecure_fixed_noise must come with --seed, which fixes the noise.")
    if given.setdefault("eval_split", "test") == "test":
        given["validation_examples"] = defaults["validation_examples"] = None
    _check_features(dataset, given)
    _check_augmentations(dataset, method, given)
    _check_weight_decay(method, given)
    _check_keras(method, given, defaults)
    _check_architecture(dataset, given)
    given["mixed_bfloat16"] = given.get("mixed_bfloat16") or None
    rest = dict(
        tempered_scale=2.0,
        tempered_temperature=2.0,
        tempered_offset=1.0,
        num_microbatches=None,
        max_attempts=None,
        seed=None,
        insecure_fixed_noise=False,
    )
    return Settings(**(rest | defaults | given))


def _check_selective(method: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    names = [name for name in SELECTIVE_FLAGS if given.get(name) is not None]
    if method in SELECTIVE_METHODS:
        if given.get("chunk_size") is not None:
            raise RefusedError(
                "--chunk_size must be left out with a selective method: an attempt is one batch. "
                f"Received: --method={method}, --chunk_size={given['chunk_size']}."
            )
        defaults["chunk_size"] = None
        return
    if names:
        raise RefusedError(
            f"--{names[0]} must come with one of --method={', '.join(SELECTIVE_METHODS)}. "
            f"Received: --method={method}, --{names[0]}={given[names[0]]}."
        )
    defaults.update(dict.fromkeys(SELECTIVE_FLAGS))


def _check_descent(method: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """DPAGD chooses the length of each step, in whole batches."""
    if method != "dpagd":
        return
    defaults.update(chunk_size=None, learning_rate_schedule="constant")
    for name in ("num_microbatches", "chunk_size"):
        if given.get(name) is not None:
            raise RefusedError(
                f"--{name} must be left out with --method=dpagd. Received: --{name}={given[name]}."
            )


def _check_keras(method: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuses what is there for Keras 2 alone; a setting of None is Keras 2."""
    if given.get("keras") != 3:
        given["keras"] = None
        return
    both = {**defaults, **given}
    for name, value, known in (
        ("method", method, KERAS_3_METHODS),
        ("activation", both["activation"], networks.ACTIVATIONS_OF_KERAS),
        ("learning_rate_schedule", both["learning_rate_schedule"], SCHEDULES_OF_KERAS),
    ):
        if value not in known:
            raise RefusedError(
                f"--{name} must be one of {', '.join(known)} with --keras=3. Received: "
                f"--{name}={value}."
            )


def _check_features(dataset: str, given: dict[str, Any]) -> None:
    if given.setdefault("features", "none") == "none":
        if "head" in given:
            raise RefusedError(
                "--head must come with --features=scattering: without features, a data set has a "
                f"network of its own. Received: --head={given['head']}."
            )
        given["head"] = None
        return
    if dataset not in datasets.IMAGES:
        raise RefusedError(
            f"--features={given['features']} must come with images: --dataset="
            f"{'|'.join(datasets.IMAGES)}. Received: --dataset={dataset}."
        )
    given.setdefault("head", networks.HEADS[0])


def _check_augmentations(dataset: str, method: str, given: dict[str, Any]) -> None:
    if "augmentations" not in given:
        return
    for name, value, accepted in (
        ("dataset", dataset, tuple(datasets.IMAGES)),
        ("features", given["features"], ("none",)),
        ("method", method, _PLAIN_STEPS),
        ("num_microbatches", given.get("num_microbatches"), (None,)),
    ):
        if value not in accepted:
            must = "be left out" if accepted == (None,) else f"be one of {', '.join(accepted)}"
            raise RefusedError(
                f"--{name} must {must} with --augmentations, which shifts images. Received: "
                f"--{name}={value}."
            )


def _check_weight_decay(method: str, given: dict[str, Any]) -> None:
    known = (*_PLAIN_STEPS, *SELECTIVE_METHODS)
    if "weight_decay" in given and method not in known:
        raise RefusedError(
            f"--method must be one of {', '.join(known)} with --weight_decay. Received: "
            f"--method={method}, --weight_decay={given['weight_decay']:g}."
        )


def _check_architecture(dataset: str, given: dict[str, Any]) -> None:
    if given.get("architecture", networks.PUBLISHED) == networks.PUBLISHED:
        given["architecture"] = None
        return
    for name, value, known in (
        ("dataset", dataset, tuple(datasets.IMAGES)),
        ("features", given["features"], ("none",)),
        ("keras", given["keras"] or 2, (2,)),
    ):
        if value not in known:
            raise RefusedError(
                f"--{name} must be one of {', '.join(map(str, known))} with --architecture="
                f"{given['architecture']}. Received: --{name}={value}."
            )


def make_network(settings: Settings):
    """Returns the untrained network that `settings` ask for."""
    mixed_precision = settings.front_end.keras.mixed_precision
    before = mixed_precision.global_policy()
    if settings.mixed_bfloat16:
        mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        network = _network(settings)
    finally:
        mixed_precision.set_global_policy(before)
    if settings.selective:
        return settings.front_end.private.SelectiveModel(network)
    return network


def _network(settings: Settings):
    """Returns the network, with layers of the global policy."""
    keras = settings.front_end.keras
    activation = networks.make_activation(
        settings.activation,
        settings.tempered_scale,
        settings.tempered_temperature,
        settings.tempered_offset,
        keras,
    )
    if settings.architecture == networks.RESIDUAL:
        return networks.residual(datasets.IMAGES[settings.dataset], activation)
    if settings.head is None:
        return networks.NETWORKS[settings.dataset](activation, keras=keras)
    shape = datasets.features_shape(settings.dataset, settings.features)
    return networks.head_on_features(shape, settings.head, activation, keras)
