"""The tools for GPUs, at small sizes in the interpreter."""

import json

import pytest
import torch

from miniinfer.kernels import _launch, autotune, device_check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_autotune_writes_the_fastest_of_what_runs(tmp_path, monkeypatch, capsys):
    times = {16: 3.0, 32: None, 64: 1.0, 128: 2.0}
    tried = []

    def timed(case, device):
        name = _launch.traits_of(device).name
        shape = autotune._launch.AttentionShape(64, 2, 2, 2, case["max_query_len"] == 1)
        options = _launch._table()[name][shape.key]
        tried.append(options)
        return times[options["TILE_K"]]

    monkeypatch.setattr(autotune, "_time", timed)
    load = autotune.Load([(1, 20), (1, 3)], 1), autotune.Load([(9, 9)], 1)
    choices = {"TILE_Q": (16,), "TILE_K": (16, 32, 64, 128), "num_warps": (4,), "num_stages": (2,)}
    path = tmp_path / "table.json"
    arguments = {"device": DEVICE, "loads": load, "choices": (choices, choices)}
    autotune.tune_all([64], [2], False, path, **arguments)
    table = json.loads(path.read_text())[_launch.traits_of(DEVICE).name]
    best = {"TILE_Q": 16, "TILE_K": 64, "num_warps": 4, "num_stages": 2}
    assert table == {"decode d64 g2 q16 kv16": best, "prefill d64 g2 q16 kv16": best}
    assert len(tried) == 8
    assert "decode d64 g2 q16 kv16: " in capsys.readouterr().out
    times.update(dict.fromkeys(times))
    with pytest.raises(RuntimeError, match="no launch of decode d64 g2 q16 kv16 runs on"):
        autotune.tune_all([64], [2], False, path, **arguments)


def test_autotune_times_what_it_tunes():
    case = autotune.attention_case(
        DEVICE, requests=[(1, 20)], heads=2, kv_heads=1, head_dim=16, dtype=torch.bfloat16
    )
    assert autotune._time(case, DEVICE) > 0


def test_device_check_passes_and_reports(tmp_path, capsys, monkeypatch):
    report = tmp_path / "report.json"
    # A GPU has its own sizes for this, which take minutes.
    monkeypatch.setattr(device_check, "DEVICE_SIZES", device_check.SMOKE_SIZES)
    arguments = ["--json", str(report)]
    if DEVICE.type == "cpu":
        arguments.append("--cpu-smoke")
    assert device_check.main(arguments) == 0, capsys.readouterr().out
    found = json.loads(report.read_text())
    names = [result["name"] for result in found["results"]]
    assert len(names) > 35
    assert all(result["ok"] for result in found["results"])
    for start in ("attention d64", "write_kv", "add_rms_norm", "apply_rotary", "sample tokens"):
        assert any(name.startswith(start) for name in names), start
    assert any(name.startswith("decode step tiny") for name in names)
    assert f"{len(names)} checks, 0 missed" in capsys.readouterr().out


def test_device_check_tells_of_wrong_results_and_failures(monkeypatch):
    def wrong(query, *arguments, **options):
        return torch.full_like(query, 0.5)

    monkeypatch.setattr(device_check._check_accuracy, "paged_attention", wrong)
    monkeypatch.setattr(device_check._check_accuracy, "write_kv", None)
    results = {
        result.name: result
        for check in device_check._check_accuracy.CHECKS[:2]
        for result in device_check._guarded(check, device_check.SMOKE_SIZES, DEVICE)
    }
    assert not results["attention d64 bfloat16 num_decodes"].ok
    failed = results["check_kv_write"]
    assert not failed.ok
    assert failed.found.startswith("TypeError: 'NoneType' object is not callable")
    assert failed.line().startswith("MISS check_kv_write")
