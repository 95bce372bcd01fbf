"""Runs a script's calls a few at a time: each is a function, and all are tried before a failure is told."""

import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_calls: list[Callable[[], None]] = []


def call(function: Callable[[], None]) -> Callable[[], None]:
    """Marks a function as one of the calls."""
    _calls.append(function)
    return function


def _run(function: Callable[[], None]) -> bool:
    begun = time.monotonic()
    try:
        function()
    except Exception:
        print(f"{function.__name__} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return False
    print(f"{function.__name__}: {time.monotonic() - begun:.1f} s")
    return True


def run_all() -> None:
    """Runs the calls, four at a time; the last line says "ok" if none failed."""
    with ThreadPoolExecutor(4) as threads:
        fine = all(list(threads.map(_run, _calls)))
    if not fine:
        sys.exit(1)
    print("ok")
