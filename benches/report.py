"""Where figures go: a JSON file of flat keys, and a table in `benches/README.md`."""

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

_HERE = Path(__file__).parent


def machine() -> str:
    """One sentence on what measured, and how busy it was."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"CPython {platform.python_version()}; load average {os.getloadavg()[0]:.1f} at the end."
    )


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def read(section: str) -> dict[str, float | str]:
    """The figures that were written last; none if there are none."""
    try:
        figures: dict[str, float | str] = json.loads(_results(section).read_text())
    except FileNotFoundError:
        return {}
    return figures


def _results(section: str) -> Path:
    return _HERE / "results" / f"{section}.json"


def write(section: str, figures: Mapping[str, float | str], table: str) -> None:
    """Write a section's figures to its JSON file, and its table between its marks of the README."""
    results = _results(section)
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(figures, indent=2) + "\n")
    readme = _HERE / "README.md"
    begin, end = f"<!-- {section} figures -->\n", f"<!-- end of {section} figures -->"
    before, rest = readme.read_text().split(begin)
    _, after = rest.split(end)
    readme.write_text(f"{before}{begin}{machine()}\n\n{table}\n{end}{after}")
