"""Generate inside an event loop: many requests at once, and one that is cancelled.

python examples/async_generate.py [MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

from miniinfer import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPTS = ("The capital of France is", "Water boils at", "1, 2, 3,")


async def complete(llm: AsyncLLM, prompt: str, max_tokens: int) -> str:
    """Return the continuation of a prompt."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    pieces = [output.text async for output in llm.generate(prompt, params)]
    return "".join(pieces)


async def first_tokens(llm: AsyncLLM, prompt: str, count: int) -> int:
    """Take some tokens of a long answer and leave, which cancels the request."""
    params = SamplingParams(
        max_tokens=1000, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    async with contextlib.aclosing(llm.generate(prompt, params)) as outputs:
        async for output in outputs:
            if len(output.token_ids) >= count:
                return len(output.token_ids)
    return 0


async def run(model: str | None, max_tokens: int) -> None:
    """Load the model and generate."""
    # Loading takes seconds, which the event loop must not wait for.
    async with await asyncio.to_thread(AsyncLLM.from_args, EngineArgs(model=model)) as llm:
        texts = await asyncio.gather(*(complete(llm, prompt, max_tokens) for prompt in PROMPTS))
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"{prompt!r} -> {text!r}")
        taken = await first_tokens(llm, "Once upon a time", 5)
        print(f"left a long answer after {taken} tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and generate."""
    parser = argparse.ArgumentParser(description="Generate inside an event loop.")
    parser.add_argument("model", nargs="?", help="default: the built-in model")
    parser.add_argument("--max-tokens", type=int, default=12)
    arguments = parser.parse_args(argv)
    asyncio.run(run(arguments.model, arguments.max_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
