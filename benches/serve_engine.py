"""An engine that computes nothing, at a fixed rate: stands in for a model in `serve.py`.

As a program it is the engine's process of layout two: `python -m benches.serve_engine`.
"""

import logging
import os
import sys
import time
from typing import Any

from miniinfer import engine_process

# Steps per second; 0 is as many as can be.
RATE = float(os.environ.get("BENCH_RATE", "20"))
_TOKEN = 70


def pace(engine: Any) -> Any:
    """Have an engine's forward pass wait for its time and always find the same token."""
    due = time.monotonic()

    def run(buffers: Any) -> None:
        nonlocal due
        buffers._host["sampled"][: buffers.header().num_samples] = _TOKEN
        if RATE:
            now = time.monotonic()
            due = max(due + 1 / RATE, now)
            time.sleep(due - now)

    engine.runner.run = run
    return engine


if __name__ == "__main__":
    code = engine_process.run(sys.argv[1:], lambda args: pace(engine_process.load(args)))
    logging.shutdown()
    os._exit(code)
