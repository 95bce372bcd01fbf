"""What a runner's outputs depend on: the model files, and how the model is computed."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_parts import part_names
from sapwood_worker.model.pools.device_pool import KVScales
from sapwood_worker.model.runner.options import DTYPES, RunnerOptions
from sapwood_worker.records.kv_layout import KVLayout


def assure_equal(options: RunnerOptions) -> None:
    """Compares all ranks; raises ConfigError if ranks have read different model files, or run different versions of torch."""
    path = options.model_path
    own = str(torch.__version__), _stamps(path) if options.nodes == 1 else sampled_fingerprint(path)
    for rank, (version, files) in enumerate(
        options.parallel.exchange(own, tuple[str, list[tuple[str, int, int]] | str])
    ):
        if version != own[0]:
            raise ConfigError(f"rank {rank} runs torch {version}, this one {own[0]}")
        if files != own[1]:
            raise ConfigError(f"{path}: rank {rank} has found other files there: were they replaced just now?")


def cache_identity(
    options: RunnerOptions, computed: str, layout: KVLayout, scales: KVScales | None, variants: tuple[str, ...]
) -> str:
    """The part of a stored page's name besides its tokens: runners with the same identity may read each other's pages.

    The number of ranks is part of it if it changes the weights: a part of a quantised matrix may have other scales than the
    whole, and dummy weights differ.

    Args:
        options: The runner's.
        computed: The dtype, and how linear layers are quantised.
        layout: What a page holds, as one rank keeps it.
        scales: The factors of a float8 cache.
        variants: Changes to the model's own rotary positions.
    """
    dummy = f"dummy-{options.seed}" if options.load_format == "dummy" else ""
    tensor, pipeline = options.parallel.tp.size, options.parallel.pp.size
    ranks = tensor * pipeline if dummy else 1 if computed in DTYPES else tensor
    parts = (
        model_fingerprint(options.model_path),
        dummy,
        computed,
        "" if scales is None else str(scales),
        layout.identity,
        torch.device(options.device).type,
        *((f"{ranks} ranks",) if ranks > 1 else ()),
        *variants,
    )
    return "|".join(parts)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """The model's files, with their sizes and times, which change if a file is replaced."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


# A hash that identifies a model's content, independent of file names.
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
    """A hash of the names and sizes of a model's files and of samples of their content. Different trainings of one model have
    different hashes.

    It reads only 64 pieces of 64 KiB of a large file, so that its time is small compared to loading.

    Args:
        path: See :func:`model_fingerprint`.
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
