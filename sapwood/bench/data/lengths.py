"""Numbers that are drawn: of tokens or turns, fixed or from a range."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers, each of ``least`` to ``most`` equally likely."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, or ``64-256``. Raises ValueError."""
        low, dash, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high if dash else low))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor a range such as 64-256") from None
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"{text!r}: a range goes up, from at least 1")
        return lengths

    def draw(self, random_: random.Random) -> int:
        """One of them."""
        return random_.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"
