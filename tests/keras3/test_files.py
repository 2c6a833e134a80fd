"""What Keras 3 computes from weights has cost what they have: LoRA and quantized layers."""

import contextlib
import warnings

import pytest

from tests import front_ends
from tests.step.test_saved_lineage import STEPS, in_another_process, steps_of, trained
from tfdp.step.record import lineage

pytestmark = front_ends.needs_keras_3
keras = front_ends.keras
FRONT = front_ends.FRONT_ENDS[-1]


def network():
    dense = keras.layers.Dense(3, use_bias=False)
    return keras.Sequential([keras.Input([4]), dense])


def merged_lora(folder):
    """Trains by LoRA, and loads the merged kernel into a model without LoRA."""
    model = network()
    model.layers[0].enable_lora(2)
    trained(FRONT, model).save_weights(folder / "m.weights.h5")
    in_another_process()
    other = network()
    other.load_weights(folder / "m.weights.h5")
    return other


def quantized(folder):
    model = trained(FRONT, network())
    with warnings.catch_warnings():  # Keras warns of the input's layer.
        warnings.simplefilter("ignore")
        model.quantize("int8")
    return keras.Sequential([keras.Input([4]), *model.layers])  # Without the optimizer.


def loaded_quantized(folder):
    quantized(folder).save(folder / "q.keras")
    in_another_process()
    return keras.models.load_model(folder / "q.keras", compile=False)


WAYS = [merged_lora, quantized, loaded_quantized]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("way", WAYS)
def test_computed_weights_have_cost_what_they_were_computed_from(way, tmp_path):
    assert steps_of(way(tmp_path)) == STEPS


@pytest.mark.slow
def test_mutant_that_ignores_what_is_computed_while_saving_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "derived", lambda values: [])
    assert steps_of(merged_lora(tmp_path)) == 0


@pytest.mark.slow
def test_mutant_that_ignores_what_is_computed_by_quantize_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lineage, "deriving", lambda inherited=False: contextlib.nullcontext(enter_result=[])
    )
    assert steps_of(quantized(tmp_path)) == 0


def test_public_layers_beside_trained_ones_cost_nothing(tmp_path):
    base = keras.layers.Dense(4)
    model = keras.Sequential([keras.Input([4]), base, keras.layers.Dense(3)])
    base.trainable = False
    trained(FRONT, model).save(tmp_path / "m.keras")
    in_another_process()
    loaded = keras.models.load_model(tmp_path / "m.keras", compile=False)
    assert steps_of(loaded) == STEPS
    other = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)])
    other.layers[0].set_weights(base.get_weights())
    assert steps_of(other) == 0
