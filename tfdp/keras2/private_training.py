"""Private training of a Keras model in one call: batches, noise for a budget, and `compile`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.accounting.ledger import Ledgers
from tfdp.data.columns import Features
from tfdp.keras2.base import PrivateOptimizerMixin
from tfdp.keras2.callbacks import PrivacyBudget
from tfdp.keras2.dp_adam import DPAdam
from tfdp.keras2.dp_sgd import DPSGD
from tfdp.keras2.dp_sign_adam import DPSignAdam
from tfdp.keras2.dp_sign_sgd import DPSignSGD
from tfdp.keras2.front_end import KERAS_2
from tfdp.keras2.keras_2 import check_is_model
from tfdp.keras2.model_check import validate, validate_without_loss
from tfdp.schedules import NoiseMultiplier, NoiseSchedule
from tfdp.training import learning_rates
from tfdp.training.private_training import Chosen, FrontEnd, PrivateTraining, prepare

_BY_NAME: dict[str, type[PrivateOptimizerMixin]] = {
    "adam": DPAdam,
    "sgd": DPSGD,
    "signadam": DPSignAdam,
    "signsgd": DPSignSGD,
}
_RATES: dict[type[PrivateOptimizerMixin], learning_rates.Kind] = {
    DPAdam: learning_rates.ADAM,
    DPSGD: learning_rates.SGD,
    DPSignAdam: learning_rates.SIGN,
    DPSignSGD: learning_rates.SIGN,
}
# Arguments of a Keras optimizer. One kind has the same names in all of Keras 2.
_OF_ADAM = ("beta_1", "beta_2", "epsilon", "amsgrad")
_TAKEN_OVER: dict[str, tuple[type[PrivateOptimizerMixin], tuple[str, ...]]] = {
    "Adam": (DPAdam, _OF_ADAM),
    "AdamW": (DPAdam, _OF_ADAM),
    "SGD": (DPSGD, ("momentum", "nesterov")),
}
# Values of other arguments with which nothing gets lost.
_WITHOUT_EFFECT = {
    "clipnorm": None,
    "clipvalue": None,
    "decay": 0.0,
    "global_clipnorm": None,
    "use_ema": False,
}


def make_private(
    model: tf.keras.Model,
    data: Any,
    *others: Any,
    epochs: int,
    target_epsilon: float | None = None,
    noise_multiplier: NoiseMultiplier | None = None,
    delta: float | None = None,
    batch_size: int | None = None,
    optimizer: Any = None,
    learning_rate: Any = None,
    l2_norm_clip: float | None = None,
    loss: Any = None,
    metrics: Any = None,
    transform: Callable[..., Any] | None = None,
    chunk_size: int | str | None = "auto",
    features: Features = None,
    label: str | None = None,
    privacy_unit: Any = None,
    examples_per_user: int | None = None,
    augmentations: int = 1,
    sampling: str = "poisson",
    noise_schedule: NoiseSchedule | None = None,
    prior: Ledgers | None = None,
    verbose: bool = True,
    **optimizer_arguments: Any,
) -> PrivateTraining:
    """Compiles a model for private training within a budget, and prepares its batches.

    It does what you could do by hand: `tfdp.data.poisson_batches`,
    `tfdp.calibrate_noise_multiplier` for the steps of all epochs, one of tfdp's optimizers,
    `model.compile`, and `tfdp.PrivacyBudget`. Before, `tfdp.validate` examines the model.

    Guarantees: training for `epochs` on the batches costs at most (`target_epsilon`, `delta`),
    together with what the model's weights have cost before and `prior`.

    Args:
      model: A built model of Keras 2. It is compiled in place; its weights are kept. If it was
        compiled, what is not given is taken over: the loss, the metrics, and of Adam, AdamW or SGD
        the learning rate and other parameters.
      data: `(x, y)`, `(x, y, sample_weight)`, `x` alone, or a `tf.data.Dataset` of single
        examples; see `tfdp.data.poisson_batches`.
      *others: Must be empty: `(x, y)` is one argument.
      epochs: Epochs that will be trained, of N / `batch_size` steps each (rounded, at least one).
      target_epsilon: Epsilon that may be spent in all, under zero-out. Give either this or
        `noise_multiplier`.
      noise_multiplier: The noise, in place of the least for a budget: a number or a schedule. The
        budget is then what all epochs cost. 0 trains without privacy, to look for faults in a
        model: epsilon is infinite, and `privacy_statement` says that there is none.
      delta: The delta of the guarantee, in (0, 1). None: N^-1.1, rounded down to two digits, which
        is below 1 / N.
      batch_size: Expected number of examples in a batch; at most N. None: what `tfdp.plan`
        recommends, the largest power of two that leaves 500 steps.
      optimizer: "adam", "adamw", "sgd", "signadam" or "signsgd"; a class such as
        `tfdp.DPSignAdam`; or an Adam, AdamW or SGD of Keras, whose parameters are taken over. None:
        that of the compiled model, otherwise "adam".
      learning_rate: A number or schedule. None: that of the Keras optimizer whose parameters are
        taken over, but for a rate that Keras set by itself, such as Adam's 0.001. In its place, and
        for names and classes of private optimizers: a rate that falls linearly to zero over the
        planned steps, whose peak follows from their number (docs/choosing.md).
      l2_norm_clip: Largest l2 norm of an example's gradient. None: each gradient `g` is scaled to
        `g / (|g| + 0.1)`, by `tfdp.clipping.AutomaticClipping(0.1)`: losses may be of any size.
      loss: See `model.compile`. None: that of the compiled model, or what the model computes by
        itself: in `train_step`, in `compute_loss`, or with `add_loss`.
      metrics: See `model.compile`. (Of a model that XLA compiles, and on a GPU, batches are padded;
        they become `weighted_metrics` then, which leave out the padding.)
      transform: See `tfdp.data.poisson_batches`.
      chunk_size: Rows that are delivered at a time; see `tfdp.data.poisson_batches`. "auto": whole
        batches, if a step of these fits into memory by an estimate of the activations of the model;
        otherwise the largest power of two that does. It follows from the model, the shapes, N,
        `batch_size` and the machine's memory alone. None: always whole batches.
      features: Names of the inputs, of examples that are dicts; see `tfdp.data.poisson_batches`.
      label: Name of the target, of examples that are dicts.
      privacy_unit: The user of each example, for user-level privacy: N and `batch_size` then count
        users. See `tfdp.data.poisson_batches`.
      examples_per_user: Examples that a batch has of a user, at most.
      augmentations: Rows that each example has in a batch; see `tfdp.data.poisson_batches`.
      sampling: "poisson": a batch has each example independently. "epochs": each example is in one
        batch of each epoch, drawn at random, as in other training loops, and needs less noise:
        docs/random_allocation.md. Epochs have N / `batch_size` steps, rounded down, and one that
        was begun costs as much as a whole one.
      noise_schedule: A schedule of `tfdp.schedules`, of which the proportions count; it is scaled
        to the budget. None: the noise is the same in all steps.
      prior: Other releases about the same examples: a `PrivacyLedger`, or several.
      verbose: Whether to print what was decided, in a line for each.
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
    given = dict(locals())
    check_is_model(model)
    return prepare(
        KERAS_2.with_parts(
            FrontEnd,
            compiled=_compile_arguments,
            choose=_choose,
            is_built=_is_built,
            validate=validate,
            validate_without_loss=validate_without_loss,
            budget=PrivacyBudget,
        ),
        **given,
    )


def _choose(
    model: Any, given: Any, is_from_compile: bool, learning_rate: Any, arguments: dict[str, Any]
) -> Chosen:
    """Returns the optimizer that an argument stands for; see `FrontEnd.choose`."""
    private_class, parameters = _private_optimizer(given, is_from_compile)
    parameters |= arguments
    if learning_rate is not None:
        parameters["learning_rate"] = learning_rate
    planned = None if "learning_rate" in parameters else _RATES.get(private_class)
    if is_from_compile and learning_rate is None and "learning_rate" not in arguments:
        rate = {"learning_rate": parameters.get("learning_rate")}
        planned = planned or learning_rates.instead_of(type(given).__name__, rate, is_task=False)
    if not isinstance(given, tf.keras.optimizers.Optimizer):  # Legacy ones have no weight decay.
        return Chosen(private_class, parameters, planned)
    names = getattr(given, "_exclude_from_weight_decay_names", [])

    def make(*args: Any, **kwargs: Any) -> PrivateOptimizerMixin:
        optimizer = private_class(*args, **kwargs)
        # Now, not before: a model that was not built has variables only since it was examined.
        excluded = [v for v in model.trainable_variables if not given._use_weight_decay(v)]
        optimizer.exclude_from_weight_decay(excluded, names)
        return optimizer

    return Chosen(make, parameters, planned)


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
    names = ", ".join(sorted([*_BY_NAME, "adamw"]))
    known = f"Known: {names}, private optimizers' classes, Adam, AdamW, SGD."
    if isinstance(optimizer, str):
        if optimizer.lower() in _BY_NAME:
            return _BY_NAME[optimizer.lower()], {}
        if optimizer.lower() == "adamw":
            return DPAdam, {"weight_decay": tf.keras.optimizers.AdamW().weight_decay}
        raise ValueError(
            f"Argument `optimizer` must have a private counterpart. {known} Received: {optimizer=}."
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
    if kind.startswith("LossScaleOptimizer"):
        raise ValueError(
            "Argument `optimizer` must not scale the loss, which would be clipped as scaled. "
            f"Received: {kind}, as the policy mixed_float16 makes it. Use the policy "
            "mixed_bfloat16, which needs no scaling."
        )
    if isinstance(optimizer, type):
        kind = f"the class {optimizer.__name__}; pass an instance or a name"
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
                f"`l2_norm_clip`, and decay by a learning rate schedule. Received: {kind} with "
                f"{name}={value}."
            )
    private_class, taken_over = _TAKEN_OVER[kind]
    parameters = {name: config[name] for name in taken_over}
    parameters["weight_decay"] = config.get("weight_decay")  # Legacy optimizers have none.
    return private_class, parameters | {"learning_rate": _learning_rate(optimizer)}


def _learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of a Keras optimizer: a schedule, or its value now."""
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        rate = optimizer._hyper["learning_rate"]  # A legacy optimizer.
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return rate
    return float(tf.keras.backend.get_value(optimizer.learning_rate))


def _is_built(model: Any) -> bool:
    return model.built and model.save_spec() is not None
