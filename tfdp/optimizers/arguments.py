"""What the arguments of a private optimizer must be."""

import math
import numbers
from collections.abc import Collection
from typing import Any

from tfdp.clipping import AdaptiveQuantile, ClippingRule


def check_privacy_arguments(
    l2_norm_clip: float,
    noise_multiplier: float,
    expected_batch_size: int,
    num_microbatches: int | None,
    gradient_accumulation_steps: int,
    dataset_size: int | None,
    noise_seed: int | None,
) -> None:
    """Raises a ValueError that names the first argument that is out of its range."""
    if not (is_number(l2_norm_clip) and l2_norm_clip > 0):
        raise ValueError(
            f"Argument `l2_norm_clip` must be a positive number. Received: {l2_norm_clip=}."
        )
    if not (is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise ValueError(
            "Argument `noise_multiplier` must be a non-negative, finite number (0: no privacy). "
            f"Received: {noise_multiplier=}."
        )
    if noise_multiplier > 0 and math.isinf(l2_norm_clip):
        raise ValueError(
            "Argument `l2_norm_clip` must be finite when there is noise: an example's influence "
            f"would not be bounded. Received: {l2_norm_clip=}, {noise_multiplier=}."
        )
    for name, value in (
        ("expected_batch_size", expected_batch_size),
        ("num_microbatches", num_microbatches),
        ("gradient_accumulation_steps", gradient_accumulation_steps),
        ("dataset_size", dataset_size),
    ):
        optional = name in ("num_microbatches", "dataset_size")
        if (value is None and optional) or (is_integer(value) and int(value or 0) >= 1):
            continue
        raise ValueError(
            f"Argument `{name}` must be a positive integer{' or None' if optional else ''}. "
            f"Received: {name}={value!r}."
        )
    if dataset_size is not None and dataset_size < expected_batch_size:
        raise ValueError(
            "Argument `dataset_size` must be at least `expected_batch_size`. "
            f"Received: {dataset_size=}, {expected_batch_size=}."
        )
    if num_microbatches is not None and gradient_accumulation_steps > 1:
        raise ValueError(
            "Argument `num_microbatches` must be None with gradient accumulation: where an "
            "example's batch ends depends on the other examples, and with it, who shares its "
            f"group. Received: {num_microbatches=}, {gradient_accumulation_steps=}."
        )
    if not (noise_seed is None or is_integer(noise_seed)):
        raise ValueError(
            f"Argument `noise_seed` must be an integer or None. Received: {noise_seed=}."
        )


def check_clipping_arguments(
    engine: str,
    engines: Collection[str],
    rule: ClippingRule,
    l2_norm_clip: float,
    num_microbatches: int | None,
) -> None:
    """Raises a ValueError that names the first argument that does not go with the others."""
    if engine not in engines:
        raise ValueError(
            f"Argument `engine` must be one of {sorted(engines)}. Received: {engine=}."
        )
    if isinstance(rule, AdaptiveQuantile) and math.isinf(l2_norm_clip):
        raise ValueError(
            "Argument `l2_norm_clip` must be finite for an adaptive clip to begin with. Received: "
            f"{l2_norm_clip=}."
        )
    if isinstance(rule, AdaptiveQuantile) and num_microbatches is not None:
        raise ValueError(
            "Argument `num_microbatches` must be None with an adaptive clip, which counts "
            f"examples. Received: {num_microbatches=}."
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a real number that is not NaN; `True` and `False` are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and not math.isnan(value)


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer; `True` and `False` are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)
