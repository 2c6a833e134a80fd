"""Findings of a check of a model."""

import dataclasses


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
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Returns whether nothing would be refused."""
        return not any(finding.refused for finding in self.findings)

    def check(self) -> None:
        """Raises a ValueError that lists what would be refused, if there is anything."""
        refused = [str(finding) for finding in self.findings if finding.refused]
        if refused:
            raise ValueError(
                "The model cannot be trained privately as it is:\n- " + "\n- ".join(refused)
            )

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines = lines or ["Nothing would be refused, and every layer has a fast rule."]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
