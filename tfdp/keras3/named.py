"""Private optimizers of Keras 3 under the names of their inner optimizers."""

from typing import TYPE_CHECKING, Any, ClassVar

import keras
import tensorflow as tf

from tfdp.accounting.sampling import PoissonSampling
from tfdp.base.validation import is_number
from tfdp.clipping.clipping_rules import ClippingRule
from tfdp.keras3.corrected_adam import CorrectedAdam
from tfdp.keras3.dp_optimizer import DPOptimizer
from tfdp.keras3.sign_descent import SignAdam, SignSGD
from tfdp.schedules import NoiseMultiplier
from tfdp.step.arguments import (
    PRIVATE_ARGUMENTS,
    as_floats,
    check_first_argument,
    check_hyperparameters,
)
from tfdp.step.corrected_second_moment import KnownNoise
from tfdp.step.privacy_config import taken

if TYPE_CHECKING:
    from tfdp.correlated_noise import CorrelatedNoise
    from tfdp.step.compression import Compression
    from tfdp.step.sparse_embeddings import SparseEmbeddings

# Arguments of Keras's optimizers that have another place here.
_OF_INNER_ALONE = ("gradient_accumulation_steps", "loss_scale_factor", "name")


class _NamedOptimizer(DPOptimizer):
    """Base class of private optimizers that make their inner optimizer themselves."""

    _inner_class: ClassVar[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        check_first_argument(cls, args, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        l2_norm_clip: float | None = None,
        noise_multiplier: NoiseMultiplier | None = None,
        expected_batch_size: int | None = None,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int | None = None,
        sampling: PoissonSampling | dict[str, int] | None = None,
        noise_seed: int | None = None,
        secure_noise: bool = False,
        engine: str = "one_pass",
        clipping_rule: ClippingRule | str | dict[str, Any] = "flat",
        noise_correlation: "CorrelatedNoise | dict[str, Any] | None" = None,
        compression: "Compression | dict[str, Any] | None" = None,
        sparse_embeddings: "SparseEmbeddings | dict[str, Any] | None" = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        check_hyperparameters(kwargs)
        inner = self._make_inner(noise_multiplier, as_floats(kwargs))
        super().__init__(inner, name=name, **taken(locals()))

    def _make_inner(self, noise_multiplier: Any, arguments: dict[str, Any]) -> Any:
        return self._inner_class(**arguments)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this optimizer again, without the secret noise key."""
        inner = self.inner_optimizer.get_config()
        inner = {name: value for name, value in inner.items() if name not in _OF_INNER_ALONE}
        return {**inner, "name": self.name, **self._privacy_config()}


_DOC = """{title}

    It is `DPOptimizer` around {inner}: see there for the guarantee, and `tfdp.{name}`, the same of
    Keras 2, for references.

    Args:
      {{private_arguments}}
      name: Name of the optimizer.
      **kwargs: Arguments of {inner}: {kwargs}.

    Raises:
      ValueError: An argument is out of its range; while training, the loss is not one value per
        example, or the model mixes examples (BatchNormalization).

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x, y = np.random.rand(1000, 20).astype("float32"), np.random.randint(0, 2, 1000)
      >>> batches = tfdp.data.poisson_batches((x, y), expected_batch_size=100)
      >>> model = keras.Sequential([keras.layers.Dense(2)])
      >>> model.compile(
      ...     optimizer=tfdp.keras3.{name}(1.0, 1.1, sampling=batches.sampling),
      ...     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      ... )
      >>> history = model.fit(batches, epochs=1, verbose=0)
      >>> round(model.optimizer.ledger.epsilon(delta=1e-5).epsilon, 2) > 0
      True
    """


def _document(cls: type[_NamedOptimizer], inner: str, kwargs: str) -> None:
    text = _DOC.format(name=cls.__name__, title=cls.__doc__, inner=inner, kwargs=kwargs)
    cls.__doc__ = text.replace("{private_arguments}", PRIVATE_ARGUMENTS)


@keras.saving.register_keras_serializable(package="tfdp")
class DPSGD(_NamedOptimizer):
    """Differentially private stochastic gradient descent, with momentum."""

    _inner_class = keras.optimizers.SGD


@keras.saving.register_keras_serializable(package="tfdp")
class DPAdam(_NamedOptimizer):
    """Differentially private Adam."""

    _inner_class = keras.optimizers.Adam


@keras.saving.register_keras_serializable(package="tfdp")
class DPAdamBC(KnownNoise, _NamedOptimizer):
    """Differentially private Adam whose second moment is corrected for the noise (DP-AdamBC)."""

    _inner_class = CorrectedAdam

    def _update(self, gradients: list[tuple[tf.Tensor | None, tf.Variable]], name: Any) -> Any:
        self.inner_optimizer.noise_variance = self.noise_variance
        return super()._update(gradients, name)


@keras.saving.register_keras_serializable(package="tfdp")
class DPSignSGD(_NamedOptimizer):
    """Differentially private sign descent: steps of one size, by the noisy gradient's signs."""

    _inner_class = SignSGD

    def _moves_by_signs(self) -> bool:
        momentum = self.inner_optimizer.momentum  # A velocity is of noisy numbers.
        return is_number(momentum) and momentum == 0


@keras.saving.register_keras_serializable(package="tfdp")
class DPSignAdam(_NamedOptimizer):
    """Differentially private Adam, fed with the signs of the noisy gradient."""

    _inner_class = SignAdam

    def _make_inner(self, noise_multiplier: Any, arguments: dict[str, Any]) -> Any:
        # Without noise, a sign can be zero, and the second moment is no constant.
        if is_number(noise_multiplier) and noise_multiplier == 0:
            return keras.optimizers.Adam(**arguments)
        return SignAdam(**arguments)

    def _moves_by_signs(self) -> bool:
        return True

    def _transform_private_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        return tf.sign(gradient)


_SGD = "`learning_rate`, `momentum`, `nesterov`, `weight_decay` and others"
_ADAM = "`learning_rate`, `beta_1`, `beta_2`, `epsilon`, `weight_decay` and others"
_document(DPSGD, "`keras.optimizers.SGD`", _SGD)
_document(DPAdam, "`keras.optimizers.Adam`", _ADAM)
_document(
    DPAdamBC,
    "Adam with a corrected second moment",
    "`least_second_moment`, `learning_rate`, `beta_1`,\n        `beta_2`, `epsilon`, "
    "`weight_decay` and others, as in `keras.optimizers.Adam`",
)
_document(DPSignSGD, "sign descent", f"{_SGD}, as in\n        `keras.optimizers.SGD`")
_document(DPSignAdam, "Adam on signs", f"{_ADAM}, as in\n        `keras.optimizers.Adam`")
