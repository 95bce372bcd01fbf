"""How far a download is: a number for a callback, and words for a log, which has no line that changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Takes what is being done, the bytes done and the bytes in all."""


def unreported(text: str, done: int, total: int) -> None:
    """A :data:`Progress` that shows nothing."""


class Quarters:
    """A line when something begins, and one at each quarter of it."""

    def __init__(self) -> None:
        self._text = ""
        self._told = 0

    def line(self, text: str, done: int, total: int) -> list[str]:
        """The lines that are due at ``done`` of ``total`` bytes; another text begins again."""
        lines = []
        if text != self._text:
            self._text, self._told = text, 0
            lines.append(f"{text}: {total / 1e6:.0f} MB")
        quarters = 4 * done // total if total else 4
        if quarters > self._told:
            self._told = quarters
            lines.append(f"{text}: {25 * quarters} %")
        return lines


def logged(logger: logging.Logger) -> Progress:
    """A :data:`Progress` that logs a line a quarter."""
    quarters = Quarters()

    def report(text: str, done: int, total: int) -> None:
        for line in quarters.line(text, done, total):
            logger.info("%s", line)

    return report
