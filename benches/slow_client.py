"""Sixty-three streams beside one more, whose client reads all at once or a byte a second.

    python benches/slow_client.py [--streams 63] [--seconds 20] [--model MODEL]

Prints the percentiles of the sixty-three's inter-token latency in both cases: the one more asks for
the same long answer, so that the engine has the same work until it pauses it. The server is a
process of its own, with the tests' tiny model unless another is named.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from miniinfer.bench.serve_client import PATHS, RequestResult, send
from miniinfer.bench.serve_report import PERCENTILES, percentile

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0


def tiny_model(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny

    return tiny.write_tiny_llama(folder, max_position_embeddings=65536)


@contextlib.contextmanager
def server(model: str, streams: int):
    command = [
        *(sys.executable, "-m", "miniinfer.cli", "serve", model, "--port", "0"),
        *("--max-num-seqs", str(streams + 1), "--no-access-log", "--log-level", "error"),
        *("--kv-cache-memory", "512MiB", "--max-model-len", "32768"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith("listens"):
                yield line.split()[1]
                break
    finally:
        process.terminate()
        process.wait()


def body(max_tokens: int) -> dict:
    return {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one_more(port: int, slow: bool) -> None:
    """Ask for a long answer and read it as it comes, or a byte of it each second."""
    raw = socket.socket()
    # A small buffer: what the system holds for the client is not the server's patience.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    content = json.dumps(body(32000)).encode()
    head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    await loop.sock_sendall(raw, head.encode() + content)
    with contextlib.closing(raw):
        while await loop.sock_recv(raw, 1 if slow else 65536):
            await asyncio.sleep(1.0 if slow else 0.0)


async def others(url: str, streams: int, seconds: float) -> list[RequestResult]:
    """Stream answers one after another for so long, on each of so many connections."""
    end = time.perf_counter() + seconds
    results: list[RequestResult] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one() -> None:
            while time.perf_counter() < end:
                results.append(await send(session, url + PATHS["chat"], body(64), TIMEOUT))

        await asyncio.gather(*(one() for _ in range(streams)))
    return results


async def measure(url: str, streams: int, seconds: float, slow: bool) -> dict[str, float]:
    another = asyncio.create_task(one_more(int(url.rpartition(":")[2]), slow))
    results = await others(url, streams, seconds)
    another.cancel()
    with contextlib.suppress(asyncio.CancelledError, ConnectionError):
        await another
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    gaps = [gap for result in results for gap in result.gaps]
    return {f"p{percent}": 1000 * percentile(gaps, percent) for percent in PERCENTILES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=63)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(tiny_model(Path(folder) / "tiny"))
        with server(model, arguments.streams) as url:
            # The first run reaches every size once.
            asyncio.run(measure(url, arguments.streams, min(5.0, arguments.seconds), False))
            for label, slow in (("all at once", False), ("a byte a second", True)):
                found = asyncio.run(measure(url, arguments.streams, arguments.seconds, slow))
                shown = "  ".join(f"{name} {value:8.2f}" for name, value in found.items())
                print(
                    f"one more reads {label:16} inter-token ms of the others:  {shown}", flush=True
                )


if __name__ == "__main__":
    main()
