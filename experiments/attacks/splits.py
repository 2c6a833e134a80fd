"""Splits of a data set into what a target and a shadow model are trained and tested on."""

import numpy as np

from experiments.datasets import Data, DataError

_SHARES = (2, 1, 2, 1)  # Target training and test set, shadow training and test set.


def split(whole: Data, seed: int, examples: int | None = None) -> tuple[Data, Data]:
    """Splits all examples of a data set at random, in the ratio 2:1:2:1.

    Sizes are multiples of a sixth, rounded down; up to five examples are left over.

    Args:
      whole: The data set. What it is trained and evaluated on is mixed.
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
    y = np.concatenate([whole.train_y, whole.eval_y])
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
    target_in, target_out, shadow_in, shadow_out = (
        (_rows(whole.train_x, whole.eval_x, part), y[part])
        for part in np.split(order[: ends[-1]], ends[:-1])
    )
    return Data(*target_in, *target_out), Data(*shadow_in, *shadow_out)


def _rows(first: np.ndarray, second: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns rows of two arrays, as if one followed the other: both may be larger than memory."""
    found = np.empty((len(indices), *first.shape[1:]), first.dtype)
    for place, index in enumerate(indices):
        found[place] = first[index] if index < len(first) else second[index - len(first)]
    return found
