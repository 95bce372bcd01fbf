"""A hash that tells one model from every other, whatever its files are called."""

from __future__ import annotations

from pathlib import Path

import xxhash

_BLOCK = 8 << 20
_PARTS = (".safetensors", ".gguf", ".json")


def model_fingerprint(path: Path) -> str:
    """A hash of all bytes that make a model: its weights, its configuration, its tokenizer. O(bytes), at the speed of reading.

    Args:
        path: A ``.gguf`` file or a Hugging Face directory.
    """
    state = xxhash.xxh3_128()
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _PARTS)
    buffer = bytearray(_BLOCK)
    for file in files:
        state.update(f"{file.suffix}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as content:
            while count := content.readinto(buffer):
                state.update(memoryview(buffer)[:count])
    return state.hexdigest()
