"""The KV cache on the device, if its memory is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.model.pools.host_pool import available_memory
from sapwood_worker.records.kv_layout import KVLayout

_GIB = 1 << 30


def build_device_pool(
    layout: KVLayout, counts: Sequence[int], device: torch.device, scales: KVScales | None
) -> DevicePool:
    """The pages.

    Args:
        layout: What a page holds.
        counts: Pages of each group of the layout, the scratch page included.
        device: Where they lie.
        scales: The factors of a float8 pool.

    Raises:
        ConfigError: The device does not have that much memory free. A CPU would have it until the pages are written, and its
            kernel would then end some process.
    """
    wanted = sum(count * layout.group_bytes(group) for group, count in enumerate(counts))
    if device.type == "cpu" and wanted > (free := available_memory() or wanted):
        raise _too_large(wanted, f"the {free / _GIB:.1f} GiB of memory that are free")
    try:
        return DevicePool(layout, counts, device, scales)
    except torch.OutOfMemoryError:
        raise _too_large(wanted, f"what is free of {device}") from None


def _too_large(wanted: int, room: str) -> ConfigError:
    return ConfigError(
        f"the KV cache of {wanted / _GIB:.1f} GiB does not fit in {room}: give --kv-cache-gb or --num-pages less"
    )
