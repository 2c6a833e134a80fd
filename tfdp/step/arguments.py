"""Checks of the arguments of private optimizers."""

import inspect
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdp import schedules
from tfdp.accounting.sampling import FULL, MOST_EXAMPLES, PoissonSampling
from tfdp.base import devices
from tfdp.base.validation import error, integer, is_integer, is_number, one_of
from tfdp.clipping.clipping_rules import LEAST_CLIP, AdaptiveQuantileClipping, ClippingRule
from tfdp.clipping.engine import ClippingEngine, check_clip
from tfdp.clipping.one_pass.one_pass_engine import OnePassEngine
from tfdp.clipping.vectorized.vectorized_engine import VectorizedEngine
from tfdp.step import replicas
from tfdp.step.secure_noise import LARGEST_COUNT_NOISE, LARGEST_NOISE_MULTIPLIER

if TYPE_CHECKING:
    from tfdp.correlated_noise import CorrelatedNoise
    from tfdp.step.compression import Compression

_FAST_MATH = "xla_cpu_enable_fast_math"
_FLAG = re.compile(r"--?(\w+)(?:=['\"]?([^\s'\"]*))?")

# In the docstrings of the optimizers, as Keras does it.
PRIVATE_ARGUMENTS = """l2_norm_clip: Largest l2 norm C of an example's gradient, over all variables
        together, in gradient units, from 1e-15 to 1e10 (or infinite: no clipping). Longer gradients
        are scaled down to it.
      noise_multiplier: Standard deviation of the noise, in units of the sensitivity of the clipped
        sum (C; 2C with `num_microbatches`). 0 trains without privacy. Or a schedule of
        `tfdp.schedules`, by the number of the step.
      expected_batch_size: Expected number of examples in a logical batch; the noisy sum is divided
        by this public constant, never by the number of examples that were drawn. Not to be given
        together with `sampling`, which knows it.
      num_microbatches: Number of microbatches, whose mean gradients are clipped instead of
        per-example gradients, or None. Saves no time; doubles the sensitivity.
      gradient_accumulation_steps: Batches that make one logical batch (1 by default). Noise is
        added, and the variables are updated, once per logical batch. Not to be given together with
        `sampling`, which knows it.
      sampling: How batches are sampled: `batches.sampling` of `tfdp.data.poisson_batches`. Every
        step must then get an unused draw of such batches. Without it the optimizer trains on any
        batches, and its `ledger` raises an error.
      noise_seed: For tests only: makes the noise reproducible, and who knows the seed can
        subtract it. By default noise comes from the operating system's entropy.
      secure_noise: Whether the floating-point numbers of the noisy sums must say no more than the
        ideal Gaussian mechanism (docs/noise.md): sums in float64, on a grid, with noise that is
        rounded exactly. Needs batches with `padding="full"`, and a CPU. Epsilon is the same without
        it if numbers were real.
      engine: "one_pass", which clips after one backward pass and leaves to the other what it cannot
        prove, or "vectorized", which is slower (`tfdp.clipping`).
      clipping_rule: "flat", "per_layer", "automatic", "adaptive_quantile", "importance_sampling",
        "perturbed", or a `tfdp.clipping.ClippingRule` with arguments of its own.
      noise_correlation: A `tfdp.BandedNoise` or `tfdp.BufferedNoise`, for batches of
        `tfdp.data.poisson_batches(..., cycle_length=c)`, with c of at least its bands, or with its
        `cycle_length`. None: steps have independent noise.
      compression: A `tfdp.contrib.RandomMask` or `tfdp.contrib.TopK`, with which each step trains a
        part of the coordinates. None: all of them.
      sparse_embeddings: A `tfdp.SparseEmbeddings`, with which rows of embedding tables that few
        examples of a batch look up get neither gradient nor noise, in Keras 3. None: all rows get
        noise."""

ENGINES: dict[str, type[ClippingEngine]] = {
    "one_pass": OnePassEngine,
    "vectorized": VectorizedEngine,
}


# Hyperparameters of Keras's optimizers that are numbers: what each must be, the least and the most.
_SHARE = ("a number in [0, 1]", 0.0, 1.0)
_DECAY = ("a number in [0, 1)", 0.0, math.nextafter(1.0, 0.0))
_NON_NEGATIVE = ("a non-negative, finite number", 0.0, sys.float_info.max)
_RATE = "a finite number, a schedule or a function of no arguments"
_HYPERPARAMETERS = {
    "learning_rate": (_RATE, -sys.float_info.max, sys.float_info.max),
    "momentum": _SHARE,
    "beta_1": _DECAY,
    "beta_2": _DECAY,
    "rho": _SHARE,
    "epsilon": _NON_NEGATIVE,
    "weight_decay": _NON_NEGATIVE,
    "ema_momentum": _SHARE,
}
_OPTIONAL = ("epsilon", "weight_decay", "ema_momentum")


def check_hyperparameters(values: Mapping[str, Any]) -> None:
    """Refuses hyperparameters with which the weights would become NaN, or the step would fail.

    Args:
      values: Arguments of an optimizer, by name. Functions of no arguments, variables and scalar
        tensors are not called or read.

    Raises:
      ValueError: A hyperparameter is not what it must be.
    """
    for name, (requirement, least, most) in _HYPERPARAMETERS.items():
        if name not in values:
            continue
        value = _item(values[name])
        if value is None and name in _OPTIONAL:
            continue
        if is_number(value):
            fits = least <= value <= most
        else:
            fits = _is_read_later(value) or (name == "learning_rate" and _is_schedule(value))
            fits = fits and not (name == "epsilon" and callable(value))  # Keras 2 calls all others.
        if not fits:
            raise error(name, requirement, values[name])


def _item(value: Any) -> Any:
    """Returns the number that an array of rank 0 holds, or the value."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _is_read_later(value: Any) -> bool:
    """Returns whether a step gets a real number of a value: a variable, a tensor or a function."""
    if callable(value) and not hasattr(value, "dtype"):
        try:
            inspect.signature(value).bind()
        except TypeError:
            return _is_schedule(value)
        except ValueError:  # The function is not written in Python.
            return True
        return True
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "shape"):
        return False
    try:
        dtype, rank = tf.as_dtype(value.dtype), len(value.shape)
    except (TypeError, ValueError, AttributeError):
        return False
    is_dense = tf.is_tensor(value) or hasattr(value, "assign")
    is_dense = is_dense and not isinstance(value, tf.RaggedTensor | tf.SparseTensor)
    return is_dense and rank == 0 and (dtype.is_floating or dtype.is_integer)


def _is_schedule(value: Any) -> bool:
    """Returns whether a value is a schedule of Keras, or the config of one."""
    if isinstance(value, Mapping):
        return "class_name" in value
    return any(kind.__name__ == "LearningRateSchedule" for kind in type(value).__mro__)


def as_floats(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of an optimizer of Keras 3, hyperparameters as it takes them: as floats.

    Raises:
      ValueError: A hyperparameter other than the learning rate is no number.
    """
    found = dict(values)
    for name in set(values) & set(_HYPERPARAMETERS):
        value = _item(values[name])
        if is_number(value):
            found[name] = float(value)
        elif name != "learning_rate" and not (value is None and name in _OPTIONAL):
            raise error(name, _HYPERPARAMETERS[name][0], value)
    return found


def check_name(name: Any) -> None:
    """Raises a ValueError unless a name can be that of an optimizer and of its variables."""
    if not (name is None or (isinstance(name, str) and name.isprintable())):
        raise error("name", "a string of printable characters or None", name)


def required(
    optimizer: str, l2_norm_clip: float | None, noise_multiplier: Any
) -> tuple[float, Any]:
    """Returns the clip and the noise; raises a ValueError that names those that were not given."""
    if l2_norm_clip is None or noise_multiplier is None:
        given = {"l2_norm_clip": l2_norm_clip, "noise_multiplier": noise_multiplier}
        missing = [f"`{name}`" for name, value in given.items() if value is None]
        raise ValueError(
            f"Argument {' and '.join(missing)} must be given to {optimizer}. Received: None. "
            "A clip of 1.0 is a good start; `tfdp.calibrate_noise_multiplier` finds the noise for "
            "a privacy budget, and `tfdp.make_private` does all of it."
        )
    return l2_norm_clip, noise_multiplier


def check_privacy_arguments(
    l2_norm_clip: float,
    noise_multiplier: float,
    expected_batch_size: int,
    num_microbatches: int | None,
    gradient_accumulation_steps: int,
    noise_seed: int | None,
) -> None:
    """Raises a ValueError that names the first argument that is out of its range."""
    if not is_number(l2_norm_clip):
        raise error("l2_norm_clip", f"a positive number, at least {LEAST_CLIP}", l2_norm_clip)
    check_clip("l2_norm_clip", l2_norm_clip)
    if not (is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise error(
            "noise_multiplier", "a non-negative, finite number (0: no privacy)", noise_multiplier
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
    ):
        integer(name, value, 1, MOST_EXAMPLES, optional=name == "num_microbatches")
    if num_microbatches is not None and gradient_accumulation_steps > 1:
        raise ValueError(
            "Argument `num_microbatches` must be None with gradient accumulation: where an "
            "example's batch ends depends on the other examples, and so do the examples of its "
            f"microbatch. Received: {num_microbatches=}, {gradient_accumulation_steps=}."
        )
    if not (noise_seed is None or is_integer(noise_seed)):
        raise error("noise_seed", "an integer or None", noise_seed)


def check_secure_noise(
    secure_noise: bool,
    noise_multiplier: float,
    count_noise: float,
    sampling: PoissonSampling | None,
) -> None:
    """Raises a ValueError if the noise is not one that secure noise can be made for."""
    if not isinstance(secure_noise, bool):
        raise error("secure_noise", "True or False", secure_noise)
    if secure_noise and noise_multiplier > LARGEST_NOISE_MULTIPLIER:
        raise error(
            "noise_multiplier",
            f"at most {LARGEST_NOISE_MULTIPLIER:g} with `secure_noise` (that of the sum, with an "
            "adaptive clip)",
            noise_multiplier,
        )
    if secure_noise and count_noise > LARGEST_COUNT_NOISE:
        raise error(
            "count_noise", f"at most {LARGEST_COUNT_NOISE:g} with `secure_noise`", count_noise
        )
    if secure_noise and noise_multiplier > 0 and sampling is not None and sampling.padding != FULL:
        raise ValueError(
            'Argument `sampling` must be that of batches with padding="full" with `secure_noise`: '
            "the last bits of an example's gradient can depend on the number of rows, which must "
            f"not depend on the data. Received: sampling.padding={sampling.padding!r}. Write "
            '`tfdp.data.poisson_batches(..., padding="full")`.'
        )


def check_correlation(
    correlation: "CorrelatedNoise | None",
    noise_multiplier: Any,
    sampling: PoissonSampling | None,
    secure_noise: bool,
    adaptive: bool,
) -> None:
    """Raises a ValueError if noise cannot be correlated, or not in this way."""
    if correlation is None:
        return
    if sampling is not None and sampling.redraws_sets:
        raise ValueError(
            "Argument `noise_correlation` must be given with `sampling` of sets that stay the "
            "same: random allocation requires independent noise. Received: "
            "sampling.redraws_sets=True. Write "
            "`tfdp.data.poisson_batches(..., redraw_sets=False)`."
        )
    correlation.check_sampling(sampling)
    for name, given in (
        ("secure_noise=True", secure_noise),
        ("a schedule as `noise_multiplier`", isinstance(noise_multiplier, schedules.NoiseSchedule)),
        ('clipping_rule="adaptive_quantile"', adaptive),
    ):
        if given:
            raise ValueError(
                "Argument `noise_correlation` must be None where steps differ in their noise, or "
                f"draw it elsewhere. Received: {name}."
            )


def check_compression(compression: "Compression", correlation: "CorrelatedNoise | None") -> None:
    """Raises a ValueError if steps with other noise cannot train a part of the coordinates."""
    if correlation is not None and compression.has_masks:
        raise ValueError(
            "Argument `noise_correlation` must be None where each step trains other coordinates: "
            "noise that a step takes back would not have been added there. Received: "
            f"noise_correlation={correlation}, compression={compression}."
        )


def check_arithmetic() -> None:
    """Raises a ValueError if XLA was told to compile floating-point arithmetic inexactly.

    Norms are upper bounds, and non-finite gradients contribute nothing, only if compilers
    neither reorder operations nor assume that there is no NaN. So do the proofs of secure noise.
    """
    value = "false"
    for name, given in _FLAG.findall(_xla_flags()):
        if name == _FAST_MATH:
            value = given or "true"
    if value.lower() not in ("false", "0"):
        raise ValueError(
            f"The environment variable XLA_FLAGS must not have --{_FAST_MATH}: compiled arithmetic "
            "would round otherwise than bounds on norms and noise assume, and take no number for "
            f"NaN. Received: --{_FAST_MATH}={value}. Remove it, or pass noise_multiplier=0."
        )


def _xla_flags() -> str:
    """Returns the flags, or the text of the file that is named in their place."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        with open(flags) as file:
            return file.read()
    except OSError:  # XLA will end the process.
        return ""


def sampling_of(
    sampling: Any, expected_batch_size: Any, gradient_accumulation_steps: Any
) -> tuple[Any, Any, PoissonSampling | None]:
    """Returns the expected batch size, the accumulation steps, and the sampling if it is known.

    Raises:
      ValueError: `sampling` is something else, or given together with what it knows.
    """
    if sampling is None:
        if expected_batch_size is None:
            raise ValueError(
                "Argument `sampling` must be given: `batches.sampling` of "
                "`tfdp.data.poisson_batches`; or `expected_batch_size`, to train without a ledger. "
                "Received neither."
            )
        steps = 1 if gradient_accumulation_steps is None else gradient_accumulation_steps
        return expected_batch_size, steps, None
    if isinstance(sampling, dict):
        try:
            sampling = PoissonSampling(**sampling)
        except TypeError as problem:  # Unknown keys, or some are missing.
            raise error("sampling", "what `get_config` wrote of one", sampling) from problem
    if not isinstance(sampling, PoissonSampling):
        raise error(
            "sampling",
            "the attribute `sampling` of `tfdp.data.poisson_batches(...)`, or None",
            sampling,
        )
    for name, given, instead in (
        ("expected_batch_size", expected_batch_size, "expected_batch_size=..."),
        ("gradient_accumulation_steps", gradient_accumulation_steps, "chunk_size=rows_of_a_part"),
    ):
        if given is not None:
            raise ValueError(
                f"Argument `{name}` must not be given together with `sampling`, which says "
                f"{getattr(sampling, name)}. Received: {name}={given!r}. To change it, draw other "
                f"batches: `tfdp.data.poisson_batches(..., {instead})`."
            )
    return sampling.expected_batch_size, sampling.gradient_accumulation_steps, sampling


def check_clipping_arguments(
    engine: str,
    rule: ClippingRule,
    l2_norm_clip: float,
    num_microbatches: int | None,
) -> None:
    """Raises a ValueError that names the first argument that does not go with the others."""
    one_of("engine", engine, sorted(ENGINES))
    if isinstance(rule, AdaptiveQuantileClipping) and math.isinf(l2_norm_clip):
        raise error("l2_norm_clip", "finite for an adaptive clip to begin with", l2_norm_clip)
    if isinstance(rule, AdaptiveQuantileClipping) and num_microbatches is not None:
        raise error(
            "num_microbatches",
            "None with an adaptive clip, which counts examples",
            num_microbatches,
        )


def check_two_term_arguments(
    clipping: ClippingEngine,
    gradient_accumulation_steps: int,
    correlation: "CorrelatedNoise | None",
    compression: "Compression | None",
    sampling: PoissonSampling | None,
) -> None:
    """Raises a ValueError that names what does not go with a TwoTermLoss where it is trained."""
    rule, each = clipping.clipping_rule, "A TwoTermLoss, and so a TermWiseVAE, must be trained"
    if replicas.count() > 1 and replicas.several_workers():
        raise ValueError(
            f"{each} in one process, as with a MirroredStrategy: its groups are of examples of all "
            "replicas, which do not leave their worker. Received a "
            f"{type(tf.distribute.get_strategy()).__name__}."
        )
    if correlation is not None:
        raise ValueError(
            f"{each} with independent noise, as each variable has noise of its own. Received: "
            f"noise_correlation={correlation}."
        )
    if compression is not None and compression.has_masks:
        raise ValueError(
            f"{each} without masks, which its groups' gradients do not have. Received: "
            f"compression={compression}."
        )
    if clipping.table_rows is not None:
        raise error(
            "sparse_embeddings",
            "None with a TwoTermLoss, as of a TermWiseVAE, whose groups have sums of their own",
            clipping.table_rows,
        )
    if clipping.rows_per_example > 1:
        raise ValueError(
            f"{each} on batches with one row for each example, without `privacy_unit` and "
            f"`augmentations`. Received: sampling={sampling}."
        )
    if clipping.wide_sums:
        raise error(
            "secure_noise",
            "False with a TwoTermLoss, whose sums are in float32 and have several sensitivities",
            True,
        )
    if isinstance(rule, AdaptiveQuantileClipping):
        raise ValueError(
            "Argument `clipping_rule` must have a fixed clip with a TwoTermLoss, whose noise "
            f"follows from it. Received: clipping_rule={rule}."
        )
    if rule.is_random:
        raise ValueError(
            "Argument `clipping_rule` must not be random with a TwoTermLoss, which draws no random "
            f"numbers for it. Received: clipping_rule={rule}."
        )
    if gradient_accumulation_steps > 1:
        raise error(
            "gradient_accumulation_steps",
            "1 with a TwoTermLoss: where an example's batch ends depends on the other examples, "
            "and so do the examples of its group",
            gradient_accumulation_steps,
        )


def scaling_hint(keras: str) -> str:
    """Returns what to do where a LossScaleOptimizer calls; empty where none does.

    Args:
      keras: Name of the Keras.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kinds = type(frame.f_locals.get("self")).__mro__
        if any(kind.__name__.startswith("LossScaleOptimizer") for kind in kinds):
            return (
                " It comes from a LossScaleOptimizer, of the policy mixed_float16: use "
                f"`{keras}.mixed_precision.set_global_policy('mixed_bfloat16')`, and build the "
                "model again."
            )
        frame = frame.f_back
    return ""


def check_not_compiled() -> None:
    """Raises a ValueError if the step being traced will be compiled for each number of rows."""
    if devices.compiled_by_xla():
        raise ValueError(
            "A step that is compiled by XLA (jit_compile=True) must get batches of few sizes, for "
            "each of which it is compiled. Received batches whose number of rows varies: use "
            '`tfdp.data.poisson_batches(..., padding="buckets")`, or `compile(jit_compile=False)`.'
        )


def check_variables(variables: Sequence[tf.Variable]) -> None:
    """Raises a ValueError unless all variables are real floating-point variables of TensorFlow."""
    for variable in variables:
        if not isinstance(getattr(variable, "dtype", None), tf.DType):
            raise ValueError(
                "Argument `var_list` must hold variables of TensorFlow. Received: "
                f"{type(variable).__name__} of {type(variable).__module__}. Models of Keras 3 "
                "(`import keras`) need an optimizer of `tfdp.keras3`; this one is for `tf.keras`, "
                "which `import tfdp` makes Keras 2."
            )
        if not variable.dtype.is_floating:
            raise ValueError(
                "Argument `var_list` must hold real floating-point variables. Received: "
                f"{variable.name} of type {variable.dtype.name}."
            )


def check_first_argument(cls: type, args: tuple, kwargs: dict[str, Any]) -> None:
    """Checks that nothing but the clip is the first positional argument of an optimizer.

    The first argument of Keras's optimizers is the learning rate.

    Raises:
      TypeError: The clip is given by name, and something else by position.
    """
    if args and "l2_norm_clip" in kwargs:
        raise TypeError(
            f"Argument `l2_norm_clip` of {cls.__name__} is the first positional argument, as in "
            f"TF-Privacy; give a learning rate by name, `learning_rate={args[0]!r}`. Received: "
            f"{args[0]!r} by position and l2_norm_clip={kwargs['l2_norm_clip']!r}."
        )
