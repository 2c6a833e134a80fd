"""Structure of data and their elements: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

Keras takes such elements apart by `unpack_x_y_sample_weight`. Only a tuple has parts: everything
else, such as a dict, is the inputs alone.
"""

from typing import Any

from tfdp.accounting.sampling import BUCKETS, NONE, PADDINGS
from tfdp.base.validation import one_of


def parts_of(element: Any) -> tuple:
    """Returns the parts of an element: the inputs, and targets and weights if there are any.

    Example:
      >>> parts_of(1), parts_of((1,)), parts_of((1, 2))
      ((1,), (1,), (1, 2))
    """
    return element if isinstance(element, tuple) else (element,)


def has_labels(element: Any) -> bool:
    """Returns whether an element, or its spec, has targets."""
    return len(parts_of(element)) > 1


def check_padding(padding: Any, chunk_size: int | None, spec: Any) -> None:
    """Raises a ValueError unless batches of such examples can be padded so.

    Args:
      padding: The argument `padding` of `poisson_batches`.
      chunk_size: Likewise.
      spec: Types and shapes of the examples.
    """
    one_of("padding", padding, PADDINGS)
    if padding == NONE:
        return
    if padding == BUCKETS and chunk_size is not None:
        raise ValueError(
            'Argument `padding` must be "none" or "full" with `chunk_size`. Received: '
            f"{padding=}, {chunk_size=}."
        )
    if not has_labels(spec):
        raise ValueError(
            'Argument `padding` must be "none" for data without labels: rows of padding have '
            "weight zero, and Keras takes weights after labels alone, (x, y, sample_weight). "
            f"Received: {padding=}, and examples {spec}. Give the data any y, such as (x, x), "
            "where `jit_compile=True` or `secure_noise=True` needs padding."
        )
    weights = parts_of(spec)[2:]
    if weights and not hasattr(weights[0], "shape"):
        raise ValueError(
            'Argument `padding` must be "none" unless the sample weights are one array. '
            f"Received: {padding=}, and sample weights {weights[0]} of each example."
        )
