"""What a device still works on: tensors on their way to the host, and marks in its queue."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor


class HostCopies:
    """Tensors on their way to the host.

    Args:
        tensors: In the host's memory, perhaps still being filled.
        wait: Returns once they are filled.
        check: Returns at once; raises what the device has failed with.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        wait: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._tensors = tensors
        self._wait = wait
        self._check = check

    def wait(self) -> list[Tensor]:
        """Waits for the copies and returns them."""
        self._wait()
        return self._tensors

    def check(self) -> None:
        """Raises what the device is known to have failed with; does not wait."""
        self._check()


class Fence:
    """A mark in the work queued on a device. This class serves a device that queues nothing."""

    def set(self) -> None:
        """Sets the mark after all that is queued on the current stream."""

    def wait(self) -> None:
        """Waits until the device has reached the mark; at once if none was set."""


class Moment:
    """When a device was done with all that had been queued on the current stream. This class serves one that queues nothing."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds from another moment to this one; the device must have reached both."""
        return self._at - earlier._at
