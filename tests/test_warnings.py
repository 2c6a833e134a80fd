import warnings

import pytest
import tensorflow as tf

import tfdp
from tests import support

X, Y = support.small_data(40)
MESSAGE = "No epsilon can be stated for this training: tfdp.DPSGD does not know"


def train(optimizer, epochs=1):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        support.compiled(optimizer).fit(X, Y, 20, epochs=epochs, verbose=0)
    return [w for w in found if str(w.message).startswith("No epsilon")]


def test_plain_fit_warns_once_at_the_line_that_calls_it():
    (warning,) = train(tfdp.DPSGD(1.0, 1.0, 20), epochs=3)
    assert str(warning.message).startswith(MESSAGE) and "poisson_batches" in str(warning.message)
    assert warning.filename == __file__


def test_the_warning_comes_before_the_first_step_ends():
    seen = []

    class Looks(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(len(found))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = support.compiled(tfdp.DPSGD(1.0, 1.0, 20))
        model.fit(X, Y, 20, callbacks=[Looks()], verbose=0)
    assert seen[0] > 0


@pytest.mark.slow
def test_training_without_noise_or_with_sampling_does_not_warn():
    assert not train(tfdp.DPSGD(1.0, 0.0, 20))
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling)
        support.compiled(optimizer).fit(batches, verbose=0)
    assert not [w for w in found if "No epsilon" in str(w.message)]


def test_arrays_in_place_of_the_batches_are_an_error_that_says_so():
    batches = tfdp.data.poisson_batches((X, Y), expected_batch_size=10)
    model = support.compiled(tfdp.DPSGD(1.0, 1.0, sampling=batches.sampling))
    with pytest.raises(ValueError, match=r"`model.fit\(batches\)`.* Received arrays"):
        model.fit(X, Y, 20, verbose=0)
