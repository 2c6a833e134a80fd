"""Blocks that are raw operations, on any axis, the rows' too."""

from tests.fuzz.blocks import N, block


@block("matmul", "net", "broadcast")
def matmul(c, k):
    """`h @ w`, which the vectorized engine may turn into a batched product that broadcasts."""
    c.need(c.rank >= 2 and c.shape[-1] != N)
    units = 1 + k[0] % 4
    w = c.weight([c.shape[-1], units], share=k[1] % 2)
    c.put(f"{{h}} @ {w}", [*c.shape[:-1], units])


@block("matmul_broadcast", "net", "broadcast")
def matmul_broadcast(c, k):
    c.need(c.rank >= 3 and c.shape[-1] != N and c.shape[-2] != N)
    last, units = c.shape[-1], 1 + k[0] % 4
    w = c.weight([1] * (1 + k[1] % 2) + [last, units])
    c.need(c.rank >= 3 + k[1] % 2)
    c.put(f"tf.matmul({{h}}, {w})", [*c.shape[:-1], units])


@block("matmul_left", "net", "broadcast")
def matmul_left(c, k):
    c.need(c.rank >= 3 and c.shape[-1] != N and c.shape[-2] != N)
    units = 1 + k[0] % 3
    w = c.weight([units, c.shape[-2]])
    c.put(f"tf.matmul({w}, {{h}})", [*c.shape[:-2], units, c.shape[-1]])


@block("einsum")
def einsum(c, k):
    axis = c.axis(k[0])
    letters, units = "abcde"[: c.rank], 1 + k[1] % 3
    w = c.weight([c.shape[axis], units], share=k[2] % 2)
    out = letters.replace(letters[axis], "z")
    shape = [*c.shape]
    shape[axis] = units
    c.put(f"tf.einsum('{letters},{letters[axis]}z->{out}', {{h}}, {w})", shape)


@block("tensordot")
def tensordot(c, k):
    axis = c.axis(k[0])
    w = c.weight([c.shape[axis], 1 + k[1] % 3])
    rest = [d for i, d in enumerate(c.shape) if i != axis]
    c.put(f"tf.tensordot({{h}}, {w}, [[{axis}], [0]])", [*rest, 1 + k[1] % 3])


@block("scale")
def scale(c, k):
    shape = [1 if d == N or k[0] >> i & 1 else d for i, d in enumerate(c.shape)]
    w = c.weight(shape, share=k[2] % 2)
    c.put(f"{{h}} {'+*-'[k[1] % 3]} {w}")


@block("scale_scalar")
def scale_scalar(c, k):
    w = c.weight([], share=True)
    c.put(["{{h}} * {w}", "{{h}} + {w}", "{{h}} * tf.exp({w})"][k[0] % 3].format(w=w))


@block("weight_norm")
def weight_norm(c, k):
    c.need(c.shape[-1] != N)
    w = c.weight([c.shape[-1], 2], share=True)
    c.put(f"tf.tensordot({{h}}, tf.nn.l2_normalize({w}, 0), 1)", [*c.shape[:-1], 2])


@block("gather_weight")
def gather_weight(c, k):
    """A lookup by computed ids, which may be outside of the table."""
    w, axis = c.weight([3, 2]), c.axis(k[0])
    ids = ["tf.argmax({{h}}, {a})", "tf.cast(tf.reduce_sum({{h}}, {a}), tf.int32) % 3"][k[1] % 2]
    rest = [d for i, d in enumerate(c.shape) if i != axis]
    c.need(k[1] % 2 or c.shape[axis] <= 3)
    c.put(f"tf.gather({w}, {ids.format(a=axis)})", [*rest, 2])


@block("lookup", "net", "ids")
def lookup(c, k):
    c.need(c.ids)
    w, ids, c.ids = c.weight([c.ids, 2]), c.ids, 0
    one_hot = f"tf.tensordot(tf.one_hot({{h}}, {ids}, dtype='{c.dtype}'), {w}, 1)"
    gather = [
        f"tf.gather({w}, {{h}})",
        f"tf.nn.embedding_lookup({w}, {{h}})",
        f"tf.gather(tf.identity({w}), {{h}})",
        one_hot,
        f"tf.gather({w} * 2, {{h}}, axis=0)",
    ][k[0] % 5]
    c.put(gather, [*c.shape, 2])


@block("tied_lookup", "ids")
def tied_lookup(c, k):
    c.need(c.ids)
    w, ids, c.ids = c.weight([c.ids, 3]), c.ids, 0
    c.put(f"tf.reduce_sum(tf.gather({w}, {{h}}), -2)", [*c.shape[:-1], 3])
    c.put(f"tf.sin({{h}} @ tf.transpose({w}))", [*c.shape[:-1], ids])


@block("transpose")
def transpose(c, k):
    order = [list(range(c.rank))[(i + k[0]) % c.rank] for i in range(c.rank)]
    if k[1] % 2:
        order.reverse()
    c.put(f"tf.transpose({{h}}, {order})", [c.shape[i] for i in order])


@block("reshape")
def reshape(c, k):
    """Joins two axes, or splits one."""
    a = c.axis(k[0])
    if k[1] % 2 and c.shape[a] % 2 == 0:
        shape = [*c.shape[:a], c.shape[a] // 2, 2, *c.shape[a + 1 :]]
    else:
        c.need(a + 1 < c.rank and c.shape[a + 1] != N)
        shape = [*c.shape[:a], c.shape[a] * c.shape[a + 1], *c.shape[a + 2 :]]
    c.put(f"tf.reshape({{h}}, {c.shape_code(shape)})", shape)


@block("fold_rows")
def fold_rows(c, k):
    """Joins the rows with another axis, maps, and parts them again."""
    c.need(c.shape[0] == N and c.rank >= 3 and c.shape[-1] != N)
    last = c.shape[-1]
    w = c.weight([last, last], share=True)
    c.put(f"tf.reshape(tf.reshape({{h}}, [-1, {last}]) @ {w}, {c.shape_code()})")


KINDS = (
    *("tanh", "square", "sigmoid", "sin", "abs", "nn.relu", "nn.softplus", "sqrt", "exp"),
    *("math.log1p", "sign", "math.reciprocal_no_nan", "nn.elu", "round", "math.erf"),
    *("stop_gradient", "identity"),
)


@block("elementwise")
def elementwise(c, k):
    kind = KINDS[k[0] % 17]
    inner = "tf.abs({h})" if kind in ("sqrt", "math.log1p") else "{h}"
    inner = "tf.minimum({h}, 3)" if kind == "exp" else inner
    c.put(f"tf.{kind}({inner})")


@block("constant")
def constant(c, k):
    c.put(f"{{h}} * {[2.0, -1.0, 0.1, 3.0][k[0] % 4]}")


@block("extreme_constant", "extreme")
def extreme_constant(c, k):
    c.need(c.dtype in ("float32", "float64", "bfloat16"))
    c.traits.add("unstable")
    c.put(f"{{h}} * {10.0 ** (k[0] % 61 - 30)}")


@block("axis_op")
def axis_op(c, k):
    """An operation along an axis, that of the rows included: then it mixes examples."""
    axis = c.axis(k[0], rows=k[2] % 3 == 0)
    kind = [
        "tf.reverse({h}, [A])",
        "tf.roll({h}, 1, A)",
        "tf.cumsum({h}, A)",
        "tf.sort({h}, A)",
        "tf.nn.softmax({h}, A)",
        "tf.nn.l2_normalize({h}, A, epsilon=1e-3)",
        "{h} - tf.reduce_mean({h}, A, keepdims=True)",
        "{h} * tf.reduce_max({h}, A, keepdims=True)",
        "tf.math.cumprod({h}, A)",
        "tf.nn.log_softmax({h}, A)",
        "tf.gather({h}, tf.argsort({h}, A), batch_dims=A, axis=A)",
        "tf.concat(tf.split({h}, [1, -1], A)[::-1], A)",
        "{h} + tf.norm({h}, axis=A, keepdims=True)",
    ][k[1] % 13]
    c.put(kind.replace("A", str(axis)))


@block("reduce")
def reduce(c, k):
    axis = c.axis(k[0])
    c.need(c.rank >= 3)
    kind = ["reduce_sum", "reduce_mean", "reduce_max", "reduce_logsumexp", "reduce_prod"][k[1] % 5]
    keep = k[2] % 2 == 0
    shape = [1 if i == axis else d for i, d in enumerate(c.shape) if keep or i != axis]
    c.put(f"tf.{kind}({{h}}, {axis}, keepdims={keep})", shape)


@block("expand")
def expand(c, k):
    axis = k[0] % (c.rank + 1)
    c.put(f"tf.expand_dims({{h}}, {axis})", [*c.shape[:axis], 1, *c.shape[axis:]])


@block("slice")
def slice_(c, k):
    axis = c.axis(k[0])
    start = k[1] % c.shape[axis]
    index = ", ".join(f"{start}:" if i == axis else ":" for i in range(c.rank))
    shape = [*c.shape]
    shape[axis] -= start
    c.put(f"{{h}}[{index}]", shape)


@block("widen")
def widen(c, k):
    axis = c.axis(k[0])
    shape = [*c.shape]
    shape[axis] = 2 * shape[axis] if k[1] % 2 else shape[axis] + 2
    ones = [[1, 1] if i == axis else [0, 0] for i in range(c.rank)]
    tiles = [2 if i == axis else 1 for i in range(c.rank)]
    kinds = [f"tf.pad({{h}}, {ones})", f"tf.tile({{h}}, {tiles})"]
    c.put(kinds[k[1] % 2], shape)


@block("concat")
def concat(c, k):
    axis = c.axis(k[0])
    shape = [*c.shape]
    shape[axis] *= 2
    c.put(f"tf.concat([{{h}}, tf.sin({{h}})], {axis})", shape)


@block("residual")
def residual(c, k):
    other = c.kept.get(tuple(c.shape))
    c.need(other is not None and other != c.h and other != "h0")
    c.put(f"{{h}} {'+*'[k[0] % 2]} {other}")


@block("cast")
def cast(c, k):
    to = ["float16", "bfloat16", "float64", "float32"][k[0] % 4]
    if to in ("float16", "bfloat16"):
        c.traits.add("unstable")
    c.put(f"tf.cast(tf.sin(tf.cast({{h}}, '{to}')), '{c.dtype}')")


@block("pairs")
def pairs(c, k):
    """Products of all pairs along an axis: attention without weights; of the rows: it mixes."""
    c.need(c.rank == 3 and c.shape[-1] != N)
    c.put("tf.matmul(tf.matmul({h}, {h}, transpose_b=True), {h})")


@block("pairs_of_rows", "mixing")
def pairs_of_rows(c, k):
    c.need(c.rank == 2 and c.shape[0] == N)
    c.put("tf.nn.softmax(tf.matmul({h}, {h}, transpose_b=True)) @ {h}")


@block("where")
def where(c, k):
    w = c.weight([], share=True)
    kinds = ["tf.where({{h}} > 0, {{h}}, {{h}} * {w})", "tf.where({{h}} > {w}, {{h}}, 0)"]
    c.put(kinds[k[0] % 2].format(w=w))
