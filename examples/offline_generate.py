"""Generate for a list of prompts, all in one batch, without a server.

python examples/offline_generate.py [MODEL]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from miniinfer import LLM, SamplingParams

PROMPTS = ("The capital of France is", "Water boils at", "1, 2, 3,")


def main(argv: Sequence[str] | None = None) -> int:
    """Continue the prompts, then answer a message and print that as it comes."""
    parser = argparse.ArgumentParser(description="Generate for several prompts at once.")
    parser.add_argument("model", nargs="?", help="default: the built-in model")
    parser.add_argument("--max-tokens", type=int, default=12)
    arguments = parser.parse_args(argv)

    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with LLM(arguments.model) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.text!r} ({output.stop_reason})")

        message = {"role": "user", "content": "Say hello."}
        [answer] = llm.chat([message], params, use_tqdm=False)
        print(f"{message['content']!r} -> {answer.text!r}")

        for piece in llm.stream(PROMPTS[0], params):
            print(piece.text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
