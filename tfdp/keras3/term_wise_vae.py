"""A Keras 3 variational autoencoder with a divergence between batches and prior, private."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdp.base.keras_3 import takes, tf_variable
from tfdp.clipping.batch_losses.two_term_loss import Aggregation, TwoTermLoss
from tfdp.clipping.loss_graph import batch_state
from tfdp.keras3.front_end import KERAS_3
from tfdp.training.term_wise.front_end import FrontEnd
from tfdp.training.term_wise.training import TermWiseTraining


def _seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    return [seed for layer in model._flatten_layers() for seed in layer._seed_generators]


@contextlib.contextmanager
def _networks_called(model: keras.Model) -> Iterator[None]:
    """Lets layers draw random numbers without a side effect: seeds stay what they are."""
    with keras.StatelessScope(collect_losses=True) as scope:
        yield
    seeds = {id(seed.state) for seed in _seed_generators(model)}
    for variable in model.variables:
        if id(variable) in scope.state_mapping.keys() - seeds:
            raise batch_state.keeps_statistic(tf_variable(variable))
    if scope.losses:
        raise ValueError(
            "The encoder and decoder must add no losses of their own, which would be of data and "
            "not clipped. Received a network with `add_loss` or an activity regularizer. "
            "(Regularizers of weights are accepted.)"
        )


@keras.saving.register_keras_serializable(package="tfdp")
class TermWiseVAE(TermWiseTraining, keras.Model):
    """A variational autoencoder (VAE), trained with differential privacy (PriVAE).

    It does for models of Keras 3 what `tfdp.keras2.TermWiseVAE` does for those of Keras 2, by the
    same code: see there for the loss, its clipping, an example, and references.

    Compile it with `tfdp.keras3.DPOptimizer`, `DPSGD`, `DPAdam`, `DPSignSGD` or `DPSignAdam`, and
    fit it on `tfdp.data.poisson_batches`. `history` shows only the number of `updates`, and nothing
    about the training data; evaluate on held-out data, with `validation_data`.

    Args:
      encoder: Model of Keras 3 that maps examples to `[rows, 2 * latent_dim]`: the locations of
        q(z|x), then the values whose softplus is its standard deviations.
      decoder: Model of Keras 3 that maps codes `[rows, latent_dim]` to tensors of the shape of
        examples, the parameters of p(x|z).
      prior: p(z), a prior of `tfdp.keras3.priors`.
      likelihood: p(x|z): "bernoulli" (the decoder returns logits), "laplace", "normal", or a
        likelihood of `tfdp.keras3.likelihoods`.
      divergence: D: "mmd" (dimension-wise), "rbf_mmd", "kl" (KL(p(z)||q(z))), a divergence of
        `tfdp.keras3.divergences`, or None for no such term.
      alpha: Weight of D.
      beta: Weight of the sample-wise KL term.
      num_samples: Codes L drawn for each example, for the expectation over q(z|x).
      aggregation: "term_wise"; the baselines "micro" and "batch", at the noise that they need; or
        "none", without privacy and with an ordinary Keras optimizer.
      batch_clip: C2, in gradient units: needed for "term_wise" with a divergence.
      num_groups: Groups m of a batch, see `tfdp.clipping.TermWiseAggregation`.
      split: Split of the noise, see there.
      group_capacity: See there.
      num_classes: For a conditional VAE, the number of classes: labels are integers below it, and
        both networks get `[input, one-hot label]`.
      non_private_diagnostics: Whether training shows `non_private_loss`, the loss of the batch,
        which is then computed once more; of several replicas, the mean of their losses. Epsilon
        does not cover it.
      **kwargs: `name` and others, as in `keras.Model`.

    Raises:
      ValueError: An argument is out of its range, or does not go with another.
    """

    _front_end = KERAS_3.with_parts(
        FrontEnd,
        scaled=lambda optimizer, loss: optimizer.scale_loss(loss),
        networks_called=_networks_called,
    )

    def _private_loss(self, data: Any, aggregation: Aggregation) -> TwoTermLoss:
        for seed in _seed_generators(self):  # Once in each step, outside of what is clipped.
            seed.next()
        return super()._private_loss(data, aggregation)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Under a strategy Keras calls the model on `x`; its networks are built, and may need `y`.
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the model, which reconstructs examples; the arguments are those of Keras."""
        kwargs.setdefault("input_signature", [takes(self.encoder)])
        super().export(*args, **kwargs)
