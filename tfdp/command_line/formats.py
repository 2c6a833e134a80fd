"""Text, Markdown and pictures that the commands print."""

import textwrap
from collections.abc import Iterable

from tfdp.accounting.planning import Plan
from tfdp.accounting.rounding import rounded_down, rounded_up
from tfdp.accounting.statement import NOT_COVERED, Statement
from tfdp.base.svg import line_chart

_WIDTH = 88


def upper(epsilon: float) -> str:
    """Formats an upper bound: six digits, rounded up."""
    return f"{rounded_up(epsilon):g}"


def lower(epsilon: float) -> str:
    """Formats a lower bound: six digits, rounded down."""
    return f"{rounded_down(epsilon):g}"


def pairs(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Returns lines of names and values, the values below each other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {value}" for name, value in rows]


def filled(text: str) -> str:
    """Breaks a paragraph into lines."""
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


def statement_markdown(stated: Statement) -> str:
    """Returns a statement as Markdown."""
    headline, *others = stated.paragraphs
    parts = ["# Privacy statement", f"**{headline}**", *others, *stated.measures, NOT_COVERED]
    parts.append("\n".join(f"- {item}" for item in stated.not_covered))
    if stated.ledger.notes:
        parts += ["Notes:", "\n".join(f"- {note}" for note in stated.ledger.notes)]
    return "\n\n".join(parts)


def plan_picture(plan: Plan) -> str:
    """Returns the noise of the run against the batch size, as SVG."""
    return line_chart(
        [(row.batch_size, row.noise_of_the_run) for row in plan.rows],
        title=f"Noise of the run, {plan.dataset_size} examples, epsilon {plan.target_epsilon:g}",
        x_label="batch size",
        y_label="noise of the run",
        x_log=True,
        marked=(plan.recommended.batch_size, plan.recommended.noise_of_the_run),
    )
