"""Draws cases, runs them, shrinks findings, and counts."""

import collections
import dataclasses
import json
import pathlib
import re
import time

import numpy as np

from tests.fuzz import recipes
from tests.fuzz.runner import Runner
from tests.fuzz.shrink import shrink


@dataclasses.dataclass
class Summary:
    """What came out of many cases."""

    cases: int = 0
    outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    families: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    refusals: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    invalid: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    fallbacks: int = 0
    one_pass: int = 0
    compared: int = 0
    findings: list = dataclasses.field(default_factory=list)  # (recipe, outcome)
    errors: list = dataclasses.field(default_factory=list)  # (recipe, traceback) of the fuzzer

    def add(self, recipe, result):
        self.cases += 1
        self.outcomes[result["outcome"]] += 1
        self.families[f"{recipe['family']} {result['outcome']}"] += 1
        if result["outcome"] in ("refused", "invalid"):
            reasons = self.refusals if result["outcome"] == "refused" else self.invalid
            reasons[general(result["reason"])] += 1
        if result["outcome"] == "ok" and recipe.get("engine") == "one_pass":
            self.fallbacks += result["fallback"]
            self.one_pass += not result["fallback"]
        if result["outcome"] == "fuzzer error":
            self.errors.append((recipe, result["reason"]))
        self.compared += bool(result.get("reference"))
        if result["outcome"] == "finding":
            self.findings.append((recipe, result))

    def __str__(self):
        lines = [
            f"{self.cases} cases: " + ", ".join(f"{v} {k}" for k, v in self.outcomes.most_common()),
            f"one pass: {self.one_pass}, fell back to the vectorized engine: {self.fallbacks}, "
            f"compared with a loop over examples: {self.compared}",
            "by family: " + ", ".join(f"{k} {v}" for k, v in sorted(self.families.items())),
            "refused:",
            *[f"{v:6}  {k}" for k, v in self.refusals.most_common(25)],
            "invalid:",
            *[f"{v:6}  {k}" for k, v in self.invalid.most_common(8)],
            *[f"error of the fuzzer: {reason}" for _, reason in self.errors[:5]],
            f"findings: {len(self.findings)}",
            *[f"  {r['kind']}: {r['detail'][:200]}" for _, r in self.findings],
        ]
        return "\n".join(lines)


def general(reason):
    """A reason without the names and numbers of its case."""
    lines = [line.strip() for line in str(reason).strip().splitlines() if line.strip()]
    text = lines[-1] if "in user code" in lines[0] else lines[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"|<[^>]*>", "..", text)
    return re.sub(r"\d+", "#", text)[:110]


def fuzz(
    seed,
    minutes=None,
    cases=None,
    families=recipes.FAMILIES,
    mutant=None,
    report=None,
    stop=False,
    runner=None,
    keras=2,
):
    """Runs cases until time or their number is up.

    Args:
      seed: Decides on the cases.
      minutes: Time limit.
      cases: Number of cases.
      families: The kinds of cases, of `recipes.FAMILIES`.
      mutant: A mechanism to take out, of `mutants.MUTANTS`.
      stop: Whether to stop at the first finding.
      runner: Of the child process to use; None: one is started.
      keras: Version of the layers and optimizers.
      report: Called with the recipe and the outcome of each case, and the runner.

    Returns:
      The `Summary`.
    """
    if runner is None:
        with Runner() as own:
            return fuzz(seed, minutes, cases, families, mutant, report, stop, own, keras)
    if keras == 3:
        families = [family for family in families if family not in recipes.OF_KERAS_2]
    end = time.monotonic() + 60 * (minutes or 1e6)
    summary = Summary()
    while time.monotonic() < end and (cases is None or summary.cases < cases):
        recipe = recipes.draw(np.random.default_rng([seed, summary.cases]), families)
        recipe = {**recipe, "keras": keras}
        result = runner.run(recipe, mutant)
        summary.add(recipe, result)
        if report is not None:
            report(recipe, result, runner)
        if stop and summary.findings:
            break
    return summary


def save(recipe, result, runner, folder):
    """Shrinks a finding, and writes it as a script; returns the path."""

    def persists(candidate):
        try:
            recipes.script(candidate)
        except Exception:  # Blocks that no longer fit.
            return False
        again = runner.run(candidate)
        return again["outcome"] == "finding" and again["kind"] == result["kind"]

    small = shrink(recipe, persists)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.py")))
    path = folder / f"finding_{number:03}_{result['kind'].replace(' ', '_')}.py"
    path.write_text(recipes.script(small))
    path.with_suffix(".json").write_text(json.dumps({"recipe": recipe, "result": result}, indent=1))
    return path
