"""What the server needs of an engine, as protocols.

`miniinfer.AsyncLLM` satisfies them, and so does the scripted engine of the tests. Nothing in the
server imports the engine itself, so the server can be imported and tested without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from miniinfer.bursts import Lane
    from miniinfer.parsing import ParserSpec, Part
    from miniinfer.sampling_params import SamplingParams
    from miniinfer.structured import CompiledGrammar, StructuredOutputsParams

RawBytes: TypeAlias = bytes
"""`bytes` under a name that the member of the same name does not hide."""


class TokenLogprob(Protocol):
    """The log probability of one generated token and of its most likely alternatives."""

    @property
    def token_id(self) -> int:
        """Id of the token that was chosen."""

    @property
    def text(self) -> str:
        """Its text; bytes that are no character alone read as U+FFFD."""

    @property
    def bytes(self) -> RawBytes:
        """Its raw bytes."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of its probability."""

    @property
    def rank(self) -> int:
        """1 for the most likely token of the vocabulary."""

    @property
    def top(self) -> Sequence[tuple[int, str, RawBytes, float]]:
        """(id, text, bytes, logprob) of the most likely tokens, best first."""


class Delta(Protocol):
    """What one choice of a request gained since its last delta."""

    @property
    def index(self) -> int:
        """Which of the request's n choices."""

    @property
    def text(self) -> str:
        """New text: whole characters, free of stop strings."""

    @property
    def parts(self) -> Sequence[Part]:
        """What the text means, if the request came with a `ParserSpec`; else empty."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of the tokens behind `text`."""

    @property
    def logprobs(self) -> Sequence[TokenLogprob] | None:
        """One entry per token, when the request asked for them."""

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None] | None:
        """One entry per prompt token, None for the first; in one delta of the first choice."""

    @property
    def finish_reason(self) -> str | None:
        """None while the choice runs, then stop, length, abort or error."""

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token's id or the stop string that ended the choice."""

    @property
    def error(self) -> str | None:
        """The message, when `finish_reason` is error."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far for this choice."""


class Stream(Protocol):
    """An async iterator over the deltas of one request; `close` ends the request."""

    def __aiter__(self) -> Stream:
        """Return itself."""

    async def __anext__(self) -> Delta:
        """Wait for the next delta."""

    async def forward(self, take: Callable[[Delta], bool], /) -> None:
        """Call `take` with each delta as it comes, until the last, or until it returns False.

        `take` runs in the event loop, but in no task.
        """

    def lane(self) -> Lane | None:
        """Return the way from the engine to a socket, past the event loop, if it has one."""

    def close(self) -> None:
        """End the request and deliver nothing more; harmless when it is over."""


class Tokenizer(Protocol):
    """Text to ids and back; safe to call from worker threads."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of special tokens."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None if it has no such token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""

    @property
    def longest_token(self) -> int | None:
        """Most bytes of text that a token can stand for; None where no number is known."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Render the chat template; raises `ChatTemplateError`."""

    def encode_rendered(self, prompt: str) -> list[int]:
        """Return the ids of a rendered chat."""


class Engine(Protocol):
    """A loaded model that takes requests from the event loop's thread."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def model_name(self) -> str:
        """Name of the model, as loaded."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that a request may have."""

    @property
    def default_sampling_params(self) -> Mapping[str, Any]:
        """Sampling defaults from the model's generation_config."""

    @property
    def is_healthy(self) -> bool:
        """False once the engine has died."""

    @property
    def error(self) -> str | None:
        """Why it died."""

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        parser: ParserSpec | None = None,
    ) -> Stream:
        """Queue a request at once; ValueError if it can never run."""

    def compile_structured(self, params: StructuredOutputsParams, /) -> CompiledGrammar:
        """Make a form ready to be submitted, from any thread; ValueError if it cannot be used."""

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges of the engine, by name."""

    def reset_prefix_cache(self) -> bool:
        """Forget unused cached prefixes; False if some are in use."""

    async def close(self) -> None:
        """Stop the engine."""
