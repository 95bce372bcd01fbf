"""Loads a tokenizer from whichever file of the known kinds a directory holds.

``tokenizer.json`` is taken where it is; else a SentencePiece ``tokenizer.model``, a tiktoken file, a ``tekken.json``; else
transformers is asked, if it is installed: it turns the older files (``vocab.json`` and ``merges.txt``, ``vocab.txt``,
``spiece.model``) into one of the library's tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.vocab.load_rehearsal import is_panic, rehearse
from sapwood_tokenizer.vocab.ranked_vocab import is_tiktoken, load_tekken, load_tiktoken, special_ids
from sapwood_tokenizer.vocab.sentencepiece_vocab import load_sentencepiece
from sapwood_tokenizer.vocab.special_tokens import VocabularyError, put_around, token_text

READ_SETTINGS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "chat_template",
    "added_tokens_decoder", "model_max_length",
)  # fmt: skip
"""The settings of tokenizer_config.json that are read."""
READ_WITHOUT_JSON = ("add_bos_token", "add_eos_token")
"""Settings that are read where there is no tokenizer.json; that file says itself which tokens surround a text."""
REFUSED_SETTINGS: Mapping[str, str] = {
    "split_special_tokens": "special tokens in a text would be text",
    "fix_mistral_regex": "texts would be cut otherwise than tokenizer.json says; change its pre_tokenizer",
}
"""Settings that change tokens in spite of a tokenizer.json, if they are true, and how."""
REFUSED_WITHOUT_JSON: Mapping[str, str] = {
    "add_prefix_space": "false leaves out the space before a text",
    "sp_model_kwargs": "they change how SentencePiece cuts a text",
}
"""The same for a SentencePiece file; the first is harmless if it is true."""
_TOKENIZER_JSON = "tokenizer.json"
_TEKKEN = "tekken.json"
_OTHERS = "tokenizer.json, tokenizer.model, *.tiktoken, tiktoken.model or tekken.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and the file it is from.

    Attributes:
        tokenizer: Encodes and decodes.
        file: The tokenizer's file.
        special_tokens: The texts of ``bos_token`` and the like, as far as the file knows them.
    """

    tokenizer: Tokenizer
    file: Path
    special_tokens: dict[str, str] = field(default_factory=dict)


def load_vocabulary(path: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer of a directory or file.

    Args:
        path: A directory, or a vocabulary file of a known kind.
        settings: The settings of the ``tokenizer_config.json`` next to it.

    Raises:
        ConfigError: There is no vocabulary, or it cannot be used; the message names the file and says why.
    """
    file = _file_in(path) if path.is_dir() else path
    if file is None:
        return _through_transformers(path)
    try:
        if file.suffix == ".json":
            return _from_tekken(file, settings) if file.name == _TEKKEN else _from_json(file)
        return _from_tiktoken(file, settings) if is_tiktoken(file) else _from_sentencepiece(file, settings)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except VocabularyError as error:
        raise ConfigError(f"{file}: {error}") from error


def refuse_settings(directory: Path, file: Path, settings: Mapping[str, Any]) -> None:
    """Refuses settings of ``tokenizer_config.json`` that would change tokens and that nothing here reads.

    Along with a tokenizer.json only ``REFUSED_SETTINGS`` do: transformers leaves all others to that file, too.

    Args:
        directory: Where the settings stand.
        file: The vocabulary.
        settings: The settings.

    Raises:
        ConfigError: There is one; the message names the file and the setting.
    """
    found = {name: why for name, why in REFUSED_SETTINGS.items() if settings.get(name)}
    if file.suffix == ".model":
        if settings.get("add_prefix_space") is False:
            found["add_prefix_space"] = REFUSED_WITHOUT_JSON["add_prefix_space"]
        if settings.get("sp_model_kwargs"):
            found["sp_model_kwargs"] = REFUSED_WITHOUT_JSON["sp_model_kwargs"]
    for name, why in found.items():
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: {name} ({settings[name]!r:.60}) is not supported: {why}; if that is "
            "not meant, remove it from the file (docs/checkpoint-keys.md lists what is known)"
        )


def _file_in(directory: Path) -> Path | None:
    named = [directory / name for name in (_TOKENIZER_JSON, "tokenizer.model", "tiktoken.model", _TEKKEN)]
    tiktoken = sorted(directory.glob("*.tiktoken"))
    return next((file for file in (*named[:3], *tiktoken, named[3]) if file.is_file()), None)


def _from_json(file: Path) -> Vocabulary:
    rehearse(file)
    try:
        return Vocabulary(Tokenizer.from_file(str(file)), file)
    except BaseException as error:  # the library raises plain Exception, and panics
        if isinstance(error, Exception) or is_panic(error):
            raise ConfigError(f"{file}: {error}") from error
        raise


def _from_sentencepiece(file: Path, settings: Mapping[str, Any]) -> Vocabulary:
    model = load_sentencepiece(file)
    _add_listed(model.tokenizer, special_ids(settings), settings, file)
    named = {"bos_token": model.bos, "eos_token": model.eos, "unk_token": model.unknown}
    named |= {name: text for name in named if (text := token_text(settings.get(name))) is not None}
    _put_around(model.tokenizer, named["bos_token"], named["eos_token"], settings)
    return Vocabulary(model.tokenizer, file, {name: text for name, text in named.items() if text is not None})


def _from_tiktoken(file: Path, settings: Mapping[str, Any]) -> Vocabulary:
    tokenizer, bos = load_tiktoken(file, special_ids(settings))
    bos = token_text(settings.get("bos_token")) or bos
    _put_around(tokenizer, bos, None, settings)
    return Vocabulary(tokenizer, file, {} if bos is None else {"bos_token": bos})


def _from_tekken(file: Path, settings: Mapping[str, Any]) -> Vocabulary:
    tokenizer = load_tekken(file)
    _put_around(tokenizer, "<s>", "</s>", settings)
    return Vocabulary(tokenizer, file, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def _through_transformers(directory: Path) -> Vocabulary:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"--model: {directory} holds no {_OTHERS}; other tokenizers are loaded through transformers, which is not "
            "installed: pip install transformers"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any class
        reason = shorten(str(error), 300, placeholder=" ...")  # several lines; the first may say nothing
        raise ConfigError(
            f"--model: {directory} holds no {_OTHERS}, and transformers finds no tokenizer in it: {reason}; "
            "the model's tokenizer.json belongs there"
        ) from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ConfigError(
            f"--model: {directory}: transformers has its tokenizer, {type(loaded).__name__}, in Python only, which is not "
            "supported; convert it to a tokenizer.json"
        )
    named = {name: text for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    return Vocabulary(loaded.backend_tokenizer, directory, named)


def _add_listed(tokenizer: Tokenizer, listed: Mapping[str, int], settings: Mapping[str, Any], file: Path) -> None:
    """Adds the tokens that the settings list and the file does not have."""
    attributes = settings.get("added_tokens_decoder", {})
    for text, index in sorted(listed.items(), key=lambda item: item[1]):
        one = attributes[str(index)]
        flags = {name: bool(one.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = AddedToken(text, special=bool(one.get("special", False)), **flags)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(text) != index:
            raise ConfigError(
                f"{file}: tokenizer_config.json gives {text!r} the id {index}, but it has {tokenizer.token_to_id(text)}"
            )


def _put_around(tokenizer: Tokenizer, bos: str | None, eos: str | None, settings: Mapping[str, Any]) -> None:
    """Has texts begin with BOS unless the settings say otherwise, and end with EOS if the settings say so."""
    put_around(
        tokenizer,
        bos if settings.get("add_bos_token", True) else None,
        eos if settings.get("add_eos_token", False) else None,
    )
