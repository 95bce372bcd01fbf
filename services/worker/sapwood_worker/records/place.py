"""Which rank of a group a process is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among those that run a model together.

    Attributes:
        rank: Its number, from 0; rank 0 has the scheduler.
        size: How many they are.
        rendezvous: Where they meet: ``file://PATH`` or ``tcp://HOST:PORT``; empty: there is but one.
    """

    rank: int = 0
    size: int = 1
    rendezvous: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


ALONE = Place()
