"""The engine: a model under the Rust core, one step at a time."""

from __future__ import annotations

import abc
import atexit
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ._core import Driver, Submission
from ._core import Engine as Core
from .config import EngineArgs
from .cpu.linear import set_kernel_threads
from .cpu.packing import choose_packing
from .generation_config import generation_defaults
from .model.read_config import read_model_config
from .parsing import ParserSpec
from .safe_logging import safe_logger
from .sampling_params import SamplingParams
from .source import ModelSource, resolve_model
from .spinning import spin_briefly
from .structured import CompiledGrammar, StructuredOutputsParams
from .submission import SubmitParams, compile_grammar
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from ._core import _Limits
    from .execution.graphs import GraphLimits
    from .model.config import ModelConfig
    from .model.host_weights import HostWeights
    from .parallel.leader import Leader
    from .parallel.model import ShardedLlamaModel
    from .runner import ModelRunner

__all__ = ["Engine", "StepEngine", "load_tokenizer"]

logger = safe_logger(__name__)


class StepEngine(abc.ABC):
    """A loaded model and the state of its requests. One thread drives `step`."""

    core: Driver

    def __init__(self, args: EngineArgs) -> None:
        spin_briefly()
        self.args = args
        self.source = resolve_model(args.model, args.revision)
        self.config = read_model_config(self.source.path)
        self.max_model_len = self._max_model_len()
        self.leader: Leader | None = None
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        _open_engines.add(self)

    def _load(self) -> None:
        args = self.args
        # What can be had without torch loads while torch, which takes seconds, is imported.
        with ThreadPoolExecutor(2) as pool:
            weights = pool.submit(_read_ahead, args, self.source)
            tokenizer = pool.submit(load_tokenizer, args, self.source)
            self._load_model(weights)
            self.tokenizer = tokenizer.result()
        self.model_name = args.served_model_name or self.source.name
        self.vocab_size = min(self.config.vocab_size, self.tokenizer.vocab_size)
        self.eos_token_ids = _eos_token_ids(self.config, self.tokenizer)
        self._make_core()

    @abc.abstractmethod
    def _new_core(self, limits: _Limits) -> Driver:
        """Make the core under the model."""

    def _load_model(self, host_weights: Future[HostWeights | None]) -> None:
        import torch

        from .backends import choose_backend
        from .model.loader import load_model

        args, packing, shard = self.args, None, None
        if args.tensor_parallel_size > 1:
            self.leader = self._lead()
            self.device, shard = self.leader.device, self.leader.shard
        else:
            if args.threads is not None:
                torch.set_num_threads(args.threads)
            self.device = _device(args.device)
            packing = choose_packing(
                args, on_cpu=self.device.type == "cpu", is_gguf=self.source.kind == "gguf"
            )
            if packing is not None:
                set_kernel_threads(torch.get_num_threads())
        self.backend = choose_backend(args, self.device, packing)
        self.model = load_model(
            self.source.path,
            None if args.dtype == "auto" else getattr(torch, args.dtype),
            self.device,
            max_positions=self.max_model_len,
            host_weights=host_weights.result(),
            packing=packing,
            shard=shard,
            random_weights=args.load_format == "dummy",
        )
        self.kv_dtype = self.backend.kv_dtype(args, self.model)

    def _lead(self) -> Leader:
        from .parallel import lead_or_follow

        leader = lead_or_follow(self.args, self.source.path, self.config)
        # An engine that nobody has any more ends the other ranks too.
        weakref.finalize(self, leader.close).atexit = False
        return leader

    def _max_model_len(self) -> int:
        asked, limit = self.args.max_model_len, self.config.max_model_len
        if asked is not None and asked > limit:
            raise ValueError(
                f"max_model_len must be at most {limit}, the model's own context, got {asked}"
            )
        return asked or limit

    def _make_core(self) -> None:
        from .execution.steps import MAX_FAILURES, Steps
        from .step import StepBuffers

        args, on_cpu = self.args, self.device.type == "cpu"
        num_blocks = self._num_kv_blocks()
        capacity = num_blocks * args.block_size
        if args.max_model_len is None and capacity < self.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens: max_model_len is lowered to that from %d",
                capacity,
                self.max_model_len,
            )
            self.max_model_len = capacity
        # First the cache: its size is what the memory may refuse.
        self.num_kv_blocks = num_blocks
        self.runner = self._new_runner()
        logger.info(
            "attention backend %s (%s); KV cache of %s, %d blocks of %d tokens",
            self.backend.name,
            self.backend.reason,
            str(self.kv_dtype).removeprefix("torch."),
            num_blocks,
            args.block_size,
        )
        self.limits: _Limits = {
            "vocab_size": self.vocab_size,
            "block_size": args.block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.batched_tokens(on_cpu=on_cpu),
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": args.enable_prefix_caching,
            "target_itl_ms": args.step_target_ms(on_cpu=on_cpu),
        }
        speculation = args.speculation()
        if speculation is not None:
            self.limits.update(speculation.limits(self.device.type))
        self.core = self._new_core(self.limits)
        slots = 2 if self._is_overlapped() else 1
        buffers = [StepBuffers(self.core, slot, self.device) for slot in range(slots)]
        # Where several processes compute, a failure may find them in different places of the step.
        most = MAX_FAILURES if self.leader is None else 1
        self._steps = Steps(self.core, self.runner, buffers, max_failures=most)
        if self.leader is not None:
            self.leader.open(num_blocks, args.block_size, buffers[0].table_shape)
            self.leader.tell(self.core.fail)

    def _new_runner(self) -> ModelRunner:
        sizes: dict[str, Any] = {
            "num_blocks": self.num_kv_blocks,
            "block_size": self.args.block_size,
            "vocab_size": self.vocab_size,
            "kv_dtype": self.kv_dtype,
            "backend": self.backend,
        }
        if self.leader is not None:
            from .parallel.runner import ParallelRunner

            return ParallelRunner(cast("ShardedLlamaModel", self.model), self.leader, **sizes)
        from .runner import ModelRunner

        return ModelRunner(self.model, **sizes, graph_limits=self._graph_limits())

    def _graph_limits(self) -> GraphLimits | None:
        from .execution.graphs import GraphLimits

        if self.args.enforce_eager or self.device.type != "cuda":
            return None
        return GraphLimits(self.args.max_num_seqs, self.max_model_len)

    def _is_overlapped(self) -> bool:
        asked = self.args.async_scheduling
        if asked and self.leader is not None:
            raise ValueError("async_scheduling must be off where several processes compute")
        drafts = self.args.speculation() is not None
        possible = self.device.type == "cuda" and self.leader is None and not drafts
        return possible if asked is None else asked

    def _num_kv_blocks(self) -> int:
        from .largest_step import run_largest_step
        from .memory import free_memory, num_kv_blocks
        from .model.kv_cache import bytes_per_block

        # Of the model, which may be a part: each rank has the heads that it computes.
        args, config = self.args, self.model.config
        free = None
        if self.leader is not None:
            free = self.leader.share_memory(free_memory(self.device))
        size = bytes_per_block(
            config.num_layers,
            args.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )

        def largest_step() -> None:
            run_largest_step(
                self.model,
                self.backend,
                num_tokens=args.batched_tokens(on_cpu=self.device.type == "cpu"),
                num_samples=args.max_num_seqs,
                max_len=self.max_model_len,
                block_size=args.block_size,
                vocab_size=self.vocab_size,
                kv_dtype=self.kv_dtype,
            )

        return num_kv_blocks(args, self.device, size, self.max_model_len, largest_step, free)

    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling parameters that the model's `generation_config.json` recommends, by name."""
        return generation_defaults(self.source)

    def step(self) -> bool:
        """Plan, forward, sample, commit; overlapped, the next step is planned before the commit.

        False if there was nothing to compute. A forward that fails ends the requests of its step;
        after some in a row the exception is raised. So is the first one where several processes
        compute.
        """
        if self.leader is not None:
            self.leader.check()
        return self._steps.step()

    def drain(self) -> None:
        """Commit the step that is under way, if there is one, and plan no other."""
        self._steps.drain()

    def close(self) -> None:
        """End the processes that compute with this one, if there are any; from any thread."""
        _open_engines.discard(self)
        if self.leader is not None:
            self.leader.close()


_open_engines: weakref.WeakSet[StepEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


class Engine(StepEngine):
    """An engine with the text pipeline beside it.

    `text_thread`: text is made on a thread of its own, for callers with an event loop; without it
    the outputs of a step are there when `step` returns.
    """

    core: Core

    def __init__(self, args: EngineArgs, *, text_thread: bool) -> None:
        self._text_thread = text_thread
        super().__init__(args)
        self._submit_params = SubmitParams(args.seed, self.tokenizer)

    def _new_core(self, limits: _Limits) -> Core:
        return Core(
            tokenizer_json=self.tokenizer.json(),
            eos_token_ids=list(self.eos_token_ids),
            text_thread=self._text_thread,
            max_backlog=self.args.max_backlog,
            stall_limit=self.args.stall_limit,
            **limits,
        )

    def compile_grammar(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Make a form of answers ready, so that `submit` has nothing to compile. From any thread.

        Takes milliseconds, and a good part of a second for the first one of a large vocabulary.
        Raises `ParameterError` for a form that cannot be used.
        """
        return compile_grammar(self.core, params)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        parser: ParserSpec | None = None,
    ) -> Submission:
        """Queue a request, from any thread; `parser` fills `Delta.parts`.

        Raises `RequestError` if it can never run, `ParameterError` for a priority beyond 32 bits
        and for structured outputs that cannot be compiled.
        """
        asked = self._submit_params.make(
            self.core,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parser=parser,
        )
        return self.core.submit(prompt_token_ids, asked)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error
    return device


def _read_ahead(args: EngineArgs, source: ModelSource) -> HostWeights | None:
    """The weights, if they can be read before torch is there: in float32, for a CPU."""
    on_cpu = args.device == "cpu" or (args.device == "auto" and not _has_accelerator())
    if source.kind != "gguf" or not on_cpu or args.tensor_parallel_size > 1:
        return None
    if args.load_format == "dummy":
        return None
    packing = choose_packing(args, on_cpu=True, is_gguf=True)
    if packing is None and args.dtype not in ("auto", "float32"):
        return None
    if packing is not None:
        set_kernel_threads(args.threads or os.cpu_count() or 1)
    from .model.gguf_weights import GGUFWeights
    from .model.host_weights import read_host_weights

    # One core is busy with the import of torch, which is what everything else waits for.
    return read_host_weights(source.path, threads=max(1, GGUFWeights.threads - 1), packing=packing)


def _has_accelerator() -> bool:
    """Whether there seems to be a CUDA or ROCm device, asked of the system and not of torch.

    A wrong answer costs time and no more.
    """
    return any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/dxg", "/dev/kfd"))


def load_tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer:
    """The tokenizer, with the chat template, that the settings name; needs no torch."""
    if args.tokenizer is not None:
        source = resolve_model(args.tokenizer)
    tokenizer = Tokenizer.from_source(source)
    if args.chat_template is not None:
        path = Path(args.chat_template)
        is_file = "{" not in args.chat_template and path.is_file()
        tokenizer.chat_template = path.read_text() if is_file else args.chat_template
    return tokenizer


def _eos_token_ids(config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text: the model's, and the tokenizer's."""
    ids = dict.fromkeys((*config.eos_token_ids, *tokenizer.eos_token_ids))
    return tuple(ids)
