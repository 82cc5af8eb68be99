"""The command line over a scripted engine: `python -m tests.server.serve_fake serve ...`.

Environment: FAKE_LOAD_SECONDS delays the load, FAKE_LOAD_ERROR makes it fail.
"""

from __future__ import annotations

import os
import sys
import time

import miniinfer
from miniinfer.cli import main

from .fake import FakeDelta, FakeEngine, answer


def script(token_ids, params):
    text = bytes(token for token in token_ids if 0 < token < 256).decode()
    if "slow" in text:
        pieces = [FakeDelta(f"{i} ", num_output_tokens=i) for i in range(20)]
        steps = [step for piece in pieces for step in (piece, 0.05)]
        return [*steps, FakeDelta("", finish_reason="length", num_output_tokens=20)]
    if "hang" in text:
        return [FakeDelta("a"), 3600.0]
    if "fail" in text:
        return [FakeDelta("a"), FakeDelta("", finish_reason="error", error="it failed")]
    return answer(params, ["you said ", text])


class FakeLLM:
    @classmethod
    def from_args(cls, args):
        print("loading the fake", file=sys.stderr, flush=True)
        time.sleep(float(os.environ.get("FAKE_LOAD_SECONDS", "0")))
        if message := os.environ.get("FAKE_LOAD_ERROR"):
            raise OSError(message)
        return FakeEngine(script, max_model_len=1000)


if __name__ == "__main__":
    miniinfer.AsyncLLM = FakeLLM
    sys.exit(main())
