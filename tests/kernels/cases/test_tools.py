"""The tools for GPUs, at small sizes in the interpreter."""

import dataclasses
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
import types
from pathlib import Path

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


# A minute of one core that is idle.
@pytest.mark.timeout(1700)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has sizes of its own, in the real check")
def test_device_check_passes_and_reports(tmp_path, capsys):
    report = tmp_path / "report.json"
    code = device_check.main(["--dry-run", "--json", str(report)])
    found = json.loads(report.read_text())
    printed = capsys.readouterr().out
    assert code == 0, printed
    names = [result["name"] for result in found["results"]]
    assert len(names) > 40
    assert found["finished"] is True
    assert all(result["ok"] for result in found["results"])
    starts = "attention d64", "write_kv", "add_rms_norm", "head_norm", "silu_mul", "apply_rotary"
    starts += "sample tokens", "sample masked tokens", "sample edited tokens"
    starts += "decode step tiny", "engine tokens, greedy", "engine tokens, sampled"
    starts += "engine tiny, 2 x 5, eager", "gap tiny", "transformers tiny", "vLLM tiny"
    for start in starts:
        assert any(name.startswith(start) for name in names), start
    assert f"{len(names)} checks, 0 missed" in printed


def instead(monkeypatch, code):
    """Have parts run this program, which is given the file for their results last."""
    start = subprocess.Popen

    def started(command, **options):
        return start([sys.executable, "-c", code, command[command.index("--lines") + 1]], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


def test_a_part_that_crashes_costs_its_own_results_alone(monkeypatch):
    instead(monkeypatch, "import os, sys; print('no kernel image', file=sys.stderr); os.abort()")
    [result] = device_check.run_round(["accuracy"], [], 60)
    assert not result.ok
    assert result.found == "ended with -6: no kernel image"


def test_a_part_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "found = {'name': 'child', 'found': str(child.pid)}\n"
        "print(json.dumps(found), '{\"name', sep='\\n', file=open(sys.argv[1], 'w', 1))\n"
        "time.sleep(600)\n"
    )
    instead(monkeypatch, code)
    found, ended, *others = device_check.run_round(["tokens", "speed"], [], 3.0)
    assert (ended.name, ended.found, ended.ok) == ("part tokens", "did not end in 3 s", False)
    assert [other.name for other in others] == ["child", "part speed"]
    end = time.monotonic() + 30
    while any(is_running(int(result.found)) for result in (found, others[0])):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_round_leaves_the_later_ones_their_time(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    clock, given = [0.0], {}
    monkeypatch.setattr(device_check.time, "monotonic", lambda: clock[0])

    def run_round(names, arguments, limit):
        given[names[0]] = limit
        clock[0] += limit
        return []

    monkeypatch.setattr(device_check, "run_round", run_round)
    sizes = device_check.DEVICE_SIZES
    results = [each for found in device_check.run(sizes, DEVICE, []) for each in found]
    assert given.pop("attention d128") == sizes.part_seconds
    # All that hangs: the rest still has what is kept for it, and the end is on time.
    assert min(given[name] for name in ("speed", "engine 0.6B", "engine 8B")) >= 39
    assert given["transformers 8B"] >= 23
    assert clock[0] <= sizes.seconds < 360
    assert [result.name for result in results] == ["part vllm 0.6B", "part vllm 8B"]
    assert "left out: 0 of 330 s are left" in results[0].found


def test_packages_that_are_not_there_cost_no_time(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = []
    monkeypatch.setattr(device_check, "run_round", lambda names, *rest: asked.append(names) or [])
    found = [
        each for part in device_check.run(device_check.DEVICE_SIZES, DEVICE, []) for each in part
    ]
    assert [names[0] for names in asked] == ["attention d128", "speed", "engine 0.6B", "engine 8B"]
    assert [(each.found, each.ok) for each in found] == [("not installed", True)] * 4


def test_the_report_is_there_whatever_ends_the_check(monkeypatch, tmp_path, capsys):
    def run(sizes, device, arguments):
        yield [device_check.Result("first", "found")]
        assert json.loads(path.read_text())["results"][0]["name"] == "first"
        raise KeyboardInterrupt

    path = tmp_path / "report.json"
    monkeypatch.setattr(device_check, "run", run)
    with pytest.raises(KeyboardInterrupt):
        device_check.check_all(device_check.SMOKE_SIZES, DEVICE, path, [])
    assert json.loads(path.read_text())["finished"] is False
    assert "ok   first" in capsys.readouterr().out


def test_without_triton_or_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        device_check.main(["--dry-run"])
    assert "the package triton is not installed" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        device_check.main([])
    assert "there is no GPU; --dry-run needs none" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        device_check.main(["--dry-run", "--part", "luck"])
    assert (
        "--part must be one of attention d64, accuracy, tokens, speed, engine tiny"
        in capsys.readouterr().err
    )


def test_modes_leave_out_what_an_engine_does_not_have(monkeypatch):
    @dataclasses.dataclass
    class Few:
        enforce_eager: bool = False

    monkeypatch.setattr(device_check._check_engine, "EngineArgs", Few)
    modes = device_check._check_engine.modes()
    assert modes == {"eager": {"enforce_eager": True}, "graphs": {"enforce_eager": False}}


def test_vllm_is_given_what_it_documents(monkeypatch):
    asked = []

    class Model:
        def __init__(self, *, model, load_format, max_model_len, max_num_seqs, **options):
            assert (Path(model) / "config.json").is_file()
            assert load_format == "dummy"
            assert (max_model_len, max_num_seqs) == (8, 2)
            assert options == {"enable_prefix_caching": False}

        def generate(self, given, params, use_tqdm=True):
            assert [len(each["prompt_token_ids"]) for each in given] == [5, 5]
            assert not use_tqdm
            asked.append(params)

    fake = types.ModuleType("vllm")
    fake.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    fake.LLM, fake.SamplingParams = Model, dict
    monkeypatch.setitem(sys.modules, "vllm", fake)
    [result] = device_check._check_engine.check_vllm(device_check.SMOKE_SIZES, DEVICE, "tiny")
    assert result.unit == "tokens/s"
    assert result.value > 0
    assert [params["max_tokens"] for params in asked] == [3, 1, 3]


class Queue:
    def run(self, work):
        return work()


class Runner:
    """Runs steps of two pieces of work, over a queue or not."""

    def __init__(self, queue=None):
        if queue is not None:
            self.queue = queue

    def run(self, answer):
        return answer

    def launch(self, answer):
        self.queue.run(lambda: None)
        return self.queue.run(lambda: answer)


@pytest.mark.parametrize("is_queued", [False, True])
def test_pauses_are_between_what_a_runner_computes(monkeypatch, is_queued):
    runner = Runner(Queue()) if is_queued else Runner()
    marks = device_check._check_engine.StepMarks(runner, torch.device("cpu"))
    assert marks.gap() is None
    clock = iter(number**2 / 1e6 for number in range(100))
    monkeypatch.setattr(device_check._check_engine.time, "perf_counter", lambda: next(clock))
    step = runner.launch if is_queued else runner.run
    assert [step(answer) for answer in (7, 8, 9)] == [7, 8, 9]
    # Work takes from an even number's square to the next odd one's. Of a queue's steps, each has
    # two pauses: 16 - 9 and 36 - 25, then 64 - 49 and 100 - 81.
    expected = [18, 34] if is_queued else [4 - 1, 16 - 9]
    assert marks.gap() == pytest.approx(sum(expected) / 2)
    marks.clear()
    assert marks.gap() is None


def test_pauses_are_judged_where_scheduling_overlaps():
    gap = device_check._check_engine._gap
    cuda = torch.device("cuda")
    assert not gap("gap", None, False, cuda).ok
    assert not gap("gap", 51.0, True, cuda).ok
    assert gap("gap", 50.0, True, cuda).ok
    assert gap("gap", 900.0, False, cuda).ok


def test_device_check_tells_of_wrong_results_and_failures(monkeypatch):
    def wrong(query, *arguments, **options):
        return torch.full_like(query, 0.5)

    monkeypatch.setattr(device_check._check_accuracy, "paged_attention", wrong)
    monkeypatch.setattr(device_check._check_accuracy, "write_kv", None)
    results = {
        result.name: result
        for check in device_check._check_accuracy.CHECKS[:2]
        for result in device_check.guarded(check, device_check.SMOKE_SIZES, DEVICE)
    }
    assert not results["attention d64 bfloat16 num_decodes"].ok
    failed = results["check_kv_write"]
    assert not failed.ok
    assert failed.found.startswith("TypeError: 'NoneType' object is not callable")
    assert failed.line().startswith("MISS check_kv_write")
