"""Load a tokenizer from a directory in the layout of the model hub.

`tokenizer.json` is the tokenizer. `tokenizer_config.json` and the older `special_tokens_map.json`
name the special tokens among its tokens and hold the chat template, unless that has files of its
own (`chat_template.jinja`, and `additional_chat_templates/NAME.jinja`).

Older models have only a SentencePiece `tokenizer.model`; the kind that Llama uses is read directly.
Any other kind, and `vocab.json` with `merges.txt`, is left to transformers to convert.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from .gguf_tokenizer import build_tokenizer
from .sentencepiece_file import read_sentencepiece
from .tokenizer_parts import TokenizerError, TokenizerParts

__all__ = ["load_tokenizer"]

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def load_tokenizer(directory: Path) -> TokenizerParts:
    """Load the tokenizer in `directory`.

    Raises:
        TokenizerError: a file is missing or malformed; the message names it.
    """
    config = _read_json(directory / "tokenizer_config.json")
    parts = _read_backend(directory, config)
    named = _special_tokens(directory, config)
    _add_special_tokens(parts.backend, config, named)
    parts.special_tokens.update((key, token.content) for key, token in named.items())
    _add_bos_and_eos(parts.backend, config, parts.special_tokens)
    parts.eos_token_ids = None
    parts.chat_templates = _read_chat_templates(directory, config)
    return parts


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


def _read_backend(directory: Path, config: dict[str, Any]) -> TokenizerParts:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return TokenizerParts(Backend.from_file(str(path)))
        except Exception as error:  # The library raises a bare Exception.
            raise TokenizerError(f"{path} is not a valid tokenizer: {error}") from None
    others = ("tokenizer.model", "vocab.json")
    found = [directory / name for name in others if (directory / name).is_file()]
    if not found:
        raise TokenizerError(
            f"{directory} has no tokenizer: none of tokenizer.json, {', '.join(others)} is there"
        )
    if found[0].name == "tokenizer.model" and (vocabulary := read_sentencepiece(found[0])):
        # These models expect a BOS unless the config says otherwise; it may also name another one.
        config.setdefault("add_bos_token", True)
        return build_tokenizer(vocabulary | {"tokenizer.ggml.add_bos_token": False})
    return TokenizerParts(_convert_with_transformers(directory, found[0].name))


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


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files take the place of what the config holds."""
    files = {}
    if (default := _read_text(directory / "chat_template.jinja")) is not None:
        files["default"] = default
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = _read_text(path) or ""
    if files:
        return files
    value = config.get("chat_template")
    if value is None:
        value = _read_json(directory / "chat_template.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    return dict(_named_templates(value))


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
