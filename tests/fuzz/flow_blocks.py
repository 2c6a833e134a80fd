"""Blocks with control flow, functions in functions, randomness, state, and mixed examples.

`PARITY` is 1 or -1 by whether the number of examples is even: a neighbor turns it round, so that
every gradient that it gets into changes its sign.
"""

from tests.fuzz.blocks import N, block

COUNT = "tf.reduce_sum(tf.cast(m, 'float32'))"
PARITY = "tf.cos(3.14159265 * {})"


def _function(code):
    return f"tf.function({code}, autograph=False)"


def _times(c, factor):
    """Multiplies with a scalar, or with one value for each row."""
    c.traits.add("unstable")
    c.put(f"{{h}} * tf.cast({factor}, '{c.dtype}')")


@block("nested_function")
def nested_function(c, k):
    w = c.weight([], share=True)
    kinds = [
        _function(f"lambda a: tf.tanh(a) * {w}") + "({{h}})",
        "tf.recompute_grad(lambda a: tf.sin(a))({{h}})",
        _function("lambda a, b: a * b") + f"({{{{h}}}}, {w}.read_value())",
        "tf.grad_pass_through(tf.round)({{h}})",
        _function(_function("lambda a: a + 1").join(["lambda a: ", "(a) * 2"])) + "({{h}})",
    ]
    c.put(kinds[k[0] % 5].replace("{{", "{").replace("}}", "}"))


@block("loop")
def loop(c, k):
    """A loop over steps or over an axis."""
    c.need(c.rank == 3 and c.row_axis == 0)
    w, steps = c.weight([], share=k[1] % 2), 1 + k[2] % 3
    time = c.shape[1]
    kinds = [
        f"tf.while_loop(lambda i, a: i < {steps}, lambda i, a: (i + 1, tf.tanh(a * {w})), "
        "(0, {h}))[1]",
        f"tf.transpose(tf.scan(lambda s, a: tf.tanh(s + a * {w}), "
        f"tf.transpose({{h}}, [1, 0, 2])), [1, 0, 2])",
        f"tf.while_loop(lambda i, a: i < {time}, "
        f"lambda i, a: (i + 1, a + {{h}}[:, i:i + 1] * {w}), "
        "(0, {h}))[1]",
    ]
    c.put(kinds[k[0] % 3])


@block("loop_over_rows")
def loop_over_rows(c, k):
    """The rows one by one: examples stay apart, or a state goes from one to the next."""
    c.need(c.row_axis == 0 and c.rank >= 2)
    w = c.weight([], share=k[1] % 2)
    kinds = [
        f"tf.map_fn(lambda a: tf.sin(a * {w}), {{h}})",
        f"tf.vectorized_map(lambda a: a * {w}, {{h}})",
        f"tf.scan(lambda s, a: tf.tanh(s + a * {w}), {{h}})",
        f"tf.foldl(lambda s, a: s + a, {{h}}) * {w} + {{h}}",
    ]
    c.put(kinds[k[0] % 4], [N, *c.shape[1:]])


@block("branch")
def branch(c, k):
    w = c.weight([], share=True)
    condition = [f"{w} > 0", "tf.reduce_sum({h}) > 0", f"{COUNT} > 4.5", "tf.shape(x)[0] > 4"]
    kinds = [
        "tf.cond({p}, lambda: {{h}} * {w}, lambda: tf.sin({{h}}))",
        "tf.switch_case(tf.cast({p}, tf.int32), [lambda: {{h}} * {w}, lambda: -{{h}}])",
    ]
    p = condition[k[0] % 4]
    c.put(kinds[k[1] % 2].format(p=p, w=w))


@block("penalty")
def penalty(c, k):
    """A gradient in the gradient."""
    c.need(c.dtype in ("float32", "float64"))
    c.put("tf.gradients(tf.reduce_sum(tf.tanh({h}) * {h}), {h})[0]")


@block("custom_gradient")
def custom_gradient(c, k):
    body = ["g * tf.sign(a)", "g * tf.reduce_sum(g)", "tf.clip_by_value(g, -1, 1)"][k[0] % 3]
    if k[0] % 3 == 1:
        c.traits.add("unstable")
    c.put(f"tf.custom_gradient(lambda a: (tf.abs(a), lambda g: {body}))({{h}})")


@block("python", "net", "state")
def python(c, k):
    """Python in the graph: its gradient is none, and its state nobody sees."""
    c.traits.add("unstable")
    kinds = [
        "numpy_function(lambda a: a, [{{h}}], {t})",
        "py_function(lambda a: a * 2, [{{h}}], {t})",
    ]
    call = kinds[k[0] % 2].format(t=f"'{c.dtype}'")
    shape = f"[{', '.join('None' if d == N else str(d) for d in c.shape)}]"
    c.put(f"tf.ensure_shape(tf.{call}, {shape})")


@block("random_rows", "net", "streams")
def random_rows(c, k):
    """Random numbers for the rows from a stream whose seed is known."""
    c.traits.add("random")
    shape = "tf.shape({h})"
    generator = ""
    if k[0] % 4 == 1:
        generator = c.state("tf.random.Generator.from_seed(1)")
    draw = [
        f"tf.random.uniform({shape}, seed=1)",
        f"{generator}.uniform({shape})",
        f"tf.random.stateless_uniform({shape}, [1, 2])",
        f"tf.random.uniform({shape})",
    ][k[0] % 4]
    c.put(f"{{h}} * tf.cast(tf.round({draw}), '{c.dtype}')")


# Examples that are mixed in the loss.


@block("batch_factor", "mixing")
def batch_factor(c, k):
    stat = [
        PARITY.format(COUNT),
        "tf.sign(tf.reduce_mean({h}))",
        "tf.cast(tf.shape(x)[0], 'float32')",
        "tf.reduce_max(tf.abs({h}))",
    ][k[0] % 4]
    _times(c, stat)


@block("mixup", "mixing")
def mixup(c, k):
    axis = c.row_axis
    kinds = ["tf.reverse({h}, [A])", "tf.roll({h}, 1, A)", "tf.cumsum({h}, A)", "tf.sort({h}, A)"]
    c.traits.add("unstable")
    c.put(f".5 * {{h}} + .5 * {kinds[k[0] % 4].replace('A', str(axis))}")


@block("segments", "mixing")
def segments(c, k):
    c.need(c.row_axis == 0)
    c.put("tf.gather(tf.math.segment_sum({h}, tf.range(tf.shape({h})[0]) // 2), "
          "tf.range(tf.shape({h})[0]) // 2)")  # fmt: skip


# State that a batch writes and the loss reads.


@block("metric", "state")
def metric(c, k):
    kind = k[0] % 6
    c.traits.add("state")
    if kind == 0:
        s = c.state("tf.keras.metrics.MeanTensor(shape=[2])")
        c.line(f"{s}.update_state(tf.stack([{COUNT}, {COUNT}]))")
        read = f"tf.gather({s}._total, tf.zeros([1], 'int32'))"
    else:
        s = c.state("tf.keras.metrics.Sum()")
        c.line(f"{s}.update_state({COUNT})")
        read = [
            f"{s}.result()",
            f"{s}.total",
            _function(f"lambda: {s}.total.read_value()") + "()",
            f"tf.cond({COUNT} > -1., lambda: {s}.total.read_value(), lambda: 0.)",
            f"tf.gather({s}.total[None], tf.cast(0 * x[:, 0], 'int32'))[0]",
        ][kind - 1]
    _times(c, PARITY.format(read))


@block("variable", "state")
def variable(c, k):
    kind = k[0] % 5
    c.traits.add("state")
    s = c.state("tf.Variable(0., trainable=False)")
    c.line(
        [
            f"{s}.assign_add({COUNT}, read_value=False)",
            f"{s}.assign({s} + {COUNT})",
            _function(f"lambda a: {s}.assign_add(a)") + f"({COUNT})",
            f"tf.cond({COUNT} > 2, lambda: {s}.assign_add({COUNT}), lambda: {s}.assign_add(1.))",
            f"tf.raw_ops.AssignAddVariableOp(resource={s}.handle, value={COUNT})",
        ][kind]
    )
    read = [f"{s}", f"{s}.read_value()", _function(f"lambda: {s} + 0.") + "()"][k[1] % 3]
    _times(c, PARITY.format(read))


@block("saved_variable", "state")
def saved_variable(c, k):
    """Written and never read: what is saved must not depend on data either."""
    c.traits.add("state")
    s = c.state("tf.Variable(0., trainable=False)", saved=True)
    c.line(
        [
            f"{s}.assign_add(tf.reduce_sum(tf.cast({{h}}, 'float32')), read_value=False)",
            f"{s}.assign({COUNT})",
            _function(f"lambda a: {s}.assign_add(a)") + f"({COUNT})",
            f"tf.raw_ops.AssignVariableOp(resource={s}.handle, value={COUNT})",
        ][k[0] % 4]
    )
    c.put("{h} * 1")


@block("table", "state")
def table(c, k):
    c.traits.add("state")
    s = c.state("tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.)")
    key = "tf.constant([0], 'int64')"
    c.line(f"{s}.insert({key}, {COUNT}[None])")
    read = f"{s}.lookup({key})[0]"
    if k[0] % 2:
        read = _function(f"lambda: {read}") + "()"
    _times(c, PARITY.format(f"tf.reshape({read}, [])"))


@block("queue", "state")
def queue(c, k):
    c.traits.add("state")
    s = c.state("tf.queue.FIFOQueue(100, [tf.float32], [[]])")
    c.line(f"{s}.enqueue({COUNT})")
    _times(c, PARITY.format(f"tf.reshape({s}.dequeue(), [])"))


@block("python_state", "state")
def python_state(c, k):
    c.traits.add("state")
    s = c.state("[0.]")
    add = f"lambda a: ({s}.append(np.sum(a)), np.float32(sum({s})))[1]"
    if k[0] % 3 == 0:
        read = f"tf.reshape(tf.numpy_function({add}, [{COUNT}], tf.float32), [])"
    elif k[0] % 3 == 1:
        fill = f"lambda a: ({s}.append(np.sum(a)), np.full(len(a), sum({s}), 'float32'))[1]"
        c.need(c.rank == 2 and c.row_axis == 0)
        call = f"tf.numpy_function({fill}, [tf.cast(m, 'float32')], tf.float32)"
        read = f"tf.reshape({call}, [-1, 1])"
    else:
        c.line(f"u = tf.numpy_function({add}, [{COUNT}], tf.float32)")
        get = _function(f"lambda: tf.numpy_function(lambda: np.float32(sum({s})), [], tf.float32)")
        read = f"tf.reshape({get}() + 0 * u, [])"
    _times(c, PARITY.format(read))
