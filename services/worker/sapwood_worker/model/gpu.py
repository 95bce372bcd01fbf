"""Checks at the start whether a GPU can run a worker: what would else fail in the middle of loading, or be slow unseen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sapwood_common.errors import ConfigError

_GIB = 1 << 30
_OLDEST = (7, 0)
_BFLOAT16, _FLOAT8 = (8, 0), (8, 9)
"""The first compute capabilities that compute with bfloat16 and with float8."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts about a GPU.

    Attributes:
        name: The maker's.
        capability: Its compute capability.
        built_for: What torch is built for, for example ``sm_90`` or, as code that is compiled when it is loaded, ``compute_90``.
        free: Bytes of memory that nobody uses.
        total: Bytes of memory.
    """

    name: str
    capability: tuple[int, int]
    built_for: Sequence[str]
    free: int
    total: int


def read_gpu(device: torch.device) -> Gpu:
    """The facts about a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    capability = torch.cuda.get_device_capability(device)
    return Gpu(torch.cuda.get_device_name(device), capability, torch.cuda.get_arch_list(), free, total)


def check_gpu(
    gpu: Gpu, *, dtype: str, kv_cache_dtype: str, quantization: str, memory_fraction: float | None
) -> list[str]:
    """What speaks against a worker on this GPU without ruling it out, for the log.

    Args:
        gpu: The GPU.
        dtype: As the flag of that name; ``auto`` is bfloat16.
        kv_cache_dtype: As the flag.
        quantization: As the flag.
        memory_fraction: As the flag; None: the cache's memory is given.

    Raises:
        ConfigError: It cannot run; names the GPU and what it lacks.
    """
    has = ".".join(map(str, gpu.capability))
    this = f"{gpu.name} (compute capability {has})"
    if gpu.capability < _OLDEST:
        raise ConfigError(f"--device: {this} is too old: the kernels need 7.0")
    built_for = [built for built in gpu.built_for if not built.startswith("gfx")]  # AMD's are named otherwise
    if built_for and not any(_runs(built, gpu.capability) for built in built_for):
        built = ", ".join(built_for)
        raise ConfigError(
            f"--device: torch {torch.__version__} is built for {built}, not for {this}: install one that is"
        )
    if dtype in ("auto", "bfloat16") and gpu.capability < _BFLOAT16:
        raise ConfigError(
            f"--dtype {dtype}: {this} does not compute in bfloat16, which needs 8.0: take --dtype float16"
        )
    if kv_cache_dtype == "fp8_e4m3" and gpu.capability < _FLOAT8:
        raise ConfigError(f"--kv-cache-dtype fp8_e4m3: {this} has no float8, which needs 8.9")
    if gpu.free < _GIB:
        raise ConfigError(f"--device: {this} has {gpu.free / _GIB:.1f} of {gpu.total / _GIB:.1f} GiB of memory free")
    warnings = []
    if quantization.startswith("fp8") and gpu.capability < _FLOAT8:
        warnings.append(
            f"--quantization {quantization}: {this} multiplies no float8; weights are widened for each product: slow"
        )
    if memory_fraction is not None and gpu.free < 0.8 * memory_fraction * gpu.total:
        warnings.append(
            f"others use {(gpu.total - gpu.free) / _GIB:.1f} of {this}'s {gpu.total / _GIB:.1f} GiB, which count into "
            f"--memory-fraction {memory_fraction}: the KV cache will be smaller"
        )
    return warnings


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """Whether code of a build's architecture runs: binaries on the same major version, portable code on all that follow."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", built)
    if found is None:
        return False
    version = int(found[2]), int(found[3])
    return version <= capability and (found[1] == "compute" or version[0] == capability[0])
