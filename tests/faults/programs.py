"""The programs that are killed: each is run as `python -c PROGRAM folder fault`.

A fault is one of:

- "none";
- "event:K", which ends the process when Python opens, renames or removes something in the folder
  for the K-th time;
- "change:K", which ends it just after the K-th change in the folder, whatever library makes it:
  HDF5 and TensorFlow write without Python's knowledge;
- "seconds:T", which ends it after some time of work;
- "disk:N", which leaves N bytes free on the disk of the folder, a small one of its own;
- "size:N", with which no file can be written beyond N bytes, as if the disk were full;
- "step:K", which ends a `fit` after the K-th step of its ledger, once all callbacks were called;
- "fitted", which ends it after `fit`, before the model is saved.
"""

_FAULT = """
import ctypes, mmap, os, resource, signal, struct, sys, threading, time

folder, fault = sys.argv[1], sys.argv[2]
kind, _, number = fault.partition(":")
seen, began = 0, 0.0
changes = mmap.mmap(-1, 8)  # Shared with the process that watches.
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(event, arguments):
    global seen
    if event in _EVENTS and str(arguments[0]).startswith(folder):
        seen += 1
        if kind == "event" and seen == int(number):
            end()

_CHANGES = 0x02 | 0x40 | 0x80 | 0x100 | 0x200  # Written, moved from and to, created, removed.
_FOLDER = 0x40000000

def watch_changes(watched, last):
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # It ends with the process that it watches.
    files = libc.inotify_init()
    paths = {}

    def add(path):
        paths[libc.inotify_add_watch(files, path.encode(), _CHANGES)] = path
        for entry in os.scandir(path):
            if entry.is_dir():
                add(entry.path)

    add(folder)
    os.write(ready, b"x")
    count = 0
    while True:
        read, at = os.read(files, 65536), 0
        while at < len(read):
            number, mask, _, length = struct.unpack_from("iIII", read, at)
            name = read[at + 16 : at + 16 + length].rstrip(bytes(1)).decode()
            at += 16 + length
            count += 1
            if count == last:
                os.kill(watched, signal.SIGKILL)
            if mask & _FOLDER and mask & 0x180 and os.path.isdir(f"{paths[number]}/{name}"):
                add(f"{paths[number]}/{name}")
        changes[:8] = count.to_bytes(8, "little")

def fill_disk():
    filler = os.path.join(os.path.dirname(folder), ".filler")
    if os.path.exists(filler):
        os.remove(filler)
    if kind == "disk":
        disk = os.statvfs(folder)
        with open(filler, "wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - int(number))))
    if kind == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), int(number)))

def begin():
    global began, ready
    fill_disk()
    started, ready = os.pipe()
    watched = os.getpid()
    if os.fork() == 0:
        try:
            watch_changes(watched, int(number) if kind == "change" else -1)
        finally:
            os._exit(1)
    os.read(started, 1)
    sys.addaudithook(watch)
    began = time.monotonic()
    if kind == "seconds":
        timer = threading.Timer(float(number), end)
        timer.daemon = True
        timer.start()

def end_at_step(step):
    if kind == "step" and step >= int(number):
        end()

def done():
    took = time.monotonic() - began
    time.sleep(0.05)  # For the changes that the other process has not read.
    print("WHOLE", seen, int.from_bytes(changes[:8], "little"), took, flush=True)
"""

_KERAS_3 = "import keras, tfdp; front = tfdp.keras3"
# What docs/sharp_edges.md says to do about a backup of Keras 3 that a kill has cut.
_MEND = """
import json, shutil

def mend():
    metadata, weights = (f"{folder}/backup/{name}" for name in
                         ("training_metadata.json", "latest.weights.h5"))
    if os.path.exists(metadata) and not os.path.getsize(metadata):
        if os.path.exists(metadata + ".bkp"):
            shutil.copy(metadata + ".bkp", metadata)
        else:
            os.remove(metadata)
    else:
        assert not os.path.exists(weights + ".bkp")
        shutil.rmtree(f"{folder}/backup")
"""
_KERAS_2 = "import tensorflow as tf, tfdp; keras = tf_keras = tf.keras; front = tfdp.keras2"
_MODEL = """
import numpy as np

x, y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 2

def made(steps_per_execution=1):
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=10, steps_per_epoch=6)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(
        front.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model, batches

def resumed(model):
    ledger = model.optimizer.ledger
    print("RESUMED", ledger.epsilon(1e-5).epsilon if ledger.steps else 0.0, flush=True)
"""


def fit(durable: str, keras_2: bool = False, steps_per_execution: int = 1) -> str:
    """Returns a training with backup and checkpoints.

    Args:
      durable: Source of a function of that name, which returns the callbacks.
      keras_2: Whether it uses Keras 2.
      steps_per_execution: Steps between two calls of the callbacks.
    """
    return f"""
{_FAULT}
{_KERAS_2 if keras_2 else _KERAS_3}
{_MODEL}
{_MEND}
{durable}

def trained():
    model, batches = made({steps_per_execution})
    told = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: resumed(model),
        on_batch_end=lambda batch, logs: end_at_step(model.optimizer.ledger.steps),
    )
    model.fit(batches, epochs=2, verbose=0, callbacks=[*durable(folder), told])
    return model

begin()
try:
    model = trained()
except (OSError, json.JSONDecodeError):
    {"raise" if keras_2 else "mend()"}
    model = trained()
if kind == "fitted":
    end()
model.save(f"{{folder}}/final.keras")
done()
"""


def save(keras_2: bool = False) -> str:
    """Returns a training that saves its model to two files after each step.

    It resumes from the newest file that can be read. In Keras 2, one is a `.h5` file; a model of
    Keras 3 that is loaded from one cannot be trained.
    """
    other = "other.h5" if keras_2 else "other.keras"
    return f"""
{_FAULT}
{_KERAS_2 if keras_2 else _KERAS_3}
{_MODEL}
paths = [folder + "/{other}", folder + "/final.keras"]
model, batches = made()
begin()
for path in paths:
    if os.path.exists(path):
        try:
            found = keras.models.load_model(path)
        except Exception as error:
            print("UNREADABLE", type(error).__name__)
        else:
            if found.optimizer.ledger.steps > model.optimizer.ledger.steps:
                model = found
resumed(model)
for _ in range(3):
    model.fit(batches, epochs=1, steps_per_epoch=1, verbose=0)
    for path in paths:
        model.save(path)
done()
"""


CLASSIFY = (
    _FAULT
    + """
from absl import flags

from experiments import classify

values = flags.FlagValues()
classify.define_flags(values)
values(["classify", "--dataset=digits", "--keras=3", "--method=dpsgd", "--epochs=2",
        "--learning_rate=1", "--expected_batch_size=600", "--target_epsilon=3",
        f"--output_dir={folder}"])
begin()
classify.run(values)
done()
"""
)

# A selection of four runs; the model that was chosen is saved after it.
TUNE = (
    _FAULT
    + """
import keras, numpy as np, tfdp
from tfdp.accounting import Repetitions

x, y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 2
Repetitions.draw = lambda self: 4

def build(units):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(units), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

begin()
tuned = tfdp.tune(
    build, (x, y), {"units": [2, 4], "learning_rate": [0.01, 0.1]}, epochs=1, target_epsilon=8.0,
    validation_data=(x, y), repetitions=Repetitions("geometric", 3), delta=1e-3, batch_size=20,
    folder=folder + "/selection", verbose=0)
assert tuned.ledger.epsilon(1e-3).epsilon <= 8.0
tuned.model.save(folder + "/final.keras")
done()
"""
)

# Features of images, in batches of 16.
FEATURES = (
    _FAULT
    + """
import numpy as np, tfdp
from tfdp.data import features

features._BATCH_SIZE = 16
images = np.random.default_rng(0).random([200, 8, 8, 1], "float32")
expected = tfdp.data.scattering_features(images)
begin()
found = tfdp.data.scattering_features(images, cache_dir=folder)
assert np.array_equal(found, expected), "other features"
done()
"""
)

# Examples in nine parts. What can be read before they are written again must be all of them.
WRITE_EXAMPLES = (
    _FAULT
    + """
import numpy as np, tensorflow as tf, tfdp
from tfdp.data import written

written._PART_BYTES = 24 * 10
x, y = np.arange(90 * 4, dtype="float32").reshape([90, 4]), np.arange(90)

def check():
    examples = tfdp.data.read_examples(folder)
    read = [examples[i] for i in range(len(examples))]
    assert np.array_equal([one[0] for one in read], x), "other examples"
    assert np.array_equal([one[1] for one in read], y), "other examples"

try:
    check()
except ValueError as error:
    assert "Call `write_examples` again" in str(error), error
begin()
data = tf.data.Dataset.from_tensor_slices((x, y))
tfdp.data.write_examples(data, folder, verbose=False)
check()
done()
"""
)

# Runs of which each adds a line to a record, such as that of `experiments.attacks`.
RECORDS = (
    _FAULT
    + """
from experiments import records

path = folder + "/attacks.jsonl"
begin()
found = [line["run"] for line in records.read(path)]
for run in range(30):
    if run not in found:
        records.append(path, {"run": run, "scores": [0.123456789] * 4000})
runs = [line["run"] for line in records.read(path)]
assert sorted(runs) == list(range(30)), runs
done()
"""
)

# Trains a target and a shadow model with and without privacy, and attacks them.
ATTACKS = (
    _FAULT
    + """
from pathlib import Path

import tfdp
from experiments import jobs, records
from experiments.attacks import attackers, command, inversion, layers
from experiments.tables import grid
from tests.experiments.attacks.test_command import DECLARED, TINY, TINY_EXAMPLES
from tests.experiments.jobs_support import WorkersHere, line, parse

tables = Path(folder + "_tables")
if not tables.exists():
    tables.mkdir()
    (tables / "tables.toml").write_text(TINY)
    (tables / "attacks.toml").write_text(DECLARED)
    for trial in grid.Grid(tables / "tables.toml").trials((), ("DPSGD",), ()):
        records.append(tables / "searches.jsonl", line(trial, 0.5))
inversion._STEPS, layers._EPOCHS = 2, 1
attackers.ATTACKERS["network"] = attackers.forest
jobs._Workers = WorkersHere
values = parse(command, tables, f"--attack_tables={tables}/attacks.toml", f"--output_dir={folder}",
               f"--runs_dir={folder}/unfinished", f"--examples={TINY_EXAMPLES}", "--epsilons=1")
begin()
assert command.run(values) == []
control, private = records.read(folder + "/attacks.jsonl")
assert (control["row"], private["row"]) == ("SGD", "DPSGD")
ledger = tfdp.accounting.PrivacyLedger.from_dict(private["ledger"])
assert ledger.epsilon(private["delta"]).epsilon == private["epsilon"] <= 1.0
done()
"""
)
