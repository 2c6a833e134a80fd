"""A Keras 2 variational autoencoder with a divergence between batches and prior, private."""

import contextlib

import tensorflow as tf

from tfdp.keras2.front_end import KERAS_2, takes
from tfdp.keras2.keras_2 import registered
from tfdp.training.term_wise.front_end import FrontEnd
from tfdp.training.term_wise.training import TermWiseTraining


@registered
class TermWiseVAE(TermWiseTraining, tf.keras.Model):
    """A variational autoencoder (VAE), trained with differential privacy (PriVAE).

    It minimizes, over batches X of examples x_i,

        (1/B) sum_i [ -E log p(x_i|z) + beta KL(q(z|x_i) || p(z)) ]  +  alpha D(q(z), p(z)).

    The first term is sample-wise: each example's gradient is clipped (C1, the `l2_norm_clip` of the
    optimizer). D, between the codes of many examples and the prior, is batch-wise: the batch is
    split into random groups, and each group's gradient is clipped (C2, `batch_clip`). See
    `tfdp.clipping.TermWiseAggregation` for the mechanism; its cost in epsilon is that of the same
    optimizer without D.

    Compile it with `tfdp.DPSGD`, `DPAdam`, `DPSignSGD` or `DPSignAdam`, and fit it on
    `tfdp.data.poisson_batches`; under a `tf.distribute.MirroredStrategy`, on
    `tfdp.data.distributed_poisson_batches`. `history` shows only the number of `updates`, and
    nothing about the training data; evaluate on held-out data, with `validation_data`.

    Args:
      encoder: Maps examples to `[rows, 2 * latent_dim]`: the locations of q(z|x), then the values
        whose softplus is its standard deviations.
      decoder: Maps codes `[rows, latent_dim]` to tensors of the shape of examples, the parameters
        of p(x|z).
      prior: p(z), a `tfdp.priors.Prior`.
      likelihood: p(x|z): "bernoulli" (the decoder returns logits), "laplace", "normal", or a
        `tfdp.likelihoods.Likelihood`.
      divergence: D: "mmd" (dimension-wise), "rbf_mmd", "kl" (KL(p(z)||q(z))), a
        `tfdp.divergences.Divergence`, or None for no such term.
      alpha: Weight of D.
      beta: Weight of the sample-wise KL term.
      num_samples: Codes L drawn for each example, for the expectation over q(z|x). More codes take
        more time but cost no privacy: the example's mean gradient is clipped.
      aggregation: "term_wise"; the baselines "micro" and "batch", at the noise that they need; or
        "none", without privacy and with an ordinary Keras optimizer.
      batch_clip: C2, in gradient units: needed for "term_wise" with a divergence.
      num_groups: Groups m of a batch, see `TermWiseAggregation`.
      split: Split of the noise, see `TermWiseAggregation`.
      group_capacity: See `TermWiseAggregation`.
      num_classes: For a conditional VAE, the number of classes: labels are integers below it, and
        both networks get `[input, one-hot label]`.
      non_private_diagnostics: Whether training shows `non_private_loss`, the loss of the batch,
        which is then computed once more; of several replicas, the mean of their losses. Epsilon
        does not cover it.
      **kwargs: `name` and others, as in `tf.keras.Model`.

    Raises:
      ValueError: An argument is out of its range, or does not go with another.

    Example:
      >>> import numpy as np, tensorflow as tf, tfdp
      >>> x = np.random.rand(500, 8).astype("float32")
      >>> batches = tfdp.data.poisson_batches((x, x), expected_batch_size=50)
      >>> dense = tf.keras.layers.Dense
      >>> model = tfdp.TermWiseVAE(
      ...     encoder=tf.keras.Sequential([dense(16, "relu", input_shape=[8]), dense(4)]),
      ...     decoder=tf.keras.Sequential([dense(16, "relu", input_shape=[2]), dense(8)]),
      ...     prior=tfdp.priors.SpikeAndSlab(latent_dim=2),
      ...     divergence="mmd",
      ...     alpha=10.0,
      ...     batch_clip=0.1,
      ...     num_groups=5,
      ... )
      >>> model.compile(tfdp.DPAdam(1.0, 1.1, sampling=batches.sampling))
      >>> history = model.fit(batches, epochs=2, verbose=0)
      >>> model.optimizer.ledger.steps
      20
      >>> model.generate(3).shape
      (3, 8)

    References:
      - Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation.
      - Burda et al., 2016, Importance Weighted Autoencoders (https://arxiv.org/abs/1509.00519), for
        `log_likelihood`.
    """

    _front_end = KERAS_2.with_parts(
        FrontEnd,
        scaled=lambda optimizer, loss: loss,
        networks_called=lambda model: contextlib.nullcontext(),
    )

    def _make_saveable(self) -> None:
        self._set_save_spec(takes(self.encoder))
