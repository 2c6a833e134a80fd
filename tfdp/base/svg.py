"""Line charts as SVG, with nothing but the standard library."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 36, 52
_LINE, _GRID, _TEXT, _MARK = "#1f5fbf", "#dddddd", "#222222", "#c03a2b"
_MOST_POINT_TICKS = 8

Point = tuple[float, float]


def line_chart(
    points: Sequence[Point],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    marked: Point | None = None,
) -> str:
    """Draws a line through points, with axes; the y axis begins at 0.

    Args:
      points: Pairs (x, y) of finite numbers, by increasing x; y >= 0, and x > 0 with `x_log`.
      title: Title of the picture; any text.
      x_label: Name of the x axis.
      y_label: Name of the y axis.
      x_log: Whether the x axis is logarithmic.
      marked: A point to mark.

    Returns:
      One `<svg>` element, of no other file and no script.

    Raises:
      ValueError: There are no points, or one is not finite.

    Example:
      >>> line_chart([(1, 2.0), (2, 1.5)], title="a < b", x_label="x", y_label="y")[:4]
      '<svg'
    """
    numbers = [number for point in points for number in point]
    if not points or not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"Argument `points` must be finite, and not empty. Received: {points!r}.")
    scale = math.log10 if x_log else float
    xs = [scale(x) for x, _ in points]
    low, high = min(xs), max(xs)
    y_ticks = _ticks(max(y for _, y in points))
    most = y_ticks[-1]

    def place(x: float, y: float) -> tuple[str, str]:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        across = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        return f"{across:.1f}", f"{_HEIGHT - _BOTTOM - y / most * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_WIDTH / 2, 20, title, 'text-anchor="middle" font-size="13"'),
    ]
    for tick in y_ticks:
        _, y = place(points[0][0], tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="{_GRID}"/>'
        )
        parts.append(_text(_LEFT - 6, float(y) + 4, f"{tick:g}", 'text-anchor="end"'))
    for tick in _x_ticks([x for x, _ in points], x_log):
        x, _ = place(tick, 0.0)
        bottom = _HEIGHT - _BOTTOM
        parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}" stroke="{_TEXT}"/>')
        parts.append(_text(float(x), bottom + 18, f"{tick:g}", 'text-anchor="middle"'))
    line = " ".join(",".join(place(*point)) for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    for point in points:
        x, y = place(*point)
        color, radius = (_MARK, 6) if point == marked else (_LINE, 3)
        parts.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}"/>')
    middle = _TOP + (_HEIGHT - _TOP - _BOTTOM) / 2
    parts += [
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 12, x_label, 'text-anchor="middle"'),
        _text(16, middle, y_label, f'text-anchor="middle" transform="rotate(-90 16 {middle:g})"'),
        "</svg>",
    ]
    return "\n".join(parts)


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _ticks(most: float) -> list[float]:
    """Returns round numbers from 0 to at least `most`, four to eight of them."""
    if most <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [round(step * number, 12) for number in range(math.ceil(most / step - 1e-9) + 1)]


def _x_ticks(xs: Sequence[float], is_log: bool) -> list[float]:
    if len(xs) <= _MOST_POINT_TICKS:
        return list(xs)
    if is_log:
        first, last = math.ceil(math.log10(min(xs))), math.floor(math.log10(max(xs)))
        return [10.0**power for power in range(first, last + 1)]
    return list(xs[:: math.ceil(len(xs) / _MOST_POINT_TICKS)])
