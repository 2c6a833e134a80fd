"""The noise: its distribution, and that it is never drawn twice."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdp
from tests import support
from tests.support import compiled, crossentropy
from tfdp.step import noise
from tfdp.step.secure_noise import add_secure_noise, add_secure_noise_to_count

pytestmark = pytest.mark.rewritten_graphs

CLIP, SIGMA, BATCH = 0.7, 1.3, 20
X, Y = support.small_data(40)
layers = tf.keras.layers


def wide_model():
    tf.keras.utils.set_random_seed(0)
    return tf.keras.Sequential([layers.Input([4]), layers.Dense(1000), layers.Dense(3)])


def noise_of_one_step(optimizer, chunks=1, model=None):
    """The noise in the clipped sum, from one step on batches without examples."""
    model = compiled(optimizer, model or wide_model())
    before = support.flat(model.get_weights())
    model.fit(tfdp_like(np.zeros(40, bool), chunks), verbose=0)
    return (before - support.flat(model.get_weights())) * BATCH


def tfdp_like(mask, chunks):
    """One logical batch in chunks, the first of which has one row more."""
    ends = np.arange(1, chunks + 1) * ((len(mask) - 1) // chunks) + 1
    parts = [(X[a:b], Y[a:b], mask[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    spec = support.open_spec(parts[0])
    return tf.data.Dataset.from_generator(lambda: parts, output_signature=spec)


def make(cls=tfdp.DPSGD, **kwargs):
    return cls(CLIP, SIGMA, BATCH, learning_rate=1.0, **kwargs)


def assert_normal(sample, stddev):
    """Kolmogorov-Smirnov: the sample fits this distribution, but not 2/3 or 3/2 of the scale."""
    p_value = {
        scale: scipy.stats.kstest(sample, scipy.stats.norm(0, scale * stddev).cdf).pvalue
        for scale in (2 / 3, 1, 3 / 2)
    }
    assert p_value[1] > 1e-6
    assert p_value[2 / 3] < 1e-9 and p_value[3 / 2] < 1e-9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunks", [1, 4])
def test_distribution_of_the_noise_whatever_the_chunks(chunks):
    sample = noise_of_one_step(make(gradient_accumulation_steps=chunks), chunks)
    assert len(sample) > 8000
    assert_normal(sample, SIGMA * CLIP)


@pytest.mark.slow
def test_distribution_of_the_noise_with_microbatches():
    optimizer = make(num_microbatches=BATCH)
    assert_normal(noise_of_one_step(optimizer), 2 * SIGMA * CLIP)


@pytest.mark.slow
def test_distribution_of_the_noise_compiled_by_xla():
    model = wide_model()
    model.compile(make(), loss=crossentropy(), jit_compile=True)
    before = support.flat(model.get_weights())
    model.fit(tf.data.Dataset.from_tensors((X, Y, np.zeros(40, bool))), verbose=0)
    assert_normal((before - support.flat(model.get_weights())) * BATCH, SIGMA * CLIP)


class HalvedNoise(tfdp.DPSGD):
    """Mutant: two thirds of the noise."""

    @property
    def noise_stddev(self):
        return super().noise_stddev * 2 / 3


class NoiseEveryMicroStep(tfdp.DPSGD):
    """Mutant: noise on every chunk, as in TF-Privacy."""

    def _accumulate(self, step, name):
        from tfdp.step.noise import add_gaussian_noise

        key = self._noise.next_key()
        noisy = add_gaussian_noise(step.clipped.gradients, self.noise_stddev, key)
        step.clipped.gradients[:] = noisy
        return super()._accumulate(step, name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("mutant", "chunks"), [(HalvedNoise, 1), (NoiseEveryMicroStep, 4)])
def test_wrong_noise_is_caught(mutant, chunks):
    sample = noise_of_one_step(make(mutant, gradient_accumulation_steps=chunks), chunks)
    with pytest.raises(AssertionError):
        assert_normal(sample, SIGMA * CLIP)


def assert_unrelated(first, second):
    """Two samples share no value, and do not correlate."""
    n = min(len(first), len(second))
    first, second = first[:n], second[:n]
    assert np.mean(np.abs(first - second) < 1e-6) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(n)


def test_runs_under_one_global_seed_do_not_share_noise():
    samples = []
    for _ in range(2):
        tf.keras.utils.set_random_seed(7)
        samples.append(noise_of_one_step(make()))
    assert_unrelated(*samples)


def test_variables_do_not_share_noise():
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [layers.Input([4]), layers.Dense(30), layers.Dense(30), layers.Dense(30), layers.Dense(3)]
    )
    noise = noise_of_one_step(make(), model=model)
    first, second = noise[150 : 150 + 900], noise[150 + 930 : 150 + 1830]
    assert_unrelated(first, second)


def test_steps_do_not_share_noise():
    optimizer = make()
    assert_unrelated(noise_of_one_step(optimizer), noise_of_one_step(optimizer))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", [None, 5])
def test_a_step_rolled_back_does_not_repeat_its_noise(seed):
    """Restoring an older checkpoint must not draw the noise of its next step again: the
    difference of the two releases would be a difference of exact gradients."""
    optimizer = make(noise_seed=seed)
    first = noise_of_one_step(optimizer)
    optimizer.iterations.assign(0)
    second = noise_of_one_step(optimizer)
    if seed is None:
        assert_unrelated(first, second)
    else:  # What a test seed is for: the same step, the same noise.
        np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.slow
def test_a_test_seed_fixes_the_noise_and_another_does_not():
    first, same, other = (noise_of_one_step(make(noise_seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert_unrelated(first, other)


def test_the_key_is_in_no_config_checkpoint_or_slot(tmp_path):
    optimizer = make()
    noise_of_one_step(optimizer)
    key = optimizer._noise.secret().numpy()
    assert np.all(key != 0)
    assert optimizer.get_config()["noise_seed"] is None
    saved = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    reader = tf.train.load_checkpoint(saved)
    names = reader.get_variable_to_shape_map()
    assert any("privacy_record" in name for name in names)
    for name in names:
        value = np.asarray(reader.get_tensor(name))
        assert not (value.dtype == np.int64 and np.any(np.isin(value, key)))
    assert all("noise" not in w.name for w in optimizer.weights)


def test_what_stands_in_for_the_noise_gets_what_the_noise_would_have():
    """And only meanwhile, in one thread: elsewhere the sums get noise."""
    key, seen = tf.constant([1, 2], tf.int64), []

    def stand_in(tensors, stddevs, dtypes):
        seen.append((tensors, stddevs, dtypes))
        return [tf.constant(7.0, dtype) for dtype in dtypes]

    sums, wide = [tf.zeros([2]), None], [tf.zeros([2], tf.float64)]
    with noise.replaced_by(stand_in):
        assert noise.add_gaussian_noise([tf.zeros([2])], 3.0, key)[0] == 7.0
        (secure,) = add_secure_noise(wide, 2.0, 1.5, 0.0, key, [tf.float32])
        count = add_secure_noise_to_count(tf.constant(1.5), 4.0, key)
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(noise.add_gaussian_noise, sums, [3.0, 3.0], key).result()
    assert secure == count == 7.0 and secure.dtype == count.dtype == tf.float32
    assert [len(tensors) for tensors, _, _ in seen] == [1, 1, 1]
    assert seen[0][1] == [3.0] and seen[2][1] == [4.0]
    assert float(seen[1][1][0]) == pytest.approx(3.0, rel=1e-5)
    for noisy in (elsewhere, noise.add_gaussian_noise(sums, [3.0, 3.0], key)):
        assert noisy[1] is None and len(set(noisy[0].numpy().tolist()) - {0.0, 7.0}) == 2
