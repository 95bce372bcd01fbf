"""Copies arrays between host and device without waiting for the device's other work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor with the array's contents. The array may be changed afterwards only if ``device`` is not the CPU.

    It goes through pinned memory: a copy from ordinary memory would wait for all that is queued on the device.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopies:
    """Tensors on their way to the host.

    Args:
        tensors: All on one device; later work on its current stream may change them.
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
