"""A step counts as Poisson only if its batch is an unused draw, byte for byte."""

import copy
import dataclasses
import logging
import os
import pickle
import select
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests import support
from tfdp.accounting.sampling import PoissonSampling
from tfdp.base import devices
from tfdp.data import draw_record
from tfdp.data.draw_record import fingerprint

pytestmark = pytest.mark.rewritten_graphs

X, Y = support.small_data(64)


def batches(**kwargs):
    return tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=3, **kwargs)


def test_a_batch_that_is_no_draw_is_not_an_empty_draw():
    record, sampling = draw_record.DrawRecord(), batches().sampling
    record.prepare(3)

    @tf.function
    def look_up(*batch):
        use = record.take(sampling, None, batch)
        return use.fresh, use.empty

    @tf.function
    def enter_empty_draw():  # In the first place, where what is not found is looked up.
        record.enter(sampling, 0, record.number(), 0, None, [X[:1], Y[:1]], rows=0)

    enter_empty_draw()
    assert [bool(fact) for fact in look_up(X[:9], Y[:9])] == [False, False]
    assert [bool(fact) for fact in look_up(X[:1], Y[:1])] == [True, True]


def trained(sampling, jit_compile=False):
    return support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=sampling), jit_compile=jit_compile)


def counted(model, elements):
    """(Poisson steps, other steps), where a refused batch counts as neither."""
    for x, y, *weights in elements:
        try:
            model.train_on_batch(x, y, *weights)
        except tf.errors.InvalidArgumentError as error:
            assert "no unused draw" in str(error)
    return model.optimizer.released_steps()


def twice(element):
    return [element, element]


def mixed(element):
    x, *rest = element
    return [(x - tf.reduce_mean(x, axis=0), *rest)]


def one_label_changed(element):
    x, y, *rest = element
    return [(x, tf.tensor_scatter_nd_update(y, [[0]], [(y[0] + 1) % 3]), *rest)]


def rows_swapped(element):
    return [tuple(tf.reverse(tensor, [0]) for tensor in element)]


def by_hand(element):
    rows = element[0].shape[0]
    return [(X[:rows], Y[:rows], np.ones(rows, bool))[: len(element)]]


def one_example_left_out(element):
    return [tuple(tensor[1:] for tensor in element)]


def weighted(element):
    x, y, *_ = element
    return [(x, y, tf.linspace(0.5, 2.0, x.shape[0]))]


MISUSES = {
    "used twice": (twice, (1, 1)),
    "normalised by the batch": (mixed, (0, 1)),
    "a label changed": (one_label_changed, (0, 1)),
    "reordered": (rows_swapped, (0, 1)),
    "by hand": (by_hand, (0, 1)),
    "one example left out": (one_example_left_out, (0, 1)),
    "weights from elsewhere": (weighted, (0, 1)),
}


def counts_of_misuses(names, padding, jit_compile=False):
    """Counts, by name, what the batches of each misuse count as, one misuse after the other."""
    data = batches(padding=padding)
    model = trained(data.sampling, jit_compile)
    elements, before, found = iter(data.repeat()), (0, 0), {}
    for name in names:
        misuse, _ = MISUSES[name]
        after = counted(model, misuse(next(elements)))
        found[name] = (after[0] - before[0], after[1] - before[1])
        before = after
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("names", "padding"),
    [(["used twice"], "full"), (["reordered"], "buckets"), (MISUSES, "none")],
    ids=["full", "buckets", "none"],
)
def test_misused_batches_are_refused(names, padding):
    expected = {name: (MISUSES[name][1][0], 0) for name in names}
    assert counts_of_misuses(names, padding) == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [["by hand"], MISUSES], ids=["one", "all"])
def test_under_xla_they_get_no_epsilon(names):
    expected = {name: MISUSES[name][1] for name in names}
    assert counts_of_misuses(names, "full", jit_compile=True) == expected


def leave_a_second_chunk(monkeypatch):
    """Has the record hold the second chunk of a draw where an unknown batch is looked for."""
    monkeypatch.setattr(draw_record, "RECORD", draw_record.DrawRecord())
    next(iter(batches(chunk_size=20, padding="full")))
    known = draw_record.RECORD._variables[1]
    known.assign(
        tf.where(tf.range(known.shape[1]) == draw_record._CHUNK, tf.ones_like(known), known)
    )


@pytest.mark.slow
def test_an_unknown_batch_counts_whatever_the_record_holds(monkeypatch):
    """Under XLA, which drops the assertion that refuses it."""
    leave_a_second_chunk(monkeypatch)
    data = batches(padding="full")
    assert counted(trained(data.sampling, jit_compile=True), by_hand(next(iter(data)))) == (0, 1)


class Forgets(draw_record.DrawRecord):
    """Mutant: what was used is found again."""

    def _take(self, *args):
        use = super()._take(*args)
        self._made()[4].assign(tf.zeros_like(self._made()[4]))
        return use


class LooksAtMasksOnly(draw_record.DrawRecord):
    """Mutant: what stands in the rows does not matter."""

    def take(self, sampling, mask, tensors, following=None, part=0):
        return super().take(sampling, mask, [], following, part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "name"), [(Forgets, "used twice"), (LooksAtMasksOnly, "normalised by the batch")]
)
def test_mutants_are_caught(mutant, name, monkeypatch):
    monkeypatch.setattr(draw_record, "RECORD", mutant())
    with pytest.raises(AssertionError):
        test_misused_batches_are_refused([name], "full")


def test_a_forgotten_mask_is_refused():
    """The rows of padding would count as examples."""
    data = batches(padding="full")
    x, y, _ = next(iter(data))
    with pytest.raises(ValueError, match="must take the sample weights of the batch"):
        counted(trained(data.sampling), [(x, y)])


def movement_by_an_empty_draw(monkeypatch):
    """Returns the length of the update of noise-free steps in which nothing was drawn."""
    nothing = tf.zeros([0], tf.int64)
    monkeypatch.setattr("tfdp.data.source.draw_indices", lambda key, sampling, size: nothing)
    x, y = np.random.default_rng(0).random([64, 6, 6, 1], dtype="float32"), Y
    data = tfdp.data.poisson_batches((x, y), expected_batch_size=1, steps_per_epoch=2)
    # (On no rows at all, TensorFlow's convolutions fail on CPUs.)
    model = tf.keras.Sequential(
        [tf.keras.layers.Conv2D(2, 3), tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)]
    )
    model.build([None, 6, 6, 1])
    support.compiled(tfdp.DPSGD(1.0, 0.0, sampling=data.sampling, learning_rate=1.0), model)
    before = support.flat(model.get_weights())
    model.fit(data, verbose=0)
    assert model.optimizer.released_steps() == (2, 0)
    return np.linalg.norm(support.flat(model.get_weights()) - before)


def test_an_empty_draw_is_a_step_without_examples(monkeypatch):
    assert movement_by_an_empty_draw(monkeypatch) == 0


def test_the_row_that_stands_for_none_is_told_from_an_example(monkeypatch):
    monkeypatch.setattr("tfdp.clipping.ClippedSum.unless", lambda clipped, empty: clipped)
    assert movement_by_an_empty_draw(monkeypatch) > 0.1


def test_a_batch_without_its_weights_is_a_draw():
    data = tfdp.data.poisson_batches((X, Y, np.ones(64)), expected_batch_size=16)
    x, y, _ = next(iter(data))
    assert counted(trained(data.sampling), [(x, y)]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_way_through_keras(jit_compile):
    data = batches(padding="buckets" if jit_compile else "none")
    model = support.compiled(
        tfdp.DPSGD(1.0, 1.0, sampling=data.sampling), jit_compile=jit_compile, steps_per_execution=3
    )
    model.fit(data, epochs=2, verbose=0)
    model.fit(data.repeat(), epochs=1, steps_per_epoch=3, verbose=0)
    model.fit(data.take(3).prefetch(1), verbose=0)
    assert model.optimizer.released_steps() == (12, 0)


def test_a_data_set_around_the_batches_is_seen_through():
    """Functions of `tf.data` that get a data set cannot refuse it; the record does."""
    data = batches()
    around = tf.data.Dataset.zip((data,)).map(lambda e: (e[0] * 2, e[1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        trained(data.sampling).fit(around, verbose=0)
    cached = tf.data.Dataset.zip((data,)).map(lambda e: e).cache()
    model = trained(data.sampling)
    model.fit(cached, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no unused draw"):
        model.fit(cached, verbose=0)
    assert model.optimizer.released_steps() == (3, 0)


def test_other_sampling_is_no_draw():
    data = batches()
    other = tfdp.data.poisson_batches((X, Y), expected_batch_size=15)
    assert counted(trained(other.sampling), [next(iter(data))]) == (0, 0)


@pytest.mark.slow
def test_a_loaded_optimizer_takes_draws_of_new_batches(tmp_path):
    data = batches()
    model = trained(data.sampling)
    model.fit(data, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    loaded.fit(batches(), verbose=0)
    assert loaded.optimizer.released_steps() == (6, 0)


def unused(record):
    """Returns how many draws of a record could be used, as a process without TensorFlow sees it."""
    _, known, _, _, uses, _ = record._variables
    entries = known.numpy()[:, draw_record._ENTRY]
    return int(np.sum((entries > 0) & (uses.numpy() < entries * draw_record._USES)))


def unused_in_fork(record):
    """Returns how many draws a forked process could use."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.write(write, str(unused(record)).encode())
        os._exit(0)
    os.close(write)
    answer = os.read(read, 64) if select.select([read], [], [], 60)[0] else b""
    os.close(read)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return int(answer)


def record_of_draws(monkeypatch):
    """Returns a record with three draws that nobody has used."""
    record = draw_record.DrawRecord()
    monkeypatch.setattr(draw_record, "RECORD", record)
    list(batches())
    assert unused(record) == 3
    return record


def test_a_forked_process_uses_no_draw_of_this_one(monkeypatch):
    record = record_of_draws(monkeypatch)
    assert unused_in_fork(record) == 0
    assert unused(record) == 3


def test_a_record_that_is_forked_is_caught(monkeypatch):
    record = record_of_draws(monkeypatch)
    monkeypatch.setattr(draw_record.DrawRecord, "begin_anew", lambda self: None)
    assert unused_in_fork(record) == 3


def test_draws_after_a_fork_can_be_used(monkeypatch):
    record, data = record_of_draws(monkeypatch), batches()
    (before, *_) = list(data)
    record.begin_anew()
    model = trained(data.sampling)
    assert counted(model, [before]) == (0, 0)
    assert counted(model, [next(iter(data))]) == (1, 0)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_of_the_record_has_no_draws(way, monkeypatch):
    new = way(record_of_draws(monkeypatch))
    new.prepare(2)
    assert isinstance(new, draw_record.DrawRecord) and unused(new) == 0


def test_of_two_threads_with_one_batch_at_most_one_has_it():
    data = batches()
    take = tf.function(lambda x, y: draw_record.RECORD.take(data.sampling, None, [x, y]).fresh)
    elements = iter(data.repeat())
    take(*next(elements))
    for _ in range(20):
        element, found = next(elements), []
        threads = [
            threading.Thread(target=lambda e=element, f=found: f.append(bool(take(*e))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(found) <= 1
        assert not bool(take(*element))


def test_iterators_and_threads_get_other_draws():
    """More draws than fit in the record are no problem: each is used at once."""
    data = tfdp.data.poisson_batches((X, Y), expected_batch_size=16, steps_per_epoch=300)
    seen = [[], []]

    def read(own):
        own.extend(tuple(x.numpy().ravel()) for x, _ in data)

    threads = [threading.Thread(target=read, args=(own,)) for own in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = seen[0] + seen[1]
    # Two batches of about 16 of 64 examples are equal with probability (5/8)^64 < 1e-13.
    assert len(set(everything)) == len(everything) == 600


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int64", "uint8", "complex64"]
)
def test_fingerprints_tell_contents_apart(dtype, jit_compile):
    dtype = tf.as_dtype(dtype)
    compute = tf.function(fingerprint, jit_compile=jit_compile)
    values = tf.cast(tf.reshape(tf.range(60), [20, 3]), dtype)
    zeros = tf.zeros([20, 3], dtype)
    others = [values, zeros, zeros[:10], tf.reverse(values, [0]), tf.reverse(values, [1])]
    others.append(tf.tensor_scatter_nd_update(values, [[7, 1]], tf.cast([1], dtype)))
    if dtype.is_floating:
        others += [-zeros, -values, zeros + tf.cast(float("nan"), dtype)]
    prints = {int(compute(other)) for other in others}
    assert len(prints) == len(others)
    assert int(compute(values)) == int(fingerprint(values)) in prints


def test_fingerprints_of_large_tensors_see_every_row_and_column():
    values = np.random.default_rng(0).normal(size=(2000, 784)).astype("float32")
    before = int(fingerprint(values))
    for change in (np.s_[1234], np.s_[:, 567]):
        changed = values.copy()
        changed[change] = 0
        assert int(fingerprint(changed)) != before
    assert int(fingerprint(-values)) != before


@pytest.mark.parametrize("count", [1, 100, 8191, 8192, 8193, 12289, 2**20, 2**31 + 11, 2**35 - 1])
def test_fingerprints_look_at_one_entry_of_each_block(count):
    entries = min(count, draw_record._ENTRIES)
    places = draw_record._PLACES[:entries] * max(count, draw_record._ENTRIES) >> 28
    ends = np.arange(entries + 1) * count / entries
    assert np.all((np.floor(ends[:-1]) <= places) & (places < np.ceil(ends[1:])))


def test_strings_have_fingerprints():
    assert int(fingerprint(tf.constant(["a", "b"]))) != int(fingerprint(tf.constant(["b", "a"])))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The record of draws is then read outside of compiled functions."""
    monkeypatch.setattr(devices, "compiled_for_gpu", devices.compiled_by_xla)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_compiled_for_a_gpu_batches_are_looked_up_outside(steps, on_a_gpu):
    chunk_size = None if steps == 1 else 20
    data = batches(chunk_size=chunk_size, padding="buckets" if steps == 1 else "full")
    model = support.compiled(
        tfdp.DPSGD(1.0, 1.0, sampling=data.sampling), jit_compile=True, steps_per_execution=steps
    )
    model.fit(data, epochs=2, verbose=0)
    assert model.optimizer.released_steps() == (6, 0)
    element = next(iter(data))
    if steps == 1:
        assert counted(model, [element, element, *mixed(next(iter(data)))]) == (7, 2)


def compiled_step(data):
    """An optimizer, and a step with it that XLA compiles."""
    model = support.small_model()
    optimizer = tfdp.DPSGD(1.0, 1.0, sampling=data.sampling)

    @tf.function(jit_compile=True)
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            loss = support.crossentropy()(y, model(x, training=True), sample_weight=mask)
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    return optimizer, step


def called_in_one_function(reads):
    """Returns what is counted of two calls of one compiled step on one or two batches."""
    data = batches(padding="full")
    optimizer, step = compiled_step(data)

    @tf.function
    def several(iterator):
        first = next(iterator)
        step(*first)
        step(*(next(iterator) if reads == 2 else first))

    several(iter(data))
    return optimizer.released_steps()


@pytest.mark.slow
def test_compiled_for_a_gpu_one_batch_counts_for_one_call(on_a_gpu):
    assert called_in_one_function(1) == (1, 1)
    # What the second reads is not what was looked up when the step was traced.
    assert called_in_one_function(2) == (1, 1)


@pytest.mark.slow
def test_calls_that_are_not_marked_are_caught(on_a_gpu, monkeypatch):
    monkeypatch.setattr(draw_record.RECORD, "_marks_on_device", Unwritten)
    with pytest.raises(AssertionError):
        test_compiled_for_a_gpu_one_batch_counts_for_one_call(None)


class Unwritten:
    """Mutant: marks that stay as they are."""

    def read_value(self):
        return tf.fill([1024], tf.constant(-1, tf.int64))

    def scatter_update(self, mark):
        pass


@pytest.mark.slow
def test_compiled_for_a_gpu_without_a_function_around_there_is_a_warning(on_a_gpu, caplog):
    data = batches(padding="full")
    optimizer, step = compiled_step(data)

    with caplog.at_level(logging.WARNING, "tfdp"):
        step(*next(iter(data)))
    assert "No epsilon can be stated" in caplog.text
    assert optimizer.released_steps() == (0, 1)


def test_draws_that_are_cut_off_otherwise_are_told_apart():
    full = PoissonSampling(64, 16, padding="full")
    other = dataclasses.replace(full, max_truncation_probability=1e-12)
    assert draw_record._facts(full, 0) != draw_record._facts(other, 0)
    # Without padding it does not matter.
    plain, same = (dataclasses.replace(one, padding="none") for one in (full, other))
    assert draw_record._facts(plain, 0) == draw_record._facts(same, 0)
    assert len(draw_record._facts(full, 0)) == draw_record._FACTS
