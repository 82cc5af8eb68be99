"""From results to figures: percentiles, throughput, errors; as a table and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .serve import LoadRun

PERCENTILES = (50, 90, 95, 99)
MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def samples(run: LoadRun) -> dict[str, list[float]]:
    """Return the seconds of each measure, over the requests that succeeded."""
    good = [result for result in run.results if result.error is None]
    return {
        "ttft": [result.ttft for result in good],
        "tpot": [tpot for result in good if (tpot := result.tpot) is not None],
        "itl": [gap for result in good for gap in result.gaps],
        "e2e": [result.latency for result in good],
    }


def figures(run: LoadRun) -> dict[str, Any]:
    """Return all figures of a run, by name; times in milliseconds."""
    good = [result for result in run.results if result.error is None]
    output = sum(result.output_tokens for result in good)
    prompt = sum(result.prompt_tokens for result in good)
    errors = Counter(result.error for result in run.results if result.error is not None)
    found: dict[str, Any] = {
        "model": run.model,
        "requests": len(run.results),
        "succeeded": len(good),
        "errors": dict(sorted(errors.items())),
        "error_reasons": _reasons(run),
        "seconds": run.seconds,
        "requests_per_second": len(good) / run.seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "prompt_tokens_per_second": prompt / run.seconds,
        "output_tokens_per_second": output / run.seconds,
    }
    for name, values in samples(run).items():
        if values:
            found[f"{name}_mean_ms"] = 1000 * sum(values) / len(values)
            for percent in PERCENTILES:
                found[f"{name}_p{percent}_ms"] = 1000 * percentile(values, percent)
    return found


def _reasons(run: LoadRun) -> dict[str, str]:
    """The first reason of each kind of error that has one, in one line."""
    reasons: dict[str, str] = {}
    for result in run.results:
        if result.error is not None and result.reason is not None:
            reasons.setdefault(result.error, " ".join(result.reason.split()))
    return reasons


def table(found: dict[str, Any]) -> str:
    """Return figures for people."""
    lines = [
        f"{found['succeeded']} of {found['requests']} requests in {found['seconds']:.2f} s "
        f"({found['model']})",
        f"requests/s       {found['requests_per_second']:10.2f}",
        f"output tokens/s  {found['output_tokens_per_second']:10.1f}",
        f"prompt tokens/s  {found['prompt_tokens_per_second']:10.1f}",
        "",
        f"{'ms':24}{'mean':>10}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTILES),
    ]
    for name, label in MEASURES.items():
        if f"{name}_mean_ms" in found:
            columns = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
            values = (found[f"{name}_{column}_ms"] for column in columns)
            lines.append(f"{label:24}" + "".join(f"{value:10.2f}" for value in values))
    if found["errors"]:
        lines += ["", "errors:"]
        for kind, count in found["errors"].items():
            reason = found["error_reasons"].get(kind)
            lines.append(f"  {count} x {kind}" + ("" if reason is None else f": {reason}"))
    return "\n".join(lines)
