"""The tokens that end an answer of a model: those of its settings, its tokenizer's own and its chat template's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sapwood_common.models.end_tokens import end_ids, turn_ends
from sapwood_common.models.gguf_file import GgufFile
from sapwood_common.models.json_file import read_json_object

_CONTROL, _USER_DEFINED = 3, 4


def read_hf_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End tokens of a Hugging Face directory; ids that are none are dropped, with a line in the log.

    ``eos_token_id`` of generation_config.json, or of config.json if that has none; ``eos_token`` of the tokenizer; and the tokens
    that end a turn in the chat template.

    Raises:
        ConfigError: A file cannot be read.
    """
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        values = _read(directory / file)
        nested = values.get("text_config")
        for each in (values, nested if isinstance(nested, dict) else {}):
            if not ids:
                ids = end_ids(each.get("eos_token_id"), vocab_size, f"{directory / file}: eos_token_id")
    settings = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    added = _added_tokens(directory, settings)
    named = settings.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str):
        own = added.get(text)
        own = _in_vocabulary(directory, text) if own is None else own
        ids += end_ids(own, vocab_size, f"{directory / 'tokenizer_config.json'}: eos_token")
    ends = turn_ends(added, _template(directory, settings))
    ids += [each for each in ends if each < vocab_size]
    return tuple(dict.fromkeys(ids))


def read_gguf_eos(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """The same of a GGUF file: what the metadata names, and special tokens that end a turn."""
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ids += end_ids(file.metadata.get(key), vocab_size, f"{file.path}: {key}")
    ids += end_ids(file.metadata.get("tokenizer.ggml.eos_token_ids"), vocab_size, f"{file.path}: eos_token_ids")
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    special = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    }
    template = file.metadata.get("tokenizer.chat_template")
    ids += turn_ends(special, template if isinstance(template, str) else None)
    return tuple(sorted({each for each in ids if each < vocab_size}))


def _added_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, int]:
    """The added tokens, special ones and others, by their text."""
    listed = settings.get("added_tokens_decoder")
    found = {}
    if isinstance(listed, dict):
        found = {
            token["content"]: int(index)
            for index, token in listed.items()
            if index.isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
        }
    if not found:
        added = _read(directory / "tokenizer.json").get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
                found[token["content"]] = token["id"]
    more = _read(directory / "added_tokens.json")
    return found | {text: index for text, index in more.items() if isinstance(index, int)}


def _in_vocabulary(directory: Path, text: str) -> int | None:
    model = _read(directory / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    index = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return index if isinstance(index, int) else None


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8", "replace")
    found = settings.get("chat_template", _read(directory / "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        found = next((each.get("template") for each in found if isinstance(each, dict)), None)
    return found if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
