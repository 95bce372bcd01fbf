"""The router that benchmarks are tested against."""

from __future__ import annotations

import runpy
from pathlib import Path

_shared = runpy.run_path(str(Path(__file__).resolve().parents[1] / "bench" / "conftest.py"))
served, sapwood = _shared["served"], _shared["sapwood"]
