"""Spaces out work that takes the event loop many milliseconds in one piece: to parse 16 MB, or to write them.

One piece at a time has the loop, each caller's in turn, and all else then has as long before the next one. A caller whose piece
took long waits longer for its own next one, by the square of its time. For anybody who needs the loop at some moment waits for a
long piece more often, and longer: it costs others as little as a short one only if it comes that much more seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

LARGE = 256 * 1024
"""Bytes from which it is worth waiting for a turn: smaller ones take less time than the wait costs."""
A_FEW = 32
"""Things that make up one piece of work, where each takes tens of microseconds."""
PIECE = 0.001
"""Seconds of a piece of work that can be cut anywhere, and seconds that a piece may take without a rest after it."""
_USUAL = 0.002
"""Seconds of a piece after which its caller waits for as long. After one of twice the time he waits four times as long."""
_LONGEST_REST = 0.5
"""Seconds that a caller waits at most after a piece."""
_MOST_KEPT = 64
"""Callers that rest, above which those are forgotten whose rest is over."""


class _Turns:
    """Who waits of one caller: with work that has begun, and with work that has not."""

    def __init__(self) -> None:
        self.begun = deque[asyncio.Future[None]]()
        self.new = deque[asyncio.Future[None]]()


class HeavyWork:
    """The heavy work of one event loop.

    Args:
        clock: Seconds of work, monotonic: CPU time of the loop's thread, which other programs do not stretch.
        rest: How many times as long as a piece took the loop rests from such work after it, for all callers.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time, *, rest: float = 1.0) -> None:
        self._clock = clock
        self._rest = rest
        self._began = 0.0
        self._caller: Hashable = None
        """The caller of the last piece."""
        self._busy = False
        """Whether a piece is being worked on, or the loop's rest after it is not over."""
        self._waiting: OrderedDict[Hashable, _Turns] = OrderedDict()
        """Each caller's waiters, the caller whose turn is next first. A caller without waiters is not in it."""
        self._resting: dict[Hashable, float] = {}
        """Caller -> when its rest is over, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Goes off at the end of the loop's rest or, if no other caller waits, of a caller's rest."""

    @property
    def waiting(self) -> int:
        """Pieces that wait for their turn, those included that were given up since."""
        return sum(len(turns.begun) + len(turns.new) for turns in self._waiting.values())

    async def turn(self, caller: Hashable = None, *, goes_on: bool = False) -> None:
        """Waits for a turn. The piece is what is done from then on until the first wait.

        Args:
            caller: Whose piece it is; callers take turns.
            goes_on: Whether the piece continues with something that has begun. Such pieces go before what the caller has yet to
                begin, else all that he asks for would be half done, and in memory, at once; among them who came first is first.
        """
        loop = asyncio.get_running_loop()
        if not self._busy and self._resting.get(caller, 0.0) <= loop.time():
            self._begin(caller)
            return
        turn: asyncio.Future[None] = loop.create_future()
        turns = self._waiting.setdefault(caller, _Turns())
        (turns.begun if goes_on else turns.new).append(turn)
        if not self._busy:
            self._next()
        await turn
        self._began = self._clock()

    def stint(self, caller: Hashable = None, *, begun: bool = True) -> Stint:
        """Work of a caller that can be cut anywhere; ``begun`` says whether it is part of something that has had a turn."""
        return Stint(self, self._clock, caller, begun)

    def _begin(self, caller: Hashable) -> None:
        self._busy = True
        self._caller = caller
        self._began = self._clock()
        asyncio.get_running_loop().call_soon(self._over)

    def _over(self) -> None:
        took = self._clock() - self._began
        if took <= PIECE:
            self._next()
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if len(self._resting) > _MOST_KEPT:
            self._resting = {caller: until for caller, until in self._resting.items() if until > now}
        self._resting[self._caller] = now + min(took * took / _USUAL, _LONGEST_REST)
        self._wake(now + self._rest * took)

    def _wake(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._next)

    def _next(self) -> None:
        now = asyncio.get_running_loop().time()
        soonest = 0.0
        for caller in tuple(self._waiting):
            until = self._resting.get(caller, 0.0)
            if until > now:
                soonest = min(soonest or until, until)
                continue
            self._resting.pop(caller, None)
            turns = self._waiting.pop(caller)
            while waiting := turns.begun or turns.new:
                turn = waiting.popleft()
                if not turn.done():
                    if turns.begun or turns.new:
                        self._waiting[caller] = turns
                    turn.set_result(None)  # who waits continues in the loop's next turn, before `_over`
                    self._begin(caller)
                    return
        self._busy = False
        if soonest:
            self._wake(soonest)


class Stint:
    """A caller's work that can be cut anywhere, such as the handling of thousands of messages. Pieces of it wait for turns.

    Args:
        heavy: Whose turns.
        clock: Its clock.
        caller: Whose work it is.
        begun: Whether it is part of something that has had a turn.
    """

    def __init__(self, heavy: HeavyWork, clock: Callable[[], float], caller: Hashable, begun: bool) -> None:
        self._begun = begun
        self._heavy = heavy
        self._clock = clock
        self._caller = caller
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether the piece is long enough: what follows is for another :meth:`turn`. So it is before the first."""
        return self._clock() >= self._until

    async def turn(self) -> None:
        """Waits for a turn, in which a piece has its time."""
        await self._heavy.turn(self._caller, goes_on=self._begun)
        self._begun = True
        self._until = self._clock() + PIECE

    async def pause(self) -> None:
        """Waits for a turn if the piece is long enough."""
        if self._clock() >= self._until:
            await self.turn()
