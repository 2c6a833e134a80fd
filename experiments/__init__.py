"""Programs that reproduce papers, with Keras 2 unless `--keras=3` is given."""

import importlib.util
import os

# Published results were made with Keras 2: `tf.keras` is Keras 2 where it is installed.
if all(map(importlib.util.find_spec, ("tf_keras", "tensorflow_privacy"))):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
