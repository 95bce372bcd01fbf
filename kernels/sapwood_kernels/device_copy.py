"""Arrays between host and device without waiting for what the device is at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor with the array's contents. The array may be changed afterwards only if ``device`` is not the CPU.

    A copy from ordinary memory would wait until the device has done all it was asked to before; one from pinned memory does
    not.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopies:
    """Tensors on their way to the host.

    Args:
        tensors: All on one device; they may be changed as soon as this returns.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None  # torch.cuda.Event has no type without CUDA
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # torch takes pinned memory
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._tensors = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """The copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
