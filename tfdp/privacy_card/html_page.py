"""A privacy card as HTML: one file, without scripts and without anything from elsewhere."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from tfdp.privacy_card import pictures, words
from tfdp.privacy_card.facts import Facts

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 52rem;
  margin: 0 auto; padding: 1.5rem 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.headline { background: #eef3fb; border-left: 4px solid #1f5fbf; padding: .75rem 1rem;
  font-weight: 600; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .9rem .3rem 0; text-align: left;
  vertical-align: top; font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
figure { margin: 0; min-width: 0; } svg { width: 100%; height: auto; border: 1px solid #ddd; }
code { font-size: .85rem; overflow-wrap: anywhere; }
details { margin: .5rem 0; }
"""


def page(facts: Facts) -> str:
    """Returns the page."""
    statement = facts.statement
    headline, *others = statement.paragraphs
    parts = [
        f"<h1>{escape(facts.title)}</h1>",
        f'<p class="headline">{escape(headline)}</p>',
        _table(facts.guarantee),
        "<h2>What an attacker can reach</h2>",
        f"<p>{escape(statement.trade_off.sentence)}</p>",
        _table(words.attack_rows(statement), words.ATTACK_HEADS),
        *_pictures(facts),
        "<h2>What was released, and what is promised</h2>",
        *(f"<p>{_prose(one)}</p>" for one in others),
        "<h2>Not covered</h2>",
        _list(statement.not_covered),
    ]
    if statement.ledger.notes:
        parts += ["<h2>Notes</h2>", _list(statement.ledger.notes)]
    if facts.parameters:
        parts += ["<h2>Parameters</h2>", _table(facts.parameters)]
    parts += ["<h2>Versions</h2>", _table(facts.versions)]
    if facts.weights_hash:
        parts += [
            "<h2>Weights</h2>",
            f"<p>SHA-256: <code>{escape(facts.weights_hash)}</code></p>",
            f"<p>{_prose(words.HASH)}</p>",
        ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(facts.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _pictures(facts: Facts) -> list[str]:
    if not (facts.by_delta and facts.by_steps):
        return []
    drawn = (pictures.by_delta(facts), pictures.by_steps(facts))
    figures = "".join(f"<figure>{picture}</figure>" for picture in drawn)
    return [
        "<h2>Epsilon</h2>",
        f'<div class="pictures">{figures}</div>',
        "<details><summary>The numbers</summary>",
        _table(words.points(facts.by_delta), ("delta", "epsilon")),
        _table(words.points(facts.by_steps), ("steps", "epsilon")),
        "</details>",
    ]


def _table(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    lines = [f"<tr>{head}</tr>"] if heads else []
    for first, *others in rows:
        cells = "".join(f"<td>{escape(one)}</td>" for one in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return "<table>" + "".join(lines) + "</table>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_prose(item)}</li>" for item in items) + "</ul>"


def _prose(text: str) -> str:
    """Returns sentences in which `names` are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
