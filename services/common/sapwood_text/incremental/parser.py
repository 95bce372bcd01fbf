"""The protocol of every parser of model output, and the one that runs a parsing generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sapwood_text.incremental.emitter import Emitter
from sapwood_text.incremental.events import Event
from sapwood_text.incremental.source import Source, Steps

Script = Callable[[Source, Emitter], Steps[None]]
"""Reads a whole output from the source and writes its events. Returns at the end of the text, never before."""


class Parser(Protocol):
    """Turns the text of one output, which arrives in pieces, into events.

    The events, put together, are the same however the text is cut. Nothing in the text makes a parser raise.
    """

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; return the events that are certain now. Not to be called after ``finish``."""

    def finish(self) -> list[Event]:
        """Return what was held back. Called once."""


class ScriptParser:
    """Implements :class:`Parser` with a generator.

    Args:
        script: Started at once; it waits for the first text.
        emitter: Where ``script`` writes; used by nobody else.
    """

    def __init__(self, script: Script, emitter: Emitter) -> None:
        self._source = Source()
        self._emitter = emitter
        self._steps = script(self._source, emitter)
        self._ended = False
        self._advance()

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if not self._source.pass_on(text):
            self._source.feed(text)
            self._advance()
            assert not self._ended, "a script ends with its text"
        return self._emitter.drain()

    def finish(self) -> list[Event]:
        self._source.close()
        self._advance()
        assert self._ended, "a script ends with its text"
        self._emitter.finish()
        return self._emitter.drain()

    def _advance(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._ended = True
