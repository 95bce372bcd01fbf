"""Compiled kernels before they are asked for: from an archive, or by compilers that run while the weights load."""

from __future__ import annotations

import logging
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from sapwood_common.errors import ConfigError
from sapwood_kernels.attention.planned import AttentionShape
from sapwood_kernels.compiled import archive, places
from sapwood_kernels.compiled.early import EarlyBuild, begin_flashinfer
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionNeeds
from sapwood_worker.model.attention.registry import choose_backend
from sapwood_worker.model.checkpoint.hf_config import read_hf_config

logger = logging.getLogger(__name__)


def this_machine() -> archive.Facts:
    """What kernels that are compiled for the current GPU depend on."""
    return archive.machine_facts(torch.cuda.get_device_capability(), str(torch.version.cuda))


def take_kernels(path: Path, facts: archive.Facts | None = None) -> None:
    """Puts the kernels of an archive where they are looked for, if it is for this machine; the log says if not, and why.

    Args:
        path: The archive, or a folder of archives.
        facts: This machine's; None: they are looked up.

    Raises:
        ConfigError: There is no such file or folder, or an archive is damaged.
    """
    facts = this_machine() if facts is None else facts
    began = time.monotonic()
    if not path.exists():
        raise ConfigError(f"--kernels {path}: there is no such file or folder")
    archives = sorted(path.glob("*.tgz")) if path.is_dir() else [path]
    unfit = []
    try:
        for each in archives:
            unlike = archive.differences(archive.read_facts(each), facts)
            if unlike:
                unfit.append(f"{each.name} is for {'; '.join(unlike)}")
                continue
            folder = places.flashinfer_folder()
            new = archive.unpack(each, places.triton_cache(), folder)
            places.take_flashinfer_from(folder)
            logger.info(
                "kernels: %s has %d of Triton's and %d of FlashInfer's that were not here; %.1f s",
                each.name, *new, time.monotonic() - began,
            )  # fmt: skip
            return
    except (ValueError, OSError) as error:
        raise ConfigError(f"--kernels {path}: {error}") from error
    logger.warning(
        "--kernels %s: nothing for this machine, kernels are compiled: %s", path, "; ".join(unfit) or "empty"
    )


def begin_kernels(
    path: Path, setting: str, page_size: int, dtype: torch.dtype, ops: DeviceOps, *, float8: bool
) -> EarlyBuild | None:
    """Begins to compile FlashInfer's libraries for a model whose weights are not loaded yet; None: there are none to compile.

    Triton's kernels are compiled when they are first launched, at the latest when graphs are captured.

    Args:
        path: The model.
        setting: As ``attention.registry.choose_backend`` takes it.
        page_size: Tokens in a page.
        dtype: The dtype of queries.
        ops: The operations of the device.
        float8: Whether the cache is float8.

    Raises:
        ConfigError: The model's configuration cannot be read, or no attention backend can serve it.
    """
    if ops.device.type != "cuda" or find_spec("flashinfer") is None or not path.is_dir():
        return None
    _, config = read_hf_config(path)
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype)
    cached = torch.float8_e4m3fn if float8 else dtype
    kinds = tuple(dict.fromkeys(config.kinds))
    needs = AttentionNeeds(shape, cached, kinds, config.max_position, latent=config.latent is not None)
    prefill = choose_backend(setting, "prefill", needs, ops).name == "flashinfer"
    decode = choose_backend(setting, "decode", needs, ops).name == "flashinfer" and not float8
    if not prefill and not decode:
        return None
    return begin_flashinfer(kinds, config.head_dim, dtype, prefill=prefill, decode=decode)
