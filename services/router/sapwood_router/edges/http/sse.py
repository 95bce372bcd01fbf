"""Server-sent events, as far as all APIs have them alike."""

from __future__ import annotations

from typing import Any

import msgspec


def event(kind: str, **fields: Any) -> bytes:
    """An event that says its kind twice: in its name, and as ``type`` of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
