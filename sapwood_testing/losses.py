"""What tests of losses write down where ``SAPWOOD_LOSS_LOG`` names a file: a long run is told by it even if it was ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def note(**what: Any) -> None:
    """Appends a line of JSON: when, at which load average of the last minute, and what happened."""
    if (path := os.environ.get("SAPWOOD_LOSS_LOG")) is not None:
        line = {"time": time.strftime("%H:%M:%S"), "load": round(os.getloadavg()[0], 1), **what}
        with Path(path).open("a") as log:
            log.write(json.dumps(line) + "\n")
