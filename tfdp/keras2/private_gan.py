"""A Keras 2 generative adversarial network (GAN), whose critic is trained privately."""

import tensorflow as tf

from tfdp.keras2.front_end import KERAS_2, takes
from tfdp.keras2.keras_2 import registered
from tfdp.training.private_gan import GANTraining


@registered
class PrivateGAN(GANTraining, tf.keras.Model):
    """A generative adversarial network (GAN), trained with differential privacy.

    The critic alone sees data. Its steps are private: each real example x_i meets one generated
    example in the same row, and the gradient of that row's loss is clipped,

        wasserstein:     D(G(z_i)) - D(x_i) + gradient_penalty * (|grad D(x'_i)| - 1)^2
        non_saturating:  softplus(D(G(z_i))) + softplus(-D(x_i))

    where x'_i is a random point between the two. The generator learns from the critic, on noise and
    labels that do not come from the data: this is post-processing, which costs no privacy, as does
    `generate`. The cost is that of the critic's optimizer on the same batches.

    Guarantees: both networks and all that is generated are (epsilon, delta)-differentially private
    under zero-out of one example, with the epsilon of the ledger of the critic's optimizer, if
    `label_probabilities` and the architecture are public.

    Compile it with `tfdp.DPSGD`, `DPAdam`, `DPSignSGD` or `DPSignAdam` for the critic and an
    ordinary optimizer for the generator, and fit it on `tfdp.data.poisson_batches`: of `(x, x)`, or
    of `(x, labels)` if it is conditional. `history` shows only the number of the critic's
    `updates`, and nothing about the training data. (`train_on_batch` is refused for batches whose
    size is known when the step is traced.)

    The generator may have BatchNormalization: generated examples for the critic are made with
    `training=False`, and its statistics are those of its own steps. The critic must not have it.

    Args:
      generator: Maps noise `[rows, latent_dim]`, normally distributed, to tensors of the shape of
        examples.
      critic: Maps examples to scores `[rows, 1]` or `[rows]`: larger ones for real examples. With
        "non_saturating", scores are logits.
      loss: "wasserstein" or "non_saturating".
      gradient_penalty: Weight of the penalty of each example; None for none.
      weight_clip: Bound on the absolute values of the critic's weights, to which they are clipped
        after each step; None for none. "wasserstein" needs either this or a gradient penalty.
      critic_steps: Number of critic steps for each step of the generator.
      generator_batch_size: Rows of a step of the generator; by default the critic's expected batch
        size. The actual size of a batch, which is private, plays no part.
      num_classes: For a conditional GAN, the number of classes: labels are integers below it, and
        both networks get `[input, one-hot label]`.
      label_probabilities: Probabilities of the classes in the generator's steps and in `generate`;
        by default all are equal. They must be public: the classes' frequencies in the training data
        are not.
      non_private_diagnostics: Whether training shows `non_private_critic_loss`, the loss of the
        batch, which is then computed once more. Epsilon does not cover it.
      **kwargs: `name` and others, as in `tf.keras.Model`.

    Raises:
      ValueError: An argument is out of its range, or does not go with another.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x = np.random.rand(500, 8).astype("float32")
      >>> batches = tfdp.data.poisson_batches((x, x), expected_batch_size=50)
      >>> dense = tf.keras.layers.Dense
      >>> model = tfdp.PrivateGAN(
      ...     generator=tf.keras.Sequential([dense(16, "relu", input_shape=[2]), dense(8)]),
      ...     critic=tf.keras.Sequential([dense(16, "tanh", input_shape=[8]), dense(1)]),
      ...     gradient_penalty=10.0,
      ...     critic_steps=2,
      ... )
      >>> model.compile(
      ...     critic_optimizer=tfdp.DPAdam(1.0, 1.1, sampling=batches.sampling),
      ...     generator_optimizer=tf.keras.optimizers.Adam(0.001),
      ... )
      >>> history = model.fit(batches, epochs=2, verbose=0)
      >>> model.optimizer.ledger.steps
      20
      >>> model.generate(3).shape
      (3, 8)

    References:
      - Gulrajani et al., 2017, Improved Training of Wasserstein GANs
        (https://arxiv.org/abs/1704.00028).
      - Xie et al., 2018, Differentially Private Generative Adversarial Network (DPGAN,
        https://arxiv.org/abs/1802.06739); Xu et al., 2019, GANobfuscator.
      - Goodfellow et al., 2014, Generative Adversarial Networks (https://arxiv.org/abs/1406.2661),
        for "non_saturating".
    """

    _front_end = KERAS_2

    def _make_saveable(self) -> None:
        self._set_save_spec(takes(self.generator))
