"""The arguments of a variational autoencoder: what they must be, and how they are kept."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.front_ends import FRONT_ENDS, with_both
from tests.vae_support import batches, compiled, conditional, optimizer, vae
from tfdp import divergences, likelihoods, priors

PRIORS = [
    priors.StandardNormal(2),
    priors.SpikeAndSlab(2, 0.1, 0.7),
    priors.GaussianMixture([[0, 1], [1, 0]], 0.3),
]
LIKELIHOODS = ["bernoulli", likelihoods.Laplace(0.3), likelihoods.Normal(0.4)]
DIVERGENCES = [
    None,
    "kl",
    divergences.DimensionwiseMMD([0.1, 3]),
    divergences.RbfMMD([2.0]),
]


ALL = {
    "prior": priors.SpikeAndSlab(2),
    "likelihood": "laplace",
    "divergence": "mmd",
    "alpha": 2.0,
    "beta": 0.5,
    "num_samples": 3,
    "batch_clip": 0.3,
    "num_groups": 5,
    "split": 0.3,
    "group_capacity": 7,
    "non_private_diagnostics": True,
    "name": "mine",
}
CHANGES = [
    *({"prior": prior} for prior in PRIORS),
    *({"likelihood": likelihood} for likelihood in LIKELIHOODS),
    *({"divergence": divergence} for divergence in DIVERGENCES),
    *({"aggregation": name, "batch_clip": None} for name in ("micro", "batch", "none")),
]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("front", "changes"),
    [*((front, ALL) for front in FRONT_ENDS), *((FRONT_ENDS[0], changes) for changes in CHANGES)],
    ids=str,
)
def test_the_config_makes_the_model_again(front, changes):
    model = vae(front, **changes)
    config = json.loads(json.dumps(model.get_config()))
    copy = front.tfdp.TermWiseVAE.from_config(config)
    copy.set_weights(model.get_weights())
    assert json.loads(json.dumps(copy.get_config())) == config
    for name, value in changes.items():
        if name in ("prior", "likelihood", "divergence") and not isinstance(value, str):
            assert getattr(copy, name) == value
        elif name in config and name not in ("likelihood", "divergence"):
            assert config[name] == value
    assert copy.aggregation == model.aggregation
    np.testing.assert_array_equal(copy.generate(3, seed=1), model.generate(3, seed=1))


@with_both
def test_the_config_of_a_conditional_one(front):
    model = conditional(front)
    copy = front.tfdp.TermWiseVAE.from_config(json.loads(json.dumps(model.get_config())))
    assert copy.num_classes == 3 and copy.generate(3, 1).shape == (3, 6)


# Arguments.


def selective(front):
    return front.tfdp.DPSURSGD(
        1.0,
        1.1,
        validation_batch_size=8,
        validation_noise_multiplier=1.0,
        threshold=0.0,
        sampling=batches().sampling,
    )


def private(front):
    return optimizer(front.tfdp.DPSGD)


PRIVATE = r"`optimizer` must be tfdp\..*DPSGD, DPAdam, DPSignSGD or DPSignAdam with aggregation='"


@pytest.mark.parametrize(
    ("aggregation", "make", "message"),
    [
        ("term_wise", selective, PRIVATE + "term_wise'. Received: .*DPSURSGD"),
        ("batch", selective, PRIVATE + "batch'. Received: .*DPSURSGD"),
        ("term_wise", lambda front: "sgd", PRIVATE + "term_wise'. Received: .*SGD"),
        (
            "micro",
            lambda front: front.keras.optimizers.Adam(),
            PRIVATE + "micro'. Received: .*Adam",
        ),
        ("none", private, "`optimizer` must be an ordinary Keras .*='none'. Received: .*DPSGD"),
        ("none", selective, "`optimizer` must be an ordinary Keras .* Received: .*DPSURSGD"),
    ],
)
@with_both
def test_optimizers_that_do_not_go_with_the_aggregation(front, aggregation, make, message):
    with pytest.raises(ValueError, match=message):
        vae(front, aggregation=aggregation).compile(make(front))


def test_legacy_optimizers_of_keras_2_are_no_private_ones_either():
    with pytest.raises(ValueError, match=PRIVATE + "batch'. Received: .*SGD"):
        vae(aggregation="batch").compile(tf.keras.optimizers.legacy.SGD())


@with_both
def test_an_optimizer_of_another_keras_is_refused(front):
    for other in FRONT_ENDS:
        if other is not front:
            with pytest.raises(ValueError, match=r"[mM]odels of Keras [23]"):
                vae(front).compile(private(other))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "given",
    [
        {"loss": "mse"},
        {"metrics": ["mse"]},
        {"weighted_metrics": ["mse"]},
        {"loss": "mse", "loss_weights": [1.0]},
    ],
    ids=str,
)
def test_it_has_a_loss_of_its_own(given):
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"`{name}` must not be given: .*Received: {name}="):
        vae().compile(optimizer(), **given)
    vae().compile(optimizer(), **dict.fromkeys(given))  # None is nothing.


@with_both
def test_there_are_no_private_steps_in_eager_training(front):
    model = vae(front, divergence=None)
    model.compile(private(front), run_eagerly=True)
    with pytest.raises(ValueError, match=r"must run in a tf\.function"):
        model.fit(batches(), verbose=0)
    assert model.optimizer.ledger.steps == 0


REFUSED = [
    ({"alpha": -1.0}, "`alpha` must be a non-negative finite number. Received: alpha=-1.0"),
    ({"alpha": math.inf}, "`alpha` must be a non-negative finite number. Received: alpha=inf"),
    ({"alpha": "1"}, "`alpha` must be a non-negative finite number. Received: alpha='1'"),
    ({"beta": -1.0}, "`beta` must be a non-negative finite number. Received: beta=-1.0"),
    ({"beta": math.nan}, "`beta` must be a non-negative finite number. Received: beta=nan"),
    ({"beta": True}, "`beta` must be a non-negative finite number. Received: beta=True"),
    ({"num_samples": 0}, "`num_samples` must be a positive integer. Received: num_samples=0"),
    ({"num_samples": 1.5}, "`num_samples` must be a positive integer. Received: num_samples=1.5"),
    (
        {"aggregation": "mean"},
        r"`aggregation` must be one of \['term_wise',.*'none'\]. Received: .*='mean'",
    ),
    ({"aggregation": None}, "`aggregation` must be one of .* Received: aggregation=None"),
    (
        {"non_private_diagnostics": "False"},
        "`non_private_diagnostics` must be True or False. Received: .*='False'",
    ),
    ({"batch_clip": None}, "`batch_clip` must be a positive number with a divergence.*=None"),
    (
        {"batch_clip": 0.0},
        "`batch_clip` must be a positive number, at least 1e-15. Received: batch_clip=0.0",
    ),
    ({"num_groups": 0}, "`num_groups` must be a positive integer. Received: num_groups=0"),
    ({"split": 1.5}, "`split` must be 'least_noise' or a number.* Received: split=1.5"),
    ({"group_capacity": 0}, "`group_capacity` must be a positive integer. Received: .*=0"),
    ({"num_classes": 0}, "`num_classes` must be a positive integer or None. Received: .*=0"),
    ({"prior": "normal"}, "`prior` must be a .*spike_and_slab.* Received: prior='normal'"),
    ({"likelihood": "gauss"}, "`likelihood` must be one of .*laplace.* Received: .*='gauss'"),
    ({"divergence": "js"}, "`divergence` must be one of .*mmd.* or None, .*Received: .*='js'"),
    ({"encoder": None}, "`encoder` must be a model of Keras 2 that is built.* Received: .*=None"),
    ({"decoder": "x"}, "`decoder` must be a model of Keras 2 that is built.* Received: .*='x'"),
]


@pytest.mark.quick_cases(17)
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_arguments_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        vae(**changes)


@pytest.mark.parametrize("aggregation", ["micro", "batch", "none"])
def test_arguments_of_another_aggregation_are_checked_too(aggregation):
    with pytest.raises(ValueError, match="batch_clip"):
        vae(aggregation=aggregation, batch_clip=-1.0)


def test_numbers_of_numpy_are_numbers():
    model = vae(
        alpha=np.float32(2), beta=np.float64(0.5), num_samples=np.int64(2), batch_clip=np.float32(1)
    )
    assert model.aggregation.batch_clip == 1
    assert vae(num_groups=np.int64(8)).aggregation.num_groups == 8


def test_a_clip_without_a_divergence_does_not_matter():
    for clips in ({"batch_clip": None}, {"batch_clip": 0.3}):
        assert vae(divergence=None, **clips).divergence is None


def test_an_infinite_clip_goes_with_no_noise():
    with pytest.raises(ValueError, match="`batch_clip` must be finite when there is noise"):
        compiled(vae(batch_clip=math.inf)).fit(batches(), verbose=0)
