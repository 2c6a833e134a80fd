"""The data sets of the experiments on variational autoencoders, as arrays in memory.

As in `experiments.datasets`, nothing here is fitted to the training data.
"""

import numpy as np

from experiments import datasets

TASKS = ("digits", "mnist", "sparsity", "pinwheel")

SPIRALS = 4

_POINTS = 400  # Points of the pinwheel in each of its sets.
_SEEDS = {"train": 1, "validation": 2, "test": 3}  # constants: all runs see the same points
_VALIDATION_EXAMPLES = {"digits": 287, "mnist": 10_000, "sparsity": 10_000}
_PADDING = 2  # pixels on every side of a 28x28 image, which 4x4 strides then halve three times


def load(task: str, *, data_dir: str | None = None, eval_split: str = "test") -> datasets.Data:
    """Loads the data set of a task.

    Args:
      task: One of `TASKS`: scikit-learn's digits `[N, 8, 8, 1]`, MNIST `[N, 28, 28, 1]`,
        Fashion-MNIST padded with black to `[N, 32, 32, 1]`, or the pinwheel `[400, 2]`.
      data_dir: Folder of TensorFlow Datasets, for MNIST and Fashion-MNIST; None for its own
        default.
      eval_split: "test", or "validation" to hold out examples that are not of the test set: for
        choosing hyperparameters.

    Returns:
      The training set and the evaluation set. `y` are classes of images and spirals of points.

    Raises:
      datasets.DataError: The data set cannot be loaded.
    """
    if task == "pinwheel":
        return datasets.Data(*pinwheel(_SEEDS["train"]), *pinwheel(_SEEDS[eval_split]))
    data = datasets.load(
        "fashion_mnist" if task == "sparsity" else task,
        data_dir=data_dir,
        eval_split=eval_split,
        validation_examples=_VALIDATION_EXAMPLES[task],
    )
    if task != "sparsity":
        return data
    return datasets.Data(pad(data.train_x), data.train_y, pad(data.eval_x), data.eval_y)


def pad(images: np.ndarray) -> np.ndarray:
    """Images `[N, 28, 28, 1]` with black around them, `[N, 32, 32, 1]`."""
    side = (_PADDING, _PADDING)
    return np.pad(images, [(0, 0), side, side, (0, 0)])


def pinwheel(
    seed: int,
    points: int = _POINTS,
    *,
    radial_std: float = 0.3,
    tangential_std: float = 0.1,
    rate: float = 0.25,
) -> tuple[np.ndarray, np.ndarray]:
    """Points in four spiral arms, and the arm that each is in.

    A point of arm k is (1 + a u, b v), u and v standard normal, a and b the standard deviations,
    turned by `2 pi k / 4 + rate * exp(1 + a u)`: the further out, the further round. As turning
    moves no point nearer to the origin, `E |x|^2 = 1 + a^2 + b^2` and
    `E |x|^4 = 1 + 6 a^2 + 3 a^4 + 2 (1 + a^2) b^2 + 3 b^4`; as the four arms are one arm turned by
    quarters, `E x = 0` and `Cov x = (1 + a^2 + b^2) / 2 * I`.

    The generator of the paper's experiment is called with (0.1, 0.3), in a version that names the
    two the other way round: what it calls tangential is along the arm, here radial.

    Args:
      seed: Seed of the points; sets with different seeds are independent, of one distribution.
      points: Number of points, N, a multiple of 4; as many in each arm.
      radial_std: Standard deviation a, along an arm.
      tangential_std: Standard deviation b, across it.
      rate: Radians by which a point is turned, per exp(radius).

    Returns:
      Points `[N, 2]` float32 in random order, and their arms `[N]` int64, in 0, ..., 3.

    Raises:
      ValueError: `points` is not a positive multiple of 4.

    References:
      - Johnson et al., 2016, Composing graphical models with neural networks for structured
        representations and fast inference (https://arxiv.org/abs/1603.06277).
      - Mathieu et al., 2019, Disentangling Disentanglement in Variational Autoencoders
        (https://arxiv.org/abs/1812.02833), for the numbers.
    """
    if points < SPIRALS or points % SPIRALS:
        raise ValueError(
            f"Argument `points` must be a positive multiple of {SPIRALS}. Received: {points=}."
        )
    random = np.random.default_rng(seed)
    arms = random.permutation(points) % SPIRALS
    along = 1 + radial_std * random.standard_normal(points)
    across = tangential_std * random.standard_normal(points)
    angles = 2 * np.pi * arms / SPIRALS + rate * np.exp(along)
    plane = (along + 1j * across) * np.exp(1j * angles)
    return np.stack([plane.real, plane.imag], axis=1).astype(np.float32), arms.astype(np.int64)
