"""The bytes that each token stands for.

The decoders of language models' tokenizers are of two kinds, and in both a text is the concatenation of its tokens' bytes:
byte-level BPE (GPT-2: each byte written as a printable character) and SentencePiece with byte fallback (U+2581 for a space,
``<0xE2>`` for a byte). So decoding a stream takes one look-up for each token and an incremental UTF-8 decoder, O(1) for each
token, and no window is decoded again. A tokenizer with another kind of decoder (word-level, WordPiece) is refused when the
service starts, unless its model makes embeddings only.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import byte_level_bytes, sentencepiece_bytes

_SPACE = "\u2581"


class TokenBytes:
    """Looks up the bytes of a token.

    Attributes:
        strips_leading_space: Whether one space at the start of a text is not part of it (SentencePiece's dummy prefix).

    Args:
        tokenizer: The tokenizer.
        origin: The file it is from, for the error.

    Raises:
        ConfigError: Its decoder is of neither kind.
    """

    def __init__(self, tokenizer: Tokenizer, origin: str = "the tokenizer") -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        if not self._byte_level and not (steps and all(map(_is_understood, steps))):
            raise ConfigError(
                f"{origin}: its decoder ({'+'.join(kinds) or 'none'}) is not supported: answers are decoded token by token, "
                "which takes byte-level BPE or SentencePiece"
            )
        self.strips_leading_space = any(
            (step["type"] == "Strip" and step["start"] == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that no token has."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def text(self, token_id: int) -> str | None:
        """The text of a token where its bytes are whole characters, else None."""
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text = self.of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token_id] = text
        return text

    def _compute(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return byte_level_bytes(token) if self._byte_level else sentencepiece_bytes(token)


def _is_understood(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder is one of SentencePiece's, with its usual settings."""
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == _SPACE and content == " ")
        case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
            return start in (0, 1)
        case {"type": "Metaspace", "replacement": replacement}:
            return bool(replacement == _SPACE)
        case _:
            return step["type"] in ("ByteFallback", "Fuse")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
