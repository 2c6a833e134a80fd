"""Times the reading of Poisson batches from memory and from disk, and its memory.

    python -m benchmarks.data --folder=/tmp/examples

Prints three Markdown tables. The first: CPU time of the start of an iteration over batches of 32,
to the first batch, which `fit` pays in each epoch. The second: rows a second of batches of images
`[28, 28, 1]`, float32, from each kind of source, with nothing else to do. The third: private steps
on MNIST's network, 256 rows each, from a data set of so many gigabytes that is generated and
deleted afterwards, in a process that may allocate 2 GiB. Sources whose packages are not installed
are left out. `print_first_start` prints what the first iteration over data in memory takes.
"""

import argparse
import multiprocessing
import pathlib
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import tfdp
from benchmarks import networks, problems

SHAPE = (28, 28, 1)
ROW_BYTES = 4 * 28 * 28 + 8
BATCHES = (256, 4096)
LIMIT = 2**31


class Items:
    """A random-access source of Python code: one example at a time."""

    def __init__(self, x: Any, y: Any):
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple:
        return self._x[index], self._y[index]


class Records(Items):
    """Records of ArrayRecord, which are read many at a time."""

    def __init__(self, path: str, size: int):
        from array_record.python import array_record_module

        self._reader, self._size = array_record_module.ArrayRecordReader(path), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple]:
        return [
            (np.frombuffer(record, np.float32, 784).reshape(SHAPE), record[-1])
            for record in self._reader.read(indices)
        ]


def from_memory(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns arrays in memory."""
    return x, y


def from_memory_map(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns memory-mapped arrays."""
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r"), y


def from_written(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns what `write_examples` has written."""
    data = tf.data.Dataset.from_tensor_slices((x, y))
    tfdp.data.write_examples(data, folder / "written")
    return tfdp.data.read_examples(folder / "written")


def from_items(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns a source of single examples."""
    return Items(*from_memory_map(x, y, folder))


def from_hdf5(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns arrays of HDF5."""
    import h5py

    file = h5py.File(folder / "examples.h5", "w")
    file["x"], file["y"] = x, y
    return file["x"], file["y"]


def from_array_record(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns records of ArrayRecord."""
    from array_record.python import array_record_module

    path = str(folder / "examples.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for image, label in zip(x, y, strict=True):
        writer.write(image.tobytes() + bytes([label]))
    writer.close()
    return Records(path, len(y))


def from_hugging_face(x: np.ndarray, y: np.ndarray, folder: pathlib.Path) -> Any:
    """Returns a data set of Hugging Face's `datasets`, on disk; its examples are dicts."""
    import datasets

    # Lists of one length: `Array3D` is slow to read.
    pixels = datasets.Sequence(datasets.Value("float32"), length=x[0].size)
    kinds = datasets.Features({"image": pixels, "label": datasets.Value("int64")})

    def parts() -> Iterator[datasets.Dataset]:
        for i in range(0, len(y), 10_000):
            rows = slice(i, i + 10_000)
            columns = {"image": list(x[rows].reshape([-1, x[0].size])), "label": y[rows].tolist()}
            yield datasets.Dataset.from_dict(columns, features=kinds)

    path = str(folder / "hugging_face")
    datasets.concatenate_datasets(list(parts())).save_to_disk(path)
    return datasets.load_from_disk(path).with_format("numpy")


SOURCES: dict[str, Callable] = {
    "arrays in memory": from_memory,
    "memory map": from_memory_map,
    "`write_examples`": from_written,
    "HDF5": from_hdf5,
    "`__getitem__` of a memory map": from_items,
    "ArrayRecord": from_array_record,
    "Hugging Face `datasets`": from_hugging_face,
}
# Names of the parts, for sources whose examples are dicts.
NAMES = {from_hugging_face: {"features": "image", "label": "label"}}


def rows_per_second(data: Any, batch: int, seconds: float, **names: str) -> float:
    """Returns the rows that are read in one second, of batches that are only drawn."""
    batches = iter(tfdp.data.poisson_batches(data, expected_batch_size=batch, **names).repeat())
    for _ in range(4):
        next(batches)
    rows, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        rows += len(next(batches)[1])
    return rows / (time.perf_counter() - begin)


def start_times(batches: tf.data.Dataset, repeats: int = 15) -> list[float]:
    """Returns milliseconds of CPU time of several starts, in increasing order."""
    times = []
    for _ in range(repeats + 2):
        begin = time.process_time()
        next(iter(batches))
        times.append(1e3 * (time.process_time() - begin))
    return sorted(times[2:])


def print_starts() -> None:
    """Prints the table of starts."""
    data = np.zeros([6000, *SHAPE], "float32"), np.arange(6000) % 10

    def poisson(**kwargs: Any) -> tf.data.Dataset:
        return tfdp.data.poisson_batches(data, expected_batch_size=32, **kwargs)

    plain = tf.data.Dataset.from_tensor_slices(data).shuffle(6000).batch(32).prefetch(2)
    print("| batches of 32 | start of an iteration, CPU ms: median (quartiles) |")
    print("|---|---|")
    for name, batches in (
        ("plain: `shuffle(6000).batch(32).prefetch(2)`", plain),
        ("Poisson", poisson()),
        ('Poisson, `padding="full"`', poisson(padding="full")),
        ("Poisson, `chunk_size=16`", poisson(chunk_size=16)),
        ("Poisson, `transform`", poisson(transform=lambda x, y: (2 * x, y))),
    ):
        times = start_times(batches)
        low, median, high = (times[int(q * len(times))] for q in (0.25, 0.5, 0.75))
        print(f"| {name} | {median:.1f} ({low:.1f} to {high:.1f}) |", flush=True)


def print_first_start(mebibytes: int = 1024) -> None:
    """Prints what the first iteration over data in memory takes; run it in a process of its own.

    Args:
      mebibytes: Size of the data.
    """

    def resident() -> float:
        fields = pathlib.Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize() / 2**20

    print("| | seconds | MiB of memory in addition |\n|---|---|---|")
    rows = mebibytes * 2**20 // ROW_BYTES
    given = resident()
    data = np.ones([rows, *SHAPE], "float32"), np.zeros(rows, "int64")
    print(f"| the data | | {resident() - given:.0f} |")
    made: list[tf.data.Dataset] = []
    for name, run in (
        ("`poisson_batches`", lambda: made.append(tfdp.data.poisson_batches(data))),
        ("the first batch", lambda: next(iter(made[0]))),
        ("the first batch of a second iteration", lambda: next(iter(made[0]))),
    ):
        before, begin = resident(), time.perf_counter()
        run()
        seconds, after = time.perf_counter() - begin, resident()
        print(f"| {name} | {seconds:.2f} | {after - before:.0f} |", flush=True)


def generated(size: int) -> Iterator[tuple]:
    """Yields images of random numbers."""
    generator = np.random.default_rng(0)
    block = generator.random([1024, *SHAPE], "float32")
    for i in range(size):
        yield block[i % 1024], i % 10


def private_steps(folder: str | None, steps: int, sender: Any) -> None:
    """Trains in a process of its own; sends milliseconds of a step, of a wait, and peak MiB.

    Args:
      folder: Folder of `write_examples`; None: a small data set in memory.
      steps: Number of steps.
      sender: Pipe to send to.
    """
    if folder is None:
        examples = list(generated(10_000))
        data = tuple(np.stack(values) for values in zip(*examples, strict=True))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
        data = tfdp.data.read_examples(folder)
    batches = tfdp.data.poisson_batches(data, expected_batch_size=256)
    model = networks.build(problems.problem("mnist_cnn"))
    model.compile(
        tfdp.DPSGD(1.0, 1.1, learning_rate=0.1, sampling=batches.sampling),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    iterator, waits, times = iter(batches.repeat()), [], []
    for _ in range(steps):
        begin = time.perf_counter()
        batch = next(iterator)
        drawn = time.perf_counter()
        model.train_on_batch(*batch)
        waits.append(1e3 * (drawn - begin))
        times.append(1e3 * (time.perf_counter() - begin))
    sender.send((statistics.median(times[9:]), statistics.median(waits[9:]), *peaks()))


def peaks() -> tuple[float, float]:
    """Returns MiB: the peak of this process, and what it holds now that no file backs."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))


def in_process(*args: Any) -> tuple:
    """Returns what `private_steps` sends."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=private_steps, args=(*args, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def print_reading(folder: pathlib.Path, size: int, seconds: float) -> None:
    """Prints the table of rows a second."""
    x, y = (np.stack(values) for values in zip(*generated(size), strict=True))
    print(f"| source | {' | '.join(f'rows a second, B = {batch:,}' for batch in BATCHES)} |")
    print("|---|" + "---|" * len(BATCHES))
    for name, make in SOURCES.items():
        try:
            data = make(x, y, folder)
        except ImportError as error:
            print(f"| {name} | not installed: {error.name} |" + " |" * (len(BATCHES) - 1))
            continue
        names = NAMES.get(make, {})
        rates = [f"{rows_per_second(data, batch, seconds, **names):,.0f}" for batch in BATCHES]
        print(f"| {name} | {' | '.join(rates)} |", flush=True)


def print_steps(folder: pathlib.Path, gigabytes: float, steps: int) -> None:
    """Prints the table of private steps."""
    size = int(gigabytes * 2**30 / ROW_BYTES)
    block = tf.stack([x for x, _ in generated(1024)])
    large = tf.data.Dataset.range(size).map(lambda i: (block[i % 1024], i % 10))
    tfdp.data.write_examples(large, folder / "large")
    print(
        "| data | step, ms | waits for data, ms | peak MiB, mapped files included | "
        "MiB without files, at the end |"
    )
    print("|---|---|---|---|---|")
    for name, place in (
        ("10,000 examples in memory", None),
        (f"{size:,} examples, {gigabytes:g} GiB, on disk", str(folder / "large")),
    ):
        step, wait, peak, own = in_process(place, steps)
        print(f"| {name} | {step:.1f} | {wait:.2f} | {peak:,.0f} | {own:,.0f} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="Where data are written.")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="0: no private steps.")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    pathlib.Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfdp-data-", dir=options.folder))
    try:
        print_starts()
        print()
        print_reading(folder, options.rows, options.seconds)
        if options.gigabytes:
            print()
            print_steps(folder, options.gigabytes, options.steps)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
