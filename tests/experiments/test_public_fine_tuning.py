"""Networks with public weights of Python packages are fine-tuned privately."""

import numpy as np
import pytest
from absl import flags

from experiments import public_fine_tuning, public_weights, records
from experiments.public_fine_tuning import ADAPTERS, BLOCK, HEAD, WHOLE
from experiments.settings import RefusedError
from tests.front_ends import keras, needs_keras_3

pytestmark = needs_keras_3
_FOLDERS = public_fine_tuning.Folders(None, "weights", "features", False)
_WEIGHTS = {HEAD: "efficientnet_lite0", BLOCK: "efficientnet_lite0"}


def _parse(*arguments):
    values = flags.FlagValues()
    public_fine_tuning.define_flags(values)
    values(["public_fine_tuning", *arguments])
    return values


def _run(part, **changed):
    given = {
        **{"weights": _WEIGHTS.get(part, "minilm"), "part": part, "size": 6, "rank": 2},
        **{"epsilon": 2.0, "delta": 1e-5, "epochs": 2, "expected_batch_size": 64},
        **{"validation_examples": 50, "split": "test", "learning_rate": 4.0, "seed": 0},
    }
    return public_fine_tuning.Run(**(given | changed))


class _Block:
    """In the place of a layer of MiniLM: the parts that `public_fine_tuning` takes of it."""

    def __init__(self):
        self._self_attention_layer = keras.layers.MultiHeadAttention(2, 4)
        self._self_attention_layer.build([None, None, 8], [None, None, 8])
        self._self_attention_layer_norm = keras.layers.LayerNormalization()
        self._feedforward_intermediate_dense = keras.layers.Dense(16, "gelu")
        self._feedforward_output_dense = keras.layers.Dense(8)
        self._feedforward_layer_norm = keras.layers.LayerNormalization()

    def __call__(self, x, padding_mask):
        attention, mask = self._self_attention_layer, padding_mask[:, None]
        return self._self_attention_layer_norm(x + attention(x, x, attention_mask=mask))


class _Backbone(keras.Model if keras else object):
    """In the place of MiniLM."""

    num_layers = 2

    def __init__(self):
        names = ("token_ids", "segment_ids", "padding_mask")
        inputs = {name: keras.Input([None], dtype="int32", name=name) for name in names}
        x = keras.layers.Embedding(200, 8, name="embeddings_dropout")(inputs["token_ids"])
        for i in range(2):
            x = keras.layers.Rescaling(1.0, 1.0, name=f"transformer_layer_{i}")(x)
        super().__init__(inputs, {"sequence_output": x})
        self.transformer_layers = [_Block(), _Block()]

    def enable_lora(self, rank):
        for layer in self.layers:
            layer.trainable = False
        for block in self.transformer_layers:
            for layer in vars(block).values():
                layer.trainable = False
            query = block._self_attention_layer._query_dense
            query.trainable = True
            query.enable_lora(rank)


@pytest.fixture
def public(monkeypatch):
    """In the place of networks with public weights."""
    layers = [keras.layers.Conv2D(8, 1), keras.layers.BatchNormalization(trainable=False)]
    top = keras.Sequential([keras.Input([2, 2, 4]), *layers, keras.layers.GlobalAveragePooling2D()])
    top.set_weights([np.full(w.shape, 0.5) for w in top.weights])
    monkeypatch.setattr(public_fine_tuning, "_lite0", lambda *_: (None, top))
    monkeypatch.setattr(public_fine_tuning, "minilm", lambda _: (_Backbone(), None))
    return top


def _minilm(part, **changed):
    return _run(part, weights="minilm", **changed)


def test_the_last_block_of_minilm(public):
    """It is that of the layers that are used; padding does not count."""
    model = public_fine_tuning.classifier(_minilm(BLOCK, layers=1), [6, 8], _FOLDERS, keras)
    assert len(model.trainable_variables) == 7 + 2 + 4 + 2 + 2
    tokens = np.random.default_rng(0).normal(size=[1, 6, 8]).astype(np.float32)
    tokens[:, 4:] = 0
    short = public_fine_tuning.classifier(_minilm(BLOCK, layers=1), [4, 8], _FOLDERS, keras)
    short.set_weights(model.get_weights())
    found, expected = model.layers[0](tokens), short.layers[0](tokens[:, :4])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_attention_of_one_vector_is_that_of_keras(public):
    random = np.random.default_rng(0)
    asking, tokens = random.normal(size=[2, 8]), random.normal(size=[2, 6, 8])
    tokens[1, 4:] = 0
    attention = keras.layers.MultiHeadAttention(2, 4)
    attention.build([2, 1, 8], [2, 6, 8])
    for weight in attention.weights:
        weight.assign(random.normal(size=weight.shape))
    expected = attention(asking[:, None], tokens, attention_mask=tokens.any(2)[:, None])[:, 0]
    inputs = keras.Input([8]), keras.Input([6, 8]), keras.Input([6], dtype="bool")
    model = keras.Model(inputs, public_fine_tuning._attended(*inputs, attention, keras))
    found = model([asking, tokens, tokens.any(2)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_first_layers(public):
    ids = np.array([[3, 5, 0]], np.int32)
    inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 1 * (ids != 0)}
    backbone = _Backbone()
    found = [
        public_fine_tuning._first_layers(backbone, layers, keras)(inputs)["sequence_output"].numpy()
        for layers in (0, 1, 2)
    ]
    np.testing.assert_array_equal(found[2], backbone(inputs)["sequence_output"])
    np.testing.assert_allclose(found[2], found[1] + 1, rtol=1e-6)
    np.testing.assert_array_equal(found[0], backbone.get_layer("embeddings_dropout")(ids))


@pytest.mark.parametrize(
    ("part", "layers", "frozen", "expected"),
    [
        *[(HEAD, 0, 0, [2]), (HEAD, 1, 0, [1]), (BLOCK, 0, 0, [1]), (BLOCK, 2, 0, [1])],
        *[(BLOCK, 1, 0, [0]), (ADAPTERS, 0, 1, [1]), (WHOLE, 2, 1, [1]), (WHOLE, 2, 0, [])],
    ],
)
def test_what_of_reviews_is_computed_once(public, monkeypatch, part, layers, frozen, expected):
    """All layers below the trained part."""
    asked = []
    features = public_fine_tuning.public_features
    monkeypatch.setattr(features, "token_ids", lambda texts, *_: np.zeros([len(texts), 3]))
    monkeypatch.setattr(features, "token_outputs", lambda x, _, used, __: asked.append(used) or x)
    monkeypatch.setattr(features, "means_over_tokens", lambda x, _: x)
    half = ([b"a"] * 4, np.arange(4) % 2)
    monkeypatch.setattr(public_fine_tuning.datasets, "reviews", lambda _: (half, half))
    public_fine_tuning._reviews.__wrapped__(part, 3, layers, frozen, _FOLDERS)
    assert asked == expected * 2


@pytest.mark.parametrize(
    ("part", "shape", "variables"),
    [(HEAD, [8], 2), (BLOCK, [2, 2, 4], 4), (ADAPTERS, [6], 2 * 3 + 2), (WHOLE, [6], 1 + 25 + 2)],
)
def test_what_is_trained(public, part, shape, variables):
    model = public_fine_tuning.classifier(_run(part), shape, _FOLDERS, keras)
    assert len(model.trainable_variables) == variables
    names = [v.path.split("/")[-1] for v in model.trainable_variables]
    assert ("lora_kernel_a" in names) == (part == ADAPTERS)
    assert ("embeddings" in names) == (part == WHOLE)
    assert not model.layers[-1].kernel.numpy().any()


@pytest.mark.parametrize(("part", "variables"), [(ADAPTERS, 3 + 2), (WHOLE, 15 + 2)])
def test_frozen_layers_are_not_trained(public, part, variables):
    """With adapters, the last block has those of the block that it is a copy of."""
    model = public_fine_tuning.classifier(_run(part, frozen_layers=1), [6, 8], _FOLDERS, keras)
    assert len(model.trainable_variables) == variables
    names = [v.path.split("/")[-1] for v in model.variables]
    assert "embeddings" not in names and ("lora_kernel_a" in names) == (part == ADAPTERS)


def test_public_weights_are_left_as_they_are(public):
    """Each run begins with them."""
    before = public.get_weights()
    model = public_fine_tuning.classifier(_run(BLOCK), [2, 2, 4], _FOLDERS, keras)
    copy = model.layers[0]
    assert copy is not public
    for found, expected in zip(copy.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    copy.set_weights([np.zeros_like(w) for w in before])
    assert all(np.all(w == 0.5) for w in public.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("part", [HEAD, BLOCK, ADAPTERS, WHOLE])
def test_runs_stay_within_the_budget(public, monkeypatch, part):
    """The parts that are computed once are of the private data as well."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 400)
    x = {
        HEAD: np.eye(8, dtype=np.float32)[y],
        BLOCK: random.random([400, 2, 2, 4], np.float32),
    }.get(part, random.integers(0, 200, [400, 6], np.int32))
    monkeypatch.setattr(public_fine_tuning, "_examples", lambda *_: ((x, y), (x[:50], y[:50])))
    accuracy, spent = public_fine_tuning.train(_run(part), _FOLDERS)
    assert 90 < accuracy <= 100 if part == HEAD else 0 <= accuracy <= 100
    assert 1.9 < spent <= 2.0


def test_a_line_for_each_part_and_no_run_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(
        public_fine_tuning, "train", lambda run, _: (50.0 + run.learning_rate + run.rank, 0.9)
    )
    given = ("--weights=minilm", "--parts=head,adapters", "--epsilons=1,8", "--learning_rates=1,2")
    values = _parse(*given, "--seeds=2", f"--record={tmp_path / 'record'}")
    found = public_fine_tuning.compare(values)
    assert list(found) == [(HEAD, 1.0), (HEAD, 8.0), (ADAPTERS, 1.0), (ADAPTERS, 8.0)]
    assert [one.mean for one in found.values()] == [52.0, 52.0, 56.0, 56.0]
    assert len(records.read(tmp_path / "record")) == 4 * (2 + 2)
    monkeypatch.setattr(public_fine_tuning, "train", None)
    assert public_fine_tuning.compare(values) == found


@pytest.mark.parametrize(
    "flag",
    [
        *["--parts=adapters", "--parts=tail", "--epsilons=0", "--learning_rates=x", "--layers=4"],
        "--frozen_layers=2",
    ],
)
def test_what_cannot_be_is_refused(flag, tmp_path):
    values = _parse(flag, f"--record={tmp_path / 'record'}")
    with pytest.raises(RefusedError, match=flag.partition("=")[0]):
        public_fine_tuning.compare(values)
    assert not (tmp_path / "record").exists()


def test_weights_that_are_not_there(tmp_path):
    folders = public_fine_tuning.Folders(None, str(tmp_path), str(tmp_path), False)
    for weights in (public_fine_tuning.minilm, lambda f: public_fine_tuning._lite0(32, f)):
        with pytest.raises(public_weights.WeightsError, match=r"--weights_dir=.*Add --download"):
            weights(folders)
