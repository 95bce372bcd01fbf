"""How the `sapwood` command fails: one line to standard error and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

FAILED = 1
"""Something went wrong on our side or the server's."""
REFUSED = 2
"""The command line or the request is wrong; the line names the flag or field."""
UNREACHABLE = 3
"""No service answers there, or not in time."""
INTERRUPTED = 130
"""Ctrl-C."""

EXIT_CODES = (
    "exit codes: 0 done; 1 failed; 2 wrong usage, or refused by the server as invalid; "
    "3 router unreachable, unavailable or too slow; 130 interrupted"
)


class CliError(Exception):
    """Ends the command: ``message`` goes to standard error, ``exit_code`` to the shell."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


@contextlib.contextmanager
def without_flag() -> Iterator[None]:
    """Errors about a model do not begin with ``--model``: this verb takes the model without a flag."""
    try:
        yield
    except CliError as error:
        raise CliError(error.message.removeprefix("--model: "), error.exit_code) from None
