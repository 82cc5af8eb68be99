"""The core without a model, the scheduler in plain Python, and the command that measures both."""

import json
import random

import pytest

from miniinfer.bench import core as bench_core
from miniinfer.bench.fake_model import FakeModel
from miniinfer.bench.python_scheduler import PythonScheduler
from miniinfer.cli import main

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
        assert name in printed
        assert figures[name] > 0
        assert figures[f"python_scheduler_{name}"] > 0
    assert figures["python_plan_commit_p99_us_256"] >= figures["python_plan_commit_p50_us_256"] > 0
    assert figures["drain_us_per_token"] > 0
