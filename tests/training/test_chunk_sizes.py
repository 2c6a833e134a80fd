"""`make_private` chooses chunks of batches that do not fit into memory."""

import numpy as np
import pytest
import tensorflow as tf

from tests.front_ends import with_both, with_one
from tests.support import small_data
from tfdp.accounting import PoissonSampling
from tfdp.accounting.sampling import padded_batch_size
from tfdp.base import devices
from tfdp.clipping import OnePassEngine
from tfdp.training import chunk_sizes

X, Y = small_data(300)
SPEC = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
ROW = 3 * (4 * 4 + 8)  # Bytes of three copies.
SAMPLING = PoissonSampling(60_000, 1024)
ROWS = SAMPLING.usual_batch_size


@pytest.mark.parametrize(
    ("bytes_per_row", "planned", "expected"),
    [
        (None, 1, None),
        (1000 - ROW, 1000 * ROWS, None),
        (1000 - ROW, 1000 * ROWS - 1, 1024),  # Two chunks.
        (1000 - ROW, 1000 * ROWS // 2, 1024),
        (1000 - ROW, 1000 * (ROWS // 2 - 1), 512),  # Three.
        (1000 - ROW, 4000, 4),
        (1000 - ROW, 1, 1),  # Not even a row fits.
    ],
)
def test_the_largest_power_of_two_that_fits(bytes_per_row, planned, expected):
    chosen = chunk_sizes.choose(bytes_per_row, SPEC, SAMPLING, planned)
    assert (None if chosen is None else chosen.chunk_size) == expected
    assert chosen is None or f"a batch of {ROWS} rows" in chosen.why


@pytest.mark.parametrize("padding", ["none", "buckets", "full"])
@pytest.mark.parametrize("planned", [10**5, 3 * 10**5, 10**6])
def test_chunks_fit_and_no_larger_ones_do(padding, planned):
    sampling = PoissonSampling(60_000, 1024, padding=padding)
    chunk = chunk_sizes.choose(1000 - ROW, SPEC, sampling, planned).chunk_size

    def taken(size):
        most = padded_batch_size(60_000, 1024, 1e-30 if padding == "none" else 1e-18)
        usual = ROWS if padding == "none" else sampling.padded_batch_size
        return 1000 * -(-usual // -(-most // size))

    assert taken(chunk) <= planned < taken(2 * chunk)


def test_a_chunk_has_all_rows_of_an_example():
    sampling = PoissonSampling(60_000, 256, rows_per_example=10)
    chosen = [chunk_sizes.choose(1000, SPEC, sampling, planned) for planned in (3000, 10**5, 10**7)]
    assert [None if choice is None else choice.chunk_size for choice in chosen] == [16, 128, None]
    assert chunk_sizes.choose(1000, SPEC, PoissonSampling(5, 1), 1).chunk_size == 1


def private(front, x=X, **kwargs):
    keras = front.keras
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    arguments = {"loss": front.crossentropy(), "batch_size": 100, "optimizer": "sgd", **kwargs}
    return front.tfdp.make_private(model, (x, Y), epochs=2, noise_multiplier=1.0, **arguments)


@pytest.fixture
def in_parts(monkeypatch):
    """Leaves little memory, in which an engine works on more than 40 rows in parts; says if so."""
    seen = []
    within = OnePassEngine._in_chunks
    monkeypatch.setattr(
        OnePassEngine, "_in_chunks", lambda *args: seen.append(True) or within(*args)
    )
    monkeypatch.setattr(devices, "memory_budget", lambda: 40 * (ROW + 4 * (4 + 3 + 3 + 3 + 3)))
    return seen


@with_both
def test_batches_come_in_chunks_that_fit(front, in_parts, capsys):
    model, batches, budget = private(front)
    chunks = batches.sampling.gradient_accumulation_steps
    assert chunks == model.optimizer.gradient_accumulation_steps > 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Chunks")]
    assert f"in {chunks} chunks of at most " in line and "rows would take about" in line
    size = int(line.split("chunks of at most ")[1].split()[0])
    assert size & (size - 1) == 0
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert model.optimizer.ledger.steps == 3
    assert all(len(x) <= size for x, _ in batches.take(2 * chunks))
    assert not in_parts  # One evaluation of the model for each row.


@with_one
def test_whole_batches_do_not_fit(front, in_parts, capsys):
    """Mutant: no size is chosen."""
    model, batches, budget = private(front, chunk_size=None)
    assert batches.sampling.gradient_accumulation_steps == 1
    assert "Chunks" not in capsys.readouterr().out
    model.fit(batches, epochs=1, callbacks=[budget], verbose=0)
    assert in_parts


@with_one
def test_the_size_follows_from_public_numbers_alone(front, in_parts):
    """Of other examples, however large their numbers, the same size follows."""
    found = {
        private(front, x=x, verbose=False).batches.sampling.gradient_accumulation_steps
        for x in (X, np.zeros_like(X), 1e9 * X)
    }
    assert len(found) == 1 and found != {1}


@with_one
def test_what_takes_whole_batches_gets_them(front, in_parts):
    batches = private(front, num_microbatches=10, verbose=False).batches
    assert batches.sampling.gradient_accumulation_steps == 1
    assert private(front, chunk_size=20).batches.sampling.gradient_accumulation_steps > 5


@with_one
def test_for_xla_chunks_are_padded(front, in_parts):
    keras = front.keras
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile("sgd", front.crossentropy(), jit_compile=True)
    arguments = {"epochs": 1, "noise_multiplier": 1.0, "batch_size": 100, "verbose": False}
    batches = front.tfdp.make_private(model, (X, Y), **arguments).batches
    assert batches.sampling.padding == "full"
    assert batches.sampling.gradient_accumulation_steps > 1


@with_one
def test_another_word_is_an_error(front):
    with pytest.raises(ValueError, match='`chunk_size` must be an integer, None or "auto"'):
        private(front, chunk_size="small")
