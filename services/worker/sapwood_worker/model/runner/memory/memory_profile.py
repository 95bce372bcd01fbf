"""How much of a GPU's memory is left for the KV cache: measured by a trial of the largest step, not guessed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from sapwood_common.errors import ConfigError

logger = logging.getLogger(__name__)
_GIB = 1 << 30


def measure_pool_bytes(device: torch.device, fraction: float, trial: Callable[[], int]) -> int:
    """Bytes for the cache, so that with the weights and the largest step ``fraction`` of the device's memory is used.

    Args:
        device: A CUDA device, with the weights on it.
        fraction: In (0, 1]; memory that other programs use counts as used.
        trial: Computes the largest step with all of a runner's buffers and a small cache; returns that cache's bytes.

    Raises:
        ConfigError: No memory is left.
    """
    _release(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    cache = trial()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_reserved(device) - before - cache
    _release(device)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    left = int(total * fraction) - used - step
    logger.info(
        "memory: %.1f of %.1f GiB used, %.1f for the largest step, %.1f for the KV cache",
        used / _GIB, total / _GIB, step / _GIB, left / _GIB,
    )  # fmt: skip
    if left <= 0:
        raise ConfigError(
            f"--memory-fraction {fraction}: of {total / _GIB:.1f} GiB {used / _GIB:.1f} are used and a step needs "
            f"{step / _GIB:.1f} more: nothing is left for the KV cache"
        )
    return left


def _release(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
