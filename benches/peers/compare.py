"""The comparison itself: what is installed is measured in turns with this engine, as ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from . import offline, places, servers, serving
from .servers import Server, ServerFailed

PLAIN_DTYPES = ("float32", "bfloat16")
Figures = dict[str, float]


def run(rounds: int = serving.ROUNDS) -> Figures:
    """Ratios of this engine to each peer that is installed, and this engine's own rates."""
    reasons = {name: places.missing(name) for name in places.NAMES}
    for reason in filter(None, reasons.values()):
        print(f"skipped: {reason}")
    present = [name for name, reason in reasons.items() if reason is None]
    figures: Figures = {}
    parts: list[Callable[[], Figures]] = []
    if "llama" in present:
        parts.append(lambda: beside_llama_bench(rounds))
    if "transformers" in present:
        parts.append(lambda: beside_transformers(rounds))
    parts.append(
        lambda: beside_servers([name for name in present if name != "transformers"], rounds)
    )
    for part in parts:
        try:
            figures |= part()
        except (RuntimeError, OSError) as error:
            print(f"skipped: {error}")
    return figures


def beside_llama_bench(rounds: int) -> Figures:
    """Prefill and decode of one stream of quantised weights."""
    figures: Figures = {}
    with offline.workers(("miniinfer", "", "auto")) as (worker,):
        for kind, ours in (
            ("prefill", offline.prefill_rate(worker)),
            ("decode", offline.decode_rate(worker)),
        ):
            mine, theirs = offline.in_turns([ours, offline.llama_bench(kind)], rounds)
            figures[f"{kind}_vs_llama"] = offline.median_ratio(mine, theirs)
            figures[f"{kind}_tok_s_beside_llama"] = statistics.median(mine)
            figures[f"llama_{kind}_tok_s"] = statistics.median(theirs)
    return figures


def beside_transformers(rounds: int) -> Figures:
    """Batches of plain weights without a server, each side in the dtype that is faster for it."""
    plain = str(places.plain_model())
    wanted = [
        (engine, plain, dtype) for engine in ("miniinfer", "transformers") for dtype in PLAIN_DTYPES
    ]
    figures: Figures = {}
    with offline.workers(*wanted, ("miniinfer", "", "auto")) as made:
        *both, quantised = made
        for batch in offline.BATCHES:
            rates = offline.in_turns([offline.request_rate(each, batch) for each in both], rounds)
            half = len(PLAIN_DTYPES)
            mine, theirs = fastest(rates[:half]), fastest(rates[half:])
            figures[f"vs_transformers_{batch}"] = offline.median_ratio(mine, theirs)
            figures[f"transformers_tok_s_{batch}"] = statistics.median(theirs)
            figures[f"offline_plain_tok_s_{batch}"] = statistics.median(mine)
        float32 = both[len(PLAIN_DTYPES)]
        mine, theirs = offline.in_turns(
            [offline.prefill_rate(quantised), offline.prefill_rate(float32)], rounds
        )
        figures["prefill_vs_transformers"] = offline.median_ratio(mine, theirs)
        figures["transformers_prefill_tok_s"] = statistics.median(theirs)
    return figures


def fastest(columns: Sequence[Sequence[float]]) -> Sequence[float]:
    """Of the rates of several variants, round by round, those of the best median."""
    return max(columns, key=statistics.median)


def beside_servers(present: Sequence[str], rounds: int) -> Figures:
    """The same load over HTTP; without a peer, this server's own rates."""
    makers = {"vllm": servers.vllm, "llama": servers.llama}
    wanted = [servers.ours("gguf")]
    if "vllm" in present:
        wanted += [servers.ours_plain(dtype) for dtype in PLAIN_DTYPES]
    wanted += [makers[name]() for name in present]
    with started(wanted) as running:
        # What is asked of llama.cpp's server is its answer to many clients.
        turns = serving.measure(running, rounds=rounds, skip={"llama": (1, 8)})
        memory = {server.name: server.resident_mb() for server in running}
    return server_figures(turns) | {f"rss_mb_{name}": value for name, value in memory.items()}


@contextmanager
def started(wanted: Sequence[Server]) -> Iterator[list[Server]]:
    """Those that came up, each alone with the machine while it did."""
    running: list[Server] = []
    try:
        for server in wanted:
            print(f"  starting {server.name}", flush=True)
            try:
                server.start()
            except ServerFailed as error:
                print(f"skipped: {error}")
                continue
            print(f"  {server.name} was ready in {server.ready_seconds:.1f} s", flush=True)
            running.append(server)
            server.pause()
        yield running
    finally:
        for server in running:
            server.stop()


def server_figures(turns: serving.Turns) -> Figures:
    """Each server's medians, and the ratios of ours to the others."""
    figures: Figures = {}
    for name, points in turns.items():
        for clients, rows in points.items():
            for measure in ("tok_s", "ttft_ms", "itl_p50_ms", "itl_p99_ms"):
                values = [getattr(row, measure) for row in rows]
                figures[f"{measure}_{name}_{clients}"] = statistics.median(values)
    for clients in serving.REQUESTS:
        mine = turns["gguf"][clients]
        if theirs := turns.get("vllm", {}).get(clients):
            figures[f"gguf_vs_vllm_{clients}"] = _ratio(mine, theirs, "tok_s")
            figures[f"ttft_vs_vllm_{clients}"] = _ratio(mine, theirs, "ttft_ms")
            plain = [
                turns[name][clients]
                for dtype in PLAIN_DTYPES
                if (name := f"plain-{dtype}") in turns
            ]
            if plain:
                figures[f"plain_vs_vllm_{clients}"] = max(
                    _ratio(each, theirs, "tok_s") for each in plain
                )
    if theirs := turns.get("llama", {}).get(32):
        figures["server32_vs_llama"] = _ratio(turns["gguf"][32], theirs, "tok_s")
    return figures


def _ratio(mine: Sequence[serving.Turn], theirs: Sequence[serving.Turn], measure: str) -> float:
    return offline.median_ratio(
        [getattr(row, measure) for row in mine], [getattr(row, measure) for row in theirs]
    )
