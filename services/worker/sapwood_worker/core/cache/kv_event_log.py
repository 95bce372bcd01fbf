"""KV events in the order in which they happened."""

from __future__ import annotations

from sapwood_worker.records.kv_events import KvEvent


class KvEventLog:
    """Events in the order they happened, until they are taken."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def add(self, event: KvEvent) -> None:
        """Appends an event."""
        self._events.append(event)

    def take(self) -> list[KvEvent]:
        """Removes and returns the events since the last call."""
        events, self._events = self._events, []
        return events
