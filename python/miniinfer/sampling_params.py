"""What a caller may ask of sampling, checked at construction so that the engine need not."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

import msgspec

GREEDY_TEMPERATURE = 1e-5
"""Temperatures up to this one mean greedy decoding.

Down there a softmax over float32 logits is one-hot but for exact ties, where greedy decoding
takes the lowest id.
"""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_STOP_BYTES = 16 * 1024
"""Bytes of a request's stop strings together; each byte costs every choice some 30 of memory."""
_INT32_MAX = 2**31 - 1
_UINT64_MASK = 2**64 - 1
_MAX_DIGITS = 20


class ParameterError(ValueError):
    """A sampling parameter has a value that cannot be served.

    `param` is the parameter's name, `message` one sentence with the limit and the value.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)
        self.param = param
        self.message = message

    def __str__(self) -> str:
        return self.message


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
        self._validate_output()

    def for_vocab(self, vocab_size: int) -> Self:
        """Check again, now with the token ids against a vocabulary of `vocab_size`; returns itself.

        Raises `ParameterError` for an id of `logit_bias` or `stop_token_ids` that is not a token.
        """
        self.validate()
        named_ids: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        )
        for name, token_ids in named_ids:
            for token_id in token_ids:
                if token_id >= vocab_size:
                    limit = f"token ids below the vocabulary size {vocab_size}"
                    _refuse(name, limit, token_id)
        return self

    def _validate_distribution(self) -> None:
        self.n = _integer("n", self.n, 1, _INT32_MAX)
        temperature = _number("temperature", self.temperature)
        if temperature < 0:
            _refuse("temperature", "at least 0", temperature)
        self.temperature = 0.0 if temperature <= GREEDY_TEMPERATURE else temperature
        self.top_p = _number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            _refuse("top_p", "greater than 0 and at most 1", self.top_p)
        self.top_k = max(_integer("top_k", self.top_k, -1, _INT32_MAX), 0)
        self.min_p = _number_between("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), _UINT64_MASK) & _UINT64_MASK

    def _validate_penalties(self) -> None:
        self.presence_penalty = _number_between("presence_penalty", self.presence_penalty, -2, 2)
        self.frequency_penalty = _number_between("frequency_penalty", self.frequency_penalty, -2, 2)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            _refuse("repetition_penalty", "greater than 0", self.repetition_penalty)
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)

    def _validate_length(self) -> None:
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"at most max_tokens, {self.max_tokens}", self.min_tokens)
        self.ignore_eos = _boolean("ignore_eos", self.ignore_eos)

    def _validate_stops(self) -> None:
        self.stop = _stop_strings(self.stop)
        token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(token_ids, list | tuple):
            _refuse("stop_token_ids", "a list of token ids", token_ids)
        checked = (_integer("stop_token_ids", i, 0, _INT32_MAX) for i in token_ids)
        self.stop_token_ids = list(dict.fromkeys(checked))
        self.include_stop_str_in_output = _boolean(
            "include_stop_str_in_output", self.include_stop_str_in_output
        )

    def _validate_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _integer(name, value, 0, MAX_LOGPROBS))
        self.skip_special_tokens = _boolean("skip_special_tokens", self.skip_special_tokens)
        if not isinstance(self.output_kind, RequestOutputKind):
            _refuse("output_kind", "a RequestOutputKind", self.output_kind)


def check_priority(priority: object) -> None:
    """Raise `ParameterError` unless a request's priority is an integer of 32 bits with a sign."""
    _integer("priority", priority, -(2**31), _INT32_MAX)


def _refuse(param: str, limit: str, value: object) -> NoReturn:
    shown = repr(value)
    if len(shown) > 100:
        shown = f"{shown[:97]}..."
    raise ParameterError(param, f"{param} must be {limit}; got {shown}")


def _boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(param, "true or false", value)
    return value


def _integer(param: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(param, "an integer", value)
    number = int(value)
    if number < low:
        _refuse(param, f"at least {low}", _printable(number))
    if number > high:
        _refuse(param, f"at most {high}", _printable(number))
    return number


def _printable(number: int) -> object:
    # CPython refuses to print integers of more than some 4300 digits.
    return number if number.bit_length() <= 1024 else f"an integer of {number.bit_length()} bits"


def _number(param: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(param, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(param, "a finite number", number)
    return number


def _number_between(param: str, value: object, low: float, high: float) -> float:
    number = _number(param, value)
    if not low <= number <= high:
        _refuse(param, f"between {low} and {high}", number)
    return number


def _stop_strings(value: object) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        _refuse("stop", "a string or a list of strings", value)
    for string in strings:
        if not isinstance(string, str):
            _refuse("stop", "a string or a list of strings", string)
        if not string:
            _refuse("stop", "strings of at least one character", string)
        if any("\ud800" <= character <= "\udfff" for character in string):
            _refuse("stop", "valid Unicode, without lone surrogates", string)
    size = sum(len(string.encode()) for string in strings)
    if size > MAX_STOP_BYTES:
        _refuse("stop", f"at most {MAX_STOP_BYTES} bytes of UTF-8 together", size)
    return list(strings)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        _refuse("logit_bias", "a mapping from token ids to numbers", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _integer("logit_bias", _token_id_key(key), 0, _INT32_MAX)
        if token_id in biases:
            _refuse("logit_bias", "a mapping that names each token id once", key)
        biases[token_id] = max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, _number("logit_bias", bias)))
    return biases


def _token_id_key(key: object) -> object:
    """JSON has string keys only, so a string of digits counts as a token id."""
    if isinstance(key, str):
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            _refuse("logit_bias", "a mapping whose keys are token ids", key)
        return int(key)
    return key
