"""Copies of pages between device and host, as the scheduler asks for them and the runner reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]
NOT_REPORTED = -1
"""The number of a copy whose end nobody is told: a load."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One batch of pages.

    Attributes:
        number: The batch's number in reports, or ``NOT_REPORTED``.
        device: int32 [n]: page ids of the device pool.
        host: int32 [n]: page ids of the host pool; page ``host[i]`` is the copy of ``device[i]``.
        windows: The same as ``device`` for each further group of the layout's components; -1: nothing is copied.
    """

    number: int
    device: PageIds
    host: PageIds
    windows: tuple[PageIds, ...] = ()

    def of(self, group: int) -> tuple[PageIds, PageIds]:
        """The pages of a group, and their host pages."""
        if not group:
            return self.device, self.host
        there = self.windows[group - 1] >= 0
        return self.windows[group - 1][there], self.host[there]


@dataclass(frozen=True, slots=True)
class CacheLoad:
    """What a request that starts with a step gets from the tiers below the device, for metrics and traces.

    Attributes:
        serial: The request.
        pages: Pages that the step loads for it.
        fetched: Pages that were read from the third tier for it before.
        began: When that began, in seconds on the storage tier's clock.
        ended: When the last of them had come, on the same clock.
    """

    serial: int
    pages: int
    fetched: int = 0
    began: float = 0.0
    ended: float = 0.0


class LatePages(Protocol):
    """Pages that a step fills. They are chosen when the device has begun to compute the step, so that it need not wait for the
    choice.

    Attributes:
        chosen: What was chosen; None: nothing was, yet or for want of room.
    """

    chosen: PageCopy | None

    def take(self) -> PageCopy | None:
        """Chooses them, with the first call, and returns what was chosen; None: there is no room for any."""
        ...


@dataclass(frozen=True, slots=True)
class Copies:
    """What a step copies: before it computes first the stores, then the loads; what it computes itself meanwhile.

    Stores may continue while the step computes, as long as ``fence`` is not set; a load must be in place where the step reads it.

    Attributes:
        store: Device to host; None: nothing.
        load: Host to device; None: nothing.
        fence: Neither load nor computation may begin before every store, this one and earlier ones, is done: pages that
            are being stored are about to be overwritten.
        loads: What each starting request gets by the load.
        during: Device to host, pages that the step fills: some layers of them as soon as these are computed; None: nothing. The
            next step waits for it. It fails if the computation does. The step's launcher chooses them.
    """

    store: PageCopy | None = None
    load: PageCopy | None = None
    fence: bool = False
    loads: tuple[CacheLoad, ...] = ()
    during: LatePages | None = None


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What has ended since the last report.

    Attributes:
        done: Numbers of stores that have ended well.
        failed: Numbers of stores that have left their host pages undefined.
        store_seconds: Seconds that stores took.
        load_seconds: Seconds that loads took.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    store_seconds: float = 0.0
    load_seconds: float = 0.0


NOTHING = CopyReport()
