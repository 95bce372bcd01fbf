"""Which rank of a group a process is."""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood_worker.records.ranks.waits import Waits


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
