"""Makes the operations of a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps


def cache_folder() -> Path:
    """The folder in which measurements and compiled kernels are kept for later starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sapwood"


def device_ops(device: str | torch.device) -> DeviceOps:
    """The operations of a torch device; the plain references for one that we have no kernels for."""
    device = torch.device(device)
    if device.type == "cuda":
        from sapwood_kernels.ops.cuda import CudaOps  # only CUDA builds of torch have triton

        return CudaOps(device)
    return CpuOps(device) if device.type == "cpu" else DeviceOps(device)
