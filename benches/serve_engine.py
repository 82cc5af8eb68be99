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
    due, filled = time.monotonic(), False

    def run(buffers: Any) -> None:
        nonlocal due, filled
        if not filled:
            buffers._host["sampled"].fill(_TOKEN)
            filled = True
        # A forward pass lets go of the interpreter's lock, however short it is.
        wait = 0.0
        if RATE:
            now = time.monotonic()
            due = max(due + 1 / RATE, now)
            wait = due - now
        time.sleep(wait)

    engine.runner.run = run
    return engine


if __name__ == "__main__":
    code = engine_process.run(sys.argv[1:], lambda args: pace(engine_process.load(args)))
    logging.shutdown()
    os._exit(code)
