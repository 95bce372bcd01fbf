"""Drops white space at the ends of a streamed text without looking ahead further than the space itself."""

from __future__ import annotations

from sapwood_text.incremental.source import Emit

MAX_HELD_SPACE = 256
"""White space held back because it may be dropped, in characters. More than that is released from the front."""


class SpaceTrimmer:
    """Passes text on, but holds white space at its end back until more text comes.

    Texts on both sides of a cut are set apart by a line break.

    Args:
        emit: Takes the text.
        at_start: Drop white space until the first text.
    """

    def __init__(self, emit: Emit, *, at_start: bool) -> None:
        self._emit = emit
        self._at_start = at_start
        self._held = ""
        self._separator = ""
        self._empty = True

    def __call__(self, piece: str) -> None:
        """More text."""
        if self._at_start:
            piece = piece.lstrip()
            if not piece:
                return
            self._at_start = False
        body = piece.rstrip()
        if body:
            self._pass_on(self._held + body)
            self._held = ""
        self._held += piece[len(body) :]
        surplus = len(self._held) - MAX_HELD_SPACE
        if surplus > 0:
            self._pass_on(self._held[:surplus])
            self._held = self._held[surplus:]

    def cut(self) -> None:
        """Drop what is held back, and the white space that follows."""
        self._held = ""
        self._at_start = True
        self._separator = "" if self._empty else "\n"

    def release(self) -> None:
        """Pass on what is held back."""
        if self._held:
            self._pass_on(self._held)
            self._held = ""

    def _pass_on(self, piece: str) -> None:
        self._emit(self._separator + piece)
        self._separator = ""
        self._empty = False
