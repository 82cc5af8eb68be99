"""A line of statistics every few seconds while there is work, and none while there is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from miniinfer.safe_logging import safe_logger

from .metrics import kv_usage
from .state import ServerState

logger = safe_logger("miniinfer.stats")


async def log_stats(state: ServerState) -> None:
    """Log for as long as the server lives; sleeps without waking while it is idle."""
    while True:
        await state.wait_busy()
        engine = state.loaded_engine
        if engine is None:
            return
        before, since = engine.stats(), time.monotonic()
        while state.num_active:
            await asyncio.sleep(state.config.stats_interval)
            now, at = engine.stats(), time.monotonic()
            logger.info("%s", describe(before, now, at - since))
            before, since = now, at


def describe(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> str:
    """Return one line from two readings of `Engine.stats()` that many seconds apart."""

    def gain(name: str) -> float:
        return max(0.0, float(now.get(name, 0)) - float(before.get(name, 0)))

    queries = gain("prefix_cache_queries")
    hit_rate = gain("prefix_cache_hits") / queries if queries else 0.0
    line = (
        f"running {now.get('num_requests_running', 0)}, "
        f"waiting {now.get('num_requests_waiting', 0)}, "
        f"prompt {gain('prompt_tokens') / seconds:.1f} tokens/s, "
        f"generation {gain('generation_tokens') / seconds:.1f} tokens/s, "
        f"KV cache {100 * kv_usage(now):.1f}%, "
        f"prefix hits {100 * hit_rate:.1f}%"
    )
    preemptions = int(gain("num_preemptions"))
    if preemptions:
        noun = "preemption" if preemptions == 1 else "preemptions"
        line += (
            f"; {preemptions} {noun}: raise --kv-cache-memory or lower --max-num-seqs to "
            "compute nothing twice"
        )
    return line
