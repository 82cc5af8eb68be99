"""The compiled core: scheduler, KV blocks, prefix cache, text pipeline, output channels."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from .parsing import Part

__version__: str

__all__ = [
    "CompiledGrammar",
    "DecoderLayers",
    "Delta",
    "Driver",
    "Engine",
    "EngineDeadError",
    "EngineHost",
    "Lane",
    "PackedLinear",
    "PagedAttention",
    "RemoteFrontend",
    "RequestError",
    "Submission",
    "TokenLogprob",
    "__version__",
    "kernel_isa",
    "parse",
    "profile_kernels",
    "rms_norm",
    "sample_rows",
    "send_each",
    "set_kernel_threads",
]

# `bytes` under a name that the member of the same name does not hide.
_RawBytes: TypeAlias = bytes

class RequestError(ValueError):
    """A request that was refused."""

    param: str
    """The parameter at fault."""

class EngineDeadError(RuntimeError):
    """The engine has stopped and takes no more requests."""

class _NgramLookup(TypedDict):
    """How drafts are looked up in a request's own tokens."""

    min: int
    max: int
    rows_per_step: float
    """Rows that take as long to compute as a step without any would."""

class _Limits(TypedDict, total=False):
    """An engine's sizes and limits. Those from `enable_prefix_caching` on have defaults."""

    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool
    target_itl_ms: float | None
    max_draft_tokens: int
    ngram_lookup: _NgramLookup | None
    max_logprobs: int

class _ParserParams(TypedDict, total=False):
    """How an answer is parsed."""

    reasoning_parser: str | None
    tool_parser: str | None
    in_reasoning: bool | None
    calls_only: bool
    tool_types: Mapping[str, Mapping[str, str]]

class _SubmitParams(_ParserParams, total=False):
    """What `Engine.submit` takes beside the prompt. All but `temperature` have defaults."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logprobs: int | None
    prompt_logprobs: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    logit_bias: list[tuple[int, float]]
    stop: list[str]
    include_stop: bool
    skip_special_tokens: bool
    final_only: bool
    priority: int
    tenant: str
    cache_salt: str | None
    grammar: CompiledGrammar | None
    grammar_after: list[int]
    allowed_token_ids: list[int] | None
    bad_words: list[list[int]]

@final
class CompiledGrammar:
    """A grammar that an engine compiled, for any number of its requests."""

@final
class TokenLogprob:
    """The log probability of one generated token."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def bytes(self) -> _RawBytes: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int:
        """1 for the most likely token."""
    @property
    def top(self) -> list[tuple[int, str, _RawBytes, float]]:
        """Id, text, bytes and logprob of the most likely tokens, best first."""

@final
class Delta:
    """What became certain of one choice since its last delta."""

    @property
    def index(self) -> int:
        """Which of the request's choices."""
    @property
    def text(self) -> str:
        """New text: whole characters, free of stop strings."""
    @property
    def parts(self) -> list[Part]:
        """What the text means, if the request asked for it to be parsed; else empty."""
    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens that the text is made of."""
    @property
    def logprobs(self) -> list[TokenLogprob] | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry a prompt token, None for the first; in one delta of the first choice."""
    @property
    def finish_reason(self) -> str | None:
        """None while the choice runs, then stop, length, abort or error."""
    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop string that ended it."""
    @property
    def error(self) -> str | None: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...

@final
class Lane:
    """A stream's own way to its socket: what is text alone is written past the event loop."""

    def open(
        self,
        socket: int,
        before: bytes,
        after: bytes,
        chunked: bool,
        text: Literal["whole", "content", "reasoning"],
        told: int,
    ) -> None:
        """Have each text written with `before` and `after` around it, as JSON.

        The socket stays open until `close`. `told` is the `num_output_tokens` of the last delta
        that was read and written.
        """
    def close(self) -> tuple[bytes, int]:
        """Have nothing more written.

        Returns what the socket did not take of the last event, to be written before anything else,
        and the number of bytes of all events since the last call.
        """
    def num_output_tokens(self) -> int: ...
    def silence(self) -> float | None:
        """Seconds since it last wrote; None if it never did."""

@final
class Submission:
    """A submitted request. Dropping it cancels what has not ended."""

    def ids(self) -> tuple[int, int]:
        """Id of the first choice and the number of choices."""
    def lane(self) -> Lane | None:
        """The way past the event loop; None for several choices."""
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def hold(self) -> None: ...
    def resume(self) -> None: ...

@disjoint_base
class Driver:
    """The side of an engine that steps it. One thread drives `plan` and `commit`."""

    def array_specs(self) -> list[tuple[str, str, int]]:
        """Name, numpy dtype and number of items of each array of a slot."""
    def register_slot(self, slot: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None: ...
    def block_table_rows(self) -> int: ...
    def plan(self, slot: int) -> int: ...
    def commit(self, slot: int) -> None: ...
    def logit_edits(
        self,
        slot: int,
        sample: npt.NDArray[np.int32],
        token: npt.NDArray[np.int32],
        repetition: npt.NDArray[np.float32],
        bias: npt.NDArray[np.float32],
    ) -> int: ...
    def prompt_rows(
        self, slot: int, index: npt.NDArray[np.int32], target: npt.NDArray[np.int32]
    ) -> int: ...
    def take_prompt_logprobs(
        self,
        slot: int,
        logprob: npt.NDArray[np.float32],
        rank: npt.NDArray[np.int32],
        top_ids: npt.NDArray[np.int32],
        top_logprobs: npt.NDArray[np.float32],
    ) -> None: ...
    def mask_words(self) -> int:
        """Words of 32 bits in a mask: one bit for each id of the vocabulary."""
    def fill_masks(
        self, slot: int, rows: npt.NDArray[np.int32], bits: npt.NDArray[np.int32]
    ) -> int: ...
    def fail_step(self, slot: int, reason: str) -> None: ...
    def fail(self, reason: str) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def interrupt(self) -> None: ...
    def check(self) -> None: ...

@final
class Engine(Driver):
    """A model's control plane. One thread drives `plan` and `commit`; any may call the rest."""

    def __new__(
        cls,
        *,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_token_ids: list[int],
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        target_itl_ms: float | None = None,
        max_draft_tokens: int = 0,
        ngram_lookup: _NgramLookup | None = None,
        max_logprobs: int = 20,
        text_thread: bool = True,
        max_backlog: int = 1024,
        stall_limit: float = 60.0,
    ) -> Engine: ...
    def has_requests(self) -> bool: ...
    def compile_grammar(
        self,
        kind: str,
        texts: list[str],
        *,
        compact: bool = False,
        whitespace_pattern: str | None = None,
    ) -> CompiledGrammar: ...
    def submit(self, prompt: list[int], params: _SubmitParams) -> Submission: ...
    def drain(self) -> list[tuple[int, Delta]]: ...
    def wake_fd(self) -> int: ...
    def clear_wake(self) -> None: ...
    def wait_output(self, timeout: float | None = None) -> bool: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class EngineHost(Driver):
    """An engine that other processes speak to."""

    def __new__(
        cls, tokenizer_json: bytes, limits: _Limits, eos_token_ids: list[int]
    ) -> EngineHost: ...
    def connect(self, client: int) -> None: ...
    def disconnect(self, client: int) -> None: ...
    def feed(self, client: int, kind: int, message: bytes) -> None: ...
    def take_frames(self, idle: bool) -> list[tuple[int, bytes]]:
        """Frames to send, each with the client it is for."""

@final
class RemoteFrontend:
    """Requests in and text out for an engine in another process. It has no threads."""

    def __new__(
        cls,
        *,
        tokenizer_json: bytes,
        limits: _Limits,
        eos_token_ids: list[int],
        client: int,
        max_backlog: int = 1024,
        stall_limit: float = 60.0,
    ) -> RemoteFrontend: ...
    def compile_grammar(
        self,
        kind: str,
        texts: list[str],
        *,
        compact: bool = False,
        whitespace_pattern: str | None = None,
    ) -> CompiledGrammar: ...
    def submit(self, prompt: list[int], params: _SubmitParams) -> Submission: ...
    def feed(self, frame: bytes) -> None: ...
    def turn(self) -> float | None:
        """Make text; the seconds after which it must be called again whatever comes."""
    def take_messages(self) -> list[tuple[int, bytes]]:
        """Messages to send: pairs of a type and what it says."""
    def drain(self) -> list[tuple[int, Delta]]: ...
    def wake_fd(self) -> int: ...
    def clear_wake(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def reopen(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

def send_each(batch: list[tuple[int, bytes]]) -> list[int]:
    """Send each socket its bytes, as far as it takes them at once; how many each has taken.

    The sockets are given by their descriptors. One that takes nothing is full or broken. Releases
    the GIL once.
    """

def parse(
    text: str,
    *,
    reasoning_parser: str | None = None,
    tool_parser: str | None = None,
    in_reasoning: bool | None = None,
    calls_only: bool = False,
    tool_types: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Part]:
    """The parts of a whole answer. Raises `RequestError` for an unknown name."""

# Kernels of the forward pass on a CPU. Tensors are given by their addresses; `miniinfer.cpu` checks
# what lies there and holds it during the call, which releases the GIL.

def set_kernel_threads(threads: int) -> None: ...
def kernel_isa() -> str: ...
def profile_kernels(on: bool) -> dict[str, float]:
    """Turn the clock of the kernels on, at zero, or off; it is the process's.

    Returns the seconds that each part of the forward passes took while it was on last: `inputs`
    (what comes before a product: norm, activation, rounding), `products` with weights, `heads`
    (their norms, rotary embedding, new keys and values) and `attention`.
    """

def rms_norm(x: int, weight: int, epsilon: float, out: int, count: int, columns: int) -> None: ...
def sample_rows(
    logits: tuple[int, int, int, int, int],
    parameters: tuple[int, int, int, int, int, float],
    edits: tuple[int, int, int, int, int],
    masks: tuple[int, int, int, int],
    sampled: int,
    logprobs: tuple[int, int, int, int, int] | None,
) -> None:
    """Choose a token for each row.

    `logits`: address, rows, columns, floats from one row to the next, columns that count.
    `parameters`: addresses of temperature, top_k, top_p, min_p and uniform; the greatest
    temperature that is greedy. `edits`: addresses of rows, tokens, repetition, bias; how many.
    `masks`: addresses of rows and bits; how many; words of each. `logprobs`: addresses of logprob,
    rank, top_ids, top_logprobs; how many tops. Raises `ValueError` for a row or token that does
    not exist.
    """

@final
class PackedLinear:
    """A linear layer's weights."""

    def __new__(
        cls,
        parts: list[tuple[int, int, npt.NDArray[np.uint8], int, int]],
        bias: list[float] | None,
    ) -> PackedLinear: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def forward(
        self,
        x: int,
        out: int,
        count: int,
        norm: int,
        epsilon: float,
        silu: bool,
        accumulate: bool,
    ) -> None: ...
    def gather(self, indices: int, count: int, out: int) -> None: ...

@final
class PagedAttention:
    """The cache of all layers, and attention over it."""

    def __new__(
        cls,
        layers: list[tuple[int, int, int, int]],
        dtype: str,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> PagedAttention: ...
    def step(
        self,
        layer: int,
        heads: int,
        out: int,
        num_heads: int,
        window: int,
        norm: int,
        epsilon: float,
        rotary: tuple[int, int],
        step: tuple[int, ...],
    ) -> None: ...

@final
class DecoderLayers:
    """All layers of a decoder in one call."""

    def __new__(
        cls,
        layers: list[
            tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear, tuple[int, int, int], int]
        ],
        num_heads: int,
        epsilon: float,
    ) -> DecoderLayers:
        """`layers`: qkv, output, gate_up, down, addresses of three norms, window or 0."""

    def forward(
        self,
        attention: PagedAttention,
        buffers: tuple[int, int, int, int],
        rotary: tuple[int, int],
        step: tuple[int, ...],
    ) -> None:
        """`buffers`: addresses of hidden, heads, attended and gate_up; the rest as in `step`."""
