"""Parameters that have no effect here: they are accepted, and named in the answer and in the log.

So does each server that clients are made for: a client sends what one of them knows to all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sapwood_common.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

LEFT_OUT_HEADER = b"x-sapwood-ignored"
_MOST_NAMED, _LONGEST_NAME = 16, 64
"""Names in the header of an answer, and characters of one."""
_MOST_LOGGED = 256
"""Names that a process logs: clients choose them, and may choose a new one each time."""


class LeftOutLog:
    """What was left out of any request.

    Args:
        strict: Whether a request with such a thing is refused.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._logged: set[str] = set()

    def note(self, name: str, hint: Callable[[], str]) -> None:
        """Logs a name, the first time that a request has it."""
        if name in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(name)
        logger.warning("ignored what nothing here serves: %s%s", name, hint())


class LeftOut:
    """What is left out of one request.

    Args:
        log: Knows what was left out before.
    """

    def __init__(self, log: LeftOutLog) -> None:
        self._log = log
        self._names: dict[str, str] = {}
        """Names as clients spell them -> as they are shown."""
        self._more = 0

    def parameter(self, name: str, hint: Callable[[], str]) -> None:
        """Leaves out a parameter that no API knows.

        Args:
            name: The parameter, as the client spells it.
            hint: Says what may have been meant; "": nothing.

        Raises:
            InvalidArgumentError: Such requests are refused.
        """
        if self._log.strict:
            raise InvalidArgumentError(f"unknown parameter: {name!r}{hint()}", field=name)
        self._add(name[:_LONGEST_NAME], hint)

    def value(self, field: str, kind: str, problem: str) -> None:
        """Leaves out a value that is known but of a kind that nothing here runs, such as a tool.

        Args:
            field: The value, as the client spells it.
            kind: Its kind, as the client spells it.
            problem: Why it is not taken.

        Raises:
            InvalidArgumentError: Such requests are refused.
        """
        if self._log.strict:
            raise InvalidArgumentError(problem, field=field)
        self._add(f"{field.partition('[')[0]}={kind[:_LONGEST_NAME]}"[:_LONGEST_NAME], lambda: "")

    def header(self) -> bytes:
        """The names, for a header of the answer; empty: nothing was left out."""
        more = (f"{self._more} more",) if self._more else ()
        return ", ".join((*self._names.values(), *more)).encode("ascii")

    def _add(self, name: str, hint: Callable[[], str]) -> None:
        if name in self._names:
            return
        if len(self._names) >= _MOST_NAMED:  # there may be tens of thousands: the rest is only counted
            self._more += 1
            return
        self._names[name] = printable = _printable(name)
        self._log.note(printable, hint)


def _printable(name: str) -> str:
    """A name as headers and logs can have it."""
    shown = name.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(character if " " < character < "\x7f" and character != "," else "_" for character in shown)
