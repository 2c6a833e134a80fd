import keras
import pytest

import tfdp
from tests import support
from tfdp.optimizers import arguments


@pytest.mark.parametrize("cls", support.OPTIMIZERS)
@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "`l2_norm_clip` and `noise_multiplier`"), ({"l2_norm_clip": 1.0}, "`noise_multiplier`")],
)
def test_missing_arguments_are_named_for_the_users_class(cls, given, missing):
    with pytest.raises(
        ValueError, match=f"^Argument {missing} must be given to tfdp.{cls.__name__}"
    ):
        cls(**given)


def test_models_of_keras_3_are_refused_with_advice():
    optimizer = tfdp.DPSGD(1.0, 1.0, 5)
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"tfdp.DPSGD, for models of Keras 2 \(`tf.keras`\)"):
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"Keras 3 .* need an optimizer of `tfdp\.keras3`"):
        arguments.check_variables(model.trainable_variables)
