"""Small engines, and what must hold when their work is done."""

from pathlib import Path
from typing import Any

from miniinfer import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "num_kv_blocks": 256,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    # What a step computes must not depend on how busy the machine is.
    "target_itl_ms": None,
}


def make_llm(folder: Path, **sizes: Any) -> LLM:
    """A tiny model's LLM; `sizes` override `SIZES`."""
    return LLM(str(folder), **(SIZES | sizes))


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Exactly `max_tokens` most likely tokens, unless `fields` say otherwise."""
    defaults = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams(**(defaults | fields))


def check_idle(core: Any) -> None:
    """Nothing is alive, every block is free, and the state is sound."""
    core.check()
    stats = core.stats()
    live = {name: stats[name] for name in stats if name.startswith("num_requests_")}
    assert set(live.values()) == {0}, live
    assert stats["kv_blocks_used"] == 0
    assert not core.has_requests()


async def whole(llm: Any, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    """The last output."""
    last = None
    async for output in llm.generate(prompt, params, **options):
        last = output
    assert last is not None
    return last


async def collect(stream: Any) -> tuple[str, list[int], str | None]:
    """Text, ids and end of a stream of one choice."""
    text, ids, end = "", [], None
    async for each in stream:
        assert end is None, "nothing comes after the end"
        text += each.text
        ids += each.token_ids
        end = each.finish_reason
    return text, ids, end
