"""Blocks that are layers of Keras."""

from tests.fuzz.blocks import N, block

ACTIVATIONS = ("None", "'tanh'", "'relu'", "'sigmoid'", "'gelu'", "'softmax'", "'swish'")


def _first(c, rank):
    c.need(c.rank == rank and c.shape[0] == N)


@block("dense")
def dense(c, k):
    c.need(c.rank >= 2 and c.shape[-1] != N and c.shape[0] == N)
    units = 1 + k[0] % 4
    code = f"Dense({units}, activation={ACTIVATIONS[k[1] % 7]}, use_bias={k[2] % 2 == 0}"
    c.layer(code, [*c.shape[:-1], units])


@block("dense_twice")
def dense_twice(c, k):
    c.need(c.rank >= 2 and c.shape[0] == N)
    units = c.shape[-1]
    c.layer(
        f"Dense({units}, activation={ACTIVATIONS[k[1] % 7]}", c.shape, "{layer}({layer}({{h}}))"
    )


@block("conv1d")
def conv1d(c, k):
    _first(c, 3)
    padding = ["same", "causal"][k[2] % 2]
    units, d = 2 * (1 + k[1] % 2), 1 + k[2] % 3
    groups = 2 if k[1] % 3 == 0 and c.shape[2] % 2 == 0 else 1
    code = (
        f"Conv1D({units}, {1 + k[0] % 3}, padding='{padding}', dilation_rate={d}, groups={groups}"
    )
    c.layer(code, [N, c.shape[1], units])


@block("conv2d")
def conv2d(c, k):
    _first(c, 4)
    units, strides = 1 + k[1] % 3, 1 + k[2] % 2
    sizes = [-(-d // strides) for d in c.shape[1:3]]
    code = f"Conv2D({units}, {1 + k[0] % 3}, padding='same', strides={strides}"
    c.layer(code, [N, *sizes, units])


@block("depthwise")
def depthwise(c, k):
    _first(c, 4)
    kind = ["DepthwiseConv2D({}", "SeparableConv2D(2, {}"][k[1] % 2]
    units = c.shape[-1] if k[1] % 2 == 0 else 2
    c.layer(kind.format(1 + k[0] % 3) + ", padding='same'", [*c.shape[:-1], units])


@block("conv_transpose")
def conv_transpose(c, k):
    _first(c, 4)
    code = f"Conv2DTranspose({1 + k[0] % 2}, 2, strides=2"
    c.layer(code, [N, 2 * c.shape[1], 2 * c.shape[2], 1 + k[0] % 2])


@block("pool")
def pool(c, k):
    _first(c, 4)
    c.need(min(c.shape[1:3]) >= 2)
    kind = ["AveragePooling2D(2", "MaxPooling2D(2"][k[0] % 2]
    c.layer(kind, [N, c.shape[1] // 2, c.shape[2] // 2, c.shape[3]], trainable=False)


@block("layer_norm")
def layer_norm(c, k):
    c.need(c.rank >= 2 and c.shape[0] == N)
    c.layer(f"LayerNormalization(epsilon={[1e-3, 1e-6][k[0] % 2]}", c.shape)


@block("group_norm")
def group_norm(c, k):
    c.need(c.rank >= 3 and c.shape[0] == N)
    c.layer(f"GroupNormalization({[1, -1][k[0] % 2]}", c.shape)


@block("batch_norm", "mixing")
def batch_norm(c, k):
    c.need(c.shape[0] == N and c.rank >= 2)
    c.layer("BatchNormalization(", c.shape, "{layer}({{h}}, training=True)")


@block("prelu")
def prelu(c, k):
    c.need(c.shape[0] == N and c.rank >= 2)
    c.layer("PReLU(", c.shape)


@block("recurrent")
def recurrent(c, k):
    _first(c, 3)
    kind = ["LSTM", "GRU", "SimpleRNN"][k[0] % 3]
    sequences, units = k[1] % 2 == 0, 1 + k[2] % 3
    code = f"{kind}({units}, return_sequences={sequences}"
    if k[2] % 5 == 0:
        code += ", go_backwards=True"
    c.layer(code, [N, c.shape[1], units] if sequences else [N, units])


@block("bidirectional")
def bidirectional(c, k):
    _first(c, 3)
    units = 1 + k[2] % 2
    inner = f"tf.keras.layers.GRU({units}, dtype='{c.dtype}')"
    c.layer(f"Bidirectional({inner}", [N, 2 * units])


@block("attention")
def attention(c, k):
    _first(c, 3)
    code = f"MultiHeadAttention({1 + k[0] % 2}, {1 + k[1] % 2}"
    c.layer(code, c.shape, "{layer}({{h}}, {{h}}, training=True)")


@block("time_distributed")
def time_distributed(c, k):
    _first(c, 3)
    inner = f"tf.keras.layers.Dense({1 + k[0] % 3}, dtype='{c.dtype}')"
    c.layer(f"TimeDistributed({inner}", [N, c.shape[1], 1 + k[0] % 3])


@block("embedding", "net", "ids")
def embedding(c, k):
    c.need(c.ids)
    width = 1 + k[0] % 3
    c.layer(f"Embedding({c.ids}, {width}, embeddings_initializer='zeros'", [*c.shape, width])
    c.ids = 0


@block("dropout", "net", "streams")
def dropout(c, k):
    c.need(c.shape[0] == N and c.rank >= 2)
    c.traits.add("random")
    code = [
        "Dropout(.5, seed=1",
        "Dropout(.5",
        "GaussianNoise(.5, seed=3",
        "GaussianDropout(.4",
        "AlphaDropout(.3, seed=2",
        "SpatialDropout1D(.5, seed=4",
    ][k[0] % 6]
    c.need("Spatial" not in code or c.rank == 3)
    c.layer(code, c.shape, "{layer}({{h}}, training=True)", trainable=False)


@block("unit_norm")
def unit_norm(c, k):
    c.need(c.shape[0] == N and c.rank >= 2)
    c.layer("UnitNormalization(", c.shape, trainable=False)
