"""Runs `cases` in a process in which Triton interprets its kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"


# Two minutes of one core that is idle.
@pytest.mark.timeout(1800)
def test_every_case_passes_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 50
    assert "skipped" not in done.stdout
