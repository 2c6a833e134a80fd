"""The ledger of what private optimizers have released, from their rows."""

import importlib
from typing import Any

import dp_accounting
import numpy as np

from tfdp.accounting import event_codec
from tfdp.accounting.bounds import Release
from tfdp.accounting.ledger import PrivacyLedger, compose_ledgers
from tfdp.accounting.observability import CONDITIONAL, OBSERVABILITY
from tfdp.accounting.sampling import (
    EXAMPLE,
    FULL,
    NONE,
    TRUNCATION_PROBABILITY,
    UNITS,
    PoissonSampling,
    power_of_ten,
)
from tfdp.step.record import lineage, record_table
from tfdp.step.record.record_table import (
    ALLOCATED,
    ALLOCATED_UNPADDED,
    CYCLES,
    CYCLES_UNPADDED,
    FIXED_SEED,
    GAUSSIAN_UNPADDED,
    KIND,
    NOT_POISSON,
    SELECTIVE,
    SHOWN,
    SIGNS,
    SIGNS_UNPADDED,
    STEPS,
    TUNED,
)

# Kinds of rows that only their own module knows: imported where there is such a row.
_OTHER_KINDS = {SELECTIVE: "tfdp.step.record.selective_rows"}
_UNPADDED = (GAUSSIAN_UNPADDED, SIGNS_UNPADDED, ALLOCATED_UNPADDED, CYCLES_UNPADDED)
_TUNED_ROWS = "tfdp.step.record.tuned_rows"

_NOT_POISSON = (
    "Some steps were taken on batches that were no unused draws of `tfdp.data.poisson_batches`: no "
    "epsilon can be stated for them."
)
_NO_SAMPLING = (
    "Some steps were taken by an optimizer that was not given `sampling`: no epsilon can be stated "
    "for them."
)
_MIXED_UNITS = (
    "Some steps were taken with single examples as the unit of privacy, others with users: no "
    "epsilon can be stated for both together."
)
_FIXED_SEED = (
    "The noise seed is fixed (`noise_seed`), which is for tests only: whoever knows it can "
    "subtract the noise."
)
_CALLBACKS = (
    "A callback of `fit` acted on losses or metrics of the training data, or showed them. Epsilon "
    "does not cover what follows from that: when training stopped, which weights were kept, or a "
    "learning rate."
)
_ATTEMPTS_SHOWN = (
    "The number of attempts was shown (`non_private_diagnostics`). Epsilon holds only towards those"
    " who did not see it."
)


def release_of(kind: float, parameters: dict[str, float]) -> Release:
    """Returns what one step of these privacy parameters (or one cycle of steps) releases.

    Args:
      kind: `SELECTIVE`, or `GAUSSIAN`, `SIGNS`, `ALLOCATED`, `CYCLES` or one of these with
        `_UNPADDED`, of `record_table`; the padded ones also as `cut_off` returns them. (What a step
        of `TUNED` releases depends on the others of its run.)
      parameters: The privacy parameters by the names of their arguments.
    """
    exponent, kind = record_table.exponent_of(kind), int(kind)
    size, noise = int(parameters["dataset_size"]), parameters["noise_multiplier"]
    padding = NONE if kind in _UNPADDED else FULL
    cycle = max(1, int(parameters.get("cycle_length", 1)))
    update = PoissonSampling(
        size,
        int(parameters["expected_batch_size"]),
        padding=padding,
        cycle_length=cycle,
        max_truncation_probability=power_of_ten(exponent) if exponent else TRUNCATION_PROBABILITY,
    )
    signs = kind in (SIGNS, SIGNS_UNPADDED)
    event: dp_accounting.DpEvent
    if kind in (ALLOCATED, ALLOCATED_UNPADDED):
        event = event_codec.allocated_gaussian(update.sampling_probability, noise, cycle)
    elif kind in (CYCLES, CYCLES_UNPADDED):
        event = dp_accounting.GaussianDpEvent(noise)
    else:
        event = event_codec.sampled_gaussian(update.sampling_probability, noise, signs)
    release = Release(event, 1, cycle * update.truncation_probability, cycle)
    if kind not in _OTHER_KINDS:
        return release
    module = importlib.import_module(_OTHER_KINDS[kind])
    return module.release_of(parameters, release, observability(parameters))


def observability(parameters: dict[str, float]) -> str:
    """Returns what is assumed to be seen of selective releases with these parameters."""
    return OBSERVABILITY[int(parameters.get("selective_release", 0))]


def ledger_of_rows(rows: np.ndarray, mode: str | None = None) -> PrivacyLedger:
    """Returns the read-only ledger of the steps that rows count.

    Args:
      rows: `[rows, COLUMNS]`, every uid once.
      mode: Assumption about what is seen of selective releases, if no row tells.
    """
    units = {_unit_of(row) for row in rows if row[STEPS] or row[NOT_POISSON]}
    ledgers = [_ledger_of_row(row, mixed=len(units) > 1) for row in rows]
    sizes = {int(record_table.parameters_of(row)["dataset_size"]) for row in rows}
    return compose_ledgers(ledgers, mode).read_only(size for size in sizes if size)


def ledger_of_model(model: Any) -> PrivacyLedger | None:
    """Returns the ledger of all releases that went into the variables of a Keras model.

    Returns:
      The ledger, or None if no private optimizer has to do with the model.

    Raises:
      ValueError: The model's optimizer was not given `sampling`.
      PrivacyParametersChangedError: A restored checkpoint is of other privacy parameters.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    own = getattr(optimizer, "_released", None)
    mode = None
    if own is not None:
        mode = optimizer.ledger.selective_release  # Raises if nothing can be known.
    tables = [table for one in lineage.of(_variables(model)) for table in one.rows()]
    rows = record_table.union([*tables, *([] if own is None else [own.rows()])])
    return ledger_of_rows(rows, mode) if len(rows) else None


def _variables(model: Any) -> list[Any]:
    """Returns the variables of a model, as far as it has been built."""
    if model.built:
        return list(model.variables)
    parts = model.submodules if hasattr(model, "submodules") else model._flatten_layers()
    built = [part for part in parts if getattr(part, "built", False)]
    return [variable for part in built for variable in part.variables]


def _unit_of(row: np.ndarray) -> str:
    return UNITS[int(record_table.parameters_of(row)["privacy_unit"])]


def _ledger_of_row(row: np.ndarray, mixed: bool) -> PrivacyLedger:
    """Returns the ledger of the steps of one row.

    Args:
      row: `[COLUMNS]`.
      mixed: Whether other rows count steps of another unit of privacy.
    """
    parameters = record_table.parameters_of(row)
    selective = row[KIND] == SELECTIVE
    mode = observability(parameters) if selective else CONDITIONAL
    unit = EXAMPLE if mixed else _unit_of(row)
    ledger = PrivacyLedger([_FIXED_SEED] if row[FIXED_SEED] else [], mode, unit)
    steps, not_poisson = int(row[STEPS]), int(row[NOT_POISSON])
    if steps and not parameters["dataset_size"]:
        ledger.add_note(_NO_SAMPLING)
        not_poisson, steps = not_poisson + steps, 0
    if steps and mixed:
        ledger.add_note(_MIXED_UNITS)
        ledger.record(dp_accounting.UnsupportedDpEvent(), steps)
    elif steps and row[KIND] == TUNED:
        ledger.record(**vars(importlib.import_module(_TUNED_ROWS).release_of(row, release_of)))
    elif steps:
        release = release_of(float(row[KIND]), parameters)
        ledger.record(**{**vars(release), "count": steps})
    if not_poisson:
        ledger.record(dp_accounting.UnsupportedDpEvent(), not_poisson)
        ledger.add_note(_NOT_POISSON)
    if row[SHOWN] and not selective:
        ledger.add_note(_CALLBACKS)
    if row[SHOWN] and selective and mode == CONDITIONAL:
        ledger.add_note(_ATTEMPTS_SHOWN)
    return ledger
