"""Every kernel compiles for NVIDIA's and AMD's GPUs, and fits their shared memory."""

import os
import subprocess
import sys
from pathlib import Path

LEAST_SHARED_MEMORY = 64 * 1024  # of gfx942; sm_80 has 163 KiB


def test_kernels_compile_ahead_of_time(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 21
    for kernel, target, shared, size in lines:
        limit = LEAST_SHARED_MEMORY if target == "gfx942" else 163 * 1024
        assert int(shared) <= limit, (kernel, target)
        assert int(size) > 0, (kernel, target)


def test_triton_is_not_imported_for_tensors_on_the_cpu():
    code = (
        "import sys, torch, miniinfer.kernels as kernels\n"
        "kernels.silu_mul(torch.zeros(2, 8))\n"
        "kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5)\n"
        "assert not any(name.startswith('triton') for name in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
