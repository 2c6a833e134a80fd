"""What the values in a file have cost: a table in the file itself.

Keras and TensorFlow write and read files in few places, which are wrapped here. Files hold the
ledger then whoever saves and loads them: a model that was compiled with another optimizer or with
none, a part of a model, weights alone, and models with a `compile` of their own. Values that are
computed while a file is written, such as the merged kernels of LoRA, have cost what they were
computed from. TensorFlow and Keras ignore the table where tfdp is not imported.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base import private_apis
from tfdp.base.user_warnings import warn_user
from tfdp.step.record import lineage, record_table

GROUP = "tfdp_lineage"
_HASHES, _COSTS, _ROWS = "hashes", "costs", "rows"

_TRAINS_WITHOUT_PRIVACY = (
    "The weights of this file were trained with a private optimizer, but the model has been loaded "
    "with {optimizer}, which is not private: `fit` would train it without privacy. (A model whose "
    "class has a `compile` of its own may choose its own optimizer when it is loaded.) Compile it "
    "with an optimizer of tfdp, or call `make_private`, before you train on private data: both "
    "start from what the weights have cost. For evaluation, load it with `compile=False`."
)


class FileTable:
    """Costs of the values of a file."""

    def __init__(self) -> None:
        self._costs: dict[int, np.ndarray] = {}

    def add(self, reads: list[lineage.Read]) -> None:
        """Adds what `lineage.deriving` has collected."""
        found = [(one, rows) for hashes, rows in reads if rows is not None for one in hashes]
        for hashed, rows in found:
            known = self._costs.get(hashed)
            self._costs[hashed] = rows if known is None else record_table.union([known, rows])

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the table as arrays to save; none if the values have cost nothing.

        `hashes`, uint8 `[n, 8]`; `rows` of `record_table`; and `costs`, uint8 `[n, rows]`: which
        of the rows went into the values.
        """
        if not self._costs:
            return {}
        # Rows of one uid with other counts are other rows.
        numbers: dict[bytes, int] = {}
        rows: list[np.ndarray] = []
        of_tables: dict[bytes, list[int]] = {}
        for table in self._costs.values():
            if table.tobytes() not in of_tables:
                for row in table:
                    if row.tobytes() not in numbers:
                        numbers[row.tobytes()] = len(rows)
                        rows.append(row)
                of_tables[table.tobytes()] = [numbers[row.tobytes()] for row in table]
        costs = np.zeros([len(self._costs), len(rows)], np.uint8)
        for at, table in enumerate(self._costs.values()):
            costs[at, of_tables[table.tobytes()]] = 1
        hashes = np.array(list(self._costs), np.dtype("<u8")).view(np.uint8).reshape(-1, 8)
        return {_HASHES: hashes, _COSTS: costs, _ROWS: np.array(rows)}


def read(arrays: Mapping[str, Any]) -> bool:
    """Notes what the values of a file have cost.

    Args:
      arrays: What `FileTable.arrays` returned; empty for a file without a table.

    Returns:
      Whether there is a table.

    Raises:
      ValueError: It is not of this form.
    """
    checked = table_of(arrays)
    if checked is None:
        return False
    hashes, costs, rows = checked
    tables: dict[bytes, np.ndarray] = {}
    for hashed, cost in zip(np.ascontiguousarray(hashes).view("<u8")[:, 0], costs, strict=True):
        table = tables.setdefault(cost.tobytes(), rows[cost > 0].astype(np.float64))
        lineage.known.note([int(hashed)], table, certain=True)
    lineage.changed()
    return bool(len(hashes))


def table_of(arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns hashes, costs and rows of a file's table: see `FileTable.arrays`; None without one.

    Raises:
      ValueError: They are not of this form.
    """
    if not all(name in arrays for name in (_HASHES, _COSTS, _ROWS)):
        return None
    hashes, costs, rows = (np.asarray(arrays[name]) for name in (_HASHES, _COSTS, _ROWS))
    columns = record_table.COLUMNS
    if (
        hashes.dtype != np.uint8
        or hashes.ndim != 2
        or rows.ndim != 2
        or rows.shape[1] != columns
        or costs.shape != (len(hashes), len(rows))
        or hashes.shape[1] != 8
    ):
        raise ValueError(
            f"The table `{GROUP}` of a file must hold `{_HASHES}` of the shape [n, 8], `{_ROWS}` "
            f"of the shape [rows, {columns}] and `{_COSTS}` of the shape [n, rows]. Received: "
            f"{hashes.shape}, {rows.shape} and {costs.shape}. The file was saved by another "
            "version of tfdp, or is damaged."
        )
    return hashes, costs, rows


# Files of Keras.


class _Files(threading.local):
    """The file that a thread writes or reads."""

    def __init__(self) -> None:
        self.table: FileTable | None = None
        self.reading = False


_files = _Files()


def let_keras_save(saving: str, legacy: str) -> None:
    """Makes a Keras save and load the table with every model and all weights.

    Args:
      saving: Name of its `saving_lib`, for `.keras` and `.weights.h5`.
      legacy: Name of its module for `.h5` files.
    """
    private_apis.replace(f"{saving}._save_state", _saving_state)
    private_apis.replace(f"{saving}._load_state", _loading_state)
    for store in ("H5IOStore", "ShardedH5IOStore", "H5Entry"):  # Each exists in some versions.
        with contextlib.suppress(AttributeError, ImportError):
            if "__setitem__" in vars(private_apis.find(f"{saving}.{store}")):
                private_apis.replace(f"{saving}.{store}.__setitem__", _storing)
    private_apis.replace(f"{legacy}.save_weights_to_hdf5_group", _saving_group)
    for name in ("load_weights_from_hdf5_group", "load_weights_from_hdf5_group_by_name"):
        private_apis.replace(f"{legacy}.{name}", _loading_group)


@contextlib.contextmanager
def _writing() -> Iterator[FileTable | None]:
    """Yields a new table, to be saved at the end; None within a file that is being written."""
    if _files.table is not None:
        yield None
        return
    _files.table = FileTable()
    try:
        yield _files.table
    finally:
        _files.table = None


def _saving_state(save: Callable) -> Callable:
    """Wraps `_save_state`, which calls itself for each part of a model."""

    def save_state(saveable: Any, weights_store: Any, *args: Any, **kwargs: Any) -> Any:
        if not weights_store:
            return save(saveable, weights_store, *args, **kwargs)
        with _writing() as table:
            with lineage.deriving() as reads:  # Reads of this part alone.
                result = save(saveable, weights_store, *args, **kwargs)
            _files.table.add(reads)  # type: ignore[union-attr]
            arrays = {} if table is None else table.arrays()
        if arrays:
            entry = weights_store.make(GROUP)
            for name, array in arrays.items():
                entry[name] = array
        return result

    return save_state


def _storing(store: Callable) -> Callable:
    """Wraps `__setitem__` of a file's entry, which may get what was computed from variables."""

    def set_item(self: Any, key: str, value: Any) -> Any:
        result = store(self, key, value)
        computed = isinstance(value, np.ndarray) or tf.is_tensor(value)
        if _files.table is not None and computed and len(np.shape(value)):
            _files.table.add(lineage.derived(value))
        return result

    return set_item


def _loading_state(load: Callable) -> Callable:
    """Wraps `_load_state`, which calls itself for each part of a model."""

    def load_state(saveable: Any, weights_store: Any, *args: Any, **kwargs: Any) -> Any:
        if _files.reading or not weights_store:
            return load(saveable, weights_store, *args, **kwargs)
        _files.reading = True
        try:
            entry = weights_store.get(GROUP)
            found = read({name: entry[name] for name in list(entry.keys())})
            result = load(saveable, weights_store, *args, **kwargs)
        except KeyError as error:
            if "nable to" not in str(error):
                raise
            # What h5py says of a file that was cut. `BackupAndRestore` of Keras expects an OSError.
            raise OSError(f"A part of the file cannot be read. {error}") from error
        finally:
            _files.reading = False
        if found:
            _warn_of_optimizer(saveable)
        return result

    return load_state


def _warn_of_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not hasattr(type(optimizer), "ledger"):
        warn_user(_TRAINS_WITHOUT_PRIVACY.format(optimizer=type(optimizer).__name__))


def _saving_group(save: Callable) -> Callable:
    def save_group(group: Any, *args: Any, **kwargs: Any) -> Any:
        table = FileTable()
        with lineage.deriving() as reads:
            result = save(group, *args, **kwargs)
        table.add(reads)
        if arrays := table.arrays():
            entry = group.create_group(GROUP)
            for name, array in arrays.items():
                entry[name] = array
        return result

    return save_group


def _loading_group(load: Callable) -> Callable:
    def load_group(group: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        entry = group.get(GROUP, {})
        found = read({name: np.array(entry[name]) for name in entry})
        result = load(group, model, *args, **kwargs)
        if found:
            _warn_of_optimizer(model)
        return result

    return load_group


# Checkpoints of TensorFlow, and SavedModels.


def _gathering(gather: Callable) -> Callable:
    """Wraps what gathers the tensors of a checkpoint, by the objects that they are of."""

    def gather_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = gather(self, *args, **kwargs)
        if tf.executing_eagerly():
            table, tensors = FileTable(), result[0]
            for variable in tensors:
                inner = getattr(variable, "value", None)  # Variables of Keras 3 hold one.
                if isinstance(variable, tf.Variable) or isinstance(inner, tf.Variable):
                    table.add(lineage.cost_of_variable(variable))
            for name, array in table.arrays().items():
                with tf.device("cpu:0"):
                    tensors.setdefault(None, {})[f"{GROUP}/{name}"] = tf.constant(array)
        return result

    return gather_tensors


def _opening(open_reader: Callable) -> Callable:
    """Wraps what opens a checkpoint: to restore it, to load a SavedModel, or to look at it."""

    def new_reader(*args: Any, **kwargs: Any) -> Any:
        reader = open_reader(*args, **kwargs)
        names = [f"{GROUP}/{name}" for name in (_HASHES, _COSTS, _ROWS)]
        if all(map(reader.has_tensor, names)):
            read({name.rpartition("/")[2]: reader.get_tensor(name) for name in names})
        lineage.changed()  # What is restored is not assigned.
        return reader

    return new_reader


private_apis.replace(
    "tensorflow.python.checkpoint.checkpoint.TrackableSaver._gather_serialized_tensors", _gathering
)
private_apis.replace(
    "tensorflow.python.training.py_checkpoint_reader.NewCheckpointReader", _opening
)
