"""What a runner's numbers depend on: which model files, and how they are computed with."""

from __future__ import annotations

from pathlib import Path

import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.fingerprint import model_fingerprint, sampled_fingerprint
from sapwood_worker.model.pools.device_pool import KVScales
from sapwood_worker.model.runner.options import DTYPES, RunnerOptions
from sapwood_worker.records.kv_layout import KVLayout


def assure_equal(options: RunnerOptions) -> None:
    """Compares all ranks; raises ConfigError if another one has read other model files, or runs another torch."""
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
    """What a page in a store is named after, beside its tokens: runners with the same identity may read each other's pages.

    The number of ranks is part of it where another number of ranks would have other weights: scales of a part of a quantised
    matrix may differ from those of the whole, and made-up weights do.

    Args:
        options: The runner's.
        computed: The dtype, and how linear layers are quantised.
        layout: What a page holds, as one rank keeps it.
        scales: The factors of a float8 cache.
        variants: How rotary positions differ from the model's own.
    """
    made_up = f"dummy-{options.seed}" if options.load_format == "dummy" else ""
    tensor, pipeline = options.parallel.tp.size, options.parallel.pp.size
    ranks = tensor * pipeline if made_up else 1 if computed in DTYPES else tensor
    parts = (
        model_fingerprint(options.model_path),
        made_up,
        computed,
        "" if scales is None else str(scales),
        layout.identity,
        torch.device(options.device).type,
        *((f"{ranks} ranks",) if ranks > 1 else ()),
        *variants,
    )
    return "|".join(parts)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """The model's files, with their sizes and times: what changes if they are replaced."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
