"""Charts as SVG, and the page that holds them: one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

Point = tuple[float, float]

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 28, 34
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:1000px}"
    "svg{background:#fff}pre{background:#f4f4f4;padding:1em;overflow:auto}"
    "text{font:11px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:12px}"
)


def page(title: str, heading: str, text: str, charts: Iterable[str]) -> str:
    """Return a page: a heading, a table as plain text, charts. All texts are escaped."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(heading)}</h1><pre>{html.escape(text)}</pre>"
        f"{''.join(charts)}</body></html>\n"
    )


def chart(title: str, x_unit: str, y_unit: str, points: Sequence[Point], *, line: bool) -> str:
    """Return a chart of points from zero on, joined by a line or each a dot."""
    x_most = max((x for x, _ in points), default=0.0) or 1.0
    y_most = max((y for _, y in points), default=0.0) or 1.0

    def place(x: float, y: float) -> Point:
        return (
            _LEFT + x / x_most * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / y_most * (_HEIGHT - _TOP - _BOTTOM),
        )

    drawn = [place(*point) for point in points]
    if line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        marks = f"<polyline points='{path}' fill='none' stroke='#1769aa' stroke-width='1.5'/>"
    else:
        marks = "".join(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='#1769aa' fill-opacity='.5'/>"
            for x, y in drawn
        )
    axes = []
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, _ = place(fraction * x_most, 0)
        _, y = place(0, fraction * y_most)
        axes.append(
            f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_WIDTH - _RIGHT}' y2='{y:.1f}' stroke='#ddd'/>"
            f"<text x='{_LEFT - 4}' y='{y + 4:.1f}' text-anchor='end'>"
            f"{fraction * y_most:.3g}</text>"
            f"<text x='{x:.1f}' y='{_HEIGHT - _BOTTOM + 14}' text-anchor='middle'>"
            f"{fraction * x_most:.3g}</text>"
        )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'><title>{html.escape(title)}</title>"
        f"<text class='t' x='{_LEFT}' y='16'>{html.escape(title)}</text>{''.join(axes)}{marks}"
        f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 6}' text-anchor='end'>{x_unit}</text>"
        f"<text x='4' y='16'>{y_unit}</text></svg>"
    )
