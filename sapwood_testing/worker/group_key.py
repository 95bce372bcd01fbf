"""The secret that hosts of a group have alike."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path


@cache
def group_key() -> str:
    """A file that holds it, for ``--rendezvous-key``."""
    path = Path(tempfile.mkdtemp(prefix="sapwood-test-key-")) / "group.key"
    path.touch(0o600)
    path.write_text("a secret of tests, the same on all hosts\n")
    return str(path)
