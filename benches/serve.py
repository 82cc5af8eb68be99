"""What a streamed token costs the server, for each layout of its processes: `make bench-serve`.

The model is a stand-in of 20 tokens per second and stream, one event a token, and for the most that
there can be, one that takes no time. Writes `benches/results/serve.json` and its table.
"""

import asyncio
import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benches.report import write  # noqa: E402  # found on the path set above
from benches.serve_load import Load, get  # noqa: E402

LAYOUTS = ("one", "two")
STREAMS = (32, 128, 256)
RATE = 20.0
SECONDS = float(os.environ.get("BENCH_SECONDS", "6"))
_LAG_INTERVAL = 0.05
_START_SECONDS = 120.0
_WARM_UP_SECONDS = 1.0

MOST_CPU = 20.0
MOST_ITL_MS = 1e3 / RATE + 10
MOST_LAG_MS = 10.0
VLLM_TOKENS = {32: 6_700, 128: 11_000, 256: 8_500}
"""Tokens per second that vLLM's API server delivers of a free model, and events, least and most."""
VLLM_EVENTS = (1_500, 6_600)


async def serve(layout: str, model: str) -> None:
    """The server: an address on standard output, figures of itself at /bench."""
    from aiohttp import web

    from miniinfer import EngineArgs
    from miniinfer.server.app import make_app
    from miniinfer.server.config import ServerConfig
    from miniinfer.server.run import SWITCH_INTERVAL_SECONDS, bind, listen

    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    args = EngineArgs(
        model=model, max_num_seqs=256, max_num_batched_tokens=8192, num_kv_blocks=70_000, threads=1
    )
    llm: Any
    if layout == "two":
        from miniinfer.remote_llm import RemoteLLM

        llm = await asyncio.to_thread(lambda: RemoteLLM(args, engine_module="benches.serve_engine"))
    else:
        from benches.serve_engine import pace

        from miniinfer import AsyncLLM

        llm = await asyncio.to_thread(AsyncLLM.from_args, args)
        pace(llm.engine)
    loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loaded.set_result(llm)
    app = make_app(loaded, ServerConfig(stats_interval=0))
    lags: list[float] = []

    probing = asyncio.Event()

    async def figures(request: web.Request) -> web.Response:
        answer = {"lags": lags.copy(), "engine": getattr(llm, "engine_pid", None)}
        lags.clear()
        # To probe the loop is work too, and not part of what a token costs.
        (probing.set if "probe" in request.query else probing.clear)()
        return web.json_response(answer)

    app.add_routes([web.get("/bench", figures)])
    listener = bind("127.0.0.1", 0)
    await listen(app, listener)
    print(listener.getsockname()[1], flush=True)
    # The end of whoever started us.
    asyncio.get_running_loop().add_reader(0, lambda: os._exit(1))
    while True:
        await probing.wait()
        before = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL)
        lags.append(time.monotonic() - before - _LAG_INTERVAL)


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed so far."""
    fields = [
        (path / "schedstat").read_text().split()[0] for path in Path(f"/proc/{pid}/task").iterdir()
    ]
    return sum(map(int, fields)) / 1e9


def load(port: int, server: int, count: int) -> dict[str, float]:
    """Read so many streams for a time; the figures of that time."""
    engine: Any = get(port, "/bench")["engine"]
    pids = [server, engine] if engine else [server]

    def now() -> tuple[float, float, int, int]:
        stats: Any = get(port, "/healthz")["stats"]
        cpu = sum(map(cpu_seconds, pids))
        return time.monotonic(), cpu, streams.events, stats["generation_tokens"]

    with contextlib.closing(Load(port, count)) as streams:
        streams.await_all()
        streams.read(_WARM_UP_SECONDS)
        before = now()
        gaps = streams.read(SECONDS)
        after = now()
        get(port, "/bench?probe")
        streams.read(SECONDS)
        lags: Any = get(port, "/bench")["lags"]
    elapsed, cpu, events, tokens = (end - start for start, end in zip(before, after, strict=True))
    return {
        "cpu_s_per_million_tokens": round(cpu / tokens * 1e6, 1),
        "tokens_per_s": round(tokens / elapsed, 1),
        "events_per_s": round(events / elapsed, 1),
        "itl_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "loop_lag_p99_ms": round(1e3 * percentile(lags, 99), 1),
    }


def percentile(values: list[float], percent: int) -> float:
    """A percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@contextlib.contextmanager
def server(layout: str, rate: float, model: str) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its port and its process id."""
    with program("benches.serve", layout, model, rate=rate) as found:
        yield found


@contextlib.contextmanager
def program(module: str, *arguments: str, rate: float) -> Iterator[tuple[int, int]]:
    """A program that prints the port it serves: that, and its process id."""
    environment = os.environ | {"BENCH_RATE": str(rate), "GOMP_SPINCOUNT": "1000"}
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], _START_SECONDS)[0]:
            raise TimeoutError(f"the server has not started in {_START_SECONDS:g} s")
        yield int(process.stdout.readline()), process.pid
    finally:
        # Whatever went wrong: a server that is left would be waited for.
        process.kill()
        process.communicate()


def floor(count: int) -> float:
    """CPU seconds for a million events of a server that does nothing but send them."""
    with (
        program("benches.serve_floor", str(count), rate=RATE) as (port, pid),
        contextlib.closing(Load(port, count)) as streams,
    ):
        streams.await_all()
        streams.read(_WARM_UP_SECONDS)
        before, events = cpu_seconds(pid), streams.events
        streams.read(SECONDS)
        return round((cpu_seconds(pid) - before) / (streams.events - events) * 1e6, 1)


def measure(layout: str, rate: float, counts: tuple[int, ...], model: str) -> dict[str, float]:
    """Figures of one layout and rate, the number of streams in their names."""
    figures: dict[str, float] = {}
    with server(layout, rate, model) as (port, pid):
        for count in counts:
            for name, value in load(port, pid, count).items():
                label = name if rate else f"free_{name}"
                figures[f"{label}_{layout}_{count}"] = value
            time.sleep(0.5)
    return figures


def table(figures: dict[str, float]) -> str:
    """The figures, a line for each number of streams and each layout."""
    lines = [
        "| streams | processes | CPU s per million tokens | sends alone | inter-token p99, ms "
        "| loop lag p99, ms | free model: tokens/s | vLLM | free model: events/s |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| must be | | <= {MOST_CPU:g} | | <= {MOST_ITL_MS:g} | <= {MOST_LAG_MS:g} "
        f"| >= 5 x vLLM | | >= 3 x vLLM's {VLLM_EVENTS[0]:,}-{VLLM_EVENTS[1]:,} |",
    ]
    for count in STREAMS:
        for layout in LAYOUTS:
            cells = [
                f"{figures[f'{name}_{layout}_{count}']:,}"
                for name in (
                    "cpu_s_per_million_tokens",
                    "itl_p99_ms",
                    "loop_lag_p99_ms",
                    "free_tokens_per_s",
                    "free_events_per_s",
                )
            ]
            cells.insert(4, f"{VLLM_TOKENS[count]:,}")
            cells.insert(1, f"{figures[f'send_cpu_s_per_million_{count}']:,}")
            lines.append(f"| {count} | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything."""
    from tiny import write_tiny_llama

    figures: dict[str, float] = {"rate_tokens_per_s_and_stream": RATE}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_llama(Path(folder) / "tiny", max_position_embeddings=4096))
        for count in STREAMS:
            figures[f"send_cpu_s_per_million_{count}"] = floor(count)
        for layout in LAYOUTS:
            for rate in (RATE, 0.0):
                figures |= measure(layout, rate, STREAMS, model)
    print(table(figures))
    write("serve", figures, table(figures))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(serve(sys.argv[1], sys.argv[2]))
    else:
        main()
