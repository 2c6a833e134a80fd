"""Trains one variational autoencoder as its settings say, and measures it."""

import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdp
from experiments.datasets import Data
from experiments.settings import RefusedError
from experiments.vae import metrics
from experiments.vae import networks as vae_networks
from experiments.vae.settings import METHODS, VaeSettings
from tfdp import likelihoods, priors
from tfdp.accounting import PoissonSampling

NUM_CLASSES = 10
LATENT_DIM = {"digits": 8, "mnist": 16, "sparsity": 50, "pinwheel": 2}
CONDITIONAL = ("digits", "mnist")  # Tasks whose networks get the class.
PINWHEEL_CENTRES = ((0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0))
PINWHEEL_VARIANCE = 0.03

MEASURES = (
    *("log_likelihood", "mmd", "sparsity", "purity"),
    *("accuracy", "kl", "explained", "diversity"),
)

_OPTIMIZERS = {
    "dpsgd": tfdp.DPSGD,
    "dpadam": tfdp.DPAdam,
    "dpsignsgd": tfdp.DPSignSGD,
    "dpsignadam": tfdp.DPSignAdam,
}
_LIKELIHOODS = {
    "digits": likelihoods.Bernoulli(),
    "mnist": likelihoods.Bernoulli(),
    "sparsity": likelihoods.Laplace(0.1),
    "pinwheel": likelihoods.Normal(0.1),
}
_DIVERGENCES = {"digits": "mmd", "mnist": "mmd", "sparsity": "mmd", "pinwheel": "kl"}
_GENERATED_PER_CLASS = 8
_MOST_GENERATED = 10_000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
      noise_multiplier: Noise multiplier of the optimizer; None where the method is not private.
      epsilon: Epsilon of the ledger; infinite where the method is not private.
      log_likelihood: Mean over held-out examples, in nats, importance-weighted.
      mmd: Squared MMD of q(z), over held-out examples, and p(z), summed over the dimensions.
      sparsity: Hoyer's, of held-out codes; None but for the task of that name.
      purity: Purity of held-out codes; None but for pinwheel.
      accuracy: On held-out examples, of a classifier of generated ones; None but for digits and
        MNIST, as the next ones.
      kl: Mean of KL(q(z|x) || p(z)) over held-out examples, in nats.
      explained: Share of the variance of held-out images within their classes that reconstructions
        explain: 0 is what the mean of the class does, which needs no code.
      diversity: Variance of generated images within their classes, by that of held-out ones.
      seconds: Time of training, its graph's making included.
    """

    noise_multiplier: float | None
    epsilon: float
    log_likelihood: float
    mmd: float
    sparsity: float | None
    purity: float | None
    accuracy: float | None
    kl: float | None
    explained: float | None
    diversity: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
      model: The `tfdp.TermWiseVAE`.
      noise_multiplier: See `Outcome`.
      epsilon: See `Outcome`.
      statement: Privacy statement.
      seconds: See `Outcome`.
    """

    model: Any
    noise_multiplier: float | None
    epsilon: float
    statement: str
    seconds: float


def run(settings: VaeSettings, data: Data) -> tuple[Outcome, dict[str, np.ndarray], str]:
    """Trains and measures.

    Returns:
      The outcome; the arrays that figures show, all functions of the trained model and of examples
      that it was not trained on; and the privacy statement.

    Raises:
      RefusedError: The budget cannot be met.
      RuntimeError: More than the budget was spent.
    """
    trained = train(settings, data)
    outcome = Outcome(
        noise_multiplier=trained.noise_multiplier,
        epsilon=trained.epsilon,
        seconds=trained.seconds,
        **measure(trained.model, settings, data),
    )
    return outcome, pictures(trained.model, settings, data), trained.statement


def train(settings: VaeSettings, data: Data) -> Trained:
    """Trains; raises as `run` does."""
    noise = calibrate(settings, data.size) if settings.private else None
    # Weights, and codes that are drawn. The noise does not depend on it.
    tf.keras.utils.set_random_seed(settings.seed)
    batches = tfdp.data.poisson_batches(
        (data.train_x, data.train_y),
        expected_batch_size=settings.expected_batch_size,
        steps_per_epoch=settings.steps,
        # Privacy amplification needs that nobody knows who was sampled.
        seed=None if settings.private else settings.seed,
    )
    model = make_model(settings)
    model.compile(optimizer=make_optimizer(settings, noise, batches.sampling))
    began = time.monotonic()
    model.fit(batches, epochs=1, verbose=0)
    seconds = time.monotonic() - began
    epsilon, statement = np.inf, "No differential privacy: trained without noise."
    if settings.private:
        epsilon = model.optimizer.ledger.epsilon(settings.delta).epsilon
        statement = tfdp.privacy_statement(model, settings.delta, dataset_size=data.size)
        if epsilon > settings.target_epsilon:
            raise RuntimeError(f"epsilon = {epsilon} was spent, more than the target: {settings}.")
    return Trained(model, noise, epsilon, statement, seconds)


def calibrate(settings: VaeSettings, dataset_size: int) -> float:
    """Returns the noise multiplier for the target epsilon.

    Raises:
      RefusedError: No noise is enough.
    """
    try:
        return tfdp.calibrate_noise_multiplier(
            target_epsilon=settings.target_epsilon,
            delta=settings.delta,
            steps=settings.steps,
            dataset_size=dataset_size,
            expected_batch_size=settings.expected_batch_size,
        )
    except ValueError as error:
        raise RefusedError(
            f"--target_epsilon={settings.target_epsilon:g} at --delta={settings.delta:g} cannot "
            f"be reached. {error}"
        ) from error


def make_prior(task: str) -> priors.Prior:
    """Returns the distribution of the codes of a task."""
    if task == "pinwheel":
        return priors.GaussianMixture(PINWHEEL_CENTRES, PINWHEEL_VARIANCE)
    prior = priors.SpikeAndSlab if task == "sparsity" else priors.StandardNormal
    return prior(LATENT_DIM[task])


def make_model(settings: VaeSettings) -> Any:
    """Returns the untrained model, a `tfdp.TermWiseVAE`."""
    num_classes = None
    if settings.task in CONDITIONAL:
        num_classes = NUM_CLASSES
        build = {"digits": vae_networks.digits, "mnist": vae_networks.mnist}[settings.task]
        networks = build(LATENT_DIM[settings.task], num_classes)
    elif settings.task == "sparsity":
        networks = vae_networks.fashion_mnist(LATENT_DIM["sparsity"])
    else:
        networks = vae_networks.pinwheel(LATENT_DIM["pinwheel"])
    method = METHODS[settings.method]
    groups = {} if settings.num_groups is None else {"num_groups": settings.num_groups}
    clip = {} if settings.batch_clip is None else {"batch_clip": settings.batch_clip}
    return tfdp.TermWiseVAE(
        *networks,
        prior=make_prior(settings.task),
        likelihood=_likelihood(settings),
        divergence=_DIVERGENCES[settings.task] if method.divergence else None,
        alpha=settings.alpha,
        beta=settings.beta,
        aggregation=method.aggregation,
        num_samples=settings.num_samples,
        num_classes=num_classes,
        **groups,
        **clip,
    )


def _likelihood(settings: VaeSettings) -> likelihoods.Likelihood:
    if settings.normal_scale is None:
        return _LIKELIHOODS[settings.task]
    return likelihoods.Normal(settings.normal_scale)


def make_optimizer(settings: VaeSettings, noise: float | None, sampling: PoissonSampling) -> Any:
    """Returns the optimizer that the settings ask for."""
    if noise is None:
        return tf.keras.optimizers.legacy.Adam(settings.learning_rate)
    return _OPTIMIZERS[settings.optimizer](
        l2_norm_clip=settings.l2_norm_clip,
        noise_multiplier=noise,
        learning_rate=settings.learning_rate,
        sampling=sampling,
    )


def measure(model: Any, settings: VaeSettings, data: Data) -> dict[str, float | None]:
    """Returns the measures of a trained model, by name; on held-out examples alone."""
    x = data.eval_x[: settings.evaluation_examples]
    labels = data.eval_y[: settings.evaluation_examples]
    y = labels if settings.task in CONDITIONAL else None
    posterior = model.encode(x, y)
    centres, drawn = np.asarray(posterior.mean()), np.asarray(posterior.sample())
    found = dict.fromkeys(MEASURES)
    likelihood = model.log_likelihood(x, y, num_samples=settings.importance_samples)
    found["log_likelihood"] = float(np.mean(likelihood))
    prior_samples = np.asarray(make_prior(settings.task).distribution().sample(len(x)))
    found["mmd"] = metrics.dimensionwise_mmd(drawn, prior_samples)
    if settings.task == "sparsity":
        found["sparsity"] = metrics.hoyer_sparsity(centres)
    elif settings.task == "pinwheel":
        found["purity"] = metrics.cluster_purity(centres, PINWHEEL_CENTRES, labels)
    else:
        # As many as there are real ones, but at most 10,000, of equally many of each class: nothing
        # of the real classes' frequencies is used.
        classes = np.arange(min(data.size, _MOST_GENERATED)) % NUM_CLASSES
        generated = generate(model, classes, settings.seed)
        found["accuracy"] = metrics.downstream_accuracy(generated, classes, x, labels)
        deviations, within = np.asarray(posterior.stddev()), metrics.variance_within(x, labels)
        found["kl"] = metrics.kl_from_standard_normal(centres, deviations)
        errors = np.square(np.asarray(model.reconstruct(x, y)) - x)
        found["explained"] = 1 - float(errors.sum(axis=(1, 2, 3)).mean()) / within
        found["diversity"] = metrics.variance_within(generated, classes) / within
    return found


def accuracy_of_real(data: Data) -> float:
    """Computes `downstream_accuracy` of as many real training images, without privacy."""
    x, y = data.train_x[:_MOST_GENERATED], data.train_y[:_MOST_GENERATED]
    return metrics.downstream_accuracy(x, y, data.eval_x, data.eval_y)


def generate(model: Any, classes: np.ndarray | int, seed: int) -> np.ndarray:
    """Images for `classes`, or so many of them, cut to the public range of pixels."""
    if isinstance(classes, int):
        images = model.generate(classes, seed=seed)
    else:
        images = model.generate(len(classes), y=classes, seed=seed)
    return np.clip(np.asarray(images), 0.0, 1.0)  # NaN stays.


def pictures(model: Any, settings: VaeSettings, data: Data) -> dict[str, np.ndarray]:
    """Collects what the figures show of a run."""
    if settings.task == "pinwheel":
        x, y = data.eval_x, data.eval_y
        return {
            "inputs": x,
            "labels": y,
            "reconstructions": np.asarray(model.reconstruct(x)),
            "latents": np.asarray(model.encode(x).sample()),
        }
    if settings.task in CONDITIONAL:
        classes = np.repeat(np.arange(NUM_CLASSES), _GENERATED_PER_CLASS)
        images = generate(model, classes, settings.seed)
    else:
        images = generate(model, NUM_CLASSES * _GENERATED_PER_CLASS, settings.seed)
    height, width = images.shape[1:3]
    return {"generated": images.reshape(NUM_CLASSES, _GENERATED_PER_CLASS, height, width)}
