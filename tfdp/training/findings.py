"""Findings of a check of a model."""

import dataclasses
from collections.abc import Iterable

_MOST_PLACES = 3  # Places that are named for one problem.


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a model that private training refuses or does slowly.

    Attributes:
      where: The layer, the loss or the optimizer.
      problem: The problem.
      remedy: The remedy; empty if `problem` says it.
      refused: Whether training raises an error; otherwise it is slow.
    """

    where: str
    problem: str
    remedy: str = ""
    refused: bool = True

    def __str__(self) -> str:
        kind = "refused" if self.refused else "slow"
        return f"{kind}: {self.where}: {self.problem} {self.remedy}".rstrip()


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """Result of `validate`: everything that it found.

    Attributes:
      findings: Reasons to refuse the model, then reasons that it is slow.
      notes: Parts that were not examined.
      bytes_per_row: About how many bytes of memory a step takes for each row of a batch; None: not
        known.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    bytes_per_row: int | None = None

    @property
    def ok(self) -> bool:
        """Returns whether nothing would be refused."""
        return not any(finding.refused for finding in self.findings)

    def check(self) -> None:
        """Raises a ValueError that lists what would be refused, if there is anything."""
        refused = _together([finding for finding in self.findings if finding.refused])
        if refused:
            raise ValueError(
                "The model cannot be trained privately as it is:\n- " + "\n- ".join(refused)
            )

    def __str__(self) -> str:
        lines = _together(self.findings)
        lines = lines or ["Nothing would be refused, and every layer has a fast rule."]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _together(findings: Iterable[Finding]) -> list[str]:
    """Returns findings as lines, with one for all places that have the same problem and remedy."""
    places: dict[tuple, list[str]] = {}
    for finding in findings:
        same = finding.problem, finding.remedy, finding.refused
        places.setdefault(same, []).append(finding.where)
    lines = []
    for (problem, remedy, refused), where in places.items():
        shown = ", ".join(where[:_MOST_PLACES])
        if len(where) > _MOST_PLACES:
            shown += f" and {len(where) - _MOST_PLACES} more"
        lines.append(str(Finding(shown, problem, remedy, refused)))
    return lines
