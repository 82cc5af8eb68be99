"""Whole engines with random weights: their tokens, their speed, and the pauses between steps."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from miniinfer.config import EngineArgs
from miniinfer.model.config import ModelConfig

from ._check_result import Result, Sizes
from ._check_speed import MODELS

_WANTED_GAP = 50.0
"""Microseconds between the steps on the device, where scheduling overlaps with them."""
_BYTES = 256

_MODES = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "graphs, overlapped": {"enforce_eager": False, "async_scheduling": True},
}
"""Ways to run an engine; a switch that the engine does not have is left out."""


def modes() -> dict[str, dict[str, bool]]:
    """The ways to run an engine that differ in what it has."""
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    found: dict[str, dict[str, bool]] = {}
    for name, switches in _MODES.items():
        had = {switch: value for switch, value in switches.items() if switch in known}
        if had not in found.values():
            found[name] = had
    return found


def write_model(folder: Path, config: ModelConfig) -> None:
    """What an engine needs of a model whose weights are random: config.json and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    vocab |= {f"<{index}>": index for index in range(_BYTES, config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = f"<{config.vocab_size - 1}>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    settings = llama_settings(config) | {"architectures": ["LlamaForCausalLM"]}
    settings |= {"model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))


def llama_settings(config: ModelConfig) -> dict[str, Any]:
    """A configuration under the names of transformers."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": config.vocab_size - 1,
        "bos_token_id": None,
    }


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """A folder with one of `MODELS`, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODELS[name])
        yield Path(folder)


def prompts(sizes: Sizes, vocab_size: int) -> list[list[int]]:
    """Random tokens, none of which ends a text."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.decodes, sizes.prompt)
    ids: list[list[int]] = torch.randint(vocab_size - 1, shape, generator=generator).tolist()
    return ids


def decode_speed(generate: Callable[[int], object], sizes: Sizes) -> float:
    """Tokens a second of decode steps: what more tokens take beyond what one takes.

    `generate` answers all prompts with so many tokens; its first call may compile.
    """
    generate(sizes.new_tokens)
    taken = {}
    for count in (1, sizes.new_tokens):
        start = time.perf_counter()
        generate(count)
        taken[count] = time.perf_counter() - start
    decoding = max(taken[sizes.new_tokens] - taken[1], 1e-9)
    return sizes.decodes * (sizes.new_tokens - 1) / decoding


class StepMarks:
    """Notes when what an engine's runner computes begins and ends on the device, step by step.

    A runner that queues its work is looked at where it is queued, so that copies beside it count as
    pauses; one that does not, where it runs a step.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[list[tuple[Any, Any]]] = []
        queue = getattr(runner, "queue", None)
        if queue is None:
            runner.run = self._step(self._work(runner.run))
        else:
            runner.launch = self._step(runner.launch)
            queue.run = self._work(queue.run)

    def clear(self) -> None:
        """Forget what was noted."""
        self._steps.clear()

    def gap(self) -> float | None:
        """The median of a step's pauses, before it and within it together, in microseconds."""
        if self._on_gpu:
            torch.cuda.synchronize()
        gaps, last = [], None
        for step in self._steps:
            gap = 0.0
            for begin, end in step:
                gap += 0.0 if last is None else self._between(last, begin)
                last = end
            gaps.append(gap)
        return statistics.median(gaps[1:]) if len(gaps) > 1 else None

    def _step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*arguments: Any, **options: Any) -> Any:
            self._steps.append([])
            return call(*arguments, **options)

        return noted

    def _work(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def marked(*arguments: Any, **options: Any) -> Any:
            begin = self._mark()
            result = call(*arguments, **options)
            self._steps[-1].append((begin, self._mark()))
            return result

        return marked

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def _between(self, end: Any, begin: Any) -> float:
        if self._on_gpu:
            return float(end.elapsed_time(begin)) * 1e3
        return float(begin - end) * 1e6


def _engine_settings(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "attention_backend": "triton",
        "device": str(device),
        "max_num_seqs": sizes.decodes,
        "max_model_len": sizes.prompt + sizes.new_tokens,
        "enable_prefix_caching": False,
    }
    if device.type == "cpu":
        settings |= {"dtype": "bfloat16", "num_kv_blocks": 64}
    return settings


def check_engine(sizes: Sizes, device: torch.device, name: str) -> Iterator[Result]:
    """Tokens a second and pauses of an engine of one of `MODELS`, in every mode."""
    from miniinfer import LLM, SamplingParams

    ids = prompts(sizes, MODELS[name].vocab_size)
    with model_folder(name) as folder:
        for mode, switches in modes().items():
            with LLM(str(folder), **_engine_settings(sizes, device), **switches) as llm:
                engine = llm.llm_engine.engine
                tokens = engine.num_kv_blocks * engine.args.block_size
                marks = StepMarks(engine.runner, device)

                def generate(count: int, llm: LLM = llm, marks: StepMarks = marks) -> None:
                    marks.clear()
                    llm.generate(
                        ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                    )

                speed = decode_speed(generate, sizes)
                gap = marks.gap()
            label = f"engine {name}, {sizes.decodes} x {sizes.prompt}, {mode}"
            found = f"{speed:.0f} tokens/s (KV cache of {tokens} tokens)"
            yield Result(label, found, value=speed, unit="tokens/s")
            yield _gap(f"gap {name}, {mode}", gap, bool(switches.get("async_scheduling")), device)
            del llm, engine, marks, generate
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _gap(name: str, gap: float | None, overlapped: bool, device: torch.device) -> Result:
    if gap is None:
        return Result(name, "no two steps were seen", ok=False)
    # Without a GPU it is Python's; without overlap the next step is planned in it.
    judged = overlapped and device.type == "cuda"
    wanted = f" (at most {_WANTED_GAP:.0f})" if judged else ""
    return Result(name, f"{gap:.0f} us{wanted}", not judged or gap <= _WANTED_GAP, gap, "us")


def check_tokens(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """Greedy and sampled tokens over the kernels against those over torch, in float32."""
    from miniinfer import LLM, SamplingParams

    ids = prompts(sizes, MODELS["tiny"].vocab_size)[:4]
    settings = _engine_settings(sizes, device) | {"dtype": "float32"}
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=sizes.new_tokens, ignore_eos=True),
        "sampled": SamplingParams(seed=1, top_p=0.9, max_tokens=sizes.new_tokens, ignore_eos=True),
    }
    with model_folder("tiny") as folder:
        answers: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
        for backend in ("triton", "torch"):
            with LLM(str(folder), **settings | {"attention_backend": backend}) as llm:
                for kind, params in kinds.items():
                    outputs = llm.generate(ids, params)
                    answers[kind].append([token for out in outputs for token in out.token_ids])
    for kind, (ours, theirs) in answers.items():
        different = sum(mine != other for mine, other in zip(ours, theirs, strict=True))
        found = f"{different} of {len(ours)} tokens differ from those over torch"
        yield Result(f"engine tokens, {kind}", found, different == 0, different)


def check_transformers(sizes: Sizes, device: torch.device, name: str) -> Iterator[Result]:
    """Tokens a second of transformers' own loop over the same model."""
    label = f"transformers {name}, {sizes.decodes} x {sizes.prompt}"
    if importlib.util.find_spec("transformers") is None:
        yield Result(label, "not installed")
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    config = MODELS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**llama_settings(config)))
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False).train(False)
    ids = torch.tensor(prompts(sizes, config.vocab_size), device=device)
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def generate(count: int) -> None:
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        ).cpu()

    speed = decode_speed(generate, sizes)
    yield Result(label, f"{speed:.0f} tokens/s", value=speed, unit="tokens/s")


def check_vllm(sizes: Sizes, device: torch.device, name: str) -> Iterator[Result]:
    """Tokens a second of vLLM with random weights of the same shapes."""
    label = f"vLLM {name}, {sizes.decodes} x {sizes.prompt}"
    if importlib.util.find_spec("vllm") is None:
        yield Result(label, "not installed")
        return
    import vllm

    ids = [{"prompt_token_ids": each} for each in prompts(sizes, MODELS[name].vocab_size)]
    with model_folder(name) as folder:
        llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            max_model_len=sizes.prompt + sizes.new_tokens,
            max_num_seqs=sizes.decodes,
            enable_prefix_caching=False,
        )

        def generate(count: int) -> None:
            params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            llm.generate(ids, params, use_tqdm=False)

        speed = decode_speed(generate, sizes)
    yield Result(label, f"{speed:.0f} tokens/s", value=speed, unit="tokens/s")
