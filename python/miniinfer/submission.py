"""A request's parameters as the core takes them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ._core import RequestError
from .parameters import ParameterError
from .parsing import ParserSpec
from .sampling_params import RequestOutputKind, SamplingParams, check_priority
from .structured import CompiledGrammar, StructuredOutputsParams

if TYPE_CHECKING:
    from ._core import Engine, RemoteFrontend, _SubmitParams
    from .tokenizer import Tokenizer

__all__ = ["SubmitParams", "compile_grammar"]


def compile_grammar(
    core: Engine | RemoteFrontend, params: StructuredOutputsParams
) -> CompiledGrammar:
    """Make a form of answers ready for a core's requests. From any thread.

    Raises `ParameterError` for a form that cannot be used.
    """
    kind, texts = params.source()
    try:
        handle = core.compile_grammar(
            kind,
            texts,
            compact=params.disable_any_whitespace,
            whitespace_pattern=params.whitespace_pattern,
        )
    except RequestError as error:
        message = f"structured_outputs: {error}"
        raise ParameterError("structured_outputs", message) from None
    return params.compiled(handle)


class SubmitParams:
    """Makes the parameters of requests, in the order of their submission.

    Args:
        seed: Makes requests without a seed of their own repeatable; None draws seeds.
        tokenizer: Spells words that must not come.
    """

    def __init__(self, seed: int | None, tokenizer: Tokenizer) -> None:
        self._next_seed = seed
        self._tokenizer = tokenizer

    def make(
        self,
        core: Engine | RemoteFrontend,
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        parser: ParserSpec | None = None,
    ) -> _SubmitParams:
        """Parameters for the core's `submit`.

        Raises `ParameterError` for a priority beyond 32 bits and for structured outputs that
        cannot be compiled.
        """
        check_priority(priority)
        form = params.structured_outputs
        if form is not None and not isinstance(form, CompiledGrammar):
            form = compile_grammar(core, form)
        return {
            "n": params.n,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "seed": self._seed() if params.seed is None else params.seed,
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": params.stop_token_ids or [],
            "logit_bias": list((params.logit_bias or {}).items()),
            "stop": [params.stop] if isinstance(params.stop, str) else params.stop or [],
            "include_stop": params.include_stop_str_in_output,
            "skip_special_tokens": params.skip_special_tokens,
            "final_only": params.output_kind is RequestOutputKind.FINAL_ONLY,
            "priority": priority,
            "tenant": tenant,
            "cache_salt": cache_salt,
            **(parser or ParserSpec()).submit_params(),
            "grammar": None if form is None else form.handle,
            "grammar_after": [] if form is None else form.after_token_ids or [],
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": self._spellings(params.bad_words or []),
        }

    def _spellings(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word at the start of a text and after a space."""
        spellings = []
        for word in words:
            bare = word.lstrip() or word
            for text in dict.fromkeys((bare, f" {bare}")):
                spellings.append(self._tokenizer.encode(text, add_special_tokens=False))
        return spellings

    def _seed(self) -> int:
        if self._next_seed is None:
            return secrets.randbits(64)
        self._next_seed = (self._next_seed + 1) % 2**64
        return self._next_seed
