"""Runs the core's benchmarks beside the scheduler in plain Python: `make bench-core`.

Writes `benches/results/core.json` and the table in `benches/README.md`.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import report

from miniinfer.bench.core import Figures, measure, table

HERE = Path(__file__).parent

# Of each figure: the benchmark, and what one iteration of it is divided by.
CRITERION = {
    "plan_commit_us_256": ("plan_commit/256", 1),
    "plan_commit_us_1024": ("plan_commit/1024", 1),
    "plan_commit_us_4096": ("plan_commit/4096", 1),
    "plan_commit_us_256_waiting_10000": ("plan_commit/256_waiting_10000", 1),
    "admit_us_8192_cold": ("admit/plan_and_commit/cold", 1),
    "admit_us_8192_hit": ("admit/plan_and_commit/hit", 1),
    "admit_plan_only_us_8192_cold": ("admit/plan/cold", 1),
    "admit_plan_only_us_8192_hit": ("admit/plan/hit", 1),
    "cancel_us": ("cancel/10000_256_running", 10_000),
    "cancel_us_4096_running": ("cancel/10000_4096_running", 10_000),
    "channel_us_per_token": ("hub/push_notify_drain_256", 256),
}

# What each figure must be, and what others take for the same (measured on a like machine).
ROWS = {
    "plan_commit_us_256": (
        "plan + commit, 256 decoding",
        25.0,
        "vLLM V1 3,400-6,100; nano-vllm 168-313",
    ),
    "plan_commit_us_1024": ("the same, 1,024", 102.4, "vLLM V1 15,000-26,000; nano-vllm 770-1,280"),
    "plan_commit_us_4096": ("the same, 4,096", 409.6, ""),
    "plan_commit_us_256_waiting_10000": ("256 with 10,000 more waiting", None, ""),
    "admit_us_8192_cold": (
        "admit 8,192 tokens, cold",
        60.0,
        "vLLM V1 1,130 to hash + 845 to schedule",
    ),
    "admit_us_8192_hit": ("admit 8,192 tokens, all cached", 60.0, ""),
    "cancel_us": ("cancel, each of 10,000", 1.0, ""),
    "channel_us_per_token": ("channel, push to drain, a token", 0.1, ""),
    "python_plan_commit_p99_us_256": (
        "plan + commit from Python beside a busy event loop, p99",
        500.0,
        "8,000-13,000 when the lock is let go at the default switch interval",
    ),
}


def criterion() -> Figures:
    """Run the Rust benchmarks; medians in microseconds."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"CRITERION_HOME": home}
        for bench, chosen in (("scheduler", []), ("channel", ["hub/push_notify_drain_256"])):
            # The profile of the wheel: what it has compiled is not compiled again.
            command = ["cargo", "bench", "--profile", "release", "--locked", "-p", "miniinfer-core"]
            command += ["--bench", bench, "--", "--noplot", *chosen]
            subprocess.run(command, check=True, env=environment, cwd=HERE.parent)
        figures = {}
        for name, (path, divisor) in CRITERION.items():
            estimates = json.loads((Path(home) / path / "new" / "estimates.json").read_text())
            figures[name] = round(estimates["median"]["point_estimate"] / 1e3 / divisor, 4)
    return figures


def merge(rust: Figures, through_python: Figures, scheduler: Figures) -> Figures:
    """All figures under flat names; ratios are of what ran in turns in one process."""
    figures = dict(rust)
    for name, value in through_python.items():
        known = name.startswith("python_")
        figures[name if known else f"from_python_{name}"] = value
    for name, value in scheduler.items():
        figures[f"python_scheduler_{name}"] = value
        figures[f"ratio_{name}"] = round(value / through_python[name], 2)
    return figures


def readme_table(figures: Figures) -> str:
    """The table of `README.md`."""
    lines = [
        "| microseconds | must be | core | core from Python | plain Python | ratio | others |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (title, target, others) in ROWS.items():
        if target is None:
            target = 1.2 * figures["plan_commit_us_256"]
        through = figures.get(f"from_python_{name}")
        scheduler = figures.get(f"python_scheduler_{name}")
        ratio = figures.get(f"ratio_{name}")
        cells = [title, f"<= {_number(target)}", _number(figures[name])]
        cells += [_number(through), _number(scheduler)]
        cells += ["" if ratio is None else f"{ratio:.1f}x", others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    rust = criterion()
    through_python, scheduler = measure()
    figures = merge(rust, through_python, scheduler)
    print(f"\n{'criterion, medians':36} {'us':>10}")
    for name, value in rust.items():
        print(f"{name:36} {value:10,.3f}")
    print("\nfrom Python, in turns with a scheduler in plain Python")
    print(table(through_python, scheduler))
    report.write("core", figures, readme_table(figures))


if __name__ == "__main__":
    main()
