"""Drive the engine one step at a time: requests that join and leave while others run.

python examples/engine_step.py [MODEL]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from miniinfer import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Step until all requests are over; one joins late and one is aborted."""
    parser = argparse.ArgumentParser(description="Drive the engine one step at a time.")
    parser.add_argument("model", nargs="?", help="default: the built-in model")
    parser.add_argument("--max-tokens", type=int, default=12)
    arguments = parser.parse_args(argv)

    params = SamplingParams(
        temperature=0,
        max_tokens=arguments.max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = LLMEngine(EngineArgs(model=arguments.model))
    engine.add_request("paris", "The capital of France is", params)
    engine.add_request("aborted", "Once upon a time", params)
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        if step == 3:
            engine.add_request("late", "1, 2, 3,", params)
            engine.abort_request("aborted")
        for output in engine.step():
            end = f" <{output.stop_reason}>" if output.finished else ""
            print(f"step {step:2} {output.request_id:8} {output.text!r}{end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
