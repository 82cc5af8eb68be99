"""What a streamed token costs the server, for each layout of its processes: `make bench-serve`.

The model is a stand-in of 20 tokens per second and stream, one event a token, and for the most that
there can be, one that takes no time. Writes `benches/results/serve.json`.
"""

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "serve.json"

LAYOUTS = ("one", "two")
STREAMS = (32, 128, 256)
RATE = 20.0
SECONDS = float(os.environ.get("BENCH_SECONDS", "6"))
_LAG_INTERVAL = 0.05
_MAX_TOKENS = 4000


async def serve(layout: str, model: str) -> None:
    """The server: an address on standard output, figures of itself at /bench."""
    from aiohttp import web

    from miniinfer import EngineArgs
    from miniinfer.server.app import make_app
    from miniinfer.server.config import ServerConfig

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

    async def figures(request: web.Request) -> web.Response:
        answer = {"lags": lags.copy(), "engine": getattr(llm, "engine_pid", None)}
        lags.clear()
        return web.json_response(answer)

    app.add_routes([web.get("/bench", figures)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    while os.getppid() != 1:
        before = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL)
        lags.append(time.monotonic() - before - _LAG_INTERVAL)


def cpu_seconds(pid: int) -> float:
    """Time that a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def get(port: int, path: str) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


class Stream:
    """One client: counts events and notes when they come."""

    def __init__(self, number: int) -> None:
        self.events = 0
        self.times: list[float] = []
        prompt = [60 + number % 60, 61, 62 + number % 7]
        self.body = json.dumps(
            {"prompt": prompt, "max_tokens": _MAX_TOKENS, "ignore_eos": True, "stream": True}
        ).encode()

    async def read(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        writer.write(head.encode() + self.body)
        try:
            while piece := await reader.read(2**16):
                self.events += piece.count(b"data: {")
                self.times.append(time.monotonic())
        finally:
            writer.close()


async def load(port: int, server: int, count: int) -> dict[str, float]:
    """Read so many streams for a time; the figures of that time."""
    streams = [Stream(number) for number in range(count)]
    tasks = [asyncio.create_task(stream.read(port)) for stream in streams]
    await asyncio.sleep(2.0)
    found = await get(port, "/bench")
    pids = [server] + ([found["engine"]] if found["engine"] else [])

    async def now() -> tuple[float, float, int, float]:
        stats = (await get(port, "/healthz"))["stats"]
        cpu = sum(cpu_seconds(pid) for pid in pids)
        return time.monotonic(), cpu, sum(s.events for s in streams), stats["generation_tokens"]

    before = await now()
    for stream in streams:
        stream.times.clear()
    await asyncio.sleep(SECONDS)
    after = await now()
    lags = (await get(port, "/bench"))["lags"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    elapsed, cpu, events, tokens = (end - start for start, end in zip(before, after, strict=True))
    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)]
    return {
        "cpu_s_per_million_tokens": round(cpu / tokens * 1e6, 1),
        "tokens_per_s": round(tokens / elapsed, 1),
        "events_per_s": round(events / elapsed, 1),
        "itl_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "loop_lag_p99_ms": round(1e3 * percentile(lags, 99), 1),
    }


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def measure(layout: str, rate: float, counts: tuple[int, ...], model: str) -> dict[str, float]:
    """Figures of one layout and rate, the number of streams in their names."""
    environment = os.environ | {"BENCH_RATE": str(rate), "GOMP_SPINCOUNT": "1000"}
    command = [sys.executable, "-m", "benches.serve", layout, model]
    figures: dict[str, float] = {}
    with subprocess.Popen(
        command, env=environment, cwd=HERE.parent, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for count in counts:
            for name, value in asyncio.run(load(port, server.pid, count)).items():
                label = name if rate else f"free_{name}"
                figures[f"{label}_{layout}_{count}"] = value
            time.sleep(0.5)
        server.kill()
    return figures


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from tiny import write_tiny_llama

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_llama(Path(folder) / "tiny", max_position_embeddings=4096))
        for layout in LAYOUTS:
            figures |= measure(layout, RATE, STREAMS, model)
            figures |= measure(layout, 0.0, (STREAMS[-1],), model)
    figures["rate_tokens_per_s_and_stream"] = RATE
    figures["load_average"] = round(os.getloadavg()[0], 1)
    figures["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, {platform.release()}"
    RESULTS.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    print(json.dumps(figures, indent=2, sort_keys=True))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(serve(sys.argv[1], sys.argv[2]))
    else:
        main()
