"""KV events in the order in which they happened."""

from __future__ import annotations

from collections.abc import Iterable

from sapwood_worker.core.cache.page_key import PageName
from sapwood_worker.records.kv_events import BlockStored, KvEvent, Medium


class KvEventLog:
    """Events in the order they happened, until they are taken."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def add(self, event: KvEvent) -> None:
        """Appends an event."""
        self._events.append(event)

    def stored(self, names: Iterable[PageName], medium: Medium) -> None:
        """Pages are cached on a medium; those that follow each other are one event."""
        run: list[PageName] = []
        for name in names:
            if run and (name.parent, name.lora) != (run[-1].key.hash, run[-1].lora):
                self.add(_stored(run, medium))
                run = []
            run.append(name)
        if run:
            self.add(_stored(run, medium))

    def take(self) -> list[KvEvent]:
        """Removes and returns the events since the last call."""
        events, self._events = self._events, []
        return events


def _stored(run: list[PageName], medium: Medium) -> BlockStored:
    hashes = b"".join(name.key.hash for name in run)
    return BlockStored(hashes, run[0].parent, b"".join(name.token_ids for name in run), medium, run[0].lora)
