"""The output of long-running verbs: lines, one changing status line, a progress bar.

On a terminal, and with `rich` installed (extra ``cli``), status and bar are drawn live below the lines. Elsewhere only
lines appear, and a bar becomes a line at each quarter.
"""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING, Protocol, TextIO

from sapwood_common.models.progress import Quarters
from sapwood_common.telemetry.shown_text import shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status


_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
_LONGEST_VALUE = 1024


def harmless(text: str) -> str:
    """Text of a model or a server without what a terminal would obey: controls are escaped, but tabs and ends of lines."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(value: object) -> str:
    """A value that a file or a server has given, as a line of a terminal may show it."""
    return shown(str(value), _LONGEST_VALUE)


class Terminal(Protocol):
    """Where a verb reports to. One status or one bar is alive at a time."""

    def line(self, text: str, *, label: str = "", colour: str = "") -> None:
        """Writes a line for good, led by a coloured label."""
        ...

    def status(self, text: str) -> None:
        """Replaces the status line; an empty text removes it."""
        ...

    def progress(self, text: str, done: int, total: int) -> None:
        """Moves the bar to ``done`` of ``total`` bytes. Another text starts another bar."""
        ...

    def close(self) -> None:
        """Removes what is drawn live; lines may still follow."""
        ...


def open_terminal(stream: TextIO) -> Terminal:
    """The richest terminal that the stream and the installed packages allow."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return RichTerminal(stream)
    return PlainTerminal(stream)


class PlainTerminal:
    """Implements :class:`Terminal` with lines only, for pipes, files and logs.

    Args:
        stream: Written to and flushed line by line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._quarters = Quarters()
        if stream.isatty():
            self.line("(for progress bars and colours: pip install 'sapwood[cli]')")

    def line(self, text: str, *, label: str = "", colour: str = "") -> None:
        print(f"{label} | {text}" if label else text, file=self._stream, flush=True)

    def status(self, text: str) -> None:
        """Shows nothing: a pipe has no line that changes."""

    def progress(self, text: str, done: int, total: int) -> None:
        for line in self._quarters.line(text, done, total):
            self.line(line)

    def close(self) -> None:
        """Has nothing to end: nothing is drawn live."""


class RichTerminal:
    """Implements :class:`Terminal` with coloured lines above a live status or bar.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._bar: tuple[str, TaskID] | None = None

    def line(self, text: str, *, label: str = "", colour: str = "") -> None:
        from rich.text import Text

        if not label:
            self._console.print(text, soft_wrap=True)
            return
        self._console.print(Text.assemble((label, colour), " | ", Text.from_ansi(text)), soft_wrap=True)

    def status(self, text: str) -> None:
        if not text:
            self.close()
        elif self._status is None:
            self.close()
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def progress(self, text: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        if self._progress is None:
            self.close()
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=self._console,
            )
            self._progress.start()
        if self._bar is None or self._bar[0] != text:
            self._bar = text, self._progress.add_task(text, total=total)
        self._progress.update(self._bar[1], completed=done)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._bar = None
