"""How a load stands while it runs: a live view on a terminal, a line every few seconds elsewhere.

Written by hand: what draws more often, or from a thread, would make the load generator late.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from sapwood.bench.benchmark import Level
    from sapwood.bench.load import Run

_PLAIN_SECONDS = 5.0
_RECENT = 200
"""Requests that the live figures are of: all of them would cost the load generator time."""
_RECENT_GAPS = 20
"""Requests that the live figures of inter-token latency are of."""


class BenchView:
    """Shows a load that runs.

    Args:
        stream: Is written to; a terminal has its last lines drawn again each time.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._drawn = 0
        self._next_line = 0.0

    def show(self, level: Level, run: Run) -> None:
        """Shows how the load stands; without a terminal only if the last line was some seconds ago."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            lines = [str(level), *(f"  {line}" for line in progress(run))]
            self._write(self._erasure() + "".join(f"{line[:width]}\n" for line in lines))
            self._drawn = len(lines)
            return
        now = time.monotonic()
        self._next_line = self._next_line or now + _PLAIN_SECONDS
        if now >= self._next_line:
            self._next_line = now + _PLAIN_SECONDS
            self._write(f"{level}: {'; '.join(progress(run))}\n")

    def clear(self) -> None:
        """Removes the live display; the next one shows another load."""
        self._next_line = 0.0
        if self._drawn:
            self._write(self._erasure())
            self._drawn = 0

    def _erasure(self) -> str:
        return f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress(run: Run) -> list[str]:
    """Counts, and figures of the last requests that ended."""
    from sapwood.bench.measures import Spread
    from sapwood.bench.targets.record import clock

    seconds = clock() - run.began
    sent, ended, failed = len(run.records), len(run.ended), run.failures
    found = [f"{seconds:.0f} s: {sent} sent, {sent - ended} under way, {ended - failed} done, {failed} failed"]
    recent = [record for record in run.ended[-_RECENT:] if not record.error]
    for title, spread in (
        ("TTFT", Spread.of(record.ttft for record in recent if record.ttft is not None)),
        ("inter-token", Spread.of(gap for record in recent[-_RECENT_GAPS:] for gap in record.gaps)),
        ("end-to-end", Spread.of(record.e2e for record in recent)),
    ):
        if spread is not None:
            found.append(f"{title} {spread.p50 * 1000:.0f} ms (p50), {spread.p99 * 1000:.0f} ms (p99)")
    if recent:
        span = max(record.ended for record in recent) - min(record.sent for record in recent)
        tokens = sum(record.completion_tokens or 0 for record in recent)
        found.append(f"{tokens / span:.0f} output tokens/s, {len(recent) / span:.1f} requests/s lately")
    return found
