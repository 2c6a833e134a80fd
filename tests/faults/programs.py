"""The programs that are killed: each is run as `python -c PROGRAM folder fault`.

A fault is "none", "event:K", which ends the process at the K-th time that it opens, renames or
removes something in the folder, or "seconds:T", which ends it after some time of work.
"""

_FAULT = """
import os, signal, sys, threading

folder, fault = sys.argv[1], sys.argv[2]
kind, _, number = fault.partition(":")
seen = 0
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(event, arguments):
    global seen
    if event in _EVENTS and str(arguments[0]).startswith(folder):
        seen += 1
        if kind == "event" and seen == int(number):
            end()

def begin():
    sys.addaudithook(watch)
    if kind == "seconds":
        timer = threading.Timer(float(number), end)
        timer.daemon = True
        timer.start()

def done():
    print("EVENTS", seen, flush=True)
"""

_MODEL = """
import keras, numpy as np, tfdp

x, y = np.random.default_rng(0).normal(size=(60, 3)).astype("float32"), np.arange(60) % 2

def made():
    batches = tfdp.data.poisson_batches((x, y), expected_batch_size=10, steps_per_epoch=4)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(
        tfdp.keras3.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model, batches
"""

# With the callbacks of docs/sharp_edges.md.
FIT = (
    _FAULT
    + _MODEL
    + """
DURABLE
begin()
model, batches = made()
model.fit(batches, epochs=2, verbose=0, callbacks=durable(folder))
model.save(f"{folder}/final.keras")
done()
"""
)

SAVE = (
    _FAULT
    + _MODEL
    + """
begin()
model, batches = made()
path = f"{folder}/final.keras"
if os.path.exists(path):
    try:
        model = keras.models.load_model(path)
    except Exception as error:
        print("UNREADABLE", type(error).__name__)
for _ in range(3):
    model.fit(batches, epochs=1, steps_per_epoch=1, verbose=0)
    model.save(path)
done()
"""
)

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
