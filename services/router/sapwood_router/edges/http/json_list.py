"""A long list in JSON, written in pieces: at once it would hold the event loop for as long as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class JsonList:
    """A list that grows."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, items: Sequence[object]) -> None:
        """Puts some more at its end, as msgspec encodes them."""
        if items:
            self._pieces.append(msgspec.json.encode(items)[1:-1])

    def join(self, other: Any) -> None:
        """Puts all of another list at its end, which is as :meth:`take` gives it."""
        if len(written := bytes(other)) > len(b"[]"):
            self._pieces.append(written[1:-1])

    def take(self) -> Any:
        """The list so far, a :class:`msgspec.Raw`: it is written as it is where a list would be. The next one begins empty."""
        whole = msgspec.Raw(b"[%b]" % b",".join(self._pieces))
        self._pieces.clear()
        return whole
