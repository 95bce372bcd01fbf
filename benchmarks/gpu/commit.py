"""Which commit is measured."""

from __future__ import annotations

import os
import subprocess


def measured_commit() -> str:
    """What BENCH_COMMIT says, for where a copy without the right history is measured; else git's HEAD, short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return (
        os.environ.get("BENCH_COMMIT")
        or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    )
