"""What a process knows and shows of itself as one of several that run a model together."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

# What a rank shows of itself while it lives: whether it computes, or waits for which other ranks.
#
# A rank that hangs in a computation gives the same signs of life as one that works. But the others wait for it, and it
# waits for nobody. So each rank writes down before an exchange whom it needs, in memory that its host's front reads.
# Ranks whose devices compute by themselves exchange nothing on their hosts: such a rank counts the steps that it has
# launched, and shows when it waits for its device, which needs all the others' devices.


Buffer: TypeAlias = bytearray | memoryview

_LAYOUT = struct.Struct("=QQQddQ")
WAITS_BYTES = _LAYOUT.size
"""Bytes of what is shown."""

AT_REST = 1 << 63
"""In the place of ranks waited for: the rank has nothing to do."""
DEVICE = 1 << 62
"""In the place of ranks waited for: the rank's own device, which computes with those of all others."""

_UNKNOWN_SECONDS = 30.0
"""How long the first computation of an epoch may take."""
_MARGIN = 4.0
"""How many times the longest computation of a step as large another may take."""


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """What a rank shows.

    Attributes:
        moves: A number that changes whenever it comes further.
        entered: Exchanges that it has entered, which are the same for all ranks of a stage.
        waits_for: A bit for each rank that it waits for; 0: it computes; :data:`DEVICE`; :data:`AT_REST`.
        last: Seconds of its last computation between two waits.
        allowed: Seconds that its current one may take, by those before.
        launched: Steps that it has launched on a device which computes by itself; 0: it has none.
    """

    moves: int
    entered: int
    waits_for: int
    last: float
    allowed: float
    launched: int = 0

    @staticmethod
    def of(memory: Buffer) -> Shown:
        """What is there now. May be torn while it is written: then ``moves`` is another the next time."""
        return Shown(*_LAYOUT.unpack_from(memory))


class Waits:
    """Written by a rank's thread that computes steps, and by one that sums for it.

    Args:
        memory: :data:`WAITS_BYTES` bytes; by default nobody sees them.
        clock: Seconds, monotonic.
    """

    def __init__(self, memory: Buffer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = bytearray(WAITS_BYTES) if memory is None else memory
        self._clock = clock
        self._moves = self._entered = self._launched = 0
        self._now = AT_REST
        self._since = clock()
        self._last = 0.0
        self._longest: dict[int, float] = {}
        self._size, self._longest_here = 0, 0.0
        self._allowed = _UNKNOWN_SECONDS
        self._show()

    def step(self, tokens: int) -> AbstractContextManager[None]:
        """Wraps the computation of a step of this many tokens, or of the rest of a step."""
        if self._longest_here:
            self._longest[self._size] = max(self._longest_here, self._longest.get(self._size, 0.0))
        self._size, self._longest_here = tokens.bit_length(), 0.0
        self._allowed = self._expected()
        return self.on(0)

    @contextmanager
    def launch(self, tokens: int, *, asynchronous: bool) -> Iterator[None]:
        """Wraps the computation of a step of this many tokens, or its launch if the device computes by itself."""
        with self.step(tokens):
            try:
                yield
            finally:
                self._launched += asynchronous

    def exchange(self, ranks: int) -> AbstractContextManager[None]:
        """While it exchanges something with ranks, a bit for each, as all ranks of its stage do at once."""
        self._entered += 1
        return self.on(ranks)

    def count_exchange(self) -> None:
        """Counts an exchange that its device enters when it comes to it."""
        self._entered += 1

    @property
    def entered(self) -> int:
        """Exchanges that it has entered, or launched, since the start."""
        return self._entered

    @contextmanager
    def on(self, ranks: int) -> Iterator[None]:
        """While it waits for what ranks send it, a bit for each."""
        before = self._now
        self._change(ranks)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, ranks: int) -> None:
        now = self._clock()
        if self._now == 0:
            self._last = now - self._since
        if self._now in (0, DEVICE):
            self._longest_here = max(self._longest_here, now - self._since)
            self._allowed = max(self._allowed, _MARGIN * self._longest_here)
        self._now, self._since = ranks, now
        self._moves += 1
        self._show()

    def _show(self) -> None:
        _LAYOUT.pack_into(
            self._memory, 0, self._moves, self._entered, self._now, self._last, self._allowed, self._launched
        )

    def _expected(self) -> float:
        """Seconds for a computation of this step: by the longest in steps as large or, if there was none, in smaller ones."""
        known = [size for size in self._longest if size <= self._size]
        if not known:
            return _UNKNOWN_SECONDS
        return _MARGIN * self._longest[max(known)] * 2.0 ** (self._size - max(known))


# Which rank of a group a process is.


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among those that run a model together.

    Attributes:
        rank: Its number, from 0; rank 0 has the scheduler.
        size: How many they are.
        rendezvous: Where they meet: ``file://PATH``, or ``tcp://HOST:PORT``, rank 0's host and a port of this one's that leads
            there; empty: there is but one.
        nodes: Hosts that they are on, equally many on each.
        listener: File descriptor of the socket that listens at the rendezvous, of rank 0; None: it is opened there.
        waits: Where it shows for whom it waits.
    """

    rank: int = 0
    size: int = 1
    rendezvous: str = ""
    nodes: int = 1
    listener: int | None = None
    waits: Waits = field(default_factory=Waits, compare=False)

    @property
    def on_node(self) -> int:
        """Ranks on each host."""
        return self.size // self.nodes

    @property
    def host(self) -> str:
        """Rank 0's address, where ranks are on several hosts."""
        return self.rendezvous.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


ALONE = Place()
