"""A queue of a device's along with the one that computes: what waits there for another device holds no computation up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class SideQueue:
    """Here for a device that queues nothing: what is called is done at once, in the order of the calls."""

    def behind(self, used: Tensor) -> AbstractContextManager[None]:
        """While it is entered, work continues this queue, after all that the current one has got so far.

        Args:
            used: Was made on the current queue; keeps its memory until this queue is done with it.
        """
        return nullcontext()


class CudaSideQueue(SideQueue):
    """A CUDA stream.

    Args:
        device: Its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def behind(self, used: Tensor) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(used.device))
        used.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
