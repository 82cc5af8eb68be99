"""Every kernel compiles for NVIDIA's and AMD's GPUs, fits their memory, and spills where it may."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A hundred compilations take a minute on two idle cores, and many on busy ones.
pytestmark = pytest.mark.timeout(1800)

README = Path(__file__).parent.parent.parent / "kernels/README.md"


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    """What each variant uses on each GPU, compiled anew."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "miniinfer.kernels.compile_check", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_kernel_fits_every_gpu(usages):
    limits = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
    assert {usage["target"] for usage in usages} == set(limits)
    for usage in usages:
        assert 0 < usage["registers"] <= (512 if usage["target"] == "gfx942" else 255), usage
        assert usage["shared"] <= limits[usage["target"]] * 1024, usage


def test_what_runs_for_every_token_spills_nothing(usages):
    decodes = [usage for usage in usages if "prefill" not in usage["variant"]]
    assert len(decodes) > 60
    assert {usage["variant"] for usage in decodes if "decode d" in usage["variant"]}
    for usage in decodes:
        assert usage["spills"] == 0, usage


def test_two_decodes_fit_a_processor_at_once(usages):
    of_hopper = [u for u in usages if u["target"] == "sm_90" and " decode " in u["variant"]]
    assert len(of_hopper) > 5
    for usage in of_hopper:
        assert 2 * usage["shared"] <= 227 * 1024, usage
        # 65536 registers for two programs of 128 threads.
        assert usage["registers"] * 2 * 128 <= 65536, usage


def test_the_readme_has_a_line_for_each(usages):
    text = README.read_text()
    lines = re.findall(r"^\| ([^|]+) \|(?: \d+ / \d+ / \d+ \|){4}$", text, re.M)
    assert lines == list(dict.fromkeys(usage["variant"] for usage in usages)), (
        "run: python -m miniinfer.kernels.compile_check --write kernels/README.md"
    )


def test_launches_compile_with_what_triton_makes_of_their_arguments(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "as_launched.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = (
        "paged_attention join_splits write_kv rms_norm rotary silu_mul sample edit mask logprobs"
    )
    assert set(json.loads(done.stdout)) == {f"{name}_kernel" for name in names.split()}


def test_triton_is_not_imported_for_tensors_on_the_cpu():
    code = (
        "import sys, torch, miniinfer.kernels as kernels\n"
        "kernels.silu_mul(torch.zeros(2, 8))\n"
        "kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5)\n"
        "assert not any(name.startswith('triton') for name in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_without_triton_the_references_run():
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "def without(name, *more): return None if name == 'triton' else find(name, *more)\n"
        "importlib.util.find_spec = without\n"
        "sys.modules['triton'] = None\n"
        "import torch, miniinfer.attention_triton, miniinfer.kernels as kernels\n"
        "assert kernels.silu_mul(torch.ones(2, 8)).shape == (2, 4)\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
