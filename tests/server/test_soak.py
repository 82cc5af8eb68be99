"""A server under clients that start, cut, stall, send garbage and cancel: nothing is left behind.

Takes SOAK_SECONDS, 60 by default; `make soak` makes it 600.
"""

from __future__ import annotations

import os

import aiohttp
import pytest

from .soak import fill_tokenizer_cache, resident_bytes, storm, until_quiet
from .test_real_engine import served_process

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
GROWTH = 1.05
"""Memory at the end over memory after the warm-up, at most."""


@pytest.mark.timeout(2 * SECONDS + 600)
async def test_soak(tiny_model):
    arguments = (
        *("--max-num-seqs", "16", "--max-model-len", "256", "--max-num-batched-tokens", "128"),
        *("--max-queued-requests", "40", "--max-queue-time", "20"),
        *("--stalled-client-timeout", "1", "--max-backlog", "64"),
        *("--body-timeout", "1", "--idle-timeout", "2"),
        *("--keep-alive-interval", "0.1", "--no-access-log", "--threads", "1"),
    )
    async with served_process(tiny_model, *arguments) as (process, session):
        port = session._base_url.port
        # Allocators, caches and pools reach their size.
        await fill_tokenizer_cache(session)
        warm = await storm(port, SECONDS / 3, seed=1)
        await until_quiet(session)
        before = resident_bytes(process.pid)
        done = await storm(port, SECONDS * 2 / 3, seed=1000)
        stats = await until_quiet(session)
        after = resident_bytes(process.pid)
        async with session.get("/health") as response:
            assert response.status == 200
        async with aiohttp.ClientSession(session._base_url) as fresh:
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            async with fresh.post("/v1/completions", json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 3
        process.terminate()
        _, err = await process.communicate()
    counters = {name: value for name, value in stats.items() if isinstance(value, int)}
    print(f"soak: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB; {dict(warm + done)}; {counters}")
    assert process.returncode == 0
    assert "Traceback" not in err.decode(), err.decode()[-5000:]
    for kind in ("stream", "whole", "cut", "stall", "garbage", "half body", "half close", "look"):
        assert done[kind] > 0, kind
    assert stats["finished_abort"] > 0
    assert stats["finished_error"] == 0
    assert after < GROWTH * before
