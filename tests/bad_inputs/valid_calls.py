"""Valid calls of everything public, by name, and the arguments that are replaced in them."""

import dataclasses
import inspect
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

import tfdp
from tfdp import accounting, auditing, clipping, contrib, data, evaluation, schedules

IS_KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras = tf.keras
if not IS_KERAS_2:
    import keras
private = tfdp.keras2 if IS_KERAS_2 else tfdp.keras3
_FRONT = "tfdp.keras2" if IS_KERAS_2 else "tfdp.keras3"

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = np.arange(40) % 2
SCORES = np.random.default_rng(1).normal(size=(2, 30))
_folders = itertools.count()
_FOLDER = tempfile.mkdtemp(prefix="bad_inputs_")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that is valid.

    Attributes:
      function: What is called.
      arguments: Its arguments, by name.
      others: Further arguments to replace, which have defaults.
      only: The arguments to replace, if not all.
      positional: Names of arguments that are given without a name, in order.
      then: Is called with the result.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    others: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    then: Callable[[Any], Any] = lambda result: result

    @property
    def varied(self):
        if self.only:
            return self.only
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(self.function).parameters.values()
        named = [p.name for p in parameters if p.kind not in kinds]
        return tuple(dict.fromkeys([*named, *self.arguments, *self.others]))

    def run(self, arguments):
        arguments = dict(arguments)
        first = [arguments.pop(name) for name in self.positional]
        return self.then(self.function(*first, **arguments))


def step(noise_multiplier=1.0):
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(0.1, gaussian)


def ledger():
    made = accounting.PrivacyLedger()
    made.record(step(), 10)
    return made


def model(*, built=True, compiled=False):
    layers = [keras.layers.Input([3])] if built else []
    made = keras.Sequential([*layers, keras.layers.Dense(2)])
    if compiled:
        made.compile("sgd", loss())
    return made


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sampling():
    return accounting.PoissonSampling(40, 10)


def batches():
    return data.poisson_batches((X, Y), expected_batch_size=10)


def trained():
    made = model()
    made.compile(private.DPSGD(1.0, 1.0, learning_rate=0.1, sampling=sampling()), loss())
    return made


def path():
    return os.path.join(_FOLDER, f"file_{next(_folders)}")


def write_files():
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    folder = path()
    data.write_examples(examples, folder, verbose=False)
    return folder


def partition():
    return contrib.pate.random_partition(100, num_teachers=10)


def run_of(function, positional=(), **arguments):
    """Returns a call with a method or a function, whose arguments are all replaced."""
    return Call(function, arguments, positional=positional)


def _recorded_allocation(noise_multiplier, steps):
    """Events check nothing themselves, as those of dp_accounting; ledgers do."""
    accounting.PrivacyLedger().record(
        accounting.RandomAllocationDpEvent(noise_multiplier=noise_multiplier, steps=steps)
    )


def _recorded_parts(events):
    accounting.PrivacyLedger().record(accounting.ParallelDpEvent(events))


_GOAL = {"target_epsilon": 3.0, "delta": 1e-3}
_SAMPLED = {"steps": 20, "sampling_probability": 0.1}
_SIZES = {"dataset_size": 1000, "expected_batch_size": 100}


def _with_sizes(function, **arguments):
    """A calibration by sizes: of its arguments those that the other form has not."""
    return Call(function, {**_GOAL, "steps": 20, **_SIZES, **arguments}, only=tuple(_SIZES))


_CALLS = {
    "accounting.BoundedRangeDpEvent": lambda: run_of(accounting.BoundedRangeDpEvent, range=1.0),
    "accounting.PldAccountant": lambda: run_of(accounting.PldAccountant),
    "accounting.PldAccountant.compose": lambda: run_of(
        accounting.PldAccountant().compose, event=step()
    ),
    "accounting.PldAccountant.get_epsilon": lambda: run_of(
        accounting.PldAccountant().compose(step()).get_epsilon, target_delta=1e-3
    ),
    "accounting.PldAccountant.get_least_epsilon": lambda: run_of(
        accounting.PldAccountant().compose(step()).get_least_epsilon, target_delta=1e-3
    ),
    "accounting.PldAccountant.get_profile": lambda: run_of(
        accounting.PldAccountant().compose(step()).get_profile, target_deltas=[1e-3]
    ),
    "accounting.PldAccountant.get_delta": lambda: run_of(
        accounting.PldAccountant().compose(step()).get_delta, target_epsilon=1.0
    ),
    "accounting.PoissonSampling": lambda: run_of(
        accounting.PoissonSampling, dataset_size=100, expected_batch_size=10
    ),
    "accounting.PrivacyLedger": lambda: run_of(accounting.PrivacyLedger),
    "accounting.PrivacyLedger.record": lambda: run_of(ledger().record, event=step()),
    "accounting.PrivacyLedger.add_note": lambda: run_of(ledger().add_note, note="A note."),
    "accounting.PrivacyLedger.read_only": lambda: run_of(ledger().read_only),
    "accounting.PrivacyLedger.epsilon": lambda: run_of(ledger().epsilon, delta=1e-3),
    "accounting.PrivacyLedger.trade_off": lambda: run_of(ledger().trade_off),
    "accounting.PrivacyLedger.from_dict": lambda: run_of(
        accounting.PrivacyLedger.from_dict, data=ledger().to_dict()
    ),
    "accounting.RdpAccountant": lambda: run_of(accounting.RdpAccountant),
    "accounting.RdpAccountant.compose": lambda: run_of(
        accounting.RdpAccountant().compose, event=step()
    ),
    "accounting.RdpAccountant.get_epsilon": lambda: run_of(
        accounting.RdpAccountant().compose(step()).get_epsilon, target_delta=1e-3
    ),
    "accounting.RdpFilter": lambda: run_of(accounting.RdpFilter, **_GOAL),
    "accounting.RdpFilter.cost": lambda: run_of(
        accounting.RdpFilter(**_GOAL, order=4.0).cost, event=step()
    ),
    "accounting.RdpFilter.can_afford": lambda: run_of(
        accounting.RdpFilter(**_GOAL, order=4.0).can_afford, event=step()
    ),
    "accounting.RdpFilter.spend": lambda: run_of(
        accounting.RdpFilter(**_GOAL, order=4.0).spend, event=step(5.0)
    ),
    "accounting.RdpFilter.from_dict": lambda: run_of(
        accounting.RdpFilter.from_dict, data=accounting.RdpFilter(**_GOAL, order=4.0).to_dict()
    ),
    "accounting.RdpFilter.resume": lambda: run_of(
        accounting.RdpFilter(**_GOAL, order=4.0).resume,
        data=accounting.RdpFilter(**_GOAL, order=4.0).to_dict(),
    ),
    "accounting.Repetitions": lambda: run_of(
        accounting.Repetitions, distribution="geometric", mean=10
    ),
    "accounting.Repetitions of negative binomials": lambda: Call(
        accounting.Repetitions,
        {"distribution": "negative_binomial", "mean": 10, "shape": 0.5},
        only=("mean", "shape"),
    ),
    "accounting.Repetitions.event": lambda: run_of(
        accounting.Repetitions("geometric", 10).event, run=step()
    ),
    "accounting.Repetitions.probability": lambda: run_of(
        accounting.Repetitions("geometric", 10).probability, runs=2
    ),
    "accounting.SelectiveReleaseDpEvent": lambda: run_of(
        accounting.SelectiveReleaseDpEvent, update=step(), selection=step()
    ),
    "accounting.RandomAllocationDpEvent": lambda: run_of(
        _recorded_allocation, noise_multiplier=1.0, steps=10
    ),
    "accounting.SignedGaussianDpEvent": lambda: run_of(
        accounting.SignedGaussianDpEvent, noise_multiplier=1.0
    ),
    "accounting.acceptance_bounds": lambda: run_of(
        accounting.acceptance_bounds, validation_noise_multiplier=1.3
    ),
    "accounting.calibrate_private_selection": lambda: run_of(
        accounting.calibrate_private_selection,
        repetitions=accounting.Repetitions("geometric", 3),
        **_GOAL,
        **_SAMPLED,
    ),
    "accounting.calibrate_selective_release": lambda: run_of(
        accounting.calibrate_selective_release,
        **_GOAL,
        updates=20,
        sampling_probability=0.1,
        validation_sampling_probability=0.1,
        validation_noise_multiplier=1.3,
    ),
    "accounting.epsilon_interval": lambda: run_of(
        accounting.epsilon_interval, ledger=ledger(), delta=1e-3
    ),
    "accounting.TradeOff.gaussian_dp": lambda: run_of(ledger().trade_off().gaussian_dp, delta=1e-3),
    "accounting.TradeOff.true_positive_rate": lambda: run_of(
        ledger().trade_off().true_positive_rate, false_positive_rate=0.1
    ),
    "accounting.parameters_for_acceptance": lambda: run_of(
        accounting.parameters_for_acceptance, least=0.5, largest=0.95
    ),
    "accounting.private_selection": lambda: run_of(
        accounting.private_selection,
        run=ledger(),
        repetitions=accounting.Repetitions("geometric", 10),
    ),
    "accounting.ParallelDpEvent": lambda: run_of(_recorded_parts, events=[step(), step()]),
    "auditing.BlackBoxAudit": lambda: run_of(
        auditing.BlackBoxAudit, data=(X, Y), canaries=(X[:9], Y[:9])
    ),
    "auditing.BlackBoxAudit.result": lambda: run_of(
        auditing.BlackBoxAudit((X, Y), (X[:30], Y[:30]), seed=1).result,
        model=model(compiled=True),
        delta=1e-3,
    ),
    "auditing.AttackResult.tpr_at_fpr": lambda: run_of(
        auditing.AttackResult(*SCORES, 4).tpr_at_fpr, fpr=0.1
    ),
    "auditing.AttackResult.plot": lambda: run_of(
        auditing.AttackResult(*SCORES, 4).plot, path=path() + ".svg"
    ),
    "auditing.advantage": lambda: run_of(
        auditing.advantage, in_scores=SCORES[0], out_scores=SCORES[1]
    ),
    "auditing.auc": lambda: run_of(auditing.auc, in_scores=SCORES[0], out_scores=SCORES[1]),
    "auditing.check_sensitivity": lambda: run_of(
        auditing.check_sensitivity, model=trained(), data=(X, Y), examples=2, verbose=False
    ),
    "auditing.confidence_scores": lambda: run_of(
        auditing.confidence_scores, model=model(compiled=True), x=X, y=Y
    ),
    "auditing.epsilon_lower_bound": lambda: run_of(
        auditing.epsilon_lower_bound, in_scores=SCORES[0], out_scores=SCORES[1], delta=1e-3
    ),
    "auditing.epsilon_of_mu": lambda: run_of(auditing.epsilon_of_mu, mu=1.0, delta=1e-3),
    "auditing.lira": lambda: run_of(
        auditing.lira,
        train=lambda part: set(map(str, part[0])),
        data=(Y, Y),
        models=4,
        score=lambda trained, x, y: [float(str(value) in trained) for value in x],
    ),
    "auditing.loss_scores": lambda: run_of(
        auditing.loss_scores, model=model(compiled=True), x=X, y=Y
    ),
    "auditing.mislabelled": lambda: run_of(auditing.mislabelled, data=(X, Y), count=3),
    "auditing.roc_curve": lambda: run_of(
        auditing.roc_curve, in_scores=SCORES[0], out_scores=SCORES[1]
    ),
    "auditing.tpr_at_fpr": lambda: run_of(
        auditing.tpr_at_fpr, in_scores=SCORES[0], out_scores=SCORES[1], fpr=0.1
    ),
    "calibrate_correlated_noise": lambda: run_of(
        tfdp.calibrate_correlated_noise, **_GOAL, steps=20, **_SIZES, most_bands=4
    ),
    "calibrate_noise_multiplier": lambda: run_of(
        tfdp.calibrate_noise_multiplier, **_GOAL, **_SAMPLED
    ),
    "calibrate_noise_multiplier of sizes": lambda: _with_sizes(tfdp.calibrate_noise_multiplier),
    "calibrate_noise_schedule": lambda: run_of(
        tfdp.calibrate_noise_schedule,
        schedule=schedules.PiecewiseConstantNoise([10], [1.0, 0.5]),
        **_GOAL,
        **_SAMPLED,
    ),
    "calibrate_steps": lambda: run_of(
        tfdp.calibrate_steps, **_GOAL, noise_multiplier=1.0, sampling_probability=0.1
    ),
    "plan": lambda: run_of(tfdp.plan, dataset_size=1000, target_epsilon=3.0, epochs=2),
    "privacy_statement": lambda: run_of(tfdp.privacy_statement, ledger=ledger(), delta=1e-3),
    "report": lambda: run_of(tfdp.report, model=trained(), path=path() + ".md"),
    "tune": lambda: _tune(),
    "BandedNoise": lambda: run_of(tfdp.BandedNoise, coefficients=[1.0, 0.5]),
    "BandedNoise.optimal": lambda: run_of(tfdp.BandedNoise.optimal, bands=3, steps=20),
    "BandedNoise.standard_error": lambda: run_of(
        tfdp.BandedNoise([1.0, 0.5]).standard_error, steps=20
    ),
    "BufferedNoise": lambda: run_of(
        tfdp.BufferedNoise, weights=[0.5], decays=[0.8], cycle_length=4, cycles=2
    ),
    "BufferedNoise.optimal": lambda: run_of(
        tfdp.BufferedNoise.optimal, cycle_length=4, cycles=2, buffers=1
    ),
    "BufferedNoise.standard_error": lambda: run_of(
        tfdp.BufferedNoise([0.5], [0.8], 4, 2).standard_error, steps=8
    ),
    "SparseEmbeddings": lambda: run_of(tfdp.SparseEmbeddings, threshold=3.0),
    "SparseEmbeddings.false_positives": lambda: run_of(
        tfdp.SparseEmbeddings(3.0).false_positives, noise_multiplier=1.0, rows=100
    ),
    "SparseEmbeddings.noise": lambda: run_of(
        tfdp.SparseEmbeddings(3.0).noise, noise_multiplier=1.0
    ),
    "clipping.AdaptiveQuantileClipping": lambda: run_of(clipping.AdaptiveQuantileClipping),
    "clipping.AutomaticClipping": lambda: run_of(clipping.AutomaticClipping),
    "clipping.OnePassEngine": lambda: run_of(clipping.OnePassEngine, l2_norm_clip=1.0),
    "clipping.OnePassEngine.sensitivity": lambda: run_of(clipping.OnePassEngine(1.0).sensitivity),
    "clipping.TermWiseAggregation": lambda: run_of(clipping.TermWiseAggregation, batch_clip=0.5),
    "clipping.TermWiseAggregation.sensitivities": lambda: run_of(
        clipping.TermWiseAggregation(0.5).sensitivities, l2_norm_clip=1.0
    ),
    "clipping.TwoTermLoss": lambda: run_of(
        clipping.TwoTermLoss,
        sample_wise=lambda x: tf.reduce_sum(x, 1),
        batch_wise=lambda x, exists: tf.reduce_sum(x),
        batch=[tf.constant(X)],
        aggregation=clipping.TermWiseAggregation(0.5),
    ),
    "clipping.VectorizedEngine": lambda: run_of(clipping.VectorizedEngine, l2_norm_clip=1.0),
    "clipping.per_example_losses": lambda: run_of(
        _in_a_graph(clipping.per_example_losses), losses=tf.constant([1.0, 2.0])
    ),
    "clipping.register_op_gradients": lambda: Call(
        clipping.register_op_gradients,
        {"types": f"BadInputs{next(_folders)}"},
        others=("weight", "open_shapes"),
        positional=("types",),
    ),
    "contrib.AdaptiveGradientDescent": lambda: run_of(
        contrib.AdaptiveGradientDescent,
        model=model(),
        loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="none"),
        batches=batches(),
        budget=accounting.RdpFilter(**_GOAL, order=4.0),
        options=contrib.DescentOptions(1.0, 4.0, 5.0, 0.5, 5),
    ),
    "contrib.DescentOptions": lambda: run_of(
        contrib.DescentOptions,
        l2_norm_clip=1.0,
        noise_multiplier=4.0,
        loss_clip=5.0,
        selection_range=0.5,
        selection_batch_size=5,
    ),
    "contrib.PerturbedClipping": lambda: run_of(contrib.PerturbedClipping),
    "contrib.RandomMask": lambda: run_of(contrib.RandomMask, fraction=0.5),
    "contrib.TopK": lambda: run_of(contrib.TopK, fraction=0.5),
    "contrib.calibrate_descent": lambda: run_of(
        contrib.calibrate_descent, **_GOAL, **_SIZES, selection_batch_size=50, iterations=5
    ),
    "contrib.pate.ConfidentGNMax": lambda: run_of(
        contrib.pate.ConfidentGNMax,
        partition=partition(),
        num_classes=3,
        noise_stddev=2.0,
        threshold=5.0,
        threshold_noise_stddev=5.0,
        max_answers=3,
    ),
    "contrib.pate.GNMax": lambda: run_of(
        contrib.pate.GNMax, partition=partition(), num_classes=3, noise_stddev=2.0
    ),
    "contrib.pate.GNMax.answer": lambda: run_of(
        contrib.pate.GNMax(partition(), num_classes=3, noise_stddev=2.0).answer,
        outputs=np.tile([2, 0], [10, 1]),
    ),
    "contrib.pate.Partition": lambda: run_of(
        contrib.pate.Partition, teacher_of=np.arange(20) % 4, num_teachers=4
    ),
    "contrib.pate.Partition.indices": lambda: run_of(partition().indices, teacher=3),
    "contrib.pate.nonprivate_data_dependent_epsilon": lambda: run_of(
        contrib.pate.nonprivate_data_dependent_epsilon,
        votes=np.ones([250, 5], int),
        num_classes=3,
        noise_stddev=40.0,
        delta=1e-3,
    ),
    "contrib.pate.random_partition": lambda: run_of(
        contrib.pate.random_partition, num_examples=40, num_teachers=4
    ),
    "contrib.pate.teacher_votes": lambda: run_of(
        contrib.pate.teacher_votes, outputs=[[1, 0], [0, 0]], num_classes=2
    ),
    "contrib.pate.vote_counts": lambda: run_of(
        contrib.pate.vote_counts, votes=[[1, 0], [1, 2]], num_classes=3
    ),
    "data.RandomizedLabels": lambda: run_of(
        data.RandomizedLabels, labels=Y, num_classes=2, epsilon=1.0
    ),
    "data.RandomizedLabels.crossentropy": lambda: run_of(
        data.RandomizedLabels(Y, 2, 1.0).crossentropy, from_logits=True
    ),
    "data.distributed_poisson_batches": lambda: run_of(
        data.distributed_poisson_batches,
        strategy=tf.distribute.get_strategy(),
        open_shard=lambda index, count: (X[index::count], Y[index::count]),
        dataset_size=40,
        expected_batch_size=10,
    ),
    "data.patch_features": lambda: run_of(
        data.patch_features, images=np.zeros([2, 8, 8, 1], "float32"), num_filters=4
    ),
    "data.poisson_batches": lambda: Call(
        data.poisson_batches, {"data": (X, Y), "expected_batch_size": 10}, then=next_batch
    ),
    "data.poisson_batches of dicts": lambda: Call(
        data.poisson_batches,
        {"data": {"x": X, "y": Y}, "expected_batch_size": 10, "features": "x", "label": "y"},
        only=("features", "label"),
    ),
    "data.poisson_batches of users": lambda: Call(
        data.poisson_batches,
        {
            "data": (X, Y),
            "expected_batch_size": 2,
            "privacy_unit": np.arange(40) // 2,
            "examples_per_user": 1,
        },
        only=("privacy_unit", "examples_per_user", "expected_batch_size"),
    ),
    "data.randomized_response_labels": lambda: run_of(
        data.randomized_response_labels, labels=Y, num_classes=2, epsilon=1.0
    ),
    "data.read_examples": lambda: run_of(data.read_examples, folder=write_files()),
    "data.scattering_features": lambda: run_of(
        data.scattering_features,
        images=np.zeros([2, 8, 8, 1], "float32"),
        num_angles=2,
        num_groups=1,
    ),
    "data.write_examples": lambda: run_of(
        data.write_examples,
        dataset=tf.data.Dataset.from_tensor_slices((X, Y)),
        folder=path(),
        verbose=False,
    ),
    "evaluation.subgroup_report": lambda: run_of(
        evaluation.subgroup_report, model=model(), x=X, y=Y, groups=Y
    ),
    "schedules.ExponentialDecayNoise": lambda: run_of(
        schedules.ExponentialDecayNoise, initial=2.0, decay_steps=10, decay_rate=0.5, least=0.5
    ),
    "schedules.ExponentialDecayNoise.scaled": lambda: run_of(
        schedules.ExponentialDecayNoise(2.0, 10, 0.5, 0.5).scaled, factor=2.0
    ),
    "schedules.PiecewiseConstantNoise": lambda: run_of(
        schedules.PiecewiseConstantNoise, boundaries=[10], values=[1.0, 0.5]
    ),
    "schedules.PiecewiseConstantNoise.scaled": lambda: run_of(
        schedules.PiecewiseConstantNoise([10], [1.0, 0.5]).scaled, factor=2.0
    ),
    "priors.StandardNormal": lambda: run_of(tfdp.priors.StandardNormal, latent_dim=2),
    "priors.SpikeAndSlab": lambda: run_of(tfdp.priors.SpikeAndSlab, latent_dim=2),
    "priors.GaussianMixture": lambda: run_of(
        tfdp.priors.GaussianMixture, locs=[[0, 1], [1, 0]], variance=0.5
    ),
    "likelihoods.Bernoulli": lambda: run_of(tfdp.likelihoods.Bernoulli),
    "likelihoods.Laplace": lambda: run_of(tfdp.likelihoods.Laplace, scale=0.5),
    "likelihoods.Normal": lambda: run_of(tfdp.likelihoods.Normal, scale=0.5),
    "divergences.DimensionwiseMMD": lambda: run_of(tfdp.divergences.DimensionwiseMMD, scales=[1]),
    "divergences.RbfMMD": lambda: run_of(tfdp.divergences.RbfMMD, bandwidths=[1]),
}


def _in_a_graph(function):
    def traced(losses):
        tf.function(lambda: function(losses), autograph=False)()

    return traced


def next_batch(made):
    for _ in made.take(1):
        pass
    return made


def _optimizer(name, **hyperparameters):
    arguments = {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 1.0,
        "sampling": sampling(),
        "learning_rate": 0.1,
        **hyperparameters,
    }
    others = (
        *("expected_batch_size", "num_microbatches", "gradient_accumulation_steps", "noise_seed"),
        *("secure_noise", "engine", "clipping_rule", "noise_correlation", "compression"),
        "sparse_embeddings",
        *("name", "weight_decay"),
    )
    return Call(getattr(private, name), arguments, others, only=(*arguments, *others))


def _selective(name):
    return Call(
        getattr(private, name),
        {
            "l2_norm_clip": 1.0,
            "noise_multiplier": 1.0,
            "sampling": sampling(),
            "learning_rate": 0.1,
            "validation_batch_size": 5,
            "validation_noise_multiplier": 1.3,
        },
        ("expected_batch_size",),
    )


def _two_networks():
    def network(inputs, outputs):
        return keras.Sequential([keras.layers.Input([inputs]), keras.layers.Dense(outputs)])

    return network


def _vae():
    network = _two_networks()
    arguments = {
        "encoder": network(3, 4),
        "decoder": network(2, 3),
        "prior": tfdp.priors.StandardNormal(2),
        "likelihood": tfdp.likelihoods.Normal(0.7),
        "divergence": tfdp.divergences.RbfMMD([1.0]),
        "batch_clip": 0.5,
    }
    return run_of(private.TermWiseVAE, **arguments)


def _gan():
    network = _two_networks()
    return run_of(
        private.PrivateGAN, generator=network(2, 3), critic=network(3, 1), weight_clip=0.1
    )


def _make_private(then=lambda made: made, only=()):
    arguments = {
        "model": model(),
        "data": (X, Y),
        "epochs": 2,
        "target_epsilon": 3.0,
        "delta": 1e-3,
        "loss": loss(),
        "verbose": False,
    }
    return Call(private.make_private, arguments, only=only, then=then)


def _built():
    built = model()
    built.compile("adam", loss())
    return built


def _tune():
    return run_of(
        tfdp.tune,
        build=_built,
        data=(X, Y),
        candidates={"learning_rate": [0.01]},
        epochs=1,
        target_epsilon=8.0,
        validation_data=(X, Y),
        repetitions=accounting.Repetitions("geometric", 1),
        delta=1e-3,
        verbose=0,
    )


def _fit(made):
    made.model.fit(made.batches, epochs=1, steps_per_epoch=1, verbose=0, callbacks=[made.budget])


def _metrics(made):
    made.model.evaluate(X, Y, verbose=0)


_OF_FRONT_END = {
    "DPSGD": lambda: _optimizer("DPSGD", momentum=0.5),
    "DPAdam": lambda: _optimizer("DPAdam", beta_1=0.9, beta_2=0.99, epsilon=1e-7),
    "DPAdamBC": lambda: _optimizer("DPAdamBC", beta_1=0.9, beta_2=0.99),
    "DPSignSGD": lambda: _optimizer("DPSignSGD", momentum=0.5),
    "DPSignAdam": lambda: _optimizer("DPSignAdam", beta_1=0.9, beta_2=0.99),
    "DPSURSGD": lambda: _selective("DPSURSGD"),
    "DPSURAdam": lambda: _selective("DPSURAdam"),
    "DPSURSignSGD": lambda: _selective("DPSURSignSGD"),
    "DPSURSignAdam": lambda: _selective("DPSURSignAdam"),
    "PrivacyBudget": lambda: run_of(private.PrivacyBudget, **_GOAL),
    "PrivateGAN": _gan,
    "SelectiveModel": lambda: run_of(private.SelectiveModel, base_model=model()),
    "TermWiseVAE": _vae,
    "make_private": _make_private,
    "make_private and fit": lambda: _make_private(_fit, ("data",)),
    "replace_batch_normalization": lambda: run_of(
        private.replace_batch_normalization,
        model=keras.Sequential(
            [keras.layers.Input([4]), keras.layers.Dense(4), keras.layers.BatchNormalization()]
        ),
    ),
    "validate": lambda: Call(
        private.validate,
        {"model": model(), "loss": loss(), "data": (X, Y)},
        then=lambda found: found.check(),  # Raises what was found.
    ),
}
if IS_KERAS_2:
    _OF_FRONT_END |= {
        "ExponentialMovingAverage": lambda: run_of(private.ExponentialMovingAverage),
    }
else:
    _OF_FRONT_END |= {
        "DPOptimizer": lambda: run_of(
            private.DPOptimizer,
            inner_optimizer=keras.optimizers.SGD(0.1),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            sampling=sampling(),
        ),
    }

CALLS = {f"{_FRONT}.{name}": make for name, make in _OF_FRONT_END.items()}
if IS_KERAS_2:
    CALLS["tfdp.auditing.CanaryAudit"] = lambda: run_of(
        auditing.CanaryAudit, model=model(), data=(X, Y), num_canaries=10
    )
else:  # They are the same in both.
    CALLS = {f"tfdp.{name}": make for name, make in _CALLS.items()} | CALLS
