"""What a caller may ask of sampling, checked at construction so that the engine need not."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

from .parameters import (
    INT32_MAX,
    ParameterError,
    boolean,
    integer,
    number,
    number_between,
    refuse,
    strings,
    token_ids,
)
from .structured import StructuredOutputsParams

__all__ = [
    "GREEDY_TEMPERATURE",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_BYTES",
    "ParameterError",
    "RequestOutputKind",
    "SamplingParams",
    "check_priority",
]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this one mean greedy decoding.

Down there a softmax over float32 logits is one-hot but for exact ties, where greedy decoding
takes the lowest id.
"""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_STOP_BYTES = 16 * 1024
"""Bytes of a request's stop strings together; each byte costs every choice some 30 of memory."""
_UINT64_MASK = 2**64 - 1
_MAX_DIGITS = 20


class RequestOutputKind(enum.Enum):
    """Which outputs a request yields."""

    CUMULATIVE = 0
    """Everything so far, at each step."""
    DELTA = 1
    """What is new, at each step."""
    FINAL_ONLY = 2
    """Nothing before the end, then everything."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it stops. Names and meanings follow vLLM.

    Construction checks every field, raises `ParameterError` for the first bad one, and puts the
    values in one form: numbers become plain `int` and `float`, `stop` and `stop_token_ids` become
    lists, `top_k=-1` becomes 0, a `temperature` up to `GREEDY_TEMPERATURE` becomes 0, a negative
    `seed` becomes the unsigned 64-bit number with the same bits, and `logit_bias` gets integer keys
    and values within ±100. A field assigned afterwards is checked by the next `validate` or
    `for_vocab`.
    """

    n: int = 1
    """Number of answers to one prompt, at least 1."""
    temperature: float = 1.0
    """Divides the logits; finite, at least 0. 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this much probability; in (0, 1]."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1 puts no limit."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token generated before; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Shrinks the logits of tokens of the prompt and the answer so far; finite, greater than 0."""
    seed: int | None = None
    """Makes the tokens repeatable, whatever else is in the batch; any 64-bit integer."""
    max_tokens: int | None = 16
    """At most this many tokens are generated, at least 1. None: as many as the context holds."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens; at most `max_tokens`."""
    stop: str | list[str] | None = None
    """Texts that end the answer; none may be empty, nor all together exceed 16 KiB of UTF-8."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the answer."""
    include_stop_str_in_output: bool = False
    """Keep the stop text in the answer."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    logprobs: int | None = None
    """Report the log probability of each token and of this many likely ones; 0 to 20, or None."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed whole; 0 to 20, or None."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; clamped to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these token ids are generated, at least one; include what is to end the answer."""
    bad_words: list[str] | None = None
    """Texts that are not generated: no token is that would complete one's usual spelling."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer has; a `CompiledGrammar` is one that need not be compiled first."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Which outputs the request yields."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field and normalise it in place; `ParameterError` names the first bad one."""
        self._validate_distribution()
        self._validate_penalties()
        self._validate_length()
        self._validate_stops()
        self._validate_limits()
        self._validate_output()

    def for_vocab(self, vocab_size: int) -> Self:
        """Check again, now with the token ids against a vocabulary of `vocab_size`; returns itself.

        Raises `ParameterError` for an id of `logit_bias`, `stop_token_ids` or `allowed_token_ids`
        that is not a token.
        """
        self.validate()
        named_ids: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )
        for name, ids in named_ids:
            for token_id in ids:
                if token_id >= vocab_size:
                    limit = f"token ids below the vocabulary size {vocab_size}"
                    refuse(name, limit, token_id)
        return self

    def _validate_distribution(self) -> None:
        self.n = integer("n", self.n, 1, INT32_MAX)
        temperature = number("temperature", self.temperature)
        if temperature < 0:
            refuse("temperature", "at least 0", temperature)
        self.temperature = 0.0 if temperature <= GREEDY_TEMPERATURE else temperature
        self.top_p = number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            refuse("top_p", "greater than 0 and at most 1", self.top_p)
        self.top_k = max(integer("top_k", self.top_k, -1, INT32_MAX), 0)
        self.min_p = number_between("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = integer("seed", self.seed, -(2**63), _UINT64_MASK) & _UINT64_MASK

    def _validate_penalties(self) -> None:
        self.presence_penalty = number_between("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = number_between("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            refuse("repetition_penalty", "greater than 0", self.repetition_penalty)
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)

    def _validate_length(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = integer("max_tokens", self.max_tokens, 1, INT32_MAX)
        self.min_tokens = integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"at most max_tokens, {self.max_tokens}", self.min_tokens)
        self.ignore_eos = boolean("ignore_eos", self.ignore_eos)

    def _validate_stops(self) -> None:
        self.stop = _stop_strings(self.stop)
        stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.stop_token_ids = token_ids("stop_token_ids", stop_token_ids)
        self.include_stop_str_in_output = boolean(
            "include_stop_str_in_output", self.include_stop_str_in_output
        )

    def _validate_limits(self) -> None:
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                refuse("allowed_token_ids", "a list of at least one token id", [])
        if self.bad_words is not None:
            self.bad_words = strings("bad_words", self.bad_words)
        structured = self.structured_outputs
        if structured is None:
            return
        if not isinstance(structured, StructuredOutputsParams):
            refuse("structured_outputs", "a StructuredOutputsParams", structured)
        structured.validate()
        if self.allowed_token_ids is not None:
            limit = "left out where structured_outputs says what is allowed"
            refuse("allowed_token_ids", limit, self.allowed_token_ids)

    def _validate_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, integer(name, value, 0, MAX_LOGPROBS))
        self.skip_special_tokens = boolean("skip_special_tokens", self.skip_special_tokens)
        if not isinstance(self.output_kind, RequestOutputKind):
            refuse("output_kind", "a RequestOutputKind", self.output_kind)


def check_priority(priority: object) -> None:
    """Raise `ParameterError` unless a request's priority is an integer of 32 bits with a sign."""
    integer("priority", priority, -(2**31), INT32_MAX)


def _stop_strings(value: object) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        refuse("stop", "a string or a list of strings", value)
    for string in strings:
        if not isinstance(string, str):
            refuse("stop", "a string or a list of strings", string)
        if not string:
            refuse("stop", "strings of at least one character", string)
        if any("\ud800" <= character <= "\udfff" for character in string):
            refuse("stop", "valid Unicode, without lone surrogates", string)
    size = sum(len(string.encode()) for string in strings)
    if size > MAX_STOP_BYTES:
        refuse("stop", f"at most {MAX_STOP_BYTES} bytes of UTF-8 together", size)
    return list(strings)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        refuse("logit_bias", "a mapping from token ids to numbers", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token_id = integer("logit_bias", _token_id_key(key), 0, INT32_MAX)
        if token_id in biases:
            refuse("logit_bias", "a mapping that names each token id once", key)
        biases[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, number("logit_bias", bias)))
    return biases


def _token_id_key(key: object) -> object:
    """JSON has string keys only, so a string of digits counts as a token id."""
    if isinstance(key, str):
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            refuse("logit_bias", "a mapping whose keys are token ids", key)
        return int(key)
    return key
