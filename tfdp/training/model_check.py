"""Check of a model, for every Keras: all that private training refuses or does slowly."""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdp.accounting.sampling import FULL, PoissonSampling
from tfdp.base.random.key_streams import KeyStream
from tfdp.base.user_warnings import said_by_keras
from tfdp.base.validation import using
from tfdp.clipping import step_check
from tfdp.clipping.loss_graph import batch_state, loss_reader
from tfdp.clipping.one_pass.one_pass_engine import OnePassEngine
from tfdp.clipping.report import SlowClippingWarning
from tfdp.data import tasks
from tfdp.data.batches import PoissonBatches
from tfdp.data.elements import parts_of
from tfdp.data.poisson import check_real
from tfdp.step.private_step import PrivateStep
from tfdp.training import front_end
from tfdp.training.findings import Finding, ModelCheck

_REPLACE = "Use `model = {}.replace_batch_normalization(model)`."
_STATELESS = "Use `stateful=False`."
_NO_STATISTIC = "Normalize within the example: GroupNormalization, LayerNormalization."
_SLOW = (
    "It trains, slower: use layers of `{}.layers` with known rules, or add a rule with "
    "`tfdp.clipping.register_op_gradients`."
)
_NO_STEP = (
    "it takes no step with the model's `optimizer`, which must be private: give `compile` the "
    "optimizer that the step uses as `optimizer`."
)
_FIT = "Give targets of the shape that the loss takes, or another loss."
_NUMBERS = "Number the classes, from 0: `[classes.index(label) for label in labels]`."
_REDUCTION = (
    "Leave the loss's `reduction` at its default: Keras cannot add a weight regularizer to losses "
    "that are not reduced."
)


_TEXTS = "it cannot be computed of inputs that are texts."
_VECTORIZE = "Give numbers, or begin the model with a layer that takes texts (`TextVectorization`)."
_UNTRAINED = Finding(
    "the model",
    "it has no trainable variables.",
    "Set `trainable = True`. If `enable_lora` of a backbone found no layers, name them: "
    "`enable_lora(rank, target_layer_names=[...])`.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontEnd(front_end.FrontEnd):
    """Parts of `validate` that differ between Keras 2 and Keras 3.

    Attributes:
      inputs: Returns the specs of the arguments and keyword arguments of a model; gets the spec of
        the data, or None. None, if they are not known.
      compiled_loss: Returns the losses and their weights of a compiled model; None for others.
      loss: Returns a function of targets, predictions and a regularizer or None: the loss that
        `fit` computes. Gets the model, its losses and their weights.
      own_variables: Returns the variables that belong to a layer itself.
      trainable_variables: Returns the variables of a layer that are trained.
      watching: Context in which a model is called, of a function that returns the specs of the
        arguments and keyword arguments that a layer had in training; None, if it was not called.
      settings: Finds what else is known without tracing.
      swap_optimizer: Gives a model another optimizer, or none if it is None.
      sgd: The class DPSGD.
      autograph: Whether AutoGraph converts the training steps of models.
    """

    inputs: Callable[[Any, Any], Any]
    compiled_loss: Callable[[Any], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], Callable[[Any, Any, Any], tf.Tensor]]
    own_variables: Callable[[Any], list[tf.Variable]]
    trainable_variables: Callable[[Any], list[tf.Variable]]
    watching: Callable[[Any], AbstractContextManager[Callable[[Any], Any]]]
    settings: Callable[[Any], list[Finding]]
    swap_optimizer: Callable[[Any, Any], None]
    sgd: type
    autograph: bool


def has_own_step(keras: Any, model: Any) -> bool:
    """Returns whether a model computes its training step or its loss itself.

    Models of tfdp are not among them: their parts are examined as those of other models.

    Args:
      keras: The package, `tf.keras` or `keras`.
      model: The model.
    """
    own = (getattr(type(model), name) for name in _own_parts(keras, model))
    return any(not part.__module__.startswith("tfdp.") for part in own)


def _own_parts(keras: Any, model: Any) -> list[str]:
    """Returns the names of the parts of Keras's training step that a model has itself."""
    kind, names = type(model), ("train_step", "compute_loss")
    return [name for name in names if getattr(kind, name) is not getattr(keras.Model, name)]


def check(
    keras: FrontEnd, model: Any, loss: Any, data: Any, *, has_no_loss: bool = False
) -> ModelCheck:
    """Does what `validate` of each Keras says.

    Args:
      keras: What differs between them.
      model: See there.
      loss: See there.
      data: See there.
      has_no_loss: Whether the model is to be trained without a loss of `compile`.
    """
    given = data is not None and not isinstance(data, PoissonBatches)
    if given and not isinstance(data, tf.data.Dataset) and tasks.preprocessor_of(model) is not None:
        data = tasks.first_prepared(model, data)
    if given:
        with using("data", data, "`(x, y)` of arrays, a `tf.data.Dataset`, or Poisson batches"):
            specs = [_spec_of(data, 0), _spec_of(data, 1)]
        check_real([spec for spec in specs if spec is not None])
    if data is not None and (has_no_loss or has_own_step(keras.package, model)):
        with _quiet():
            return _Check(keras, model).run_step(loss, data)
    spec = keras.inputs(model, None if data is None else _spec_of(data, 0))
    if spec is None:
        raise ValueError(
            "Argument `model` must be built, to be examined: call it on a batch, or let it begin "
            f"with an `{keras.name}.Input`. Received: the model '{model.name}', never called."
        )
    with _quiet():
        return _Check(keras, model).run(spec, loss, data)


class _Check:
    """The check of one model."""

    def __init__(self, keras: FrontEnd, model: Any) -> None:
        self._keras = keras
        self._model = model
        self._slow = _SLOW.format(keras.name)
        self._outputs: Any = None
        self._bytes_per_row: int | None = None

    def run(self, spec: Any, loss: Any, data: Any) -> ModelCheck:
        """Examines settings, layers and loss."""
        findings = [*self._settings(), *self._keras.settings(self._model)]
        if not self._model.trainable_variables:
            findings.append(_UNTRAINED)
        losses, weights = self._keras.compiled_loss(self._model) if loss is None else (loss, None)
        findings += self._of_model(spec, data)
        if losses is not None and self._outputs is not None:
            findings += self._of_loss(losses, weights, data)
        findings.sort(key=lambda finding: not finding.refused)
        return self._result(findings, self._notes(losses))

    def run_step(self, loss: Any, data: Any) -> ModelCheck:
        """Examines settings and the training step that the model has itself."""
        settings = [*self._settings(), *self._keras.settings(self._model)]
        findings = self._of_step(loss, data)
        if not self._model.trainable_variables:  # The first step may make them.
            findings.append(_UNTRAINED)
        findings = sorted([*settings, *findings], key=lambda finding: not finding.refused)
        return self._result(findings)

    def _result(self, findings: list[Finding], notes: tuple[str, ...] = ()) -> ModelCheck:
        return ModelCheck(tuple(dict.fromkeys(findings)), notes, self._bytes_per_row)

    def _of_step(self, loss: Any, data: Any) -> list[Finding]:
        model = self._model
        sampling = data.sampling if isinstance(data, PoissonBatches) else None
        probe = self._probe(sampling)
        trace = _StepTrace(probe, self._keras.autograph)
        with self._keras.watching(model) as inputs_of, self._trained_by(probe, loss):
            error = trace.run(model.train_step, _element_spec(data))
        if error is None:
            self._bytes_per_row = getattr(trace.engine, "bytes_per_row", None)
            return trace.slow(self._where(self._owners()), "the model", self._slow)
        return self._explain(error, trace, inputs_of, self._step_name())

    def _step_name(self) -> str:
        own = _own_parts(self._keras.package, self._model)
        return f"`{own[0]}` of {type(self._model).__name__}" if own else "the training step"

    def _probe(self, sampling: PoissonSampling | None) -> Any:
        """Returns a private optimizer that stands for the one that the model is trained with."""
        optimizer: Any = getattr(self._model, "optimizer", None)
        kind: Any = type(optimizer)
        if issubclass(kind, PrivateStep):
            return kind.from_config(optimizer.get_config())
        arguments = {"expected_batch_size": 1} if sampling is None else {"sampling": sampling}
        return self._keras.sgd(1.0, 1.0, **arguments)

    @contextlib.contextmanager
    def _trained_by(self, optimizer: Any, loss: Any) -> Iterator[None]:
        """Compiles a model with an optimizer for a while; a loss of None is that which it has."""
        model, attributes = self._model, vars(self._model)
        before, had = dict(attributes), getattr(model, "optimizer", None)
        # Only the optimizer is replaced in a model that was compiled by a `compile` of its own.
        compiles = type(model).compile is self._keras.package.Model.compile
        is_compiled = False
        if compiles and (loss is not None or had is None):
            model.compile(optimizer=optimizer, loss=loss)
            is_compiled = True
        elif had is None:
            given = {"optimizer": optimizer, **({} if loss is None else {"loss": loss})}
            with contextlib.suppress(Exception):  # `compile` may take other arguments.
                inspect.signature(model.compile).bind(**given)
                model.compile(**given)
                is_compiled = True
        changed = {name for name, value in attributes.items() if before.get(name) is not value}
        if not is_compiled:
            self._keras.swap_optimizer(model, optimizer)
        try:
            yield
        finally:
            self._keras.swap_optimizer(model, had)
            for name in changed - {"optimizer"}:
                if name in before:
                    attributes[name] = before[name]
                else:
                    attributes.pop(name, None)

    def _owners(self) -> dict[int, tuple[tf.Variable, Any]]:
        """Returns all variables, by identity, and the layers to which they belong."""
        return {
            id(variable): (variable, layer)
            for layer in self._model._flatten_layers()
            for variable in self._keras.own_variables(layer)
        }

    def _where(self, owners: dict[int, tuple[tf.Variable, Any]]) -> Callable[[str], str]:
        by_name = {v.name: layer for v, layer in owners.values()}

        def where(variable: str) -> str:
            return f"variable '{variable}' of {self._named(by_name.get(variable, self._model))}"

        return where

    def _of_model(self, spec: Any, data: Any) -> list[Finding]:
        padded = isinstance(data, PoissonBatches) and data.sampling.padding == FULL
        trace = _Trace(None if padded else KeyStream(domain="validate"))
        with self._keras.watching(self._model) as inputs_of:
            error = trace.run(lambda args, kwargs: self._forward(trace, args, kwargs), spec)
        if error is None:
            given = None if data is None else _spec_of(data, 0)
            if given is not None and casts_texts(self._model, given):
                return [Finding("the model", _TEXTS, _VECTORIZE)]
            self._bytes_per_row = trace.engine.bytes_per_row
            return trace.slow(self._where(self._owners()), "the model", self._slow)
        return self._explain(error, trace, inputs_of, "the model")

    def _explain(
        self, error: Exception, trace: "_Trace", inputs_of: Callable[[Any], Any], whole: str
    ) -> list[Finding]:
        """Finds the layers because of which a step is refused."""
        owners = self._owners()
        where = self._where(owners)
        findings, stateful = [], set()
        for variable in trace.kept:
            layer = owners.get(id(variable), (None, None))[1]
            stateful.add(id(layer))
            findings.append(self._of_statistic(variable, layer))
        for layer in self._units(self._model):
            inside = {id(sub) for sub in layer._flatten_layers()}
            if not inside & stateful:
                findings += self._of_layer(layer, inputs_of(layer), where)
        if not any(finding.refused for finding in findings):
            findings.append(Finding(whole, _text(error)))
        return findings

    def _forward(self, trace: "_Trace", args: Any, kwargs: Any) -> tf.Tensor | None:
        """Calls the model in training mode; keeps the specs of its outputs."""
        outputs = self._model(*args, **{**kwargs, "training": True})
        trace.variables = self._keras.trainable_variables(self._model)
        self._outputs = tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), outputs
        )
        return _surrogate(outputs)

    def _of_statistic(self, variable: tf.Variable | None, layer: Any) -> Finding:
        if layer is None:
            return Finding("the model", str(batch_state.keeps_statistic(variable)))
        remedy = _NO_STATISTIC
        if isinstance(layer, self._keras.normalizations):
            remedy = _REPLACE.format(self._keras.part)
        elif getattr(layer, "stateful", False):
            remedy = _STATELESS
        return Finding(self._named(layer), "it keeps a statistic of the batch, or a state.", remedy)

    def _of_layer(self, layer: Any, spec: Any, where: Callable[[str], str]) -> list[Finding]:
        """Examines a layer by itself, with the inputs that it had in the model."""
        if spec is None:
            return []
        trace = _Trace()
        scale = tf.Variable(1.0, trainable=True)  # Layers without weights need a gradient, too.

        def loss(args: Any, kwargs: Any) -> tf.Tensor | None:
            def scaled(x: Any) -> Any:
                floats = tf.is_tensor(x) and x.dtype.is_floating
                return x * tf.cast(scale, x.dtype) if floats else x

            outputs = layer(*tf.nest.map_structure(scaled, args), **kwargs)
            trace.variables = [*self._keras.trainable_variables(layer), scale]
            return _surrogate(outputs)

        error = trace.run(loss, spec)
        if error is not None:
            return [Finding(self._named(layer), _text(error))]
        return trace.slow(where, self._named(layer), self._slow)

    def _of_loss(self, losses: Any, weights: Any, data: Any) -> list[Finding]:
        """Examines a loss by itself, with outputs like the model's."""
        if data is not None and _spec_of(data, 1) is None:
            return self._without_labels()
        compute = self._keras.loss(self._model, losses, weights)
        scale = tf.Variable(1.0, trainable=True)
        regularized = any(map(_is_regularized, self._model._flatten_layers()))
        errors = []
        for targets in _targets(self._outputs, losses, data):
            trace = _Trace()
            trace.variables = [scale]

            def loss(y: Any, predictions: Any) -> tf.Tensor:
                predictions = tf.nest.map_structure(
                    lambda p: p * tf.cast(scale, p.dtype), predictions
                )
                return compute(y, predictions, tf.reduce_sum(scale**2) if regularized else None)

            error = trace.run(loss, (targets, self._outputs))
            misfit = None
            if data is not None and (error is not None or _are_texts(targets)):
                misfit = _misfit(compute, targets, self._outputs)
            if misfit is not None:
                return [Finding("the loss", misfit, _NUMBERS if _are_texts(targets) else _FIT)]
            if error is None:
                return []
            errors.append(error)
            if _is_ours(error):
                break
        error = next(filter(_is_ours, errors), errors[0])
        remedy = _REDUCTION if "equal rank" in str(error) and regularized else ""
        return [Finding("the loss", _text(error), remedy)]

    def _without_labels(self) -> list[Finding]:
        """Finds that data have no labels where Keras's own training step needs them."""
        if _own_parts(self._keras.package, self._model):
            return []
        remedy = "Give data (x, y); of examples that are dicts, also `features` and `label`."
        return [Finding("the loss", "it needs labels, and the data have none.", remedy)]

    def _settings(self) -> list[Finding]:
        """Finds what is known without tracing."""
        model, findings = self._model, []
        half = [layer for layer in model._flatten_layers() if _policy(layer) == "mixed_float16"]
        if half or type(getattr(model, "optimizer", None)).__name__.startswith("LossScale"):
            findings.append(
                Finding(
                    "the policy mixed_float16",
                    "loss scaling multiplies gradients before they are clipped.",
                    f"Use `{self._keras.name}.mixed_precision.set_global_policy('mixed_bfloat16')`"
                    ", and build the model again.",
                )
            )
        if model.run_eagerly or tf.config.functions_run_eagerly():
            findings.append(
                Finding(
                    "run_eagerly", "the graph of the step is not known.", "Use run_eagerly=False."
                )
            )
        return findings

    def _notes(self, losses: Any) -> tuple[str, ...]:
        notes = []
        if losses is None:
            notes.append(
                "no loss was given, and the model is not compiled: the loss is not examined."
            )
        kind = type(self._model)
        if kind.train_step is not self._keras.package.Model.train_step:
            notes.append(
                f"`train_step` of {kind.__name__} is not examined, but its `call` is: give `data`."
            )
        return tuple(notes)

    def _units(self, model: Any) -> Iterator[Any]:
        """Yields the layers of a model, and of the models in it."""
        for layer in model.layers:
            if isinstance(layer, self._keras.package.Model):
                yield from self._units(layer)
            elif not isinstance(layer, self._keras.package.layers.InputLayer):
                yield layer

    def _named(self, layer: Any) -> str:
        kind = "model" if isinstance(layer, self._keras.package.Model) else "layer"
        return f"{kind} '{layer.name}' ({type(layer).__name__})"


class _Trace:
    """One tracing of a step by the engine, and what is known when it fails."""

    def __init__(self, streams: KeyStream | None = None) -> None:
        self.kept: list[tf.Variable | None] = []
        self.variables: list[tf.Variable] = []
        self.engine = OnePassEngine(1.0)
        self.engine.streams = streams

    def run(self, loss: Callable[..., tf.Tensor | None], spec: Any) -> Exception | None:
        """Traces the clipped sum of a loss; returns the error that ends it."""

        def step(*arguments: Any) -> None:
            value = loss(*arguments)
            if value is None:
                return
            self._note_kept(value)
            step_check.check_step(value)
            self.engine.clipped_sum(value, self.variables, tf.zeros([2], tf.int64))

        try:
            tf.function(step, autograph=False).get_concrete_function(*spec)
        except Exception as error:  # Layers and losses may raise any type.
            return error
        return None

    def _note_kept(self, loss: tf.Tensor) -> None:
        data = loss_reader.data_of(loss)[1]
        self.kept = list(batch_state.kept(loss.graph, lambda t: loss_reader.depends_on(t, data)))

    def slow(self, where: Callable[[str], str], whole: str, remedy: str) -> list[Finding]:
        """Finds the variables whose gradients are clipped by the slower engine."""
        with contextlib.suppress(ValueError):  # Nothing was clipped.
            report = self.engine.report()
            if report.fallback:
                return [Finding(whole, report.fallback, remedy, refused=False)]
            return [
                Finding(where(entry.variable), entry.how + ".", remedy, refused=False)
                for entry in report.entries
                if not entry.fast
            ]
        return []


class _StepTrace(_Trace):
    """One tracing of the training step that a model has itself, with a private optimizer.

    Args:
      optimizer: The optimizer, whose steps are watched.
      autograph: Whether AutoGraph converts the step.
    """

    def __init__(self, optimizer: Any, autograph: bool) -> None:
        super().__init__()
        self.engine = optimizer._clipping
        self._optimizer, self._autograph, self._steps = optimizer, autograph, 0

    def run(self, step: Callable[..., Any], spec: Any) -> Exception | None:
        """Traces the step; returns the error that ends it."""
        clip = self._optimizer._clipped_step

        def watched(loss: Any, *args: Any, **kwargs: Any) -> Any:
            loss = loss() if callable(loss) else loss
            self._steps += 1
            if tf.is_tensor(loss):
                self._note_kept(loss)
            return clip(loss, *args, **kwargs)

        self._optimizer._clipped_step = watched
        if not self._autograph:
            step = tf.autograph.experimental.do_not_convert(step)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tf.function(step).get_concrete_function(spec)
            if not self._steps:
                raise ValueError(_NO_STEP)
        except Exception as error:  # The model may raise any type.
            return error
        return None


def _element_spec(data: Any) -> Any:
    """Returns the spec of what a training step gets."""
    if isinstance(data, tf.data.Dataset):
        return data.element_spec

    def spec(array: Any) -> tf.TensorSpec:
        dtype = tf.as_dtype(array.dtype)  # As Keras has it: NumPy's default is float64.
        dtype = tf.float32 if dtype == tf.float64 else dtype
        return tf.TensorSpec([None, *tf.shape(array)[1:]], dtype)

    return tf.nest.map_structure(spec, data)


def _spec_of(data: Any, index: int) -> Any:
    """Returns the specs of the inputs, 0, or of the targets, 1, of data; None: there are none."""
    is_dataset = isinstance(data, tf.data.Dataset)
    elements = data.element_spec if is_dataset else data
    parts = tuple(elements) if isinstance(elements, list) else parts_of(elements)
    if index >= len(parts):
        return None
    if is_dataset:
        return parts[index]
    return tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *tf.shape(t)[1:]], tf.as_dtype(t.dtype)), parts[index]
    )


def _misfit(compute: Callable[..., tf.Tensor], targets: Any, outputs: Any) -> str | None:
    """Says why a loss cannot be computed of five rows of targets and outputs, if it cannot."""

    def of_rows(spec: Any) -> tf.TensorSpec:
        return tf.TensorSpec([5, *spec.shape[1:]], spec.dtype)

    specs = tf.nest.map_structure(of_rows, (targets, outputs))
    traced = tf.function(lambda y, p: compute(y, p, None), autograph=False)
    try:
        loss = traced.get_concrete_function(*specs)
        if _are_texts(targets):  # Tracing casts them to numbers; running does not.
            loss(*tf.nest.map_structure(_of_zeros, specs))
    except Exception as error:  # A loss may raise any type.
        if _are_texts(targets):
            return "it cannot be computed of targets that are texts."
        y, p = (", ".join(str(s.shape) for s in tf.nest.flatten(part)) for part in specs)
        said = _text(error).rstrip(".")
        return f"it cannot be computed of targets {y} and outputs {p}: {said}."
    return None


def _are_texts(targets: Any) -> bool:
    return any(spec.dtype == tf.string for spec in tf.nest.flatten(targets))


def casts_texts(model: Any, inputs: Any) -> bool:
    """Returns whether a model casts its inputs to numbers, and they are texts.

    Tracing casts texts, running does not: the model is called on a row of texts. Other errors say
    nothing of the user's texts: the row holds none of them.

    Args:
      model: A model of Keras.
      inputs: Specs of its inputs.
    """
    if not _are_texts(inputs):
        return False
    try:
        model(tf.nest.map_structure(_of_zeros, inputs))
    except tf.errors.UnimplementedError:  # There is no cast of texts.
        return True
    except Exception:  # Layers may raise any type.
        return False
    return False


def _of_zeros(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [size or 1 for size in spec.shape]
    return tf.fill(shape, "0") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _targets(outputs: Any, losses: Any, data: Any) -> list[Any]:
    """Returns specs of the targets: those of the data, or guesses."""
    if data is not None:
        return [_spec_of(data, 1)]
    like = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape, tf.float32), outputs)
    classes = tf.nest.map_structure(lambda o: tf.TensorSpec(o.shape[:-1], tf.int64), outputs)
    names = [str(getattr(x, "name", getattr(x, "__name__", x))) for x in tf.nest.flatten(losses)]
    sparse = all("sparse" in name.lower() for name in names)
    return [classes, like] if sparse else [like, classes]


def _surrogate(outputs: Any) -> tf.Tensor | None:
    """Returns a loss of each example that every output enters."""
    real = [o for o in tf.nest.flatten(outputs) if o.dtype.is_floating and o.shape.rank]
    if not real:
        return None
    squares = [tf.square(tf.cast(o, tf.float32)) for o in real]
    return tf.add_n([tf.reduce_sum(s, axis=list(range(1, s.shape.rank))) for s in squares])


def _is_regularized(layer: Any) -> bool:
    kinds = ("kernel_regularizer", "bias_regularizer", "embeddings_regularizer")
    return bool(layer.trainable_weights) and any(getattr(layer, k, None) for k in kinds)


def _policy(layer: Any) -> str:
    return getattr(getattr(layer, "dtype_policy", None), "name", "")


def _is_ours(error: Exception) -> bool:
    """Returns whether an error is raised by the library, and not by Keras or TensorFlow."""
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module.startswith("tfdp.")


def _text(error: Exception) -> str:
    converted = getattr(error, "ag_error_metadata", None)  # Set if AutoGraph converted the code.
    if converted is not None:
        said = " ".join(converted.cause_message.split())
        return said.removeprefix("ValueError: ").removeprefix("RuntimeError: ")
    lines = said_by_keras(error).splitlines()
    if _is_ours(error):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out warnings that are findings already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowClippingWarning)
        yield


def replicas(model: Any) -> list[Finding]:
    """Finds a number of replicas that is not that of the parts that are sampled."""
    count = model.distribute_strategy.num_replicas_in_sync
    sampling = getattr(getattr(model, "optimizer", None), "sampling", None)
    if sampling is None or sampling.parts == count:
        return []
    return [
        Finding(
            "the distribution strategy",
            f"it has {count} replicas, and batches are sampled of {sampling.parts} parts.",
            "Use `tfdp.data.distributed_poisson_batches(strategy, ...)`.",
        )
    ]
