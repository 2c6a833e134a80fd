"""Private parts of TensorFlow, Keras and TensorFlow Privacy that tfdp uses, and their guards.

A release may rename them. `INDEX` has all of them (`tools/private_apis.py` finds where they are
used, and a test compares). What happens without one is one of three:

- `IMPORT`: a front end is not imported, and the error names it and the versions that have it.
- `USE`: an error where it is used; nothing else changes.
- a sentence: what is done without it. What tfdp replaces is replaced by `replace`. If files lose
  the ledger without it, which nobody would notice, `warn_of_missing` says so.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

from tfdp.base.user_warnings import warn_user

IMPORT, USE = "import", "use"
_REPLACED = "_tfdp_replaced"
_SUPPORTED = "TensorFlow 2.15 to 2.21, Keras 3.0 to 3.15 and tf-keras 2.15 to 2.21"
_PACKAGES = ("tensorflow", "keras", "tf-keras")
# Versions that tfdp is tested with: from the first, and before the second.
_RANGES = {"tensorflow": ((2, 15), (2, 22)), "keras": ((2, 15), (3, 16))}

_FILES = (
    "Files of models do not hold what their weights have cost. Keep the ledger by hand "
    "(`model.optimizer.ledger.to_dict()`), and give it as `prior` where the weights are used again."
)
_NAMES = "Names such as `dense_9` in it tell how many models were built: name its layers."
_UNKNOWN = "It is taken as not there; what depends on it is refused or traced anew."


@dataclasses.dataclass(frozen=True)
class PrivateApi:
    """A private part of another package.

    Attributes:
      name: Its full name; or, of an attribute of objects, a dot and the attribute.
      why: What tfdp does with it.
      without: What happens without it: `IMPORT`, `USE`, or a sentence.
    """

    name: str
    why: str
    without: str = USE


_TF, _PY = "tensorflow", "tensorflow.python"
INDEX = tuple(
    PrivateApi(*entry)
    for entry in (
        # TensorFlow: graphs.
        ("._add_control_input", "A step waits for its count."),
        ("._get_function", "Functions that a graph calls are read."),
        ("._functions", "Functions that a transform calls are read."),
        ("._gradient_function", "One backward pass keeps what weights' gradients follow from."),
        ("._handle_data", "The type of a captured variable, in a graph that stands in for it."),
        ("._is_function", "Functions that a graph calls are read."),
        ("._update_input", "Operations of the copied loss get other values: clamped, keyed."),
        ("._variable_creator_stack", "Traces that TensorFlow discards are recognized.", _UNKNOWN),
        ("._watched_variables", "Variables that a function reads are found."),
        ("._add_scope_exit_callback", "The finished step is checked."),
        (f"{_PY}.framework.func_graph.FuncGraph", "Graphs of functions.", IMPORT),
        ("tf.__internal__.FuncGraph", "Graphs of functions.", IMPORT),
        (
            f"{_PY}.framework.function_def_to_graph.function_def_to_graph",
            "Functions of loaded models are read.",
            IMPORT,
        ),
        (f"{_PY}.framework.op_def_registry.get", "Whether an operation has a state.", IMPORT),
        (
            f"{_PY}.framework.ops.get_gradient_function",
            "Own gradients are taken over into copies of a graph.",
            IMPORT,
        ),
        (
            f"{_PY}.ops.control_flow_util.GraphOrParentsInXlaContext",
            "Whether a step is compiled by XLA.",
            IMPORT,
        ),
        *(
            (f"{_PY}.ops.control_flow_v2_func_graphs.{name}", "Branches and loops.", IMPORT)
            for name in ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")
        ),
        (
            f"{_PY}.ops.handle_data_util.get_resource_handle_data",
            "The number of rows of a table that is looked up.",
            IMPORT,
        ),
        *(
            (f"{_PY}.ops.parallel_for.pfor.{name}", "Vectorized gradients.", IMPORT)
            for name in ("_fallback_converter", "_pfor_converter_registry", "wrap")
        ),
        (f"{_PY}.eager.context.context", "Functions that are defined already.", IMPORT),
        (
            f"{_TF}.compiler.tf2xla.ops.gen_xla_ops.xla_variadic_reduce_v2",
            "One loop over a sum, compiled by XLA.",
            IMPORT,
        ),
        (
            f"{_PY}.autograph.core.config.CONVERSION_RULES",
            "AutoGraph leaves tfdp's functions as they are.",
            IMPORT,
        ),
        # TensorFlow: variables and files.
        (
            f"{_PY}.ops.resource_variable_ops.BaseResourceVariable",
            "What reads and writes a variable notes its lineage.",
            IMPORT,
        ),
        (
            f"{_PY}.ops.resource_variable_ops.ResourceVariable",
            "Variables of one process, whatever the strategy.",
            IMPORT,
        ),
        ("._distributed_container", "Mirrored variables are kept private as one.", USE),
        ("._parent_trackable", "The owner of a table or of a variable, for messages.", USE),
        ("._unique_id", "A variable's name that no other has.", USE),
        (
            f"{_PY}.checkpoint.checkpoint.TrackableSaver._gather_serialized_tensors",
            "Checkpoints hold what weights have cost.",
            _FILES,
        ),
        (
            f"{_PY}.training.py_checkpoint_reader.NewCheckpointReader",
            "What checkpoints hold of it is read.",
            _FILES,
        ),
        # TensorFlow: data.
        (
            f"{_PY}.data.ops.iterator_ops.OwnedIterator",
            "Batches of any size, one trace; iterators that are prepared when they are used.",
            IMPORT,
        ),
        (
            f"{_PY}.data.ops.multi_device_iterator_ops._create_device_dataset",
            "Draws are not tuned on several devices.",
            "They are tuned, which takes longer at first.",
        ),
        (
            f"{_PY}.distribute.input_lib.DistributedDatasetsFromFunction",
            "Batches of replicas.",
            IMPORT,
        ),
        ("._variant_tensor", "A dataset that refuses changes wraps another.", USE),
        # Keras 3.
        (
            "keras.src.trainers.trainer.Trainer._resolve_auto_jit_compile",
            "Steps on batches without padding are not compiled by XLA.",
            "They are refused where Keras compiles them: write `jit_compile=False`.",
        ),
        (
            "keras.src.backend.tensorflow.trainer.TensorFlowTrainer._maybe_symbolic_build",
            "Models are built from the specs of distributed batches.",
            "Build models before they are trained under a distribution strategy.",
        ),
        *(
            (f"keras.src.saving.saving_lib.{name}", "Files hold what weights have cost.", _FILES)
            for name in ("_load_state", "_save_state")
        ),
        *(
            (f"keras.src.legacy.saving.legacy_h5_format.{name}", "So do `.h5` files.", _FILES)
            for name in (
                "load_weights_from_hdf5_group",
                "load_weights_from_hdf5_group_by_name",
                "save_weights_to_hdf5_group",
            )
        ),
        (
            "._all_reduce_sum_gradients",
            "Gradients are the sums of all replicas already, and are not added up again.",
            "A step on several replicas is refused.",
        ),
        ("._build_shapes_dict", "Shapes that a model was built for."),
        ("._check_variables_are_known", "Other variables than those at first are refused."),
        ("._compile_config", "Arguments of `compile` are taken over."),
        ("._compile_loss", "The loss of a compiled model."),
        ("._compile_metrics", "The metrics of a compiled model."),
        ("._distributed_dataset", "Distributed batches are recognized.", _UNKNOWN),
        ("._exclude_from_weight_decay_pattern", "Weight decay is taken over."),
        ("._flatten_layers", "All layers of a model."),
        ("._get_variable_index", "Slots of own optimizers."),
        ("._inner_optimizers", "Optimizers inside of an optimizer."),
        ("._inputs_struct", "Specs of a model's inputs.", _UNKNOWN),
        ("._loss_tracker", "The loss that `fit` shows."),
        ("._non_trainable_variables", "States of a layer."),
        ("._optimizer_map", "The optimizer of each variable."),
        ("._output_shape", "The shape that a BatchNormalization layer is replaced for."),
        ("._trainable_variables", "Variables of a layer or of an optimizer."),
        ("._use_weight_decay", "Weight decay is taken over."),
        ("._user_loss", "The loss that was given to `compile`."),
        ("._user_loss_weights", "Its weights."),
        ("._user_metrics", "The metrics that were given to `compile`."),
        ("._velocities", "Slots of own optimizers."),
        # Keras 2.
        *(
            (f"tf_keras.src.saving.saving_lib.{name}", "Files hold the optimizer's state.", _FILES)
            for name in ("_is_keras_trackable", "_load_state", "_save_state")
        ),
        *(
            (f"tf_keras.src.saving.legacy.hdf5_format.{name}", "So do `.h5` files.", _FILES)
            for name in (
                "load_weights_from_hdf5_group",
                "load_weights_from_hdf5_group_by_name",
                "save_weights_to_hdf5_group",
            )
        ),
        (
            "tf_keras.src.saving.legacy.saved_model.load.load",
            "The state of an optimizer is restored from a SavedModel.",
            IMPORT,
        ),
        (
            "tf_keras.src.engine.compile_utils.LossesContainer",
            "The loss of `compile`, as Keras computes it.",
            USE,
        ),
        ("._check_timing", "Keras does not log how long rejected attempts took."),
        ("._decayed_lr", "The rate of a step."),
        ("._exclude_from_weight_decay_names", "Weight decay is taken over."),
        ("._expects_training_arg", "How a layer is called."),
        ("._fallback_apply_state", "Rates of a step, as the base class has them."),
        ("._get_hyper", "Hyperparameters."),
        ("._get_save_spec", "Specs of a layer's inputs."),
        ("._hyper", "Hyperparameters."),
        ("._hypers_created", "Hyperparameters become variables once."),
        ("._is_compiled", "Whether a model is compiled."),
        ("._momentum", "Whether SGD has momentum."),
        ("._non_trainable_weights", "States of a layer."),
        ("._saved_model_inputs_spec", "Specs of a layer's inputs."),
        ("._set_save_spec", "Specs of the inputs of own models."),
        ("._steps_per_execution", "How many steps a call takes."),
        ("._track_trackable", "Averages are in checkpoints."),
        ("._trainable_weights", "Variables of a layer."),
        ("._use_locking", "Updates, as the base class makes them."),
        ("._user_losses", "The losses that were given to `compile`."),
        ("._user_weighted_metrics", "Its weighted metrics."),
        *(
            (name, "The model that `tune` returns has the names of a first one.", _NAMES)
            for name in (
                "keras.src.backend.common.global_state.get_global_attribute",
                "tf_keras.src.backend.PER_GRAPH_OBJECT_NAME_UIDS",
            )
        ),
        (
            "tf_keras.src.backend._SEED_GENERATOR.generator",
            "Runs of `tune` have weights by fresh seeds, whatever seed was set.",
            "Set no seed in Keras 2: weights that are not trained would tell the number of runs.",
        ),
        # TensorFlow Privacy and dp_accounting.
        ("._orders", "The orders of dp_accounting's RDP accountant."),
        *(
            (
                "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized."
                f"VectorizedDPKeras{name}Optimizer",
                "The classes that the optimizers for Keras 2 are subclasses of.",
                IMPORT,
            )
            for name in ("Adam", "SGD")
        ),
    )
)
_BY_NAME = {api.name: api for api in INDEX}
_missing: dict[str, PrivateApi] = {}


class PrivateApiMissingError(ImportError):
    """Error of a version of TensorFlow or Keras that lacks what tfdp cannot do without."""


def find(name: str) -> Any:
    """Returns what has the full name.

    Raises:
      AttributeError: It is not there.
      ImportError: Nor is its module.
    """
    parts = name.replace("tf.__internal__", "tensorflow.__internal__").split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[count:], found)
    raise ImportError(f"There is no module {name}.")


def check(*packages: str) -> None:
    """Checks that all of some packages is there that a front end cannot be imported without.

    Args:
      packages: Names of packages, such as "tensorflow".

    Raises:
      PrivateApiMissingError: Something is not there.
    """
    missing = []
    for api in INDEX:
        root = api.name.split(".")[0].replace("tf", "tensorflow", api.name.startswith("tf."))
        if api.without == IMPORT and root in packages:
            try:
                find(api.name)
            except (AttributeError, ImportError):
                missing.append(api.name)
    if missing:
        raise PrivateApiMissingError(
            f"tfdp needs parts of TensorFlow and Keras that are not public: those of {_SUPPORTED}. "
            f"Received: {_versions()}, without {' and '.join(missing)}. Install one of these "
            "versions, or a newer tfdp."
        )


@functools.cache
def warn_of_versions() -> None:
    """Warns, once, of a TensorFlow or Keras that tfdp is not tested with."""
    for package, (first, end) in _RANGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # Built in another way, as `tf-nightly`.
            continue
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not first <= found < end:
            warn_user(
                f"tfdp is tested with {_SUPPORTED}. Received: {_versions()}. What it promises may "
                "not hold: install one of these versions, or a newer tfdp."
            )
            return


def replace(name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replaces a function of another package by its wrapper; once, however often this is called.

    Where it is not there, nothing is done; `warn_of_missing` will say so if files lose the ledger.

    Args:
      name: Full name, one of `INDEX`.
      wrapper: Gets the function, and returns the other.
    """
    path, _, last = name.rpartition(".")
    try:
        owner = find(path)
        function = getattr(owner, last)
    except (AttributeError, ImportError):
        if name in _BY_NAME and _BY_NAME[name].without == _FILES:
            _missing[name] = _BY_NAME[name]
        return
    if not hasattr(function, _REPLACED):
        wrapped = functools.wraps(function)(wrapper(function))
        setattr(wrapped, _REPLACED, True)
        setattr(owner, last, wrapped)


def warn_of_missing() -> None:
    """Warns of what could not be replaced, once each: called before the first private step."""
    while _missing:
        name, api = _missing.popitem()
        warn_user(f"{_versions()} lacks `{name}`, by which tfdp works. {api.without}")


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
