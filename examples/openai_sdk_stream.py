"""Use a running server through OpenAI's own client (`pip install openai`).

    miniinfer serve &
    python examples/openai_sdk_stream.py

Several conversations run at once; the server computes them in one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from openai import AsyncOpenAI

QUESTIONS = ("Name a colour.", "What is 2 + 3?", "Say hello in French.")


async def ask(client: AsyncOpenAI, model: str, question: str, max_tokens: int) -> str:
    """Return the streamed answer to one question."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    pieces = []
    async for chunk in stream:
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
    return "".join(pieces)


async def ask_all(url: str, max_tokens: int) -> None:
    """Ask all questions at once and print the answers in order."""
    key = os.environ.get("MINIINFER_API_KEY", "none")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = (await client.models.list()).data[0].id
        answers = await asyncio.gather(
            *(ask(client, model, question, max_tokens) for question in QUESTIONS)
        )
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {answer.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and ask."""
    parser = argparse.ArgumentParser(description="Ask a running server several questions at once.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args(argv)
    asyncio.run(ask_all(arguments.url, arguments.max_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
