"""Private training of a model in one call, for every Keras: batches, noise, and `compile`."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._findings import ModelCheck
from tfdp._model_check import has_own_step
from tfdp._privacy_budget import BudgetCallback
from tfdp._validation import positive_integer
from tfdp.accounting import calibrate_noise_multiplier, calibrate_noise_schedule
from tfdp.accounting.ledger import Ledgers, as_ledgers, check_unit, compose_ledgers
from tfdp.accounting.relation import RELATION, stated_constants
from tfdp.accounting.sampling import BUCKETS, FULL, NONE
from tfdp.clipping import devices
from tfdp.data import poisson_batches, tasks
from tfdp.data.batches import PoissonBatches
from tfdp.optimizers import record_ledger
from tfdp.optimizers.selective import SelectiveUpdateMixin
from tfdp.schedules import NoiseMultiplier, NoiseSchedule


class PrivateTraining(NamedTuple):
    """A model that is ready for private training.

    Attributes:
      model: The compiled model.
      batches: Poisson batches of its training data.
      budget: A callback that stops training before the budget is overspent; `budget.delta` is the
        delta of the guarantee.
    """

    model: Any
    batches: PoissonBatches
    budget: Any


class FrontEnd(NamedTuple):
    """Parts of `make_private` that differ between Keras 2 and Keras 3.

    Attributes:
      package: The package, `tf.keras` or `keras`.
      compiled: Returns the arguments of a model's last `compile`; empty if there was none.
      choose: Gets the model; an optimizer, or what stands for one; whether it is that of the
        compiled model; the learning rate, if it is given; and other arguments. Returns a function
        that makes the private optimizer of the clip, the noise and arguments; and these.
      is_built: Returns whether a model has its weights, and knows its inputs.
      validate: Finds what training would refuse of a model with a loss.
      validate_without_loss: Finds what training would refuse of a model with a loss of its own.
      budget: The callback's class.
    """

    package: Any
    compiled: Callable[[Any], dict[str, Any]]
    choose: Callable[
        [Any, Any, bool, Any, dict[str, Any]], tuple[Callable[..., Any], dict[str, Any]]
    ]
    is_built: Callable[[Any], bool]
    validate: Callable[..., ModelCheck]
    validate_without_loss: Callable[..., ModelCheck]
    budget: type[BudgetCallback]


def prepare(
    keras: FrontEnd,
    model: Any,
    data: tuple,
    *,
    epochs: int,
    target_epsilon: float,
    delta: float | None,
    batch_size: int | None,
    optimizer: Any,
    learning_rate: Any,
    l2_norm_clip: float,
    loss: Any,
    metrics: Any,
    chunk_size: int | None,
    noise_schedule: NoiseSchedule | None,
    prior: Ledgers | None,
    verbose: bool,
    optimizer_arguments: dict[str, Any],
    **data_arguments: Any,
) -> PrivateTraining:
    """Does what `make_private` of each Keras says; `data` has all its positional arguments."""
    positive_integer("epochs", epochs)
    if batch_size is not None:
        positive_integer("batch_size", batch_size)
    preprocessor = tasks.preprocessor_of(model)
    if preprocessor is not None:
        names = [data_arguments.pop(name) for name in ("features", "label")]
        data = (tasks.preprocessed(model, data[0], *names), *data[1:])
        data_arguments |= {"features": None, "label": None}
    compiled = keras.compiled(model)
    loss = compiled.get("loss") if loss is None else loss
    own_step = has_own_step(keras.package, model)
    given = optimizer if optimizer is not None else compiled.get("optimizer") or "adam"
    if isinstance(given, type) and issubclass(given, SelectiveUpdateMixin):
        raise ValueError(
            "Argument `optimizer` must not be selective, whose test has a noise of its own. "
            f"Received: {given.__name__}: use SelectiveModel and PrivacyBudget."
        )
    make, parameters = keras.choose(
        model, given, optimizer is None, learning_rate, optimizer_arguments
    )
    takes_weights = loss is not None and _takes_weights(model)
    if devices.has_gpu() and not takes_weights:  # It can be neither padded nor compiled.
        compiled.pop("jit_compile", None)
    padding, few_sizes = NONE, BUCKETS if chunk_size is None else FULL
    if parameters.get("secure_noise"):
        padding = FULL
    elif compiled.get("jit_compile"):
        padding = few_sizes
    data_arguments |= {"expected_batch_size": batch_size, "chunk_size": chunk_size}
    batches = None
    if padding == NONE and devices.has_gpu() and takes_weights:
        # For a GPU, kernels are chosen, or compiled, anew for each number of rows.
        with contextlib.suppress(ValueError):  # Not all data can be padded.
            batches = _batches(data, padding=few_sizes, **data_arguments)
    if batches is None:
        batches = _batches(data, padding=padding, **data_arguments)
    batches.preprocessor = preprocessor
    size, expected = batches.sampling.dataset_size, batches.sampling.expected_batch_size
    delta = default_delta(size) if delta is None else delta
    if loss is not None and not own_step and not keras.is_built(model):
        x = batches.input_spec
        model(tf.nest.map_structure(lambda s: tf.zeros([1, *s.shape[1:]], s.dtype), x))
    pad = functools.partial(_batches, data, padding=FULL, **data_arguments)
    batches = _accepted(keras, model, loss, batches, pad if takes_weights else None)
    steps = epochs * max(1, round(size / expected))
    spent = [*_spent(model), *as_ledgers(prior)]
    check_unit(compose_ledgers(spent), batches.sampling.unit)
    budgeted: dict[str, Any] = {
        "target_epsilon": target_epsilon,
        "delta": delta,
        "steps": steps,
        "dataset_size": size,
        "expected_batch_size": expected,
        "truncation_probability": batches.sampling.truncation_probability,
        "prior": spent,
    }
    noise: NoiseMultiplier
    if noise_schedule is None:
        noise = calibrate_noise_multiplier(**budgeted)
    else:
        noise = calibrate_noise_schedule(noise_schedule, **budgeted)
    private = make(l2_norm_clip, noise, sampling=batches.sampling, **parameters)
    _compile(keras.package, model, private, loss, metrics, compiled)
    budget: Any = keras.budget(target_epsilon, delta, prior)
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


def _accepted(
    keras: FrontEnd,
    model: Any,
    loss: Any,
    batches: PoissonBatches,
    pad: Callable[[], PoissonBatches] | None,
) -> PoissonBatches:
    """Returns batches on which the model can be trained: padded ones if it takes only those.

    Layers that draw random numbers in a loop or a branch need them (`recurrent_dropout` and
    `RandomCrop` of Keras 2).

    Args:
      keras: The front end.
      model: The model.
      loss: Its loss, or None.
      batches: Batches that are preferred.
      pad: Makes batches that are padded to one size; None if the model cannot take them.

    Raises:
      ValueError: Training would refuse the model on either.
    """
    try:
        _validate(keras, model, loss, batches)
    except ValueError:
        if pad is None or batches.sampling.padding == FULL:
            raise
        with contextlib.suppress(ValueError):  # Not all data can be padded.
            padded = pad()
            _validate(keras, model, loss, padded)
            return padded
        raise
    return batches


def _validate(keras: FrontEnd, model: Any, loss: Any, batches: PoissonBatches) -> None:
    """Raises a ValueError if training would refuse the model."""
    validate = keras.validate if loss is not None else keras.validate_without_loss
    found = validate(model, loss, data=batches)
    if (
        not found.ok
        and loss is None
        and not has_own_step(keras.package, model)
        and not model.losses
    ):
        raise ValueError(
            "Argument `loss` must be given, as in `model.compile`: the model was compiled without "
            "one, or not at all, and has no loss of its own (`add_loss`, `compute_loss`, "
            "`train_step`). Received: loss=None."
        )
    found.check()


def _takes_weights(model: Any) -> bool:
    """Returns whether a model's step and loss are Keras's own, which take weights of rows."""
    steps = (type(model).train_step, type(model).compute_loss)
    return all(step.__module__.split(".")[0] in ("keras", "tf_keras") for step in steps)


def _batches(data: tuple, **kwargs: Any) -> PoissonBatches:
    if isinstance(data[0], PoissonBatches):
        raise ValueError(
            "Argument `data` must be the examples, from which batches are drawn here. Received "
            "Poisson batches: pass what they were made of."
        )
    try:
        return poisson_batches(*data, **kwargs)
    except ValueError as error:
        raise ValueError(str(error).replace("expected_batch_size", "batch_size")) from error


def _spent(model: Any) -> list:
    """Returns the ledgers of the steps that the model's weights have cost already."""
    ledger = record_ledger.ledger_of_model(model)
    return [] if ledger is None else [ledger]


def _compile(
    keras: Any, model: Any, optimizer: Any, loss: Any, metrics: Any, compiled: dict[str, Any]
) -> None:
    names = ("weighted_metrics", "loss_weights", "steps_per_execution", "jit_compile")
    kept = {name: compiled[name] for name in names if compiled.get(name) is not None}
    metrics = compiled.get("metrics") if metrics is None else metrics
    if metrics and optimizer.sampling.has_padding:
        weighted = kept.get("weighted_metrics") or []
        both = isinstance(metrics, list) and isinstance(weighted, list)
        kept["weighted_metrics"], metrics = weighted + metrics if both else metrics, None
        kept["metrics"] = None  # Not the default of a model with a `compile` of its own.
    kept |= {name: v for name, v in (("loss", loss), ("metrics", metrics)) if v is not None}
    try:
        inspect.signature(model.compile).bind(optimizer=optimizer, **kept)
    except TypeError:  # It takes more, or other, arguments: what it was given stays.
        keras.Model.compile(model, optimizer=optimizer, **kept)
    else:
        model.compile(optimizer=optimizer, **kept)


def _print(
    optimizer: Any,
    batches: PoissonBatches,
    budget: Any,
    epochs: int,
    steps: int,
    before: float,
) -> None:
    sampling = batches.sampling
    unit = sampling.unit
    rate = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
    rate = f"{rate:g}" if isinstance(rate, (int, float)) else "by schedule"
    print(
        f"Privacy: epsilon <= {budget.target_epsilon:g} at delta = {budget.delta:g} after {epochs} "
        f"epochs, for {RELATION} of one of {sampling.dataset_size} {unit}s"
        f"{f' (spent before: {before:.4g})' if before else ''}.\n"
        f"{stated_constants(unit, [sampling.dataset_size])}\n"
        f"Batches: Poisson sampled, {sampling.expected_batch_size} {unit}s expected (each with "
        f"probability {sampling.sampling_probability:.4g}); {steps} steps.\n"
        f"Gradients: each {unit}'s is clipped to l2 norm {optimizer.l2_norm_clip:g}; noise "
        f"multiplier {_noise(optimizer.noise_multiplier)}, the least for this budget.\n"
        f"Optimizer: {_name(optimizer)}, learning rate {rate}.\n"
        f"Train by `model.fit(batches, epochs={epochs}, callbacks=[budget])`; then "
        "`tfdp.privacy_statement(model, delta=budget.delta)` states what was spent."
    )


def _noise(noise: NoiseMultiplier) -> str:
    if not isinstance(noise, NoiseSchedule):
        return f"{noise:.4g}"
    values = noise.stages().values
    return f"{values[0]:.4g}, which changes {len(values) - 1} times, at last to {values[-1]:.4g}"


def _name(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)  # Of Keras 3.
    name = type(optimizer).__name__
    return f"{name} of {type(inner).__name__}" if name == "DPOptimizer" else name
