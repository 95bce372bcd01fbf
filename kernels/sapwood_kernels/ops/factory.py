"""Makes the operations of a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.ops.fixed_order import FixedOrderCpuOps


def cache_folder() -> Path:
    """The folder in which measurements and compiled kernels are kept for later starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sapwood"


def device_ops(device: str | torch.device, *, fixed_order: bool = False) -> DeviceOps:
    """The operations of a torch device; the plain references for one that we have no kernels for.

    Args:
        device: A CPU or a CUDA GPU, if ``fixed_order``.
        fixed_order: Whether each row of a product comes out the same whatever rows are computed with it.
    """
    device = torch.device(device)
    if device.type == "cuda":  # only CUDA builds of torch have triton
        from sapwood_kernels.ops.cuda import CudaOps
        from sapwood_kernels.ops.fixed_order_cuda import FixedOrderCudaOps

        return FixedOrderCudaOps(device) if fixed_order else CudaOps(device)
    if fixed_order:
        assert device.type == "cpu"
        return FixedOrderCpuOps(device)
    return CpuOps(device) if device.type == "cpu" else DeviceOps(device)
