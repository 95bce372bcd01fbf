"""What can go wrong with a program. Each error names the node and its line."""

from __future__ import annotations

import traceback
from pathlib import Path

_OWN = str(Path(__file__).parent)


class ProgramError(Exception):
    """A node failed; ``__cause__`` is what its backend said.

    Attributes:
        node: What the node does, such as ``gen('answer')``.
        line: ``file:line`` of the program.
    """

    def __init__(self, node: str, line: str, reason: str) -> None:
        super().__init__(f"{node} at {line}: {reason}" if line else f"{node}: {reason}")
        self.node = node
        self.line = line
        self.reason = reason


class UnsupportedError(ProgramError):
    """The backend cannot do this."""


class UntraceableError(BaseException):
    """The program looks at a value that there is none of yet: its trace ends here.

    It is no Exception: a program that tries again after any Exception would be traced for ever.
    """


def line_of(error: BaseException) -> str:
    """``file:line`` of the innermost line outside of this package that an exception passed; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (f"{each.filename}:{each.lineno}" for each in reversed(frames) if not each.filename.startswith(_OWN)), ""
    )
