"""DP events as immutable values and as JSON: checked, hashable, comparable, serializable."""

import importlib
import math
import typing
from typing import Any

import attr
import dp_accounting
import numpy as np

from tfdp.accounting import mechanisms
from tfdp.base import validation

# Decoding imports the class that a file names, so only classes of these packages are looked up.
_TRUSTED_PACKAGES = ("dp_accounting", "tfdp")
# Events within events. The library nests five at most; Python's stack ends at about a thousand.
_MOST_NESTED = 50


def sampled_gaussian(
    sampling_probability: float, noise_multiplier: float, releases_signs: bool = False
) -> dp_accounting.PoissonSampledDpEvent:
    """Returns the event of one private step: a Gaussian mechanism on a Poisson-sampled batch.

    Args:
      sampling_probability: Probability q, in (0, 1], that an example is in the batch.
      noise_multiplier: Standard deviation of the noise over the sensitivity of the sum.
      releases_signs: Whether only the signs of the noisy sum are released.
    """
    cls = dp_accounting.GaussianDpEvent
    if releases_signs:  # Not imported by others: its module needs the accountants.
        cls = importlib.import_module("tfdp.accounting.signed_gaussian").SignedGaussianDpEvent
    return dp_accounting.PoissonSampledDpEvent(sampling_probability, cls(noise_multiplier))


def allocated_gaussian(
    sampling_probability: float, noise_multiplier: float, steps: int
) -> dp_accounting.DpEvent:
    """Returns the event of one epoch by random allocation: see `RandomAllocationDpEvent`.

    Args:
      sampling_probability: Probability q, in (0, 1], that an example takes part in the epoch.
      noise_multiplier: Standard deviation of the noise over the sensitivity of the sum.
      steps: Steps of the epoch.
    """
    module = importlib.import_module("tfdp.accounting.random_allocation")
    event = module.RandomAllocationDpEvent(noise_multiplier, steps)
    return dp_accounting.PoissonSampledDpEvent(sampling_probability, event)


def freeze(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns `event` with lists replaced by tuples and NumPy scalars by Python's.

    A frozen event cannot be changed after it was recorded, and can be a key of the accountants'
    caches.

    Raises:
      ValueError: A parameter cannot be one of a mechanism (see `check_event`).
    """
    check_event(event)
    if not attr.has(type(event)):
        return event
    fields = {f.name: _freeze(getattr(event, f.name)) for f in attr.fields(type(event))}
    return type(event)(**fields)


def _freeze(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return freeze(value)
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def check_event(event: dp_accounting.DpEvent) -> None:
    """Refuses parameters for which an accountant would return nonsense instead of failing.

    dp_accounting checks few of them: its RDP of a Gaussian with NaN noise gives epsilon 0, and
    noise multiplier -1 is priced as 1.

    Raises:
      ValueError: `event` is not a DpEvent; a field is not of its type; a number in it is NaN; a
        `noise_multiplier` is negative or infinite; a `sampling_probability` is not in [0, 1]; a
        `threshold` is non-finite; a `count` is not positive; a RepeatAndSelectDpEvent is not of a
        distribution of `Repetitions`; events are nested too deeply.
    """
    _check_event(event, _MOST_NESTED)


def _check_event(event: Any, levels: int) -> None:
    if levels == 0:
        raise _nested_too_deeply()
    if not isinstance(event, dp_accounting.DpEvent):
        raise validation.error("event", "a dp_accounting.DpEvent", event)
    mechanism = mechanisms.of(event)
    if mechanism is not None:
        mechanism.check(event)
    for field in attr.fields(type(event)) if attr.has(type(event)) else ():
        name, value = field.name, getattr(event, field.name)
        if not _is_of_type(value, field.type):
            kind = getattr(field.type, "__name__", field.type)
            raise validation.error("event", f"one whose `{name}` has type {kind}", event)
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, dp_accounting.DpEvent):
                _check_event(part, levels - 1)
            elif isinstance(part, float | np.floating) and math.isnan(part):
                raise validation.error("event", f"without NaN in `{name}`", event)
        number = value if validation.is_number(value) else math.nan
        if name == "noise_multiplier" and not 0 <= number < math.inf:
            raise validation.error("event", f"of finite `{name}` >= 0", event)
        if name == "sampling_probability" and not 0 <= number <= 1:
            raise validation.error("event", f"of `{name}` in [0, 1]", event)
        if name == "threshold" and not math.isfinite(number):
            raise validation.error("event", f"of finite `{name}`", event)
        if name == "count" and not (validation.is_integer(value) and value > 0):
            raise validation.error("event", f"of positive integer `{name}`", event)


def _nested_too_deeply() -> ValueError:
    return ValueError(
        f"Argument `event` must be nested at most {_MOST_NESTED} events deep. Received: more."
    )


def _is_of_type(value: Any, declared: Any) -> bool:
    """Returns whether a value can be that of a field, as far as the class says what it must be."""
    if declared is float:
        return isinstance(value, float | np.floating) or validation.is_number(value)  # NaN: later.
    if declared is int:
        return validation.is_integer(value)
    if isinstance(declared, type) and issubclass(declared, dp_accounting.DpEvent):
        return isinstance(value, declared)
    if typing.get_origin(declared) is list:
        (part,) = typing.get_args(declared)
        return isinstance(value, list | tuple) and all(_is_of_type(one, part) for one in value)
    return True


def encode(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns `event` as nested dicts and lists that JSON can hold.

    Raises:
      ValueError: The class or a value of the event could not be read back.

    Example:
      >>> encode(dp_accounting.GaussianDpEvent(1.1))
      {'class': 'dp_accounting.dp_event.GaussianDpEvent', 'fields': {'noise_multiplier': 1.1}}
    """
    cls = type(event)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if _find_class(name) is not cls:
        raise validation.error(
            "event", f"of an attrs DpEvent class of {' or '.join(_TRUSTED_PACKAGES)}", event
        )
    fields = {f.name: _encode(getattr(event, f.name)) for f in attr.fields(cls)}
    return {"class": name, "fields": fields}


def _encode(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return encode(value)
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return {"float": str(value)}  # JSON has no infinity.
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise validation.error("event", "made of numbers, strings, events and lists of them", value)


def decode(data: Any) -> dp_accounting.DpEvent:
    """Returns the event that `encode` turned into `data`.

    Raises:
      ValueError: `data` is not of that form, names a class that is not an attrs DpEvent of
        dp_accounting or tfdp, or has other fields than the class.
    """
    return _decode_event(data, 2 * _MOST_NESTED)  # Lists of events are a level of their own.


def _decode_event(data: Any, levels: int) -> dp_accounting.DpEvent:
    if levels == 0:
        raise _nested_too_deeply()
    if not (isinstance(data, dict) and set(data) == {"class", "fields"}):
        raise validation.error("event", "a dict with the keys `class` and `fields`", data)
    cls = _find_class(data["class"])
    if cls is None:
        raise validation.error(
            "class", f"an attrs DpEvent class of {' or '.join(_TRUSTED_PACKAGES)}", data["class"]
        )
    names = {field.name for field in attr.fields(cls)}
    if not isinstance(data["fields"], dict) or set(data["fields"]) != names:
        raise validation.error("fields", f"a dict with the keys {sorted(names)}", data["fields"])
    fields = {name: _decode(value, levels) for name, value in data["fields"].items()}
    return freeze(cls(**fields))


def _decode(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        if set(value) != {"float"}:
            return _decode_event(value, levels - 1)
        if value["float"] not in ("inf", "-inf"):
            raise validation.error("float", "'inf' or '-inf'", value["float"])
        return float(value["float"])
    if isinstance(value, list):
        if levels == 0:
            raise _nested_too_deeply()
        return tuple(_decode(v, levels - 1) for v in value)
    return value


def _find_class(name: Any) -> type | None:
    module, _, cls_name = str(name).rpartition(".")
    if module.split(".")[0] not in _TRUSTED_PACKAGES:
        return None
    try:
        cls = getattr(importlib.import_module(module), cls_name, None)
    except ImportError:
        return None
    is_event = isinstance(cls, type) and issubclass(cls, dp_accounting.DpEvent) and attr.has(cls)
    return cls if is_event else None
