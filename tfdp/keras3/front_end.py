"""Keras 3, as training sees it."""

import keras

from tfdp.base.keras_3 import takes, tf_variable
from tfdp.training.front_end import FrontEnd

KERAS_3 = FrontEnd(
    package=keras,
    name="keras",
    title="Keras 3",
    part="tfdp.keras3",
    optimizers="tfdp.keras3.DPOptimizer, DPSGD, DPAdam, DPSignSGD or DPSignAdam",
    ordinary="an ordinary optimizer of Keras 3 (`keras.optimizers`)",
    normalizations=(keras.layers.BatchNormalization,),
    takes=takes,
    tf_variable=tf_variable,
    # `fit` calls all layers of a functional model with `training=True`.
    is_called_for_inference=lambda layer: False,
)
