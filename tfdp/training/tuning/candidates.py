"""Candidates of a private selection, and the models that its runs train."""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.accounting.found_ledger import is_model
from tfdp.base import front_ends, validation
from tfdp.training.private_training import PrivateTraining

# Arguments of `make_private` that may differ between runs: no run costs more for them.
_TUNED = ("learning_rate", "l2_norm_clip", "loss", "optimizer")
# Those that `tune` gives itself, or that would make runs cost what the selection does not count.
_OWN = ("model", "data", "noise_multiplier", "noise_schedule", "optimizer_arguments")


class Runs:
    """The candidates, and what a run of each is made of.

    Args:
      build: See `tune`.
      data: See `tune`.
      candidates: See `tune`.
      epochs: See `tune`.
      arguments: Arguments of `make_private` that all runs share.

    Attributes:
      candidates: The settings of each candidate.
      epochs: Epochs of a run.

    Raises:
      TypeError: One of the arguments is given by `tune` itself.
      ValueError: An argument is out of its range, or a setting is none that may differ between
        runs.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        data: Any,
        candidates: Any,
        epochs: int,
        arguments: Mapping[str, Any],
    ):
        try:
            parameters = inspect.signature(build).parameters.values()
        except (TypeError, ValueError):
            requirement = "a function that returns a compiled model, whose arguments can be known"
            raise validation.error("build", requirement, build) from None
        self._build, self._data, self.epochs = build, data, epochs
        self.candidates = _listed(candidates)
        self._arguments = arguments
        if own := [name for name in arguments if name in _OWN]:
            raise TypeError(f"tune() takes no argument `{own[0]}`, which it finds itself.")
        takes = {one.name for one in parameters}
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._make_private = front_ends.attribute("make_private")
        known = inspect.signature(self._make_private).parameters
        names = {name for settings in self.candidates for name in settings}
        self._of_build = {n for n in names if n in takes or (takes_all and n not in known)}
        for name in sorted(names - self._of_build):
            if name in arguments:
                raise validation.error(
                    "candidates", f"without `{name}`, which is given for all runs", name
                )
            if name in known and name not in _TUNED:
                raise validation.error(
                    "candidates",
                    f"of arguments of `build`, of {', '.join(_TUNED)}, and of arguments of the "
                    "optimizer: all runs must cost the same",
                    name,
                )

    def prepared(
        self, candidate: int, noise_multiplier: float, delta: float | None
    ) -> PrivateTraining:
        """Returns a new model that is ready for a run of a candidate."""
        settings = self.candidates[candidate]
        of_build = {name: value for name, value in settings.items() if name in self._of_build}
        model = self._build(**of_build)
        if not is_model(model):
            raise validation.error("build", "a function that returns a model of Keras", model)
        others = {name: value for name, value in settings.items() if name not in of_build}
        return self._make_private(
            model,
            self._data,
            epochs=self.epochs,
            noise_multiplier=noise_multiplier,
            delta=delta,
            verbose=False,
            **{**self._arguments, **others},
        )

    def shown(self, candidate: int) -> str:
        """Returns the settings of a candidate as text."""
        settings = self.candidates[candidate].items()
        return ", ".join(f"{name}={validation.shown(value)}" for name, value in settings)


def _listed(candidates: Any) -> list[dict[str, Any]]:
    """Returns the candidates, each as a dict of its settings."""
    if isinstance(candidates, Mapping) and candidates:
        values = [
            list(one) if isinstance(one, Sequence) and not isinstance(one, str) else []
            for one in candidates.values()
        ]
        found = [dict(zip(candidates, one, strict=True)) for one in itertools.product(*values)]
    elif isinstance(candidates, Sequence) and not isinstance(candidates, str):
        found = [dict(one) if isinstance(one, Mapping) else {} for one in candidates]
    else:
        found = []
    names = [name for one in found for name in one]
    if not found or not all(found) or not all(isinstance(name, str) for name in names):
        raise validation.error(
            "candidates",
            "a dict of names of settings and non-empty lists of their values, or a list of dicts "
            "of names and values",
            candidates,
        )
    return found
