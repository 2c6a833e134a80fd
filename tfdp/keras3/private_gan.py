"""A Keras 3 generative adversarial network (GAN), whose critic is trained privately."""

from typing import Any

import keras

from tfdp.base.keras_3 import takes
from tfdp.keras3.front_end import KERAS_3
from tfdp.training.private_gan import GANTraining


@keras.saving.register_keras_serializable(package="tfdp")
class PrivateGAN(GANTraining, keras.Model):
    """A generative adversarial network (GAN), trained with differential privacy.

    It does for models of Keras 3 what `tfdp.keras2.PrivateGAN` does for those of Keras 2, by the
    same code: see there for the losses, what is private and why, and references.

    Compile it with `tfdp.keras3.DPOptimizer`, `DPSGD`, `DPAdam`, `DPSignSGD` or `DPSignAdam` for
    the critic and an ordinary optimizer of Keras 3 for the generator, and fit it on
    `tfdp.data.poisson_batches`: of `(x, x)`, or of `(x, labels)` if it is conditional. `history`
    shows only the number of the critic's `updates`, and nothing about the training data.

    Args:
      generator: Model of Keras 3 that maps noise `[rows, latent_dim]`, normally distributed, to
        tensors of the shape of examples.
      critic: Model of Keras 3 that maps examples to scores `[rows, 1]` or `[rows]`: larger ones for
        real examples. With "non_saturating", scores are logits.
      loss: "wasserstein" or "non_saturating".
      gradient_penalty: Weight of the penalty of each example; None for none.
      weight_clip: Bound on the absolute values of the critic's weights, to which they are clipped
        after each step; None for none. "wasserstein" needs either this or a gradient penalty.
      critic_steps: Number of critic steps for each step of the generator.
      generator_batch_size: Rows of a step of the generator; by default the critic's expected batch
        size.
      num_classes: For a conditional GAN, the number of classes: labels are integers below it, and
        both networks get `[input, one-hot label]`.
      label_probabilities: Public probabilities of the classes in the generator's steps and in
        `generate`; by default all are equal.
      non_private_diagnostics: Whether training shows `non_private_critic_loss`, the loss of the
        batch, which is then computed once more. Epsilon does not cover it.
      **kwargs: `name` and others, as in `keras.Model`.

    Raises:
      ValueError: An argument is out of its range, or does not go with another.

    Example:
      >>> import keras, numpy as np, tfdp.keras3
      >>> x = np.random.rand(500, 8).astype("float32")
      >>> batches = tfdp.data.poisson_batches((x, x), expected_batch_size=50)
      >>> dense = keras.layers.Dense
      >>> model = tfdp.keras3.PrivateGAN(
      ...     generator=keras.Sequential([keras.Input([2]), dense(16, "relu"), dense(8)]),
      ...     critic=keras.Sequential([keras.Input([8]), dense(16, "tanh"), dense(1)]),
      ...     gradient_penalty=10.0,
      ...     critic_steps=2,
      ... )
      >>> model.compile(
      ...     critic_optimizer=tfdp.keras3.DPAdam(1.0, 1.1, sampling=batches.sampling),
      ...     generator_optimizer=keras.optimizers.Adam(0.001),
      ... )
      >>> history = model.fit(batches, epochs=2, verbose=0)
      >>> model.optimizer.ledger.steps
      20
      >>> model.generate(3).shape
      (3, 8)
    """

    _front_end = KERAS_3

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Does nothing: networks and optimizers are built. Keras would call the model on `x`."""

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the model, which maps noise to examples; the arguments are those of Keras."""
        kwargs.setdefault("input_signature", [takes(self.generator)])
        super().export(*args, **kwargs)
