"""Pictures of a privacy card."""

from tfdp.base.svg import line_chart
from tfdp.privacy_card.facts import Facts


def by_delta(facts: Facts) -> str:
    """Returns epsilon against delta, as SVG."""
    delta = facts.statement.bound.delta
    return line_chart(
        facts.by_delta,
        title="Epsilon against delta",
        x_label="delta",
        y_label="epsilon",
        x_log=True,
        marked=next((point for point in facts.by_delta if point[0] == delta), None),
    )


def by_steps(facts: Facts) -> str:
    """Returns epsilon against steps, as SVG."""
    return line_chart(
        facts.by_steps,
        title=f"Epsilon against steps, at delta = {facts.statement.bound.delta:g}",
        x_label="steps",
        y_label="epsilon",
        marked=facts.by_steps[-1],
    )
