"""Private training of a Keras 3 model in one call: batches, noise for a budget, and `compile`."""

from collections.abc import Callable
from typing import Any

import keras

from tfdp.accounting.ledger import Ledgers
from tfdp.base import devices
from tfdp.base.validation import error, using
from tfdp.data import tasks
from tfdp.data.columns import Features
from tfdp.keras3 import several_optimizers
from tfdp.keras3.callbacks import PrivacyBudget
from tfdp.keras3.dp_optimizer import DPOptimizer
from tfdp.keras3.front_end import KERAS_3
from tfdp.keras3.keras_3 import check_is_model
from tfdp.keras3.model_check import validate, validate_without_loss
from tfdp.keras3.named import DPSGD, DPAdam, DPSignAdam, DPSignSGD
from tfdp.schedules import NoiseMultiplier, NoiseSchedule
from tfdp.training import learning_rates
from tfdp.training.private_training import Chosen, FrontEnd, PrivateTraining, prepare

_BY_NAME = {"adam": DPAdam, "sgd": DPSGD, "signadam": DPSignAdam, "signsgd": DPSignSGD}
_RATES = {
    DPAdam: learning_rates.ADAM,
    DPSGD: learning_rates.SGD,
    DPSignAdam: learning_rates.SIGN,
    DPSignSGD: learning_rates.SIGN,
}


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

    It does what can be done by hand: `tfdp.data.poisson_batches`, `tfdp.calibrate_noise_multiplier`
    for the steps of all epochs, an optimizer of `tfdp.keras3`, `model.compile`, and
    `tfdp.keras3.PrivacyBudget`. Before, `tfdp.keras3.validate` examines the model.

    Guarantees: training for `epochs` on the batches costs at most (`target_epsilon`, `delta`),
    together with what the model's weights have cost before and `prior`.

    Args:
      model: A model of Keras 3. It is compiled in place; its weights are kept. If it was
        compiled, what is not given is taken over: the loss, the metrics, and the optimizer,
        which is made private. Of a task of KerasHub, the preprocessor is applied to each example.
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
      optimizer: "adam", "sgd", "signadam" or "signsgd"; a class such as `tfdp.keras3.DPSignAdam`;
        or any optimizer of Keras 3, which `tfdp.keras3.DPOptimizer` makes private. None: that of
        the compiled model, otherwise "adam".
      learning_rate: A number or schedule. None: that of the Keras optimizer that is given, or that
        the model was compiled with, but for a rate that Keras or KerasHub set by themselves, such
        as Adam's 0.001. In its place, and for names and classes of private optimizers: a rate that
        falls linearly to zero over the planned steps, whose peak follows from their number
        (docs/choosing.md); the optimizer's own for kinds that have no such rule.
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
) -> Chosen:
    """Returns the optimizer that an argument stands for; see `FrontEnd.choose`."""
    parameters, is_name = dict(arguments), isinstance(given, str)
    if isinstance(given, str) and given.lower() in _BY_NAME and not is_from_compile:
        given = _BY_NAME[given.lower()]
    elif isinstance(given, str):
        with using("optimizer", given, "an optimizer of Keras, its name, or its class"):
            given = DPAdam if given == "adam" else keras.optimizers.get(given)
    if isinstance(given, type) and issubclass(given, DPOptimizer) and given is not DPOptimizer:
        if learning_rate is not None:
            parameters.setdefault("learning_rate", learning_rate)
        planned = None if "learning_rate" in parameters else _RATES.get(given)
        return Chosen(given, parameters, planned)
    if isinstance(given, DPOptimizer) or not isinstance(given, keras.optimizers.Optimizer):
        why = ", as the model was compiled with a private one" if is_from_compile else ""
        raise ValueError(
            f"Argument `optimizer` must be given{why}: one of {sorted(_BY_NAME)}, a class such as "
            "`tfdp.keras3.DPAdam`, whose noise can be calibrated, or an optimizer of Keras 3. "
            f"Received: {given!r}."
        )
    inner = several_optimizers.fresh(given, model.trainable_variables)

    def make(*args: Any, learning_rate: Any = None, **kwargs: Any) -> DPOptimizer:
        if learning_rate is not None:
            inner.learning_rate = learning_rate
        return DPOptimizer(inner, *args, **kwargs)

    if several_optimizers.is_multi(inner):
        if learning_rate is not None:
            raise error(
                "learning_rate", "None for a MultiOptimizer, whose parts have rates", learning_rate
            )
        return Chosen(make, parameters)
    if learning_rate is not None:
        return Chosen(make, {**parameters, "learning_rate": learning_rate})
    if not (is_from_compile or is_name):
        return Chosen(make, parameters)
    name, is_task = type(inner).__name__, tasks.is_task(model)
    return Chosen(make, parameters, learning_rates.instead_of(name, inner.get_config(), is_task))
