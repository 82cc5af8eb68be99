"""Servers under the same load in turns: one is loaded while the others are held."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miniinfer.bench.serve import LoadSettings, run_load
from miniinfer.bench.serve_report import percentile, samples

from .servers import Server

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
REQUESTS = {1: 3, 8: 16, 32: 32}
"""Of a turn, by the number of clients."""
ROUNDS = 3


@dataclass(frozen=True)
class Turn:
    """What one server did in one turn."""

    tok_s: float
    """Output tokens a second, the prompts' time included."""
    ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


Turns = dict[str, dict[int, list[Turn]]]
"""By server and number of clients, in the order of the rounds."""


def measure(
    servers: Sequence[Server],
    *,
    rounds: int = ROUNDS,
    skip: Mapping[str, Sequence[int]] | None = None,
) -> Turns:
    """Load started servers in turns; all of them are held between.

    `skip`: numbers of clients that a server is not measured at.
    """
    for server in servers:
        server.pause()
    found: Turns = {server.name: {} for server in servers}
    for number in range(-1, rounds):
        for clients, requests in REQUESTS.items():
            for server in servers:
                if clients in (skip or {}).get(server.name, ()):
                    continue
                # The first round, which counts for nothing, warms them up.
                count = requests if number >= 0 else clients
                server.resume()
                try:
                    turn = load(server, clients, count, seed=1000 * clients + number)
                finally:
                    server.pause()
                if number >= 0:
                    found[server.name].setdefault(clients, []).append(turn)
                    print(f"  {server.name:16} {clients:3} clients {turn.tok_s:8.1f} tokens/s")
    return found


def load(server: Server, clients: int, requests: int, seed: int) -> Turn:
    """Load one server; raises `RuntimeError` if a request fails."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps(each) for each in random_prompts(requests, seed)))
        settings = LoadSettings(
            url=server.url,
            endpoint="completions",
            num_requests=requests,
            num_warmup=0,
            concurrency=clients,
            prompts=prompts,
            max_tokens=OUTPUT_TOKENS,
            extra_body={"ignore_eos": True, "temperature": 0},
        )
        run = asyncio.run(run_load(settings))
    errors = {result.error for result in run.results if result.error is not None}
    tokens = sum(result.output_tokens for result in run.results)
    if errors or tokens != requests * OUTPUT_TOKENS:
        raise RuntimeError(f"{server.name} gave {tokens} tokens for {requests} requests: {errors}")
    times = samples(run)
    return Turn(
        tok_s=tokens / run.seconds,
        ttft_ms=1000 * percentile(times["ttft"], 50),
        itl_p50_ms=1000 * percentile(times["itl"], 50),
        itl_p99_ms=1000 * percentile(times["itl"], 99),
    )


def random_prompts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens: no server finds one in its cache."""
    source = random.Random(seed)
    return [
        {"prompt": [source.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]}
        for _ in range(count)
    ]
