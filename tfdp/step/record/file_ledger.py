"""The ledger of a file, read from the file alone: no model is made, and no class of the user's.

It is that of everything that went into the values of the file: the table that
`tfdp.step.record.saved_lineage` writes, and the record of a private optimizer whose state is there.
"""

import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfdp.accounting.ledger import PrivacyLedger
from tfdp.step.record import record_ledger, record_table, saved_lineage
from tfdp.step.record.release_count import RECORD

FORMATS = (
    "a `.keras`, `.weights.h5`, `.weights.json` or `.h5` file, a checkpoint of TensorFlow (its "
    "prefix, index file or folder), or the folder of a SavedModel"
)
_UNKNOWN_PAST = (
    "training of these weights without a private optimizer, before it or after it: a file does not "
    "show it"
)


class NoRecordError(ValueError):
    """Error of a file that holds no record of a private training."""


@dataclasses.dataclass(frozen=True)
class FileLedger:
    """What a file says about its past.

    Attributes:
      ledger: The releases that went into its values.
      not_covered: What a statement about the file must add.
    """

    ledger: PrivacyLedger
    not_covered: tuple[str, ...]


@dataclasses.dataclass
class _Found:
    """What the parts of a file hold."""

    tables: list[np.ndarray] = dataclasses.field(default_factory=list)
    has_record: bool = False
    optimizer: str = ""  # The class that the model was compiled with; empty if it is not known.


def ledger_of_file(path: str | os.PathLike) -> FileLedger:
    """Returns the ledger of a saved model, of weights or of a checkpoint.

    Args:
      path: One of `FORMATS`.

    Raises:
      FileNotFoundError: There is no such file.
      NoRecordError: It is none of these, or holds no record of a private training.
      ValueError: The record is damaged, or of another version of tfdp.
    """
    path = Path(path)
    found = _Found()
    try:
        _reader_of(path)(path, found)
    except (OSError, zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise NoRecordError(f"{path} cannot be read: {error}") from error
    if not found.tables:
        raise NoRecordError(
            f"{path} holds no record of a private training: it was saved before one, or without "
            "tfdp."
        )
    other: tuple[str, ...] = ()
    if found.optimizer and not found.has_record and not found.optimizer.startswith("tfdp"):
        other = (
            f"what {found.optimizer} does to the model, which was compiled with it: it is not a "
            "private optimizer. If it has trained on private data, nothing above holds for the "
            "model",
        )
    ledger = record_ledger.ledger_of_rows(record_table.union(found.tables))
    return FileLedger(ledger, (*other, _UNKNOWN_PAST))


def _reader_of(path: Path) -> Callable[[Path, _Found], None]:
    if path.is_dir():
        return _read_folder
    if not path.exists():
        if path.with_name(path.name + ".index").exists():
            return _read_checkpoint
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix == ".index":
        return lambda index, found: _read_checkpoint(index.with_suffix(""), found)
    if path.name.endswith(".weights.json"):
        return _read_shards
    if zipfile.is_zipfile(path):
        return _read_archive
    if h5py.is_hdf5(path):
        return _read_h5
    raise NoRecordError(f"{path} is not {FORMATS}.")


def _read_folder(folder: Path, found: _Found) -> None:
    if (folder / "variables" / "variables.index").exists():
        _read_checkpoint(folder / "variables" / "variables", found)
    elif weights := sorted(folder.glob("*.weights.h5")):  # `zipped=False` of Keras 3.
        for one in weights:
            _read_h5(one, found)
        if (folder / "config.json").exists():
            _read_config(json.loads((folder / "config.json").read_text()), found)
    elif (prefix := tf.train.latest_checkpoint(str(folder))) is not None:
        _read_checkpoint(Path(prefix), found)
    else:
        raise NoRecordError(f"{folder} is not {FORMATS}.")


def _read_archive(path: Path, found: _Found) -> None:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".weights.h5")]
        if not names:
            raise NoRecordError(f"{path} is not {FORMATS}.")
        for name in names:
            _read_h5(io.BytesIO(archive.read(name)), found)
        if "config.json" in archive.namelist():
            _read_config(json.loads(archive.read("config.json")), found)


def _read_shards(path: Path, found: _Found) -> None:
    shards: set[str] = set()
    for names in json.loads(path.read_text())["weight_map"].values():
        shards.update([names] if isinstance(names, str) else names)
    for name in sorted(shards):
        _read_h5(path.with_name(Path(name).name), found)


def _read_h5(file: Any, found: _Found) -> None:
    def look(name: str, item: Any) -> None:
        last = name.rpartition("/")[2]
        if isinstance(item, h5py.Group) and last == saved_lineage.GROUP:
            entry = item.get("vars", item)  # One level deeper in files of Keras's own format.
            _add_table({key: np.array(entry[key]) for key in entry}, found)
        elif isinstance(item, h5py.Dataset) and last.startswith(RECORD):
            _add_record(np.array(item), found)

    with h5py.File(file, "r") as opened:
        opened.visititems(look)  # Each object once, also where links make a circle.
        config = opened.attrs.get("training_config")
    if config is not None:
        compiled = json.loads(config).get("optimizer_config") or {}
        found.optimizer = str(compiled.get("registered_name") or compiled.get("class_name") or "")


def _read_checkpoint(prefix: Path, found: _Found) -> None:
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise NoRecordError(f"{prefix} is no checkpoint that can be read: {error}") from error
    shapes, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    names = [name for name in shapes if name.startswith(f"{saved_lineage.GROUP}/")]
    _add_table({name.rpartition("/")[2]: reader.get_tensor(name) for name in names}, found)
    for name, shape in shapes.items():
        # The state of an optimizer of Keras 3 is in a list, without names.
        if shape == [record_table.ROWS, record_table.COLUMNS] and types[name] == tf.float64:
            rows = reader.get_tensor(name)
            if RECORD in name or _is_record(rows):
                _add_record(rows, found)


def _is_record(rows: np.ndarray) -> bool:
    counts = rows[:, : record_table.SHOWN + 1]
    used = rows[rows[:, record_table.UID] > 0]
    whole = bool(np.all(counts == np.floor(counts)) and np.all(counts >= 0))
    return (
        whole
        and len(used) > 0
        and set(np.floor(used[:, record_table.KIND])) <= set(record_table.KINDS)
    )


def _add_table(arrays: dict[str, np.ndarray], found: _Found) -> None:
    table = saved_lineage.table_of(arrays)
    if table is not None:
        found.tables.append(table[2].astype(np.float64))


def _add_record(rows: np.ndarray, found: _Found) -> None:
    if rows.ndim != 2 or rows.shape[1] != record_table.COLUMNS:
        raise ValueError(
            f"A `{RECORD}` must have the shape [rows, {record_table.COLUMNS}]. Received: "
            f"{rows.shape}. It was saved by another version of tfdp."
        )
    found.tables.append(rows.astype(np.float64))
    found.has_record = True


def _read_config(config: dict[str, Any], found: _Found) -> None:
    optimizer = (config.get("compile_config") or {}).get("optimizer") or ""
    if isinstance(optimizer, dict):
        optimizer = optimizer.get("registered_name") or optimizer.get("class_name") or ""
    found.optimizer = str(optimizer)
