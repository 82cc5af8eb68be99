"""The core without a model, the scheduler in plain Python, and the commands that measure."""

import json
import random

import pytest

from miniinfer import EngineArgs
from miniinfer.bench import core as bench_core
from miniinfer.bench import offline as bench_offline
from miniinfer.bench.fake_model import FakeModel
from miniinfer.bench.python_scheduler import PythonScheduler
from miniinfer.cli import main
from miniinfer.cli.client_options import output_file
from tiny import write_tiny_llama

LIMITS = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 10,
    "max_model_len": 64,
}


def collect(model: FakeModel, rounds: int = 1000) -> dict[int, list]:
    """Step until nothing is left; what each request got."""
    seen: dict[int, list] = {}
    for _ in range(rounds):
        tokens = model.step()
        model.core.check()
        for request, delta in model.drain():
            seen.setdefault(request, []).append(delta)
        if not tokens and not model.core.has_requests():
            return seen
    raise AssertionError("requests are left over")


def test_a_fake_model_gives_each_request_the_script_from_its_own_position():
    script = [random.Random(0).randrange(64) for _ in range(37)]
    model = FakeModel(script, vocab_size=64, text_thread=False, **LIMITS)
    prompts = {length: list(range(length)) for length in (1, 3, 4, 5, 13, 30, 50)}
    submissions = {
        length: model.submit(prompt, max_tokens=12) for length, prompt in prompts.items()
    }
    seen = collect(model)
    for length, submission in submissions.items():
        deltas = seen[submission.ids()[0]]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == model.expected(length, 12)
        assert "".join(delta.text for delta in deltas) == "".join(f"<{t}>" for t in tokens)
        assert deltas[-1].finish_reason == "length"


def test_a_scripted_end_of_sequence_ends_the_request():
    model = FakeModel([5, 6, 7, 9], vocab_size=10, eos_token_ids=[9], text_thread=False, **LIMITS)
    submission = model.submit([1, 2, 3, 4, 5], max_tokens=20)
    deltas = collect(model)[submission.ids()[0]]
    # Positions 5 and 6 of the script are 6 and 7; position 7 is the end.
    assert "".join(delta.text for delta in deltas) == "<6><7>"
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("script", "message"),
    [([], "at least one token, got none"), ([3, 10], "from 0 to 9, got 10"), ([-1], "got -1")],
)
def test_a_script_that_cannot_be_sampled_is_refused(script: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        FakeModel(script, vocab_size=10)


class Shadow:
    """Predicts from what its cache holds in the places that the arrays name."""

    def __init__(self, scheduler: PythonScheduler, num_blocks: int) -> None:
        self.scheduler = scheduler
        self.cache = [0] * (num_blocks * scheduler.block_size)

    def forward(self) -> list[int]:
        scheduler = self.scheduler
        arrays, size = scheduler.arrays, scheduler.block_size
        digests: list[int] = []
        for number in range(len(scheduler.planned)):
            table = scheduler.block_table[arrays["rows"][number]]
            for at in range(arrays["query_start"][number], arrays["query_start"][number + 1]):
                position = int(arrays["positions"][at])
                before = 0
                if position:
                    before = self.cache[
                        table[(position - 1) // size] * size + (position - 1) % size
                    ]
                digest = hash((before, int(arrays["token_ids"][at])))
                self.cache[arrays["slot_mapping"][at]] = digest
                digests.append(digest)
        count = sum(s.computed + s.scheduled == len(s.tokens) for s in scheduler.planned)
        return [digests[at] % 50 for at in arrays["logits_index"][:count]]


def continuation(prompt: list[int], count: int) -> list[int]:
    digest, tokens = 0, []
    for token in prompt:
        digest = hash((digest, token))
    for _ in range(count):
        tokens.append(digest % 50)
        digest = hash((digest, tokens[-1]))
    return tokens


@pytest.mark.parametrize("num_blocks", [16, 24, 200])
@pytest.mark.parametrize("seed", range(5))
def test_the_scheduler_in_python_computes_what_a_model_alone_would(num_blocks: int, seed: int):
    generator = random.Random(seed)
    limits = LIMITS | {"num_blocks": num_blocks}
    scheduler = PythonScheduler(**limits)
    shadow = Shadow(scheduler, num_blocks)
    shared = generator.choices(range(50), k=20)
    asked: dict[int, tuple[list[int], int]] = {}
    got: dict[int, list[int]] = {}
    cancelled = set()
    for _ in range(2000):
        if len(asked) < 40 and generator.random() < 0.5:
            prompt = shared[: generator.randrange(21)] + generator.choices(
                range(50), k=generator.randrange(1, 30)
            )
            count = generator.randrange(1, 64 - len(prompt))
            asked[scheduler.submit(prompt, max_tokens=count)] = (prompt, count)
        if generator.random() < 0.02 and asked:
            victim = generator.choice(list(asked))
            live = victim in scheduler.waiting or victim in scheduler.running
            scheduler.cancel(victim)
            cancelled |= {victim} if live else set()
        if scheduler.plan():
            for request, token in scheduler.commit(shadow.forward()):
                got.setdefault(request, []).append(token)
        if len(asked) == 40 and not scheduler.running and not scheduler.waiting:
            break
    assert len(scheduler.finished) == 40
    assert cancelled < asked.keys()
    for request, (prompt, count) in asked.items():
        expected = continuation(prompt, count)
        if request in cancelled:
            assert got.get(request, []) == expected[: len(got.get(request, []))]
        else:
            assert got[request] == expected
    assert len(scheduler.free_blocks) == num_blocks
    assert not any(scheduler.references)
    assert len(scheduler.free_rows) == LIMITS["max_num_seqs"]


def test_the_scheduler_in_python_takes_a_prompt_it_has_seen_from_its_cache():
    scheduler = PythonScheduler(**LIMITS | {"max_num_batched_tokens": 64})
    prompt = list(range(21))
    scheduler.submit(prompt, max_tokens=1)
    assert scheduler.plan() == 21
    scheduler.commit([7])
    scheduler.submit(prompt, max_tokens=1)
    # Five full blocks are found; the last token is computed always.
    assert scheduler.plan() == 1


def test_the_command_measures_and_writes_every_figure(tmp_path, capsys, monkeypatch):
    measure = bench_core.measure
    monkeypatch.setattr(bench_core, "measure", lambda: measure(scale=0.02))
    file = tmp_path / "core.json"
    assert main(["bench", "core", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    for name in (
        "plan_commit_us_256",
        "plan_commit_us_1024",
        "plan_commit_us_4096",
        "plan_commit_us_256_waiting_10000",
        "admit_us_8192_cold",
        "admit_us_8192_hit",
        "cancel_us",
    ):
        assert figures[name] > 0
        assert figures[f"python_scheduler_{name}"] > 0
    assert figures["python_plan_commit_p99_us_256"] >= figures["python_plan_commit_p50_us_256"] > 0
    assert figures["drain_us_per_token"] > 0
    own = [name for name in figures if not name.startswith("python_scheduler_")]
    assert sorted(own) == sorted(bench_core.TITLES)
    for name, title in bench_core.TITLES.items():
        [row] = [line for line in printed.splitlines() if line.startswith(f"{title}  ")]
        cells = row.removeprefix(title).split()
        assert cells[0] == f"{figures[name]:,.2f}"
        beside = figures.get(f"python_scheduler_{name}")
        assert cells[1:2] == ([] if beside is None else [f"{beside:,.1f}"])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny")


def test_the_engine_is_measured_by_batch_size(tiny_model):
    settings = bench_offline.OfflineSettings(
        batches=(1, 3), input_tokens=9, max_tokens=5, rounds=2, seed=7
    )
    args = EngineArgs(model=str(tiny_model), num_kv_blocks=64, threads=1)
    found = bench_offline.measure(args, settings)
    assert list(found) == [1, 3]
    for batch, figures in found.items():
        assert figures["requests"] == figures["succeeded"] == 2 * batch
        assert figures["prompt_tokens"] == 2 * batch * 9
        assert figures["output_tokens"] == 2 * batch * 5
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"] <= figures["e2e_p99_ms"]
        rate = f"{figures['output_tokens_per_second']:,.1f}"
        assert rate in bench_offline.table(found)


def test_a_request_beyond_the_model_is_refused_before_anything_runs(tiny_model):
    settings = bench_offline.OfflineSettings(input_tokens=250, max_tokens=7)
    args = EngineArgs(model=str(tiny_model), num_kv_blocks=64, threads=1)
    with pytest.raises(ValueError, match=r"at most 256 together.*got 257"):
        bench_offline.measure(args, settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batches": (1, 0)}, "batch size must be at least 1, got 0"),
        ({"input_tokens": 0}, "input_tokens must be at least 1, got 0"),
        ({"rounds": -1}, "rounds must be at least 1, got -1"),
    ],
)
def test_offline_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        bench_offline.OfflineSettings(**fields)


def test_the_offline_command_writes_figures_and_a_page(tiny_model, tmp_path, capsys):
    files = {"--output": tmp_path / "f.json", "--html": tmp_path / "f.html"}
    command = ["bench", "offline", str(tiny_model), "--batch-sizes", "1", "2", "--rounds", "1"]
    command += ["--input-tokens", "8", "--max-tokens", "4", "--num-kv-blocks", "64"]
    command += ["--threads", "1", *(str(part) for pair in files.items() for part in pair)]
    assert main(command) == 0
    found = json.loads(files["--output"].read_text())
    assert [found[batch]["output_tokens"] for batch in ("1", "2")] == [4, 8]
    assert "output tok/s" in capsys.readouterr().out
    assert files["--html"].read_text().count("<svg") == 4


def test_the_core_command_writes_a_page(tmp_path, monkeypatch):
    figures = dict.fromkeys(bench_core.SIZES, 1.5)
    monkeypatch.setattr(bench_core, "measure", lambda: (figures, figures))
    file = tmp_path / "core.html"
    assert main(["bench", "core", "--html", str(file)]) == 0
    text = file.read_text()
    assert text.count("<svg") == 2
    assert bench_core.TITLES["plan_commit_us_256"] in text


@pytest.mark.parametrize("subject", ["core", "offline", "serve"])
@pytest.mark.parametrize("flag", ["--json", "--output", "--html"])
def test_a_file_that_cannot_be_written_is_found_before_the_measurement(
    subject, flag, tmp_path, capsys
):
    for path in (tmp_path / "absent" / "file", tmp_path):
        with pytest.raises(SystemExit) as end:
            main(["bench", subject, flag, str(path)])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert str(path) in error
        assert flag in error
        assert error.count("\n") == 1


def test_a_check_of_a_file_leaves_none_behind_and_keeps_what_is_there(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    assert output_file(str(old)) == old
    assert output_file(str(new)) == new
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.parametrize("url", ["http://", "ftp://127.0.0.1", "http://127.0.0.1:x", ":::"])
def test_an_address_that_is_none_is_found_before_the_load(url, capsys):
    assert main(["bench", "serve", "--url", url]) == 2
    error = capsys.readouterr().err
    assert "--url must look like" in error
    assert repr(url) in error


def test_certificates_that_are_none_are_named(tmp_path, capsys):
    file = tmp_path / "ca.pem"
    assert main(["bench", "serve", "--cacert", str(file)]) == 2
    assert f"cannot read --cacert {file}" in capsys.readouterr().err
    file.write_text("no certificate")
    assert main(["bench", "serve", "--cacert", str(file)]) == 2
    assert f"--cacert {file} holds no certificates" in capsys.readouterr().err
