"""The bytes that each token of a ``tokenizers`` vocabulary stands for.

The decoders of language models' tokenizers are of two kinds, and in both a text is the concatenation of its tokens' bytes:
byte-level BPE (GPT-2: each byte written as a printable character) and SentencePiece with byte fallback (U+2581 for a space,
``<0xE2>`` for a byte). A tokenizer with another kind of decoder (word-level, WordPiece) is refused when the service starts,
unless its model makes embeddings only.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import byte_level_bytes, sentencepiece_bytes
from sapwood_text.vocabulary import TokenTable

_SPACE = "\u2581"


def token_table(tokenizer: Tokenizer, origin: str = "the tokenizer") -> TokenTable:
    """The bytes of each token.

    Args:
        tokenizer: The tokenizer.
        origin: The file it is from, for the error.

    Raises:
        ConfigError: Its decoder is of neither kind.
    """
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    byte_level = kinds == ["ByteLevel"]
    if not byte_level and not (steps and all(map(_is_understood, steps))):
        raise ConfigError(
            f"{origin}: its decoder ({'+'.join(kinds) or 'none'}) is not supported: answers are decoded token by token, "
            "which takes byte-level BPE or SentencePiece"
        )
    bytes_of = byte_level_bytes if byte_level else sentencepiece_bytes

    def spell(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes_of(token)

    strips = any(
        (step["type"] == "Strip" and step["start"] == 1)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return TokenTable(spell, strips_leading_space=strips)


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
