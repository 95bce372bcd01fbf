"""The place of a rank among the ranks of a model, and the progress that it shows to others."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

# The progress that a rank shows: whether it computes, or for which other ranks it waits.
# A rank that hangs in a computation has the same heartbeat as one that works. But the others wait for it, and it waits for no
# rank. So before an exchange each rank writes down which ranks it needs, in memory that its host's front reads.
# Ranks whose devices compute asynchronously exchange nothing on their hosts: such a rank counts the steps that it has
# launched, and shows when it waits for its device, which needs all other ranks' devices.


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
"""A computation may take this many times as long as the longest one of a step of the same size."""


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """What a rank shows.

    Attributes:
        moves: A number that changes whenever the rank makes progress.
        entered: How many exchanges it has entered; the exchanges are the same for all ranks of a stage.
        waits_for: A bit for each rank that it waits for; 0: it computes; :data:`DEVICE`; :data:`AT_REST`.
        last: Seconds of its last computation between two waits.
        allowed: Seconds that its current computation may take, judged by earlier ones.
        launched: How many steps it has launched on a device that computes asynchronously; 0: it has no such device.
    """

    moves: int
    entered: int
    waits_for: int
    last: float
    allowed: float
    launched: int = 0

    @staticmethod
    def of(memory: Buffer) -> Shown:
        """Reads the present values. They may be inconsistent during a write; then ``moves`` differs at the next read."""
        return Shown(*_LAYOUT.unpack_from(memory))


class Waits:
    """Written by a rank's thread that computes steps, and by one that sums for it.

    Args:
        memory: :data:`WAITS_BYTES` bytes; by default a private buffer that no other process reads.
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
        """Wraps an exchange with ranks, given as a bit for each; all ranks of its stage join it at once."""
        self._entered += 1
        return self.on(ranks)

    def count_exchange(self) -> None:
        """Counts an exchange that its device will enter later."""
        self._entered += 1

    @property
    def entered(self) -> int:
        """How many exchanges it has entered, or launched, since the start."""
        return self._entered

    @contextmanager
    def on(self, ranks: int) -> Iterator[None]:
        """Wraps a wait for tensors from ranks, given as a bit for each."""
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
        """Expected seconds for a computation of this step: from the longest in steps of the same size or, without any, in smaller
        steps."""
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
        size: How many ranks there are.
        rendezvous: Where ranks meet: ``file://PATH``, or ``tcp://HOST:PORT`` with rank 0's host and a port of this host that
            leads there; empty: there is only one rank.
        nodes: How many hosts the ranks are on, with the same number on each.
        listener: On rank 0, the file descriptor of the socket that listens at the rendezvous; None: rank 0 opens one.
        waits: Where the rank shows for which ranks it waits.
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
