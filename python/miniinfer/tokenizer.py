"""Text to token ids and back, and chat messages to prompts.

One class wraps the `tokenizers` library for every kind of model source: a directory with a
`tokenizer.json`, a GGUF file (see `gguf_tokenizer`), and, through transformers, a directory that
has only a SentencePiece or `vocab.json` tokenizer. `Tokenizer.json` is the whole of it in one
document, which the text pipeline reads, so that both sides of the program decode alike.

Two settings of `tokenizer_config.json` need a word. `clean_up_tokenization_spaces` is ignored: it
edits decoded English text after the fact, and text that is streamed cannot be edited.
`add_bos_token` and `add_eos_token` are honoured where they ask for a token that the post-processor
of `tokenizer.json` does not add, as transformers 4 does for Llama tokenizers; they never remove
one. transformers 5 ignores both. Chat prompts are not concerned: templates write their own BOS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from .chat_template import ChatTemplate, ChatTemplateError

if TYPE_CHECKING:
    from .source import ModelSource

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """The tokenizer's files are missing, malformed or of a kind that is not supported."""


class Tokenizer:
    """A tokenizer with its chat template.

    All methods may be called from any thread; encoding and decoding release the GIL.

    Args:
        backend: the tokenizer proper; it belongs to this object from now on.
        name: what to call the model in messages.
        special_tokens: named tokens (`bos_token`, `eos_token`, ...) to their texts.
        eos_token_ids: ids that end an answer; default: that of `eos_token`.
        chat_template: Jinja source, or several by name, or `None`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str = "the model",
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        # A limit or padding left in the file by training code would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.chat_template: str | dict[str, str] | None = (
            dict(chat_template) if isinstance(chat_template, Mapping) else chat_template
        )
        self.bos_token_id = self._named_id("bos_token")
        self.pad_token_id = self._named_id("pad_token")
        eos = self._named_id("eos_token")
        if eos_token_ids is None:
            eos_token_ids = () if eos is None else (eos,)
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """Load the tokenizer of a resolved model. Raises `TokenizerError`."""
        if source.kind == "gguf":
            return cls.from_gguf(source.path, name=source.name)
        return cls.from_directory(source.path, name=source.name)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], *, name: str | None = None) -> Tokenizer:
        """Load from a directory in the layout of the model hub. Raises `TokenizerError`."""
        directory = Path(path)
        config = _read_json(directory / "tokenizer_config.json")
        backend = _read_backend(directory)
        special_tokens = _special_tokens(directory, config)
        _add_special_tokens(backend, config, special_tokens)
        texts = {key: token.content for key, token in special_tokens.items()}
        _add_bos_and_eos(backend, config, texts)
        return cls(
            backend,
            name=name or directory.name,
            special_tokens=texts,
            chat_template=_read_chat_templates(directory, config),
        )

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
        from .gguf_tokenizer import GGUFTokenizerError, build_tokenizer

        try:
            built = build_tokenizer(metadata)
        except GGUFTokenizerError as error:
            raise TokenizerError(f"{name}: {error}") from None
        return cls(
            built.backend,
            name=name,
            special_tokens=built.special_tokens,
            eos_token_ids=built.eos_token_ids,
            chat_template=_single_or_named(built.chat_templates),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` adds BOS and EOS as the model wants them.

        The text of a special token inside `text` becomes that token.
        """
        encoding = self._backend.encode(_encodable(text), add_special_tokens=add_special_tokens)
        return encoding.ids

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
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's logits may be wider, never narrower."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when it skips special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of `token` as the vocabulary spells it, or `None`."""
        return self._backend.token_to_id(token)

    def id_to_token(self, index: int) -> str | None:
        """Return the vocabulary's spelling of a token, or `None` outside the vocabulary."""
        return self._backend.id_to_token(index) if index >= 0 else None

    def json(self) -> bytes:
        """Return this tokenizer as a `tokenizer.json` document, UTF-8 encoded."""
        return self._backend.to_str().encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
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


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an absent file is an empty object."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _read_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # The library raises a bare Exception.
            raise TokenizerError(f"{path} is not a valid tokenizer: {error}") from None
    others = ("tokenizer.model", "vocab.json", "spiece.model")
    found = [name for name in others if (directory / name).is_file()]
    if not found:
        raise TokenizerError(
            f"{directory} has no tokenizer: none of tokenizer.json, {', '.join(others)} is there"
        )
    return _convert_with_transformers(directory, found[0])


def _convert_with_transformers(directory: Path, found: str) -> Backend:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            f"{directory} has {found} but no tokenizer.json: converting it needs transformers,"
            " which `pip install 'miniinfer[transformers]'` brings"
        ) from None
    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return Backend.from_str(converted.backend_tokenizer.to_str())
    except Exception as error:  # Whatever a converter raises, the file is what is wrong.
        raise TokenizerError(f"cannot convert {directory / found}: {error}") from error


def _token(value: Any, where: str, *, special: bool = True) -> AddedToken:
    """Read a token from a config: its text, or an object with its text and flags."""
    if isinstance(value, str):
        value = {"content": value}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TokenizerError(f"{where} must be a string or an object with content, not {value!r}")
    flags = {flag: bool(value.get(flag)) for flag in ("lstrip", "rstrip", "single_word")}
    # Special tokens are searched for in the text as it came.
    normalized = not special and bool(value.get("normalized", True))
    return AddedToken(value["content"], special=special, normalized=normalized, **flags)


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Named special tokens. Where both files name one, tokenizer_config.json decides."""
    sources = [
        (directory / "special_tokens_map.json", _read_json(directory / "special_tokens_map.json")),
        (directory / "tokenizer_config.json", config),
    ]
    tokens = {}
    for path, values in sources:
        extra = values.get("extra_special_tokens")
        named = dict(extra) if isinstance(extra, dict) else {}
        named.update({name: values[name] for name in _NAMED_TOKENS if name in values})
        for name, value in named.items():
            if value is not None:
                tokens[name] = _token(value, f"{path}: {name}")
    return tokens


def _add_special_tokens(
    backend: Backend, config: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> None:
    """Make the config's special tokens special in the backend too, and add those it lacks."""
    where = "tokenizer_config.json"
    wanted: list[AddedToken] = []
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(index.isdecimal() for index in declared):
        raise TokenizerError(f"{where}: added_tokens_decoder must map ids to tokens")
    for index, value in sorted(declared.items(), key=lambda item: int(item[0])):
        special = isinstance(value, dict) and bool(value.get("special"))
        token = _token(value, f"{where}: added_tokens_decoder[{index}]", special=special)
        if special or backend.token_to_id(token.content) is None:
            wanted.append(token)
    wanted += named.values()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(extra := config.get(key), list):
            wanted += [_token(value, f"{where}: {key}") for value in extra]
    known = backend.get_added_tokens_decoder().values()
    already = {token.content for token in known if token.special}
    backend.add_tokens([token for token in wanted if token.content not in already])


def _add_bos_and_eos(backend: Backend, config: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    present = backend.encode("", add_special_tokens=True).ids
    parts: list[str] = ["$A:0"]
    added: list[tuple[str, int]] = []
    for setting, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        text = texts.get(name)
        index = None if text is None else backend.token_to_id(text)
        if config.get(setting) is not True or text is None or index is None or index in present:
            continue
        added.append((text, index))
        parts.insert(0 if name == "bos_token" else len(parts), f"{text}:0")
    if not added:
        return
    template = processors.TemplateProcessing(single=parts, pair=None, special_tokens=added)
    existing = backend.post_processor
    backend.post_processor = (
        template if existing is None else processors.Sequence([existing, template])
    )


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Template files take the place of what the config holds."""
    files = {}
    if (default := _read_text(directory / "chat_template.jinja")) is not None:
        files["default"] = default
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = _read_text(path) or ""
    if files:
        return _single_or_named(files)
    value = config.get("chat_template")
    if value is None:
        value = _read_json(directory / "chat_template.json").get("chat_template")
    if value is None or isinstance(value, str):
        return value
    return _single_or_named(dict(_named_templates(value)))


def _named_templates(value: Any) -> Iterable[tuple[str, str]]:
    entries: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        entries = [{"name": name, "template": source} for name, source in value.items()]
    for entry in entries:
        name, source = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(source, str):
            break
        yield name, source
    else:
        if entries:
            return
    raise TokenizerError(
        "tokenizer_config.json: chat_template must be a string or a list of {name, template}"
    )


def _single_or_named(templates: Mapping[str, str]) -> str | dict[str, str] | None:
    if not templates:
        return None
    if list(templates) == ["default"]:
        return templates["default"]
    return dict(templates)
