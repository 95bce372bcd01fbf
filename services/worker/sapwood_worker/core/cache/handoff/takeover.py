"""What takes handed-off prompts over: their pages go to the device, where its room and the mover let them, or to the second tier.

All pages of a transfer go one way. Those of which the second tier has the beginning go there, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.cache.handoff.landing import Landing, Prompt
from sapwood_worker.core.cache.handoff.pulls import Pulls
from sapwood_worker.core.cache.page_key import PageName
from sapwood_worker.records.handoff import HandoffTicket


class Takeover:
    """Two pulls with one count. Single-threaded but for the reads of their executor, which they share.

    Args:
        host: Pulls into the second tier.
        landing: The device's pages that can be filled; None: it cannot.
        device: Pulls into these.

    Attributes:
        host: The argument.
        counters: What has happened so far.
        page_bytes: Bytes of a page's content.
    """

    def __init__(self, host: Pulls, landing: Landing | None = None, device: Pulls | None = None) -> None:
        self.host = host
        self._landing = landing
        self._device = device
        self._both = (host,) if device is None else (device, host)
        self.counters = host.counters
        self.page_bytes = host.page_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes that came before all layers of their pages were computed."""
        return self.host.part_bytes

    @property
    def busy(self) -> bool:
        """Whether reads are under way."""
        return any(each.busy for each in self._both)

    def pull(self, serial: int, prompt: Prompt, cached: int, found: int, ticket: HandoffTicket) -> bool:
        """Reads pages that a new request lacks; returns whether it is to wait until :meth:`poll` names it.

        Args:
            serial: The request.
            prompt: Its prompt.
            cached, found: How many of its pages the device has, and the second tier after them.
            ticket: Its ticket.
        """
        if (device := self._suited(ticket, prompt.pages, cached, found)) is not None:
            device[0].expect(serial, prompt)
            return device[1].pull(serial, prompt.pages[cached:], cached, ticket)
        first = cached + found
        return self.host.pull(serial, prompt.pages[first:], first, ticket)

    def announced(self, ticket: HandoffTicket, pages: list[PageName], cached: int, found: int) -> None:
        """Reads pages that are lacking for a request which is likely to come.

        Args:
            ticket: For some of its prompt's pages.
            pages: All of the prompt's; empty if an earlier call for the same transfer had them.
            cached, found: As for :meth:`pull`, as far as they were asked for.
        """
        device = self._suited(ticket, pages, cached, found)
        (self.host if device is None else device[1]).announced(ticket, pages, cached)

    def announced_pages(self, ticket: HandoffTicket) -> Sequence[PageName]:
        """All pages of the prompt of which some were announced; none if none were."""
        return next(filter(None, (each.announced_pages(ticket) for each in self._both)), ())

    def settle(self, serial: int) -> tuple[int, float, float] | None:
        """A request has started or ended; returns as :meth:`Arrivals.settle`."""
        if self._landing is not None:
            self._landing.forget(serial)
        settled = [each.arrivals.settle(serial) for each in self._both]
        return next(filter(None, settled), None)

    def lapse(self) -> None:
        """Lets go of announced pages of which nothing was heard for long."""
        for each in self._both:
            each.lapse()

    def poll(self) -> list[int]:
        """Takes the ends of reads; returns the requests that need not wait any longer."""
        return [serial for each in self._both for serial in each.poll()]

    def wait(self, seconds: float) -> None:
        """Returns when a read has ended, or after so many seconds."""
        self.host.wait(seconds)

    def pins(self) -> dict[int, int]:
        """What :meth:`Arrivals.pins` says of the second tier. For tests."""
        if self._device is not None and self._landing is not None:
            self._landing.check(self._device.arrivals.pins())
        return self.host.arrivals.pins()

    def _suited(
        self, ticket: HandoffTicket, pages: list[PageName], cached: int, found: int
    ) -> tuple[Landing, Pulls] | None:
        landing, device = self._landing, self._device
        if landing is None or device is None or self.host.knows(ticket):
            return None
        lacking = len(pages) - cached
        fits = not found and 0 < lacking <= min(landing.room, device.arrivals.room) and landing.reaches(ticket)
        return (landing, device) if fits or device.knows(ticket) else None
