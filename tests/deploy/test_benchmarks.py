"""Every benchmark starts: what it imports is there, and it says how it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
# What lies deeper are the processes that these start.
_FILES = sorted((*_ROOT.glob("benchmarks/*.py"), *_ROOT.glob("benchmarks/gpu/*.py")))
_PROGRAMS = [path for path in _FILES if "__main__" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_benchmark_says_how_it_is_called(program: Path) -> None:
    told = subprocess.run(
        [sys.executable, program, "--help"], check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert told.stdout.startswith("usage: ")
