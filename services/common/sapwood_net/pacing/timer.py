"""One timer of a connection, which is set again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls the last given function once its time is over."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether it was started, and neither stopped nor set off since."""
        return self._handle is not None

    def start(self, seconds: float, then: Callable[..., None], *given: object) -> None:
        """Calls ``then(*given)`` in this many seconds, instead of the function given before."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._set_off, then, given)

    def stop(self) -> None:
        """Calls nothing any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set_off(self, then: Callable[..., None], given: tuple[object, ...]) -> None:
        self._handle = None
        then(*given)
