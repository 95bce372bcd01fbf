"""The bytes of every token, which is all that a grammar needs to know of a tokenizer.

Tokenizers of language models write bytes in one of two ways: byte-level BPE writes each byte as a printable character (GPT-2's
table), SentencePiece writes a space as U+2581 and a byte that is no character as ``<0xE2>``. O(characters of the vocabulary).
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_common.packed_tokens import PackedTokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
# Token types of the GGUF specification that never stand for text: unknown, control, unused.
_GGUF_SPECIAL = frozenset({2, 3, 5})


@dataclass(frozen=True)
class TokenVocabulary:
    """The tokens of a model.

    Args:
        spelled: The bytes of each id; empty for an id that no token has. A special token's bytes are its name.

    Attributes:
        special_ids: Tokens that stand for no text.
        tokens: ``spelled``, packed.
        fingerprint: 16 bytes that are equal for equal vocabularies.
    """

    spelled: InitVar[Sequence[bytes]]
    special_ids: frozenset[int]
    tokens: PackedTokens = field(init=False, repr=False, compare=False)
    fingerprint: bytes = field(init=False)

    def __post_init__(self, spelled: Sequence[bytes]) -> None:
        digest = hashlib.blake2b(digest_size=16)
        tokens = PackedTokens.of(spelled)
        for part in (
            array("Q", map(len, spelled)).tobytes(),
            array("Q", sorted(self.special_ids)).tobytes(),
            tokens.joined,
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "fingerprint", digest.digest())

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of the special tokens whose name is printable, in the order of their ids."""
        names = (self.tokens[index].decode("utf-8", "replace") for index in sorted(self.special_ids))
        return tuple(dict.fromkeys(name for name in names if name and name.isprintable()))


def load_vocabulary(path: Path) -> TokenVocabulary | None:
    """The vocabulary of a model, or None where there is none: a directory without ``tokenizer.json``.

    Args:
        path: A ``.gguf`` file or a Hugging Face model directory.

    Raises:
        ConfigError: A file cannot be read; the message names it and says why.
    """
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            return vocabulary_of_json(json.loads(file.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: holds no vocabulary that can be read: {error!r}") from error
    try:
        file_ = GgufFile(path)
    except GgufError as error:
        raise ConfigError(str(error)) from error
    metadata = file_.metadata
    file_.close()
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    return vocabulary_of_gguf(metadata)


def vocabulary_of_gguf(metadata: dict[str, Any]) -> TokenVocabulary:
    """The vocabulary in a GGUF file's metadata."""
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = frozenset(index for index, kind in enumerate(types) if kind in _GGUF_SPECIAL)
    decode = byte_level_bytes if metadata.get("tokenizer.ggml.model") == "gpt2" else sentencepiece_bytes
    added = {index: tokens[index] for index, kind in enumerate(types) if kind == 4 or index in special}
    return TokenVocabulary(_decode_all(list(tokens), added, decode), special)


def vocabulary_of_json(content: dict[str, Any]) -> TokenVocabulary:
    """The vocabulary in a ``tokenizer.json``."""
    vocab = content["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((item[0], index) for index, item in enumerate(vocab))
    by_id = {index: token for token, index in pairs}
    added = {item["id"]: item["content"] for item in content.get("added_tokens") or ()}
    special = frozenset(item["id"] for item in content.get("added_tokens") or () if item.get("special"))
    size = max(max(by_id, default=-1), max(added, default=-1)) + 1
    tokens = [by_id.get(index, "") for index in range(size)]
    decoder = json.dumps(content.get("decoder") or {})
    return TokenVocabulary(
        _decode_all(tokens, added, byte_level_bytes if '"ByteLevel"' in decoder else sentencepiece_bytes), special
    )


def _decode_all(tokens: list[str], added: dict[int, str], decode: Any) -> list[bytes]:
    decoded = [decode(token) for token in tokens]
    for index, text in added.items():  # added tokens are written as plain text
        decoded[index] = text.encode("utf-8", "replace")
    return decoded


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token as SentencePiece writes it."""
    if token.startswith("<0x") and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte.group(1), 16)])
    return token.replace(_SPACE, " ").encode("utf-8", "surrogateescape")


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token as byte-level BPE writes it."""
    try:
        return bytes([_FROM_PRINTABLE[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogateescape")


def printable_bytes() -> dict[int, str]:
    """GPT-2's table: each byte as itself where that is printable, else as the next free character from U+0100."""
    printable = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    others = (byte for byte in range(256) if byte not in printable)
    return printable | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


_FROM_PRINTABLE = {character: byte for byte, character in printable_bytes().items()}
