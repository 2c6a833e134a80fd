"""Facts that a privacy card shows."""

import dataclasses
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdp.accounting import bounds
from tfdp.accounting.bounds import Release
from tfdp.accounting.found_ledger import is_model
from tfdp.accounting.rounding import rounded_down, rounded_up
from tfdp.accounting.statement import Statement
from tfdp.accounting.trade_off import percent

_PACKAGES = ("tfdp", "tensorflow", "keras", "tf-keras", "numpy", "dp-accounting")
# Deltas beside that of the guarantee, in powers of ten from it.
_POWERS = (-4, -3, -2, -1, 0, 1, 2)
_POINTS = 6
# Arguments of private optimizers that say how the training went.
_ARGUMENTS = {
    "l2_norm_clip": "clip (l2 norm of each gradient)",
    "expected_batch_size": "expected batch size",
    "gradient_accumulation_steps": "batches per step",
    "secure_noise": "noise against floating-point attacks",
}

Rows = tuple[tuple[str, str], ...]
Points = tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that a privacy card shows.

    Attributes:
      name: The model's name; empty if it has none.
      statement: The privacy statement.
      parameters: Names and values.
      by_delta: Deltas, and epsilon at each, rounded up; empty without a guarantee.
      by_steps: Numbers of steps, and epsilon after the first so many.
      versions: Packages and their versions.
      weights_hash: SHA-256 of the weights; empty if there are none.
    """

    name: str
    statement: Statement
    parameters: Rows
    by_delta: Points
    by_steps: Points
    versions: Rows
    weights_hash: str

    @property
    def title(self) -> str:
        """Title of the page."""
        return f"Privacy card: {self.name}" if self.name else "Privacy card"

    @property
    def guarantee(self) -> Rows:
        """The guarantee in numbers."""
        ledger, bound = self.statement.ledger, self.statement.bound
        gaussian = self.statement.gaussian_dp
        return (
            ("epsilon, upper bound", f"{rounded_up(bound.epsilon):g}"),
            ("epsilon, lower bound", f"{rounded_down(self.statement.lower):g}"),
            ("delta", f"{bound.delta:g}"),
            ("mu of Gaussian DP, up to delta", f"{rounded_up(gaussian.mu):g}"),
            ("regret of mu, about", f"{gaussian.regret:.2g}"),
            ("advantage of any attack, upper bound", percent(self.statement.trade_off.advantage)),
            ("unit of privacy", f"one {ledger.unit}"),
            ("neighboring relation", ledger.relation),
            ("steps", f"{ledger.steps}"),
        )


def facts_of(model: Any, statement: Statement) -> Facts:
    """Returns what the card of a model shows, of which the statement is known."""
    has_weights = is_model(model)
    weights = model.get_weights() if has_weights else []
    return Facts(
        str(getattr(model, "name", "")) if has_weights else "",
        statement,
        tuple(_parameters(model, statement, weights)),
        _by_delta(statement),
        _by_steps(statement),
        tuple(_versions()),
        weights_hash(weights) if has_weights else "",
    )


def weights_hash(weights: list[np.ndarray]) -> str:
    """Returns the SHA-256 of weights: of type, shape and little-endian bytes of each, in order.

    Args:
      weights: What `model.get_weights()` returns.

    Example:
      >>> weights_hash([np.zeros(2, np.float32)])[:8]
      'a8c7f57b'
    """
    digest = hashlib.sha256()
    for array in map(np.asarray, weights):
        digest.update(f"{array.dtype.name}{list(array.shape)}".encode())
        ordered = np.ascontiguousarray(array)
        if ordered.dtype.byteorder == ">":
            ordered = ordered.astype(ordered.dtype.newbyteorder("<"))
        digest.update(ordered.tobytes())
    return digest.hexdigest()


def _parameters(
    model: Any, statement: Statement, weights: list[np.ndarray]
) -> Iterator[tuple[str, str]]:
    if weights:
        yield "numbers in the weights", f"{sum(np.size(array) for array in weights)}"
    sizes = statement.ledger.dataset_sizes
    if sizes:
        yield "number of training examples, N", " and ".join(map(str, sizes))
    optimizer = getattr(model, "optimizer", None) if is_model(model) else model
    if optimizer is None or not hasattr(type(optimizer), "ledger"):
        return
    yield "optimizer", type(optimizer).__name__
    for name, words in _ARGUMENTS.items():
        value = getattr(optimizer, name, None)
        if value is not None:
            yield words, _in_words(value)


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _by_delta(statement: Statement) -> Points:
    delta = statement.bound.delta
    deltas = [delta * 10.0**power for power in _POWERS]
    ledger = statement.ledger
    found = ((one, ledger.epsilon(one).epsilon) for one in deltas if 1e-200 < one < 0.5)
    return tuple((one, rounded_up(epsilon)) for one, epsilon in found if math.isfinite(epsilon))


def _by_steps(statement: Statement) -> Points:
    ledger, delta = statement.ledger, statement.bound.delta
    if not math.isfinite(statement.bound.epsilon) or not ledger.steps:
        return ()
    points = sorted({max(1, ledger.steps * part // _POINTS) for part in range(1, _POINTS + 1)})
    mode = ledger.selective_release
    found = [(0.0, 0.0)]
    for steps in points:
        releases = list(_first(ledger.releases, steps))
        found.append((steps, bounds.tightest_epsilon(releases, delta, mode).epsilon))
    return tuple((steps, rounded_up(epsilon)) for steps, epsilon in found)


def _first(releases: tuple[Release, ...], steps: int) -> Iterator[Release]:
    """Yields the releases of the first steps."""
    for release in releases:
        count = min(release.count, steps)
        if count:
            yield dataclasses.replace(release, count=count)
        steps -= count


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield "Python", platform.python_version()
