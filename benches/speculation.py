"""What drafts from a request's own tokens cost and save, with the built-in model on a CPU.

`make bench-speculation` prints the output tokens a second without and with them, as medians of runs
in turns, and the median ratio of each pair of runs; and writes them to
benches/results/speculation.json.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miniinfer import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "speculation.json"
CONFIG = {"method": "ngram", "num_speculative_tokens": 4}
MAX_TOKENS = 96
# Sources that a model can be asked to repeat: the standard library's, of about 700 tokens.
SOURCES = (textwrap.dedent, textwrap.indent, statistics.quantiles, inspect.cleandoc)

Load = Callable[[int, int], tuple[list[Any], SamplingParams]]


def quotation(clients: int, turn: int) -> tuple[list[Any], SamplingParams]:
    """Edits of code: a source, and the same once more with a line changed."""
    prompts = []
    for client in range(clients):
        source = inspect.getsource(SOURCES[(turn + client) % len(SOURCES)])
        head, _, rest = source.partition("\n")
        begun = rest.partition("\n")[0]
        prompts.append(
            f"```python\n{source}```\nThe same code with a comment above it:\n"
            f"```python\n# {turn}, {client}\n{head}\n{begun}\n"
        )
    return prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def unrelated(clients: int, turn: int) -> tuple[list[Any], SamplingParams]:
    """Random ids, each answered by a text sampled without a filter: nothing to quote."""
    source = random.Random(turn)
    prompts: list[Any] = [
        {"prompt_token_ids": [source.randrange(100, 40_000) for _ in range(400)]}
        for _ in range(clients)
    ]
    params = SamplingParams(temperature=1, seed=turn, max_tokens=MAX_TOKENS, ignore_eos=True)
    return prompts, params


def misleading(clients: int, turn: int) -> tuple[list[Any], SamplingParams]:
    """Answers of few different ids in a random order: guesses everywhere, hardly any right."""
    source = random.Random(turn)
    prompts: list[Any] = [
        {"prompt_token_ids": [source.choice(range(300, 308)) for _ in range(400)]}
        for _ in range(clients)
    ]
    params = SamplingParams(
        temperature=2, seed=turn, max_tokens=MAX_TOKENS, ignore_eos=True, top_k=4
    )
    return prompts, params


LOADS: tuple[Load, ...] = (quotation, unrelated, misleading)


def rate(llm: LLM, load: Load, clients: int, turn: int) -> float:
    """Output tokens a second, prompts included."""
    prompts, params = load(clients, turn)
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    return sum(len(output.token_ids) for output in outputs) / elapsed


def compare(plain: LLM, drafting: LLM, load: Load, clients: int, turns: int) -> dict[str, float]:
    """Both in turns, first the one and then the other, after a turn that does not count."""
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    rates = []
    before = [drafting.get_metrics()[name] for name in names]
    for turn in range(turns + 1):
        pair = [(llm, rate(llm, load, clients, turn)) for llm in _order(plain, drafting, turn)]
        rates.append(dict(pair))
    drafted, accepted = (
        drafting.get_metrics()[name] - count for name, count in zip(names, before, strict=True)
    )
    rates = rates[1:]
    tokens = clients * MAX_TOKENS * (turns + 1)
    return {
        "without": statistics.median(pair[plain] for pair in rates),
        "with": statistics.median(pair[drafting] for pair in rates),
        "ratio": statistics.median(pair[drafting] / pair[plain] for pair in rates),
        "drafted_per_token": drafted / tokens,
        "accepted_share": accepted / drafted if drafted else 0.0,
    }


def _order(plain: LLM, drafting: LLM, turn: int) -> tuple[LLM, LLM]:
    return (plain, drafting) if turn % 2 else (drafting, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8], help="at once")
    parser.add_argument("--quantization", default="auto", help="none computes in float32")
    arguments = parser.parse_args()
    sizes: Any = {"num_kv_blocks": 1024, "quantization": arguments.quantization}
    results: dict[str, Any] = {}
    with LLM(**sizes) as plain, LLM(speculative_config=CONFIG, **sizes) as drafting:
        for load in LOADS:
            for clients in arguments.clients:
                name = f"{load.__name__}, {clients} clients"
                results[name] = compare(plain, drafting, load, clients, arguments.turns)
                cells = "  ".join(f"{key}: {value:.2f}" for key, value in results[name].items())
                print(f"{name:<24} {cells}", flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
