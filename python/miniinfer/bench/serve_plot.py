"""A run as one HTML page: distributions and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import plot
from .plot import Point, chart
from .serve import LoadRun
from .serve_report import MEASURES, percentile, samples, table

_STEPS = 100


def page(run: LoadRun, found: dict[str, Any]) -> str:
    """Return the page."""
    charts = [
        chart(f"{label}: share of all", "ms", "%", _distribution(values), line=True)
        for (name, label) in MEASURES.items()
        if (values := samples(run)[name])
    ]
    charts.append(_timeline(run))
    return plot.page("miniinfer bench serve", str(found["model"]), table(found), charts)


def _distribution(values: Sequence[float]) -> list[Point]:
    """Return (milliseconds, percent of the values that are not above)."""
    ordered = sorted(values)
    return [
        (1000 * percentile(ordered, 100 * step / _STEPS), 100 * step / _STEPS)
        for step in range(_STEPS + 1)
    ]


def _timeline(run: LoadRun) -> str:
    good = [result for result in run.results if result.error is None]
    first = min((result.started for result in good), default=0.0)
    points = [(result.started - first, 1000 * result.ttft) for result in good]
    return chart("time to first token by start", "s", "ms", points, line=False)
