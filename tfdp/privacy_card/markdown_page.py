"""A privacy card as Markdown: one file; its pictures are inside it."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

from tfdp.privacy_card import pictures, words
from tfdp.privacy_card.facts import Facts


def page(facts: Facts) -> str:
    """Returns the page."""
    statement = facts.statement
    headline, *others = statement.paragraphs
    parts = [
        f"# {_plain(facts.title)}",
        f"**{_prose(headline)}**",
        _table(("", ""), facts.guarantee),
        "## What an attacker can reach",
        statement.trade_off.sentence,
        _table(words.ATTACK_HEADS, words.attack_rows(statement)),
        *_pictures(facts),
        "## What was released, and what is promised",
        *map(_prose, others),
        "## Not covered",
        _list(statement.not_covered),
    ]
    if statement.ledger.notes:
        parts += ["## Notes", _list(statement.ledger.notes)]
    if facts.parameters:
        parts += ["## Parameters", _table(("", ""), facts.parameters)]
    parts += ["## Versions", _table(("", ""), facts.versions)]
    if facts.weights_hash:
        parts += ["## Weights", f"SHA-256: `{facts.weights_hash}`", words.HASH]
    return "\n\n".join(parts) + "\n"


def _pictures(facts: Facts) -> list[str]:
    if not (facts.by_delta and facts.by_steps):
        return []
    return [
        "## Epsilon",
        _image("Epsilon against delta", pictures.by_delta(facts)),
        _table(("delta", "epsilon"), words.points(facts.by_delta)),
        _image("Epsilon against steps", pictures.by_steps(facts)),
        _table(("steps", "epsilon"), words.points(facts.by_steps)),
    ]


def _image(name: str, svg: str) -> str:
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_prose(item)}" for item in items)


def _prose(text: str) -> str:
    """Returns sentences of tfdp's, with their backticks; notes may be the user's."""
    return escape(" ".join(text.split()), quote=False)


def _plain(text: str) -> str:
    """Returns names of the user's so that Markdown and HTML show them as they are."""
    return re.sub(r"([\\`*_{}\[\]<>#|&!])", r"\\\1", " ".join(text.split()))
