"""An engine in a process of its own: reads what to generate from its input, answers with seconds.

Arguments: miniinfer or transformers, the model, the dtype.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], object]


def ours(model: str, dtype: str) -> Generate:
    from miniinfer import LLM, SamplingParams

    llm = LLM(model or None, dtype=dtype, num_kv_blocks=2048)

    def generate(prompts: list[list[int]], output: int) -> object:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return llm.generate(asked, params)

    return generate


def transformers(model: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output: int) -> object:
        ids = torch.tensor(prompts)
        return loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
        )

    return generate


def main() -> None:
    engine, model, dtype = sys.argv[1:]
    generate = {"miniinfer": ours, "transformers": transformers}[engine](model, dtype)
    source = random.Random(0)
    for line in sys.stdin:
        batch, prompt, output = json.loads(line)
        prompts = [[source.randrange(100, 40_000) for _ in range(prompt)] for _ in range(batch)]
        began = time.perf_counter()
        generate(prompts, output)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
