"""Splits of a data set into what a target and a shadow model are trained and tested on."""

import numpy as np

from experiments.datasets import Data, DataError

_SHARES = (2, 1, 2, 1)  # Target training and test set, shadow training and test set.


def split(
    x: np.ndarray, y: np.ndarray, seed: int, examples: int | None = None
) -> tuple[Data, Data]:
    """Splits a data set at random, in the ratio 2:1:2:1.

    Sizes are multiples of a sixth, rounded down; up to five examples are left over.

    Args:
      x: Inputs, `[n, ...]`.
      y: Classes, `[n]`.
      seed: Chooses the split.
      examples: Number of examples to use, chosen at random; None: all of them.

    Returns:
      The data of the target model and that of the shadow model. Members are what a model is
      trained on (`train_x`), the others what it is tested on (`eval_x`).

    Raises:
      DataError: `examples` does not fit the data set.

    References:
      - Fu et al., DPSUR, section 6.4.2; Ghosh and Das, Bottlenecked Backpropagation, section 5.4.1.
    """
    size = len(y) if examples is None else examples
    parts = sum(_SHARES)
    # At least two examples in each part, of which an attacker may know one.
    if not 2 * parts <= size <= len(y):
        raise DataError(
            f"--examples must be in [{2 * parts}, {len(y)}], the size of the data set. Received: "
            f"--examples={size}."
        )
    order = np.random.default_rng(seed).permutation(len(y))
    ends = np.cumsum(_SHARES) * (size // parts)
    target_in, target_out, shadow_in, shadow_out = np.split(order[: ends[-1]], ends[:-1])
    return (
        Data(x[target_in], y[target_in], x[target_out], y[target_out]),
        Data(x[shadow_in], y[shadow_in], x[shadow_out], y[shadow_out]),
    )
