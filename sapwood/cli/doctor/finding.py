"""What an examination finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "missing"]
"""There; not there, or not as it could be, but `sapwood up` starts without it; needed for `sapwood up` and not there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer.

    Attributes:
        name: The examined thing, such as ``python`` or ``disk``.
        state: How it is.
        found: The finding in words; of a missing thing also its purpose.
        mend: The command or setting that mends it; empty: there is nothing to mend.
    """

    name: str
    state: State
    found: str
    mend: str = ""
