"""Private training of a Keras 3 model in one call: batches, noise for a budget, and `compile`."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdp.accounting.ledger import Ledgers
from tfdp.base import devices
from tfdp.base.validation import error
from tfdp.data.columns import Features
from tfdp.keras3 import several_optimizers
from tfdp.keras3.callbacks import PrivacyBudget
from tfdp.keras3.dp_optimizer import DPOptimizer
from tfdp.keras3.front_end import KERAS_3
from tfdp.keras3.keras_3 import check_is_model
from tfdp.keras3.model_check import validate, validate_without_loss
from tfdp.keras3.named import DPSGD, DPAdam, DPSignAdam, DPSignSGD
from tfdp.schedules import NoiseMultiplier, NoiseSchedule
from tfdp.training.private_training import (
    FrontEnd,
    PrivateTraining,
    prepare,
    with_shared_arguments,
)

_BY_NAME = {"adam": DPAdam, "sgd": DPSGD, "signadam": DPSignAdam, "signsgd": DPSignSGD}
# Where none is given; docs/choosing.md says how they were measured.
_LEARNING_RATES = {DPAdam: 0.005, DPSGD: 0.5, DPSignAdam: 0.002}


def make_private(
    model: keras.Model,
    data: Any,
    *others: Any,
    epochs: int,
    target_epsilon: float | None = None,
    noise_multiplier: NoiseMultiplier | None = None,
    delta: float | None = None,
    batch_size: int | None = None,
    optimizer: Any = None,
    learning_rate: Any = None,
    l2_norm_clip: float = 1.0,
    loss: Any = None,
    metrics: Any = None,
    transform: Callable[..., Any] | None = None,
    chunk_size: int | str | None = "auto",
    features: Features = None,
    label: str | None = None,
    privacy_unit: Any = None,
    examples_per_user: int | None = None,
    augmentations: int = 1,
    noise_schedule: NoiseSchedule | None = None,
    prior: Ledgers | None = None,
    verbose: bool = True,
    **optimizer_arguments: Any,
) -> PrivateTraining:
    """Compiles a model for private training within a budget, and prepares its batches.

    It does what can be done by hand: `tfdp.data.poisson_batches`, `tfdp.calibrate_noise_multiplier`
    for the steps of all epochs, an optimizer of `tfdp.keras3`, `model.compile`, and
    `tfdp.keras3.PrivacyBudget`. Before, `tfdp.keras3.validate` examines the model.

    Guarantees: training for `epochs` on the batches costs at most (`target_epsilon`, `delta`),
    together with what the model's weights have cost before and `prior`.

    Args:
      model: A model of Keras 3. It is compiled in place; its weights are kept. If it was
        compiled, what is not given is taken over: the loss, the metrics, and the optimizer,
        which is made private. Of a task of KerasHub, the preprocessor is applied to each example.
      {{data_arguments}}
      optimizer: "adam", "sgd", "signadam" or "signsgd"; a class such as `tfdp.keras3.DPSignAdam`;
        or any optimizer of Keras 3, which `tfdp.keras3.DPOptimizer` makes private. None: that of
        the compiled model, otherwise "adam".
      learning_rate: A number or schedule. None: that of the Keras optimizer that is given, if one
        is; otherwise 0.005 for Adam, 0.5 for SGD and 0.002 for SignAdam, with which a convolutional
        network learns MNIST (docs/choosing.md), and the optimizer's own for others.
      {{other_arguments}}

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x, y = np.random.rand(1000, 8).astype("float32"), np.random.randint(0, 2, 1000)
      >>> model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
      >>> model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
      >>> model, batches, budget = tfdp.keras3.make_private(
      ...     model, (x, y), epochs=2, target_epsilon=2.0, batch_size=100, verbose=False)
      >>> history = model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
      >>> model.optimizer.ledger.epsilon(budget.delta).epsilon <= 2.0
      True
    """
    given = dict(locals())
    check_is_model(model)
    if devices.has_gpu():
        _let_layers_be_clipped_fast(model)
    return prepare(
        KERAS_3.with_parts(
            FrontEnd,
            compiled=_compile_arguments,
            choose=_choose,
            is_built=lambda model: model.built,
            validate=validate,
            validate_without_loss=validate_without_loss,
            budget=PrivacyBudget,
        ),
        **given,
    )


make_private.__doc__ = with_shared_arguments(make_private.__doc__)


def _let_layers_be_clipped_fast(model: keras.Model) -> None:
    """Has recurrent layers compute by operations that the one-pass engine knows, not by cuDNN."""
    for layer in model._flatten_layers():
        if getattr(layer, "use_cudnn", None) == "auto":
            layer.use_cudnn = False


def _compile_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments of the last `compile`; empty if there was none."""
    config = getattr(model, "_compile_config", None)
    return {} if config is None or not model.compiled else dict(config.config)


def _choose(
    model: Any, given: Any, is_from_compile: bool, learning_rate: Any, arguments: dict[str, Any]
) -> tuple[Callable[..., DPOptimizer], dict[str, Any]]:
    """Returns a function that makes the private optimizer, and its arguments."""
    parameters = dict(arguments)
    if isinstance(given, str) and given.lower() in _BY_NAME and not is_from_compile:
        given = _BY_NAME[given.lower()]
    elif isinstance(given, str):
        given = DPAdam if given == "adam" else keras.optimizers.get(given)
    if isinstance(given, type) and issubclass(given, DPOptimizer) and given is not DPOptimizer:
        if learning_rate is None and given in _LEARNING_RATES:
            learning_rate = _LEARNING_RATES[given]
        if learning_rate is not None:
            parameters.setdefault("learning_rate", learning_rate)
        return given, parameters
    if isinstance(given, DPOptimizer) or not isinstance(given, keras.optimizers.Optimizer):
        why = ", as the model was compiled with a private one" if is_from_compile else ""
        raise ValueError(
            f"Argument `optimizer` must be given{why}: one of {sorted(_BY_NAME)}, a class such as "
            "`tfdp.keras3.DPAdam`, whose noise can be calibrated, or an optimizer of Keras 3. "
            f"Received: {given!r}."
        )
    inner = several_optimizers.fresh(given, model.trainable_variables)
    if learning_rate is not None:
        if several_optimizers.is_multi(inner):
            raise error(
                "learning_rate", "None for a MultiOptimizer, whose parts have rates", learning_rate
            )
        inner.learning_rate = learning_rate
    return functools.partial(DPOptimizer, inner), parameters
