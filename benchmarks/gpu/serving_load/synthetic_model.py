"""A model folder without weights and without a real vocabulary: a configuration, and a tokenizer.json of the size it names.

Models with random weights have no tokenizer, but a server that answers with text needs one. The made-up one is byte-level BPE
without merges, as Llama 3's and Qwen's are with them: the 256 bytes first, then words of letters, each with a space before it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import string
from collections.abc import Iterator
from pathlib import Path

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that GPT-2's table writes as the character of the same number; the others follow from 256 on."""


def write_model(config: Path, folder: Path) -> None:
    """Writes the folder of a model.

    Args:
        config: A folder with a ``config.json`` that names a ``vocab_size``.
        folder: Exists.
    """
    shutil.copy(config / "config.json", folder)
    size = json.loads((config / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of(size)))


def tokenizer_of(size: int) -> dict[str, object]:
    """The content of a ``tokenizer.json`` with ``size`` tokens, at least 256."""
    vocabulary = dict(zip(itertools.chain(_byte_characters(), _words()), range(size), strict=False))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    characters = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def _words() -> Iterator[str]:
    """\u0120a, \u0120b, ... \u0120aa, ... without end; \u0120 stands for a space."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "\u0120" + "".join(letters)
