"""Build a tokenizer from the metadata of a GGUF file.

GGUF carries a vocabulary, not a tokenizer: `tokenizer.ggml.model` names the algorithm ("gpt2" is
byte-level BPE, "llama" is SentencePiece BPE) and `tokenizer.ggml.pre` names the rule that cuts text
into words before BPE. What is built here gives the same ids as the `tokenizer.json` that the file
was converted from, which is the reference; llama.cpp approximates some of those rules, so where the
two differ this follows the former (Qwen's NFC normalisation, for one).

Source: the GGUF specification in ggml's `docs/gguf.md`, section "Tokenizer".
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .tokenizer_parts import TokenizerError, TokenizerParts

__all__ = ["TokenType", "build_tokenizer"]


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that `metadata` (a GGUF file's key-value pairs) describes.

    Raises:
        TokenizerError: a key is missing or inconsistent, or the kind is not supported.
    """
    return _Builder(metadata).build()


_ENGLISH_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TRAILING_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, symbols: str) -> str:
    """The word rule that tiktoken's cl100k_base brought and most models since vary slightly."""
    return f"{_ENGLISH_CONTRACTIONS}|{letters}|{digits}|{symbols}|{_TRAILING_SPACES}"


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CL100K = _words(_LETTERS, r"\p{N}{1,3}", _SYMBOLS)
_QWEN2 = _words(_LETTERS, r"\p{N}", _SYMBOLS)
_QWEN35 = _words(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_SEED_CODER = _words(_LETTERS, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+")

# tiktoken's o200k_base: a word is upper case then lower case, so that camelCase is cut.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _cased_words(suffix: str, digits: str) -> str:
    return (
        f"{_BEFORE}{_UPPER}*{_LOWER}+{suffix}|{_BEFORE}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TRAILING_SPACES}"
    )


_O200K = _cased_words(_ENGLISH_CONTRACTIONS + "?", r"\p{N}{1,3}")
_TEKKEN = _cased_words("", r"\p{N}")

_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + "|" + _TRAILING_SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Letters with case, as of the Unicode version it was made with.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut into words: each pattern cuts what the ones before it left."""

    patterns: tuple[str, ...] = ()
    """Empty: the GPT-2 rule, after `digits` if set."""
    digits: bool = False
    """Every digit on its own, before the GPT-2 rule."""
    nfc: bool = False
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is taken as it is."""
    add_bos: bool = False
    """Whether a BOS is added when the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


_GPT2 = _PreTokenizer()
_DIGITS_GPT2 = _PreTokenizer(digits=True)
_LLAMA3 = _PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True)
_QWEN = _PreTokenizer((_QWEN2,), nfc=True)
# What llama.cpp applies to files that name no rule, made by its earliest converters.
_DEFAULT = _PreTokenizer(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
)

_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_GPT2,
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _PreTokenizer((_CL100K,))),
    **dict.fromkeys(("qwen2", "megrez"), _QWEN),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "grok-2"), _PreTokenizer((_QWEN2,))),
    "qwen35": _PreTokenizer((_QWEN35,), nfc=True),
    "seed-coder": _PreTokenizer((_SEED_CODER,)),
    "deepseek-v3": _PreTokenizer(_DEEPSEEK_V3),
    "deepseek-llm": _PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": _PreTokenizer(_DEEPSEEK_CODER),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _PreTokenizer((_O200K,), ignore_merges=True)),
}

# Files without `eot_token_id` still end a turn with one of these.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>")
_TEMPLATE_KEY = "tokenizer.chat_template"


class _Builder:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._kind = self._text("tokenizer.ggml.model")
        self._tokens: list[str] = self._strings("tokenizer.ggml.tokens")
        if not self._tokens:
            raise TokenizerError("tokenizer.ggml.tokens is empty")
        types = metadata.get("tokenizer.ggml.token_type")
        self._types: Sequence[int] = [TokenType.NORMAL] * len(self._tokens)
        if types is not None:
            self._types = list(types)
            self._check_length("tokenizer.ggml.token_type", self._types)

    def build(self) -> TokenizerParts:
        if self._kind == "gpt2":
            backend, add_bos = self._byte_level()
        elif self._kind == "llama":
            backend, add_bos = self._sentence_piece()
        else:
            raise TokenizerError(
                f"tokenizer.ggml.model is {self._kind!r}: supported are 'gpt2' (byte-level BPE) and"
                " 'llama' (SentencePiece BPE)"
            )
        self._add_tokens(backend)
        self._set_post_processor(backend, add_bos)
        return TokenizerParts(
            backend=backend,
            special_tokens=self._special_tokens(),
            eos_token_ids=self._eos_token_ids(),
            chat_templates=self._chat_templates(),
        )

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        rule = self._pre_tokenizer()
        merges = []
        for index, merge in enumerate(self._strings("tokenizer.ggml.merges")):
            left, space, right = merge.partition(" ")
            if not space:
                raise TokenizerError(f"tokenizer.ggml.merges[{index}] is {merge!r}, not two tokens")
            merges.append((left, right))
        backend = self._bpe(merges, ignore_merges=rule.ignore_merges)
        if rule.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = rule.build()
        backend.decoder = decoders.ByteLevel()
        return backend, rule.add_bos

    def _pre_tokenizer(self) -> _PreTokenizer:
        name = self._metadata.get("tokenizer.ggml.pre")
        if name is None:
            warnings.warn(
                "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre): using llama.cpp's"
                " default, which may cut text otherwise than the model was trained on",
                stacklevel=2,
            )
            return _DEFAULT
        rule = _PRE_TOKENIZERS.get(name)
        if rule is None:
            raise TokenizerError(
                f"tokenizer.ggml.pre is {name!r}: supported are {', '.join(_PRE_TOKENIZERS)}"
            )
        return rule

    def _sentence_piece(self) -> tuple[Tokenizer, bool]:
        backend = self._bpe(
            self._merges_from_scores(),
            unk_token=self._token_text("unknown"),
            fuse_unk=True,
            byte_fallback="<0x00>" in self._vocabulary,
        )
        space_to_underline = normalizers.Replace(" ", "▁")
        prefix = bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), space_to_underline])
            if prefix
            else space_to_underline
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)
        return backend, True

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """Recover BPE merges: SentencePiece joins the pair whose union has the best score.

        Each way to cut a piece into two others is a merge; its rank is the piece's score.
        """
        scores = self._metadata.get("tokenizer.ggml.scores")
        if scores is None:
            raise TokenizerError("tokenizer.ggml.scores is missing")
        self._check_length("tokenizer.ggml.scores", scores)
        merged = (TokenType.NORMAL, TokenType.USER_DEFINED)
        vocabulary = self._vocabulary
        ranked: list[tuple[float, int, str, str]] = []
        for piece, score, kind in zip(self._tokens, scores, self._types, strict=True):
            if kind not in merged:
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocabulary and right in vocabulary:
                    ranked.append((-score, vocabulary[left], left, right))
        ranked.sort(key=lambda merge: merge[:2])
        return [(left, right) for _, _, left, right in ranked]

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        if len(vocabulary) != len(self._tokens):
            first = next(
                index for index, token in enumerate(self._tokens) if vocabulary[token] != index
            )
            raise TokenizerError(
                f"tokenizer.ggml.tokens[{first}] is {self._tokens[first]!r}, which is also"
                f" token {vocabulary[self._tokens[first]]}"
            )
        return vocabulary

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(models.BPE(self._vocabulary, merges, **options))
        except Exception as error:  # The library raises a bare Exception.
            raise TokenizerError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from None

    def _add_tokens(self, backend: Tokenizer) -> None:
        special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
        backend.add_tokens(
            [
                AddedToken(token, special=special[TokenType(kind)], normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind in special and token
            ]
        )

    def _set_post_processor(self, backend: Tokenizer, add_bos: bool) -> None:
        start = self._added_token("bos", add_bos)
        end = self._added_token("eos", False)
        if not start and not end:
            return
        first = [f"{text}:0" for text, _ in start]
        last = [f"{text}:0" for text, _ in end]
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A:0", *last], pair=None, special_tokens=start + end
        )

    def _added_token(self, name: str, default: bool) -> list[tuple[str, int]]:
        index = self._token_id(name)
        if index is None or not self._metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            return []
        return [(self._tokens[index], index)]

    def _special_tokens(self) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        texts = {f"{short}_token": self._token_text(name) for name, short in names.items()}
        return {name: text for name, text in texts.items() if text is not None}

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = [self._token_id(name) for name in ("eos", "eot", "eom")]
        if ids[1] is None:
            ids += [
                self._vocabulary[text]
                for text in _END_OF_TURN
                if text in self._vocabulary
                and self._types[self._vocabulary[text]] == TokenType.CONTROL
            ]
        return tuple(dict.fromkeys(index for index in ids if index is not None))

    def _chat_templates(self) -> dict[str, str]:
        templates = {}
        for key in self._metadata:
            if key == _TEMPLATE_KEY or key.startswith(_TEMPLATE_KEY + "."):
                templates[key[len(_TEMPLATE_KEY) + 1 :] or "default"] = self._text(key)
        return templates

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        index = self._metadata.get(key)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self._tokens):
            raise TokenizerError(
                f"{key} is {index!r}, outside the vocabulary of {len(self._tokens)} tokens"
            )
        return index

    def _token_text(self, name: str) -> str | None:
        index = self._token_id(name)
        return None if index is None else self._tokens[index]

    def _text(self, key: str) -> str:
        value = self._metadata.get(key)
        if not isinstance(value, str):
            problem = "missing" if value is None else f"{type(value).__name__}, not a string"
            raise TokenizerError(f"{key} is {problem}")
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if value is None:
            raise TokenizerError(f"{key} is missing")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TokenizerError(f"{key} is not an array of strings")
        return value

    def _check_length(self, key: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._tokens):
            raise TokenizerError(f"{key} has {len(values)} entries for {len(self._tokens)} tokens")
