"""Private training of a Keras model in one call: batches, noise for a budget, and `compile`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._validation import positive_integer
from tfdp.accounting import calibrate_noise_multiplier
from tfdp.accounting.ledger import Ledgers, as_ledgers, check_unit, compose_ledgers
from tfdp.accounting.sampling import BUCKETS, FULL, NONE
from tfdp.callbacks import PrivacyBudget
from tfdp.data import poisson_batches
from tfdp.data.batches import PoissonBatches
from tfdp.data.columns import Features
from tfdp.models.model_check import check_is_model, validate
from tfdp.optimizers import DPSGD, DPAdam, DPSignAdam, DPSignSGD, record_ledger
from tfdp.optimizers.base import PrivateOptimizerMixin
from tfdp.optimizers.selective import SelectiveUpdateMixin

_BY_NAME: dict[str, type[PrivateOptimizerMixin]] = {
    "adam": DPAdam,
    "sgd": DPSGD,
    "signadam": DPSignAdam,
    "signsgd": DPSignSGD,
}
# Where none is given; docs/choosing.md says how they were measured.
_LEARNING_RATES = {DPAdam: 0.005, DPSGD: 0.5, DPSignAdam: 0.002}
# Of a Keras optimizer; those of one kind have the same names in all of Keras 2.
_TAKEN_OVER = {
    "Adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "SGD": ("momentum", "nesterov"),
}
# What other arguments may be, for nothing to get lost.
_WITHOUT_EFFECT = {
    "clipnorm": None,
    "clipvalue": None,
    "decay": 0.0,
    "global_clipnorm": None,
    "use_ema": False,
    "weight_decay": None,
}


class PrivateTraining(NamedTuple):
    """A model that is ready for private training.

    Attributes:
      model: The compiled model.
      batches: Poisson batches of its training data.
      budget: A callback that stops training before the budget is overspent; `budget.delta` is the
        delta of the guarantee.
    """

    model: tf.keras.Model
    batches: PoissonBatches
    budget: PrivacyBudget


def make_private(
    model: tf.keras.Model,
    data: Any,
    *,
    epochs: int,
    target_epsilon: float,
    delta: float | None = None,
    batch_size: int = 256,
    optimizer: Any = None,
    learning_rate: Any = None,
    l2_norm_clip: float = 1.0,
    loss: Any = None,
    metrics: Any = None,
    transform: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    chunk_size: int | None = None,
    features: Features = None,
    label: str | None = None,
    privacy_unit: Any = None,
    examples_per_user: int | None = None,
    augmentations: int = 1,
    prior: Ledgers | None = None,
    verbose: bool = True,
    **optimizer_arguments: Any,
) -> PrivateTraining:
    """Compiles a model for private training within a budget, and prepares its batches.

    It does what you could do by hand: `tfdp.data.poisson_batches`,
    `tfdp.calibrate_noise_multiplier` for the steps of all epochs, one of tfdp's optimizers,
    `model.compile`, and `tfdp.callbacks.PrivacyBudget`. Before, `tfdp.validate` examines the model.

    Guarantees: training for `epochs` on the batches costs at most (`target_epsilon`, `delta`),
    together with what the model's weights have cost before and `prior`.

    Args:
      model: A built model of Keras 2. It is compiled in place; its weights are kept. If it was
        compiled, what is not given is taken over: the loss, the metrics, and of Adam or SGD the
        learning rate and other parameters.
      data: `(x, y)`, `(x, y, sample_weight)`, or a `tf.data.Dataset` of single examples; see
        `tfdp.data.poisson_batches`.
      epochs: Epochs that will be trained, of N / `batch_size` steps each.
      target_epsilon: Epsilon that may be spent in all, under add-or-remove-one.
      delta: The delta of the guarantee, in (0, 1). None: N^-1.1, rounded down to two digits, which
        is below 1 / N.
      batch_size: Expected number of examples in a batch; at most N.
      optimizer: "adam", "sgd", "signadam" or "signsgd"; a class such as `tfdp.DPSignAdam`; or an
        Adam or SGD of Keras, whose parameters are taken over. None: that of the compiled model,
        otherwise "adam".
      learning_rate: A number or schedule. None: that of the Keras optimizer whose parameters are
        taken over; otherwise 0.005 for Adam, 0.5 for SGD and 0.002 for SignAdam, with which a
        convolutional network learns MNIST (docs/choosing.md), and the optimizer's own for others.
      l2_norm_clip: Largest l2 norm of an example's gradient.
      loss: See `model.compile`.
      metrics: See `model.compile`. (Of a model that XLA compiles, whose batches are padded, they
        become `weighted_metrics`, which leave out the padding.)
      transform: See `tfdp.data.poisson_batches`.
      chunk_size: See `tfdp.data.poisson_batches`.
      features: Names of the inputs, of examples that are dicts; see `tfdp.data.poisson_batches`.
      label: Name of the target, of examples that are dicts.
      privacy_unit: The user of each example, for user-level privacy: N and `batch_size` then count
        users. See `tfdp.data.poisson_batches`.
      examples_per_user: Examples that a batch has of a user, at most.
      augmentations: Rows that each example has in a batch; see `tfdp.data.poisson_batches`.
      prior: Other releases about the same examples: a `PrivacyLedger`, or several.
      verbose: Whether to print what was decided, in five lines.
      **optimizer_arguments: Other arguments of the optimizer, such as `clipping_rule`.

    Returns:
      The model, its batches and a callback: `model.fit(batches, epochs=..., callbacks=[budget])`,
      then `tfdp.privacy_statement(model, delta=budget.delta)`.

    Raises:
      ValueError: An argument is out of its range; the model or its loss would be refused, with all
        reasons; or the budget is spent.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x, y = np.random.rand(1000, 8).astype("float32"), np.random.randint(0, 2, 1000)
      >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[8])])
      >>> model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
      >>> model, batches, budget = tfdp.make_private(
      ...     model, (x, y), epochs=2, target_epsilon=2.0, batch_size=100, verbose=False)
      >>> history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
      >>> model.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
      True
    """
    check_is_model(model)
    positive_integer("epochs", epochs)
    positive_integer("batch_size", batch_size)
    compiled = _compile_arguments(model)
    loss = compiled.get("loss") if loss is None else loss
    if loss is None:
        raise ValueError(
            "Argument `loss` must be given, as in `model.compile`: the model was compiled without "
            "one, or not at all. Received: loss=None."
        )
    given = optimizer if optimizer is not None else compiled.get("optimizer") or "adam"
    private_class, parameters = _private_optimizer(given, optimizer is None)
    parameters |= optimizer_arguments
    if learning_rate is not None:
        parameters["learning_rate"] = learning_rate
    elif "learning_rate" not in parameters and private_class in _LEARNING_RATES:
        parameters["learning_rate"] = _LEARNING_RATES[private_class]
    padding = NONE
    if parameters.get("secure_noise"):
        padding = FULL
    elif compiled.get("jit_compile"):
        padding = BUCKETS if chunk_size is None else FULL
    batches = _batches(
        data,
        batch_size,
        transform=transform,
        chunk_size=chunk_size,
        padding=padding,
        features=features,
        label=label,
        privacy_unit=privacy_unit,
        examples_per_user=examples_per_user,
        augmentations=augmentations,
    )
    size = batches.sampling.dataset_size
    delta = default_delta(size) if delta is None else delta
    _check_model(model, batches, loss)
    steps = epochs * max(1, round(size / batch_size))
    spent = [*_spent(model), *as_ledgers(prior)]
    check_unit(compose_ledgers(spent), batches.sampling.unit)
    noise = calibrate_noise_multiplier(
        target_epsilon=target_epsilon,
        delta=delta,
        steps=steps,
        dataset_size=size,
        expected_batch_size=batch_size,
        truncation_probability=batches.sampling.truncation_probability,
        prior=spent,
    )
    private = private_class(l2_norm_clip, noise, sampling=batches.sampling, **parameters)
    _compile(model, private, loss, metrics, compiled)
    budget = PrivacyBudget(target_epsilon, delta, prior)
    if verbose:
        before = compose_ledgers(spent).epsilon(delta).epsilon if spent else 0.0
        _print(private, batches, budget, epochs, steps, before)
    return PrivateTraining(model, batches, budget)


def default_delta(dataset_size: int) -> float:
    """Returns the delta of a guarantee for N examples: N^-1.1, rounded down to two digits.

    It is below 1 / N, so that publishing one example in full is not within the guarantee.

    Args:
      dataset_size: Number of examples, N.

    Example:
      >>> default_delta(60000)
      5.5e-06
    """
    delta = max(2, dataset_size) ** -1.1
    digit = 10.0 ** (math.floor(math.log10(delta)) - 1)
    return float(f"{math.floor(delta / digit) * digit:.1e}")


def _compile_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments of the last `compile`; empty if there was none."""
    config = getattr(model, "_compile_config", None)
    if config is None or not model._is_compiled:
        return {}
    return {**config.config, "optimizer": model.optimizer}


def _private_optimizer(
    optimizer: Any, is_from_compile: bool
) -> tuple[type[PrivateOptimizerMixin], dict[str, Any]]:
    """Returns the private optimizer that replaces another one, and the parameters to keep."""
    known = f"Known: {', '.join(sorted(_BY_NAME))}, private optimizers' classes, Adam, SGD."
    if isinstance(optimizer, str):
        if optimizer.lower() in _BY_NAME:
            return _BY_NAME[optimizer.lower()], {}
        raise ValueError(
            f"Argument `optimizer` must have a private counterpart. {known} Received: {optimizer=}."
        )
    if isinstance(optimizer, type) and issubclass(optimizer, SelectiveUpdateMixin):
        raise ValueError(
            "Argument `optimizer` must not be selective, whose test has a noise of its own. "
            f"Received: {optimizer.__name__}: use tfdp.SelectiveModel and PrivacyBudget."
        )
    if isinstance(optimizer, type) and issubclass(optimizer, PrivateOptimizerMixin):
        return optimizer, {}
    if isinstance(optimizer, PrivateOptimizerMixin):
        if is_from_compile:
            raise ValueError(
                "Argument `optimizer` must be given where the model was compiled with a private "
                f"one, whose noise was chosen already. Received: optimizer=None, and a model "
                f"compiled with {type(optimizer).__name__}: pass its class."
            )
        raise ValueError(
            "Argument `optimizer` must be a class, whose noise can be calibrated. Received: an "
            f"instance. Pass optimizer=tfdp.{type(optimizer).__name__}."
        )
    kind = type(optimizer).__name__
    if kind not in _TAKEN_OVER or not type(optimizer).__module__.startswith("tf_keras."):
        raise ValueError(
            f"Argument `optimizer` must have a private counterpart. {known} Received: {kind}"
            f"{', with which the model was compiled' if is_from_compile else ''}."
        )
    config = optimizer.get_config()
    for name, neutral in _WITHOUT_EFFECT.items():
        value = config.get(name, neutral)
        if value != neutral and value:
            raise ValueError(
                f"Argument `optimizer` must not use `{name}`: private optimizers clip by "
                "`l2_norm_clip`, decay by a learning rate schedule, and shrink weights by a "
                f"`kernel_regularizer`. Received: {kind} with {name}={value}."
            )
    parameters = {name: config[name] for name in _TAKEN_OVER[kind]}
    return _BY_NAME[kind.lower()], parameters | {"learning_rate": _learning_rate(optimizer)}


def _learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of a Keras optimizer: a schedule, or its value now."""
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        rate = optimizer._hyper["learning_rate"]  # Of a legacy one.
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return rate
    return float(tf.keras.backend.get_value(optimizer.learning_rate))


def _batches(data: Any, batch_size: int, **kwargs: Any) -> PoissonBatches:
    if isinstance(data, PoissonBatches):
        raise ValueError(
            "Argument `data` must be the examples, from which batches are drawn here. Received "
            "Poisson batches: pass what they were made of."
        )
    try:
        return poisson_batches(data, expected_batch_size=batch_size, **kwargs)
    except ValueError as error:
        raise ValueError(str(error).replace("expected_batch_size", "batch_size")) from error


def _check_model(model: Any, batches: PoissonBatches, loss: Any) -> None:
    """Raises an error with all that training would refuse; builds the model."""
    if not model.built or model.save_spec() is None:
        x = batches.element_spec[0]
        model(tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape[1:]], s.dtype), x))
    validate(model, loss, data=batches).check()


def _spent(model: Any) -> list:
    """Returns the ledgers of the steps that the model's weights have cost already."""
    ledger = record_ledger.ledger_of_model(model)
    return [] if ledger is None else [ledger]


def _compile(model: Any, optimizer: Any, loss: Any, metrics: Any, compiled: dict[str, Any]) -> None:
    names = ("weighted_metrics", "loss_weights", "steps_per_execution", "jit_compile")
    kept = {name: compiled[name] for name in names if compiled.get(name) is not None}
    metrics = compiled.get("metrics") if metrics is None else metrics
    if metrics and optimizer.sampling.has_padding:
        weighted = kept.get("weighted_metrics") or []
        both = isinstance(metrics, list) and isinstance(weighted, list)
        kept["weighted_metrics"], metrics = weighted + metrics if both else metrics, None
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics, **kept)


def _print(
    optimizer: Any,
    batches: PoissonBatches,
    budget: PrivacyBudget,
    epochs: int,
    steps: int,
    before: float,
) -> None:
    sampling = batches.sampling
    unit = sampling.unit
    rate = optimizer.get_config()["learning_rate"]
    rate = f"{rate:g}" if isinstance(rate, (int, float)) else "by schedule"
    print(
        f"Privacy: epsilon <= {budget.target_epsilon:g} at delta = {budget.delta:g} after {epochs} "
        f"epochs, for adding or removing one of {sampling.dataset_size} {unit}s"
        f"{f' (spent before: {before:.4g})' if before else ''}.\n"
        f"Batches: Poisson sampled, {sampling.expected_batch_size} {unit}s expected (each with "
        f"probability {sampling.sampling_probability:.4g}); {steps} steps.\n"
        f"Gradients: each {unit}'s is clipped to l2 norm {optimizer.l2_norm_clip:g}; noise "
        f"multiplier {optimizer.noise_multiplier:.4g}, the least for this budget.\n"
        f"Optimizer: {type(optimizer).__name__}, learning rate {rate}.\n"
        f"Train by `model.fit(batches, epochs={epochs}, callbacks=[budget])`; then "
        "`tfdp.privacy_statement(model, delta=budget.delta)` states what was spent."
    )
