"""Text to token ids and back, and chat messages to prompts.

One class wraps the `tokenizers` library for every kind of model source: a directory with a
`tokenizer.json` or a SentencePiece model (see `hf_tokenizer`), and a GGUF file (see
`gguf_tokenizer`). `Tokenizer.json` is the whole of it in one document, which the text pipeline
reads, so that both sides of the program decode alike.

Two settings of `tokenizer_config.json` need a word. `clean_up_tokenization_spaces` is ignored: it
edits decoded English text after the fact, and text that is streamed cannot be edited.
`add_bos_token` and `add_eos_token` are honoured where they ask for a token that the post-processor
of `tokenizer.json` does not add, as transformers 4 does for Llama tokenizers; they never remove
one. transformers 5 ignores both. Chat prompts are not concerned: templates write their own BOS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_template import ChatTemplate, ChatTemplateError
from .token_bytes import longest_token
from .tokenizer_parts import TokenizerError, TokenizerParts

if TYPE_CHECKING:
    from .source import ModelSource

__all__ = ["Tokenizer", "TokenizerError"]

_LONG = 1024
"""Characters, or tokens, from which the GIL is released: the library does that for batches only."""


class Tokenizer:
    """A tokenizer with its chat template.

    All methods may be called from any thread; encoding and decoding release the GIL where they
    take long.

    Attributes:
        name: what to call the model in messages.
        special_tokens: named tokens (`bos_token`, `eos_token`, ...) to their texts.
        bos_token_id: id of the beginning-of-sequence token, or `None`.
        pad_token_id: id of the padding token, or `None`.
        eos_token_ids: ids that end an answer. The model's generation config may have more.
        chat_template: Jinja source; or several sources by name; or `None`.
    """

    def __init__(self, parts: TokenizerParts, name: str = "the model") -> None:
        # A limit or padding left in the file by training code would cut prompts silently.
        parts.backend.no_truncation()
        parts.backend.no_padding()
        self._backend = parts.backend
        self.name = name
        self.special_tokens = parts.special_tokens
        self.bos_token_id = self._named_id("bos_token")
        self.pad_token_id = self._named_id("pad_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        if parts.eos_token_ids is not None:
            self.eos_token_ids = parts.eos_token_ids
        self.chat_template: str | dict[str, str] | None = parts.chat_templates or None
        if list(parts.chat_templates) == ["default"]:
            self.chat_template = parts.chat_templates["default"]

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """Load the tokenizer of a resolved model. Raises `TokenizerError`."""
        if source.kind == "gguf":
            return cls.from_gguf(source.path, name=source.name)
        return cls.from_directory(source.path, name=source.name)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], *, name: str | None = None) -> Tokenizer:
        """Load from a directory in the layout of the model hub. Raises `TokenizerError`."""
        from .hf_tokenizer import load_tokenizer

        return cls(load_tokenizer(Path(path)), name or Path(path).resolve().name)

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str], *, name: str | None = None) -> Tokenizer:
        """Load from the metadata of a GGUF file.

        Raises:
            TokenizerError: the metadata describes no supported tokenizer.
            GGUFError: the file itself is malformed.
        """
        from .gguf_file import GGUFFile

        return cls.from_gguf_metadata(GGUFFile(path).metadata, name=name or Path(path).name)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], *, name: str) -> Tokenizer:
        """Load from the key-value pairs of a GGUF file. Raises `TokenizerError`."""
        from .gguf_tokenizer import build_tokenizer

        try:
            return cls(build_tokenizer(metadata), name)
        except TokenizerError as error:
            raise TokenizerError(f"{name}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` adds BOS and EOS as the model wants them.

        The text of a special token inside `text` becomes that token.
        """
        text = _encodable(text)
        if len(text) < _LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Fast: without the offsets of the tokens.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each of `texts`, encoded in parallel."""
        encodings = self._backend.encode_batch(
            [_encodable(text) for text in texts], add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside the vocabulary have no text."""
        try:
            return self._decode(ids, skip_special_tokens)
        except OverflowError:
            within = [index for index in ids if 0 <= index < self.vocab_size]
            return self._decode(within, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) < _LONG:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's logits may be wider, never narrower."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when it skips special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def longest_token(self) -> int | None:
        """Most bytes of text that a token can stand for; `None` where no number is known."""
        return longest_token(self.json())

    def token_to_id(self, token: str) -> int | None:
        """Return the id of `token` as the vocabulary spells it, or `None`."""
        return self._backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return the vocabulary's spelling of a token, or `None` outside the vocabulary."""
        return self._backend.id_to_token(index) if 0 <= index < self.vocab_size else None

    def json(self) -> bytes:
        """Return this tokenizer as a `tokenizer.json` document, UTF-8 encoded."""
        return self._backend.to_str().encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render `messages` to the prompt text; see `ChatTemplate.render`.

        `chat_template` is the name of one of the model's templates, or Jinja source to use instead.

        Raises:
            ChatTemplateError: there is no template, or it cannot render these messages.
        """
        template = ChatTemplate.of(self._template_source(chat_template, tools))
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **{**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[int]:
        """Return the ids of the rendered `messages`; `options` are `apply_chat_template`'s.

        A template writes its own special tokens, so none are added unless `add_special_tokens`
        asks; then a BOS that the template has already written is not repeated.
        """
        return self.encode_rendered(
            self.apply_chat_template(messages, **options), add_special_tokens=add_special_tokens
        )

    def encode_rendered(self, prompt: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a rendered prompt, with at most one BOS at its start."""
        ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def _template_source(self, chosen: str | None, tools: Sequence[Any] | None) -> str:
        templates = self.chat_template
        if isinstance(templates, dict):
            if chosen is not None:
                return templates.get(chosen, chosen)
            for name in ("tool_use", "default") if tools else ("default",):
                if name in templates:
                    return templates[name]
            raise ChatTemplateError(
                f"{self.name} has several chat templates and none named 'default': choose one with"
                f" chat_template ({', '.join(sorted(templates))})"
            )
        source = chosen if chosen is not None else templates
        if source is None:
            raise ChatTemplateError(
                f"{self.name} has no chat template, so it cannot take chat messages: use plain"
                " completions, or give a template with chat_template"
            )
        return source

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, as decoders do."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
