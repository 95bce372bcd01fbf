"""Unfolds large messages beside everything else: 16 KB may become 16 MB, which takes 40 ms."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sapwood_common.http2.wire.encoding import TooLargeError, Unfolder
from sapwood_common.pacing.time_share import TimeShare


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    unfolder: Unfolder
    keep: Callable[[int], None]
    done: asyncio.Future[bytes]


class Unfoldings:
    """A server's messages that wait to be decompressed: one after another, each caller's in turn, so that few are half done.

    Implements ``time_share.Worker``: however many messages wait, together they have one share of the event loop's time.

    Args:
        share: Shares it.
    """

    def __init__(self, share: TimeShare) -> None:
        self._share = share
        self._waiting: OrderedDict[Hashable, OrderedDict[_Work, None]] = OrderedDict()
        """Each caller's messages, the caller whose turn is next first. A caller without messages is not in it."""

    def is_waiting(self, caller: Hashable) -> bool:
        """Whether a message of the caller is here already."""
        return caller in self._waiting

    async def unfold(self, caller: Hashable, unfolder: Unfolder, keep: Callable[[int], None]) -> bytes:
        """The message.

        Args:
            caller: Whose it is.
            unfolder: Decompresses the message, which has begun.
            keep: Told how many bytes there are by now.

        Raises:
            TooLargeError, ValueError: As the unfolder does.
        """
        work = _Work(unfolder, keep, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(caller, OrderedDict())[work] = None
        self._share.add(self)
        try:
            return await work.done
        except asyncio.CancelledError:  # its message is not to be kept until its turn
            self._drop(caller, work)
            raise

    def _drop(self, caller: Hashable, work: _Work) -> None:
        works = self._waiting.get(caller)
        if works is not None:
            works.pop(work, None)
            if not works:
                del self._waiting[caller]

    def go_on(self, until: float) -> bool:
        while self._waiting and self._share.clock() < until:
            caller, works = next(iter(self._waiting.items()))
            work = next(iter(works))
            if _go_on(work):
                self._waiting.move_to_end(caller)
                self._drop(caller, work)
        return bool(self._waiting)


def _go_on(work: _Work) -> bool:
    """A step; says whether it was the last."""
    if work.done.done():  # nobody waits for it
        return True
    try:
        whole = work.unfolder.step()
    except (TooLargeError, ValueError) as error:
        work.done.set_exception(error)
        return True
    if whole is not None:
        work.done.set_result(whole)
        return True
    work.keep(work.unfolder.size)
    return False
