"""A hash that tells one model from every other, whatever its files are called."""

from __future__ import annotations

from pathlib import Path

import xxhash

from sapwood_common.models.gguf_parts import part_names

_BLOCK = 8 << 20
_SAMPLE, _SAMPLES = 1 << 16, 64
_PARTS = (".safetensors", ".gguf", ".json")


def model_fingerprint(path: Path) -> str:
    """A hash of all bytes that make a model: its weights, its configuration, its tokenizer. O(bytes), at the speed of reading.

    Args:
        path: A ``.gguf`` file, the first of several, or a Hugging Face directory.
    """
    state = xxhash.xxh3_128()
    files = _files(path)
    buffer = bytearray(_BLOCK)
    for file in files:
        state.update(f"{file.suffix}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as content:
            while count := content.readinto(buffer):
                state.update(memoryview(buffer)[:count])
    return state.hexdigest()


def sampled_fingerprint(path: Path) -> str:
    """A hash of the names and sizes of a model's files and of samples of their content. It tells trainings of the same model
    apart.

    Of large files it reads 64 pieces of 64 KiB, so that it takes no time beside the loading.

    Args:
        path: As of :func:`model_fingerprint`.
    """
    state = xxhash.xxh3_128()
    files = _files(path)
    for file in files:
        size = file.stat().st_size
        state.update(f"{'' if path.is_file() else file.name}:{size}:".encode())
        with file.open("rb", buffering=0) as content:
            for number in range(_SAMPLES):
                content.seek(max(size - _SAMPLE, 0) * number // (_SAMPLES - 1))
                state.update(content.read(_SAMPLE))
                if size <= _SAMPLE:
                    break
    return state.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path, *filter(Path.is_file, map(path.with_name, part_names(path.name)[1:]))]
    return sorted(each for each in path.iterdir() if each.suffix in _PARTS)
