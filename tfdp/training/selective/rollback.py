"""Check that attempts have one distribution, however many came before."""

from typing import Any

from tfdp.clipping import step_check


def check_randomness(function: Any, compiled_by_xla: bool = False) -> None:
    """Refuses predictable random streams whose position cannot be rolled back.

    Attempts must have one distribution, whatever came before. With a stream that everybody can
    compute, an accepted update would show how many attempts preceded it. The state of other
    operations may not be possible to roll back, so that a training step may have none.

    Args:
      function: The traced function that makes an attempt.
      compiled_by_xla: Whether it will be, where every such stream has a fixed seed.

    Raises:
      ValueError: An operation draws from such a stream, or has another state.
    """
    step_check.check_types(function.graph)
    graph = function.graph.as_graph_def()
    # Those that a secret stream has taken the place of are used by nothing.
    used = {name.lstrip("^").split(":")[0] for node in graph.node for name in node.input}
    used |= {tensor.op.name for tensor in function.graph.outputs}
    nodes = [node for node in graph.node if node.name in used]
    nodes += [node for f in graph.library.function for node in f.node_def]
    for node in nodes:
        if node.op not in step_check.RANDOM_STREAMS:
            continue
        if compiled_by_xla or node.attr["seed"].i or node.attr["seed2"].i:
            raise ValueError(
                f"The model draws random numbers of a fixed seed ('{node.name}'), by which an "
                "accepted update would show how many were rejected before. Give no `seed` to "
                "layers such as Dropout, call no `set_random_seed`, and compile without XLA; or "
                "make their state one that can be rolled back: in Keras 2 with "
                "`tf.keras.backend.experimental.enable_tf_random_generator()`, in Keras 3 with "
                "`keras.random` instead of `tf.random`."
            )
