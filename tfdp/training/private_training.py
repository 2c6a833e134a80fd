"""Private training of a model in one call, for every Keras: batches, noise, and `compile`."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp.accounting.budget import default_delta
from tfdp.accounting.calibration import calibrate_noise_multiplier, calibrate_noise_schedule
from tfdp.accounting.ledger import Ledgers, as_ledgers, check_unit, compose_ledgers
from tfdp.accounting.planning import check_steps, planned_batch_size, steps_of
from tfdp.accounting.relation import RELATION, stated_constants
from tfdp.accounting.sampling import BUCKETS, FULL, NONE, PoissonSampling
from tfdp.base import devices
from tfdp.base.validation import (
    error,
    is_integer,
    non_negative,
    one_of,
    positive_integer,
    using,
)
from tfdp.clipping import clipping_rules
from tfdp.clipping.clipping_rules import AutomaticClipping
from tfdp.data import poisson, poisson_batches, tasks
from tfdp.data.batches import PoissonBatches
from tfdp.data.elements import parts_of
from tfdp.schedules import NoiseMultiplier, NoiseSchedule
from tfdp.step.record import record_ledger
from tfdp.step.selective import SelectiveUpdateMixin
from tfdp.training import chunk_sizes, front_end, learning_rates
from tfdp.training.findings import ModelCheck
from tfdp.training.model_check import has_own_step
from tfdp.training.privacy_budget import BudgetCallback

# Scaling makes gradients of losses in any unit equally long. Gradients much shorter than 0.1 stay
# short: otherwise the many examples that are classified well outweigh the few of a rare class.
_SCALING = AutomaticClipping(stability=0.1)
_SAMPLINGS = ("poisson", "epochs")
_EPOCHS = _SAMPLINGS[1]
_CLOSE = 0.95  # The least share of a budget that the least noise for it costs, usually.


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


class Chosen(NamedTuple):
    """The private optimizer of a training.

    Attributes:
      make: Makes it, of the clip, the noise and other arguments.
      arguments: These.
      rates: The rule for its learning rate, if none was given.
    """

    make: Callable[..., Any]
    arguments: dict[str, Any]
    rates: learning_rates.Kind | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd(front_end.FrontEnd):
    """Parts of `make_private` that differ between Keras 2 and Keras 3.

    Attributes:
      compiled: Returns the arguments of a model's last `compile`; empty if there was none.
      choose: Gets the model; an optimizer, or what stands for one; whether it is that of the
        compiled model; the learning rate, if it is given; and other arguments.
      is_built: Returns whether a model has its weights, and knows its inputs.
      validate: Finds what training would refuse of a model with a loss.
      validate_without_loss: Finds what training would refuse of a model with a loss of its own.
      budget: The callback's class.
    """

    compiled: Callable[[Any], dict[str, Any]]
    choose: Callable[[Any, Any, bool, Any, dict[str, Any]], Chosen]
    is_built: Callable[[Any], bool]
    validate: Callable[..., ModelCheck]
    validate_without_loss: Callable[..., ModelCheck]
    budget: type[BudgetCallback]


def prepare(
    keras: FrontEnd,
    *,
    model: Any,
    data: Any,
    others: tuple,
    epochs: int,
    target_epsilon: float | None,
    noise_multiplier: NoiseMultiplier | None,
    delta: float | None,
    batch_size: int | None,
    optimizer: Any,
    learning_rate: Any,
    l2_norm_clip: float | None,
    loss: Any,
    metrics: Any,
    chunk_size: int | str | None,
    sampling: str,
    noise_schedule: NoiseSchedule | None,
    prior: Ledgers | None,
    verbose: bool | int,
    optimizer_arguments: dict[str, Any],
    **data_arguments: Any,
) -> PrivateTraining:
    """Does what `make_private` of each Keras says, of whose arguments it gets all."""
    data = (data, *others)
    positive_integer("epochs", epochs)
    in_epochs = one_of("sampling", sampling, _SAMPLINGS) == _EPOCHS
    if not (noise_schedule is None or isinstance(noise_schedule, NoiseSchedule)):
        raise error("noise_schedule", "a schedule of `tfdp.schedules` or None", noise_schedule)
    if in_epochs and noise_schedule is not None:
        raise error("noise_schedule", "None with sampling='epochs'", noise_schedule)
    if l2_norm_clip is None:
        l2_norm_clip = 1.0
        optimizer_arguments = {"clipping_rule": _SCALING, **optimizer_arguments}
    _check_goal(target_epsilon, noise_multiplier, noise_schedule)
    if batch_size is not None:
        positive_integer("batch_size", batch_size)
    if not (isinstance(verbose, bool | np.bool_) or (is_integer(verbose) and verbose in (0, 1))):
        raise error("verbose", "True or False", verbose)
    verbose = bool(verbose)
    _check_metrics(metrics)
    is_chosen, chunk_size = isinstance(chunk_size, str), chunk_sizes.given(chunk_size)
    preprocessor = tasks.preprocessor_of(model)
    if preprocessor is not None:
        names = ("features", "label", "transform")
        chosen = {name: data_arguments.pop(name) for name in names}
        prepared = tasks.prepared(model, data[0], **chosen, verbose=verbose)
        data = (prepared.data, *data[1:])
        data_arguments |= {"features": None, "label": None, "transform": prepared.transform}
    compiled = keras.compiled(model)
    loss = compiled.get("loss") if loss is None else loss
    own_step = has_own_step(keras.package, model)
    given = optimizer if optimizer is not None else compiled.get("optimizer") or "adam"
    if isinstance(given, type) and issubclass(given, SelectiveUpdateMixin):
        raise ValueError(
            "Argument `optimizer` must not be selective, whose test has a noise of its own. "
            f"Received: {given.__name__}: use SelectiveModel and PrivacyBudget."
        )
    make, parameters, rates = keras.choose(
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
    if not own_step:
        _check_weights(batches.element_spec)
    size = batches.sampling.dataset_size
    delta = default_delta(size) if delta is None else delta
    if batch_size is None:
        expected = planned_batch_size(size, epochs)
        batches = poisson.of_batch_size(batches, expected, chunk_size)
        data_arguments["expected_batch_size"] = expected
    steps = steps_of(size, batches.sampling.expected_batch_size, epochs)
    if in_epochs:
        batches = poisson.in_epochs(batches)
        steps = epochs * batches.sampling.cycle_length
    check_steps(steps, epochs)
    if rates is not None:
        peak = rates.peak(steps, l2_norm_clip, parameters)
        schedules = keras.package.optimizers.schedules
        parameters["learning_rate"] = schedules.PolynomialDecay(peak, steps, 0.0)
    if loss is not None and not own_step and not keras.is_built(model):
        x = batches.input_spec
        with using("data", x, "inputs of the model"):
            call_on_zeros(model, x)

    def pad() -> PoissonBatches:
        padded = _batches(data, padding=FULL, **data_arguments)
        return poisson.in_epochs(padded) if in_epochs else padded

    batches, found = _accepted(keras, model, loss, batches, pad if takes_weights else None)
    chunks = None
    if is_chosen and parameters.get("num_microbatches") is None:  # Microbatches must be whole.
        batches, chunks = _that_fit(keras, model, loss, batches, found, own_step)
    batches.preprocessor, batches.is_private = preprocessor, True
    spent = [*_spent(model), *as_ledgers(prior)]
    check_unit(compose_ledgers(spent), batches.sampling.unit)
    budgeted: dict[str, Any] = {
        "target_epsilon": target_epsilon,
        "delta": delta,
        "steps": steps,
        "prior": spent,
    }
    noise: NoiseMultiplier
    if noise_multiplier is None:  # One that is not used tells, with the least noise.
        probe = make(l2_norm_clip, 0.01, sampling=batches.sampling, **parameters)
        budgeted["releases_signs"] = probe.releases_signs
    if noise_multiplier is not None:
        noise = noise_multiplier
    elif noise_schedule is None:
        noise = calibrate_noise_multiplier(**budgeted, sampling=batches.sampling)
    else:
        noise = calibrate_noise_schedule(
            noise_schedule,
            **budgeted,
            dataset_size=size,
            expected_batch_size=batches.sampling.expected_batch_size,
            truncation_probability=batches.sampling.truncation_probability,
        )
    private = make(l2_norm_clip, noise, sampling=batches.sampling, **parameters)
    _compile(keras.package, model, private, loss, metrics, compiled)
    planned = _planned_epsilon(private, spent, steps, delta)
    budget: Any = keras.budget(planned if target_epsilon is None else target_epsilon, delta, prior)
    if verbose:
        before = compose_ledgers(spent).epsilon(delta).epsilon if spent else 0.0
        why = _why_this_noise(target_epsilon, planned)
        rate = _rate(private) if rates is None else f"{peak:g}, which falls linearly to 0"
        rule = clipping_rules.get(parameters.get("clipping_rule", "flat"))
        scaled = isinstance(rule, AutomaticClipping)
        _print(private, batches, budget, epochs, steps, before, why, scaled, rate, chunks)
    return PrivateTraining(model, batches, budget)


def call_on_zeros(model: Any, spec: Any) -> None:
    """Calls a model on one row of zeros, so that it makes its weights.

    Args:
      model: The model.
      spec: Types and shapes of its inputs, the rows first.
    """
    model(tf.nest.map_structure(lambda one: tf.zeros([1, *one.shape[1:]], one.dtype), spec))


def _check_goal(
    target_epsilon: float | None,
    noise_multiplier: NoiseMultiplier | None,
    noise_schedule: NoiseSchedule | None,
) -> None:
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "Either argument `target_epsilon`, for which the noise is found, or `noise_multiplier` "
            f"must be given. Received: {target_epsilon=}, {noise_multiplier=}."
        )
    if noise_multiplier is not None and noise_schedule is not None:
        raise error(
            "noise_schedule",
            "None with `noise_multiplier`, which takes a schedule itself",
            noise_schedule,
        )
    if noise_multiplier is not None and not isinstance(noise_multiplier, NoiseSchedule):
        non_negative("noise_multiplier", noise_multiplier)


def _check_metrics(metrics: Any) -> None:
    """Raises a ValueError unless metrics are what `compile` takes, which looks when it trains."""
    waiting = [metrics]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and all(isinstance(name, str) for name in one):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif not (one is None or callable(one) or (isinstance(one, str) and one.isprintable())):
            requirement = "names of metrics, metrics or functions, in lists or dicts, or None"
            raise error("metrics", requirement, metrics)


def _check_weights(spec: Any) -> None:
    """Raises a ValueError if weights have more dimensions than the losses that they multiply."""
    parts = parts_of(spec)
    if len(parts) < 3 or tf.nest.is_nested(parts[1]) or tf.nest.is_nested(parts[2]):
        return
    if parts[1].shape.rank == 1 and parts[2].shape.rank > 1:
        requirement = "data with one weight for each example, as there is one label"
        raise error("data", requirement, parts[2])


def _planned_epsilon(optimizer: Any, spent: list, steps: int, delta: float) -> float:
    """Returns what the steps of all epochs will have cost, after what was spent before.

    It is infinite without noise.
    """
    if not optimizer._has_noise:
        return math.inf
    ledger = compose_ledgers(spent)
    cycles = -(-steps // optimizer.sampling.cycle_length)
    for release in optimizer.next_releases(0, cycles):
        ledger.record(**vars(release))
    return ledger.epsilon(delta).epsilon


def _why_this_noise(target_epsilon: float | None, planned: float) -> str:
    """Says why the noise is what it is: the least for a budget, unless that is large."""
    if target_epsilon is None:
        return "as given"
    if planned > _CLOSE * target_epsilon:
        return "the least for this budget"
    return (
        f"with which epsilon will be {planned:.4g}: no less is chosen for so large a budget, as no "
        "bound is known to be both finite and near it"
    )


def _accepted(
    keras: FrontEnd,
    model: Any,
    loss: Any,
    batches: PoissonBatches,
    pad: Callable[[], PoissonBatches] | None,
) -> tuple[PoissonBatches, ModelCheck]:
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
        return batches, _validate(keras, model, loss, batches)
    except ValueError:
        if pad is None or batches.sampling.padding == FULL:
            raise
        with contextlib.suppress(ValueError):  # Not all data can be padded.
            padded = pad()
            return padded, _validate(keras, model, loss, padded)
        raise


def _that_fit(
    keras: FrontEnd,
    model: Any,
    loss: Any,
    batches: PoissonBatches,
    found: ModelCheck,
    own_step: bool,
) -> tuple[PoissonBatches, str | None]:
    """Returns batches that fit into memory, in chunks if need be; and why, or None."""
    chosen = chunk_sizes.choose(
        found.bytes_per_row, batches.element_spec, batches.sampling, devices.memory_budget()
    )
    if chosen is None:
        return batches, None
    try:
        chunked = poisson.in_chunks(batches, chosen.chunk_size)
        if own_step:  # Not each takes batches in chunks.
            _validate(keras, model, loss, chunked)
    except ValueError:
        return batches, None
    return chunked, (
        f"in {chunked.sampling.gradient_accumulation_steps} chunks of at most "
        f"{chosen.chunk_size} rows, which `fit` counts: {chosen.why}"
    )


def _validate(keras: FrontEnd, model: Any, loss: Any, batches: PoissonBatches) -> ModelCheck:
    """Raises a ValueError if training would refuse the model; returns what was found."""
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
    return found


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
        kept["metrics"] = None  # Replaces the default of a `compile` of its own.
    kept |= {name: v for name, v in (("loss", loss), ("metrics", metrics)) if v is not None}
    signature = inspect.signature(model.compile)
    if "sampler" in signature.parameters and hasattr(model, "sampler"):  # For language models.
        kept["sampler"] = model.sampler
    try:
        signature.bind(optimizer=optimizer, **kept)
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
    why: str,
    is_scaled: bool,
    rate: str,
    chunks: str | None,
) -> None:
    sampling = batches.sampling
    unit = sampling.unit
    target = budget.target_epsilon
    bound = "none, as there is no noise: epsilon is infinite"
    if math.isfinite(target):
        bound = f"epsilon <= {target:g}"
    print(
        f"Privacy: {bound} at delta = {budget.delta:g} after {epochs} "
        f"epochs, for {RELATION} of one of {sampling.dataset_size} {unit}s"
        f"{f' (spent before: {before:.4g})' if before else ''}.\n"
        f"{stated_constants(unit, [sampling.dataset_size])}\n"
        f"Batches: {_drawn(sampling)}; {steps} steps.\n"
        f"{f'Chunks: batches come {chunks}.{chr(10)}' if chunks else ''}"
        f"Gradients: each {unit}'s is {'scaled' if is_scaled else 'clipped'} to l2 norm "
        f"{optimizer.l2_norm_clip:g}; noise "
        f"multiplier {_noise(optimizer.noise_multiplier)}, {why}.\n"
        f"Optimizer: {_name(optimizer)}, learning rate {rate}.\n"
        f"Train by `model.fit(batches, epochs={epochs}, callbacks=[budget])`; then "
        "`tfdp.privacy_statement(model, delta=budget.delta)` states what was spent."
    )


def _drawn(sampling: PoissonSampling) -> str:
    """Says how batches are drawn."""
    unit, probability = sampling.unit, sampling.sampling_probability
    expected = f"{sampling.expected_batch_size} {unit}s expected"
    if sampling.redraws_sets:
        share = "" if probability == 1 else f" (of none with probability {1 - probability:.2g})"
        return (
            f"epochs of {sampling.cycle_length}, {expected}; each {unit} is part of one of them"
            f"{share}, drawn anew in each epoch"
        )
    return f"Poisson sampled, {expected} (each with probability {probability:.4g})"


def _rate(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = getattr(inner, "optimizers", [inner])  # A MultiOptimizer has no rate itself.
    rates = [part.get_config()["learning_rate"] for part in parts]
    shown = [f"{rate:g}" if isinstance(rate, (int, float)) else "by schedule" for rate in rates]
    return " and ".join(dict.fromkeys(shown)) or "by a function"


def _noise(noise: NoiseMultiplier) -> str:
    if not isinstance(noise, NoiseSchedule):
        return f"{noise:.4g}"
    values = noise.stages().values
    return f"{values[0]:.4g}, which changes {len(values) - 1} times, at last to {values[-1]:.4g}"


def _name(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)  # Set in Keras 3.
    name = type(optimizer).__name__
    return f"{name} of {type(inner).__name__}" if name == "DPOptimizer" else name
