"""What one flood of one server has done, as a line of JSON, and whether that meets the goal."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floods.attacker import Fate

_RATIO, _ADDED, _MOST_MB = 3.0, 0.02, 100.0
"""The goal: of the calm p99, and seconds more; and the memory."""


@dataclass(frozen=True)
class Outcome:
    """One flood of one server. Seconds, and MB."""

    flood: str
    server: str
    connections: int
    tls: bool
    calm: dict[str, float]
    """p99 by kind of other clients, just before."""
    flooded: dict[str, float]
    failed: dict[str, int]
    """Other clients' calls, by what went wrong."""
    memory_before: float
    memory_most: float
    memory_after: float
    cores: float
    """That the server took."""
    fate: Fate

    @property
    def worst(self) -> tuple[str, float]:
        """The kind of other clients that came off worst, and its p99 as a share of what the goal lets it be."""
        shares = {kind: p99 / (_RATIO * self.calm[kind] + _ADDED) for kind, p99 in self.flooded.items()}
        return max(shares.items(), key=lambda item: item[1])

    @property
    def grown(self) -> float:
        """Memory at its most, above the calm one."""
        return self.memory_most - self.memory_before

    @property
    def met(self) -> bool:
        """Each kind's p99 is at most 3 times the calm one and 20 ms, and memory at most 100 MB above the calm one and back."""
        left = self.memory_after - self.memory_before
        return not self.failed and self.worst[1] <= 1 and self.grown <= _MOST_MB and left <= _MOST_MB / 2

    def to_json(self, **more: str) -> str:
        """A line, with ``more`` fields."""
        return json.dumps({**dataclasses.asdict(self), "met": self.met, **more})


def read_outcomes(files: list[Path]) -> list[Outcome]:
    """What :meth:`Outcome.to_json` wrote; of a case that was measured again, the last."""
    names = {field.name for field in dataclasses.fields(Outcome)}
    found: dict[tuple[Any, ...], Outcome] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = {name: value for name, value in json.loads(line).items() if name in names}
            outcome = Outcome(**{**row, "fate": Fate(**row["fate"])})
            found[outcome.server, outcome.flood, outcome.connections, outcome.tls] = outcome
    return list(found.values())
