"""Check for everything in a Keras model that private training refuses or does slowly."""

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp._random.key_streams import KeyStream
from tfdp.accounting.sampling import FULL
from tfdp.clipping import OnePassEngine, SlowClippingWarning, step_check
from tfdp.clipping.loss_graph import batch_state, reading
from tfdp.data.batches import PoissonBatches
from tfdp.models.batch_normalization import BATCH_NORMALIZATION

_REPLACE = "Use `model = tfdp.replace_batch_normalization(model)`."
_STATELESS = "Use `stateful=False`."
_NO_STATISTIC = "Normalize within the example: GroupNormalization, LayerNormalization."
_SLOW = (
    "It trains, slower: use layers of `tf.keras.layers` with known rules, or add a rule with "
    "`tfdp.clipping.register_op_gradients`."
)
_FIT = "Give targets of the shape that the loss takes, or another loss."
_REDUCTION = (
    "Leave the loss's `reduction` at its default: Keras cannot add a weight regularizer to losses "
    "that are not reduced."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a model that private training refuses or does slowly.

    Attributes:
      where: The layer, the loss or the optimizer.
      problem: The problem.
      remedy: The remedy; empty if `problem` says it.
      refused: Whether training raises an error; otherwise it is slow.
    """

    where: str
    problem: str
    remedy: str = ""
    refused: bool = True

    def __str__(self) -> str:
        kind = "refused" if self.refused else "slow"
        return f"{kind}: {self.where}: {self.problem} {self.remedy}".rstrip()


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """Result of `validate`: everything that it found.

    Attributes:
      findings: Reasons to refuse the model, then reasons that it is slow.
      notes: Parts that were not examined.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Returns whether nothing would be refused."""
        return not any(finding.refused for finding in self.findings)

    def check(self) -> None:
        """Raises a ValueError that lists what would be refused, if there is anything."""
        refused = [str(finding) for finding in self.findings if finding.refused]
        if refused:
            raise ValueError(
                "The model cannot be trained privately as it is:\n- " + "\n- ".join(refused)
            )

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines = lines or ["Nothing would be refused, and every layer has a fast rule."]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def validate(model: tf.keras.Model, loss: Any = None, *, data: Any = None) -> ModelCheck:
    """Finds everything in a model that private training refuses or does slowly, before training.

    The training step is traced on symbolic inputs, with the engine that clips in training; no batch
    is computed. If the step is refused, the layers and the loss are traced one by one, so that all
    problems are reported together.

    Args:
      model: A model of Keras 2 that is built, or was called.
      loss: The loss, as in `model.compile`; None: that of the compiled model. Without either, only
        the layers are examined.
      data: `(x, y)`, or `tfdp.data.poisson_batches`, from which the shapes and types of targets
        are taken; None: they are guessed from the model's outputs and the loss.

    Returns:
      The findings; `print` shows them. `ok` tells whether training would start; `check()` raises an
      error if it would not.

    Raises:
      ValueError: `model` is not a model of Keras 2, or its inputs are not known.

    Example:
      >>> import tensorflow as tf, tfdp
      >>> model = tf.keras.Sequential([
      ...     tf.keras.layers.Dense(4, input_shape=[3]),
      ...     tf.keras.layers.BatchNormalization(name="bn"),
      ... ])
      >>> found = tfdp.validate(model, "mse")
      >>> found.ok, found.findings[0].where
      (False, "layer 'bn' (BatchNormalization)")
    """
    check_is_model(model)
    spec = model.save_spec()
    if spec is None:
        raise ValueError(
            "Argument `model` must be built, to be examined: call it on a batch, or give its first "
            f"layer an `input_shape`. Received: the model '{model.name}', never called."
        )
    findings = _settings(model)
    losses, weights = loss, None
    if loss is None and model.compiled_loss is not None:
        losses = model.compiled_loss._user_losses
        weights = model.compiled_loss._user_loss_weights
    with _quiet():
        padded = isinstance(data, PoissonBatches) and data.sampling.padding == FULL
        trace = _Trace(None if padded else KeyStream(domain="validate"))
        error = trace.run(lambda args, kwargs: _surrogate(trace.forward(model, args, kwargs)), spec)
        findings += _of_model(model, trace, error)
        if losses is not None and trace.outputs is not None:
            findings += _of_loss(model, trace.outputs, losses, weights, data)
    findings.sort(key=lambda finding: not finding.refused)
    return ModelCheck(tuple(dict.fromkeys(findings)), _notes(model, losses))


def check_is_model(model: Any) -> None:
    """Raises a ValueError if `model` is not a model of Keras 2."""
    if not isinstance(model, tf.keras.Model):
        module = type(model).__module__
        keras_3 = module.startswith("keras.") or any(
            base.__module__.startswith("keras.src") for base in type(model).__mro__
        )
        raise ValueError(
            "Argument `model` must be a model of Keras 2, which `import tfdp` makes `tf.keras`. "
            f"Received: {type(model).__name__} of {module}."
            + (" Models of Keras 3 (`import keras`) have `tfdp.keras3`." if keras_3 else "")
        )


class _Trace:
    """One tracing of a step by the engine, and what is known when it fails."""

    def __init__(self, streams: KeyStream | None = None) -> None:
        self.kept: list[tf.Variable | None] = []
        self.outputs: Any = None
        self.variables: list[tf.Variable] = []
        self.engine = OnePassEngine(1.0)
        self.engine.streams = streams

    def forward(self, model: Any, args: Any, kwargs: Any) -> Any:
        """Calls a model in training mode; keeps the specs of its outputs."""
        outputs = model(*args, **{**kwargs, "training": True})
        self.variables = model.trainable_variables
        self.outputs = tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), outputs
        )
        return outputs

    def run(self, loss: Callable[..., tf.Tensor | None], spec: Any) -> Exception | None:
        """Traces the clipped sum of a loss; returns the error that ends it."""

        def step(*arguments: Any) -> None:
            value = loss(*arguments)
            if value is None:
                return
            data = reading.data_of(value)[1]
            self.kept = list(batch_state.kept(value.graph, lambda t: reading.depends_on(t, data)))
            step_check.check_step(value)
            self.engine.clipped_sum(value, self.variables, tf.zeros([2], tf.int64))

        try:
            tf.function(step, autograph=False).get_concrete_function(*spec)
        except Exception as error:  # Also of layers and losses, of whatever type.
            return error
        return None

    def slow(self, where: Callable[[str], str], whole: str = "the model") -> list[Finding]:
        """Finds the variables whose gradients are clipped by the slower engine."""
        with contextlib.suppress(ValueError):  # Nothing was clipped.
            report = self.engine.report()
            if report.fallback:
                return [Finding(whole, report.fallback, _SLOW, refused=False)]
            return [
                Finding(where(entry.variable), entry.how + ".", _SLOW, refused=False)
                for entry in report.entries
                if not entry.fast
            ]
        return []


def _of_model(model: Any, trace: _Trace, error: Exception | None) -> list[Finding]:
    owners = _owners(model)
    by_name = {v.name: layer for v, layer in owners.values()}

    def where(variable: str) -> str:
        return f"variable '{variable}' of {_named(by_name.get(variable, model))}"

    if error is None:
        return trace.slow(where)
    findings, stateful = [], set()
    for variable in trace.kept:
        layer = owners.get(id(variable), (None, None))[1]
        stateful.add(id(layer))
        findings.append(_of_statistic(variable, layer))
    for layer in _units(model):
        inside = {id(sub) for sub in layer._flatten_layers()}
        if not inside & stateful:
            findings += _of_layer(layer, where)
    if not any(finding.refused for finding in findings):
        findings.append(Finding("the model", _text(error)))
    return findings


def _of_statistic(variable: tf.Variable | None, layer: Any) -> Finding:
    if layer is None:
        return Finding("the model", str(batch_state.keeps_statistic(variable)))
    remedy = _NO_STATISTIC
    if isinstance(layer, BATCH_NORMALIZATION):
        remedy = _REPLACE
    elif getattr(layer, "stateful", False):
        remedy = _STATELESS
    return Finding(_named(layer), "it keeps a statistic of the batch, or a state.", remedy)


def _of_layer(layer: Any, where: Callable[[str], str]) -> list[Finding]:
    """Examines a layer by itself, with the inputs that it had in the model."""
    spec = layer._get_save_spec(inputs_only=False) if layer._saved_model_inputs_spec else None
    if spec is None:
        return []
    trace = _Trace()
    scale = tf.Variable(1.0, trainable=True)  # Layers without weights need a gradient, too.

    def loss(args: Any, kwargs: Any) -> tf.Tensor | None:
        def scaled(x: Any) -> Any:
            floats = tf.is_tensor(x) and x.dtype.is_floating
            return x * tf.cast(scale, x.dtype) if floats else x

        args = tf.nest.map_structure(scaled, args)
        if layer._expects_training_arg:
            kwargs = {**kwargs, "training": True}
        outputs = layer(*args, **kwargs)
        trace.variables = [*layer.trainable_variables, scale]
        return _surrogate(outputs)

    error = trace.run(loss, spec)
    if error is not None:
        return [Finding(_named(layer), _text(error))]
    return trace.slow(where, _named(layer))


def _of_loss(model: Any, outputs: Any, losses: Any, weights: Any, data: Any) -> list[Finding]:
    """Examines a loss by itself, with outputs like the model's."""
    container = _container(model, losses, weights)
    scale = tf.Variable(1.0, trainable=True)
    regularizers = [w.name for layer in model._flatten_layers() for w in _regularized(layer)]
    errors = []
    for targets in _targets(outputs, losses, data):
        trace = _Trace()
        trace.variables = [scale]

        def loss(y: Any, predictions: Any) -> tf.Tensor:
            predictions = tf.nest.map_structure(lambda p: p * tf.cast(scale, p.dtype), predictions)
            public = [tf.reduce_sum(scale**2)] if regularizers else None
            return container(y, predictions, regularization_losses=public)

        error = trace.run(loss, (targets, outputs))
        if error is None:
            return []
        errors.append(error)
        misfit = None if data is None else _misfit(container, targets, outputs)
        if misfit is not None:
            return [Finding("the loss", misfit, _FIT)]
        if _is_ours(error):
            break
    error = next(filter(_is_ours, errors), errors[0])
    remedy = _REDUCTION if "equal rank" in str(error) and regularizers else ""
    return [Finding("the loss", _text(error), remedy)]


def _misfit(container: Any, targets: Any, outputs: Any) -> str | None:
    """Says why a loss cannot be computed of five rows of targets and outputs, if it cannot."""

    def of_rows(spec: Any) -> tf.TensorSpec:
        return tf.TensorSpec([5, *spec.shape[1:]], spec.dtype)

    specs = tf.nest.map_structure(of_rows, (targets, outputs))
    try:
        tf.function(container, autograph=False).get_concrete_function(*specs)
    except Exception as error:  # Of a loss, of whatever type.
        y, p = (", ".join(str(s.shape) for s in tf.nest.flatten(part)) for part in specs)
        said = _text(error).rstrip(".")
        return f"it cannot be computed of targets {y} and outputs {p}: {said}."
    return None


def _targets(outputs: Any, losses: Any, data: Any) -> list[Any]:
    """Returns specs of the targets: those of the data, or guesses."""
    if isinstance(data, tf.data.Dataset):
        return [data.element_spec[1]]
    if data is not None:
        return [
            tf.nest.map_structure(
                lambda t: tf.TensorSpec([None, *tf.shape(t)[1:]], tf.as_dtype(t.dtype)), data[1]
            )
        ]
    like = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape, tf.float32), outputs)
    classes = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape[:-1], tf.int64), outputs)
    names = [str(getattr(x, "name", getattr(x, "__name__", x))) for x in tf.nest.flatten(losses)]
    sparse = all("sparse" in name.lower() for name in names)
    return [classes, like] if sparse else [like, classes]


def _settings(model: Any) -> list[Finding]:
    """Finds what is known without tracing."""
    findings = []
    half = [layer for layer in model._flatten_layers() if _policy(layer) == "mixed_float16"]
    if half or type(getattr(model, "optimizer", None)).__name__.startswith("LossScaleOptimizer"):
        findings.append(
            Finding(
                "the policy mixed_float16",
                "loss scaling multiplies gradients before they are clipped.",
                "Use `tf.keras.mixed_precision.set_global_policy('mixed_bfloat16')`, and build the "
                "model again.",
            )
        )
    if getattr(model, "_run_eagerly", None) or tf.config.functions_run_eagerly():
        findings.append(
            Finding("run_eagerly", "the graph of the step is not known.", "Use run_eagerly=False.")
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    sampling = getattr(getattr(model, "optimizer", None), "sampling", None)
    if sampling is not None and sampling.parts != replicas:
        findings.append(
            Finding(
                "the distribution strategy",
                f"it has {replicas} replicas, and batches are sampled of {sampling.parts} parts.",
                "Use `tfdp.data.distributed_poisson_batches(strategy, ...)`.",
            )
        )
    if not model.trainable_variables:
        findings.append(
            Finding("the model", "it has no trainable variables.", "Set `trainable = True`.")
        )
    return findings


def _notes(model: Any, losses: Any) -> tuple[str, ...]:
    notes = []
    if losses is None:
        notes.append("no loss was given, and the model is not compiled: the loss is not examined.")
    if type(model).train_step is not tf.keras.Model.train_step:
        notes.append(f"`train_step` of {type(model).__name__} is not examined, but its `call` is.")
    return tuple(notes)


def _surrogate(outputs: Any) -> tf.Tensor | None:
    """Returns a loss of each example that every output enters."""
    real = [o for o in tf.nest.flatten(outputs) if o.dtype.is_floating and o.shape.rank]
    if not real:
        return None
    squares = [tf.square(tf.cast(o, tf.float32)) for o in real]
    return tf.add_n([tf.reduce_sum(s, axis=list(range(1, s.shape.rank))) for s in squares])


def _container(model: Any, losses: Any, weights: Any) -> Any:
    """Returns the object that computes a loss in `fit`."""
    compile_utils = importlib.import_module("tf_keras.src.engine.compile_utils")
    names = getattr(model, "output_names", None)
    return compile_utils.LossesContainer(losses, weights, output_names=names)


def _units(model: Any) -> Iterator[Any]:
    """Yields the layers of a model, and of the models in it."""
    for layer in model.layers:
        if isinstance(layer, tf.keras.Model):
            yield from _units(layer)
        elif not isinstance(layer, tf.keras.layers.InputLayer):
            yield layer


def _owners(model: Any) -> dict[int, tuple[tf.Variable, Any]]:
    """Returns the layer of each variable, by the variable's id."""
    return {
        id(v): (v, layer)
        for layer in model._flatten_layers()
        for v in [*layer._trainable_weights, *layer._non_trainable_weights, *_states(layer)]
        if isinstance(v, tf.Variable)  # Vocabularies, which are tables, are among them.
    }


def _states(layer: Any) -> list[tf.Variable]:
    states = getattr(layer, "states", None)  # Of stateful recurrent layers.
    return [s for s in tf.nest.flatten(states) if isinstance(s, tf.Variable)]


def _regularized(layer: Any) -> list[tf.Variable]:
    kinds = ("kernel_regularizer", "bias_regularizer", "embeddings_regularizer")
    return layer.trainable_weights if any(getattr(layer, k, None) for k in kinds) else []


def _policy(layer: Any) -> str:
    return getattr(getattr(layer, "_dtype_policy", None), "name", "")


def _named(layer: Any) -> str:
    if isinstance(layer, tf.keras.Model):
        return f"model '{layer.name}' ({type(layer).__name__})"
    return f"layer '{layer.name}' ({type(layer).__name__})"


def _is_ours(error: Exception) -> bool:
    """Returns whether an error is raised by the library, and not by Keras or TensorFlow."""
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module.startswith("tfdp.")


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if _is_ours(error):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out warnings that are findings already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowClippingWarning)
        yield
