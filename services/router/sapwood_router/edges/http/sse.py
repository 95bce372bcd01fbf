"""Server-sent events, as far as all APIs have them alike."""

from __future__ import annotations

from typing import Any

import msgspec


def event(kind: str, **fields: Any) -> bytes:
    """An event that says its kind twice: in its name, and as ``type`` of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def with_field(events: bytes, name: bytes, value: int) -> bytes:
    """The same events, the last that is an object with one more field: clients skip a field they do not know, few an event."""
    end = events.rfind(b"}\n")  # in JSON a line feed is escaped: it ends an event's data
    return events if end < 0 else b'%b,"%b":%d%b' % (events[:end], name, value, events[end:])
