"""Reasoning between tags, which all families but gpt-oss use; they differ in the tags and in who opens them.

The output either begins inside the reasoning, where the prompt has already opened it (an opening tag that the model repeats is
dropped), or with the opening tag; without one there is no reasoning. Only the first block counts, and those that follow
it at once: a pair of tags later in the answer is text; a closing tag without an opening one is dropped, unless it stands behind
a backtick. White space around the reasoning and the tags is dropped, up to ``MAX_HELD_SPACE`` characters at the end. Reasoning
cut off by the end of the output stays reasoning.

A whole tool call inside reasoning that no closing tag follows is part of the answer: the model has made it without an end of its
reasoning. A call that a closing tag or more than ``MAX_PROSE`` characters follow was only thought of, and stays reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sapwood_text.incremental.parser import Emitter, Script, SpaceTrimmer
from sapwood_text.incremental.source import Emit, Markers, Source, Steps, markers_of

MAX_PROSE = 1024
"""How much text may follow a call inside reasoning, if it is to be a call."""


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A family of models and how they mark reasoning.

    Attributes:
        name: Its name in requests.
        opening: The opening tag.
        closing: The closing tag.
        starts_open: Whether the family's prompts usually open the reasoning.
        tokens: Special tokens that are part of the opening tag.
        answer_tags: Tags around the answer, which are dropped.
        implied_by: Markers that end the reasoning although they are part of the answer.
        signs: Strings that together tell the family's chat templates from those of the families after it in the table.
    """

    name: str
    opening: str
    closing: str
    starts_open: bool = False
    tokens: tuple[str, ...] = ()
    answer_tags: tuple[str, ...] = ()
    implied_by: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that may be special tokens of the vocabulary; the text must hold them."""
        return frozenset([self.opening, self.closing, *self.tokens, *self.implied_by])

    def script(self, starts_open: bool | None, calls: DraftedCalls | None = None) -> Script:
        """The script that parses an output.

        Args:
            starts_open: Whether the output begins inside the reasoning; None is the family's usual form.
            calls: Finds calls inside the reasoning; None if there are none.
        """
        is_open = self.starts_open if starts_open is None else starts_open
        ends = (self.closing, *self.implied_by)
        openers = tuple(opener for opener in calls.openers if opener not in ends) if calls else ()
        marks = markers_of(*ends, *openers)

        def script(source: Source, out: Emitter) -> Steps[None]:
            source.start_recording()
            yield from source.whitespace()
            tag = yield from source.accept(self.opening, self.closing)
            before = source.stop_recording()
            reasoning = SpaceTrimmer(out.reasoning, at_start=True)
            inside = is_open
            if not tag and not is_open:
                out.text(before)
            while tag or inside:
                while tag:  # the last of several counts
                    inside = tag == self.opening
                    yield from source.whitespace()
                    tag = yield from source.accept(self.opening, self.closing)
                if not inside:
                    break
                end = yield from source.until(marks, reasoning)
                while calls and end in openers:
                    end = yield from _read_draft(source, out, end, marks, calls, reasoning)
                reasoning.cut()
                inside = False
                tag = end if end == self.closing else ""
                if not tag:
                    out.text(end)
            yield from source.rest(out.text)

        return script

    def strays(self) -> Script:
        """The script that takes tags of the family that have no business there out of an answer's text."""
        marks = markers_of(self.opening, self.closing, *self.answer_tags)

        def script(source: Source, out: Emitter) -> Steps[None]:
            last = ""
            opened = 0

            def emit(piece: str) -> None:
                nonlocal last
                last = piece[-1]
                out.text(piece)

            while mark := (yield from source.until(marks, emit)):
                quoted = last == "`"
                if mark == self.opening:
                    opened += 1
                elif mark == self.closing and (opened or quoted):
                    opened = max(0, opened - 1)
                elif not quoted:
                    continue
                emit(mark)

        return script


class DraftedCalls(Protocol):
    """Looks at a text that may be calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """What a call begins with."""

    def begin(self) -> Draft:
        """Begin to look at a text."""


class Draft(Protocol):
    """One text that may be calls, as it comes."""

    def feed(self, piece: str) -> None:
        """More of the text."""

    def is_prose(self) -> bool:
        """Whether the text is known to be no more than text about calls."""

    def is_call(self) -> bool:
        """Whether the text, which is over, holds whole calls."""


def _read_draft(
    source: Source, out: Emitter, opener: str, marks: Markers, calls: DraftedCalls, reasoning: Emit
) -> Steps[str]:
    """Read on after what opens a call inside reasoning, up to the next mark that counts; return it.

    The text is held back while it may be a call that the model makes without an end of its reasoning. If the output ends with
    it, it is part of the answer; else it is reasoning.
    """
    draft = calls.begin()
    held: list[str] = []

    def take(piece: str) -> None:
        if draft.is_prose():
            reasoning(piece)
            return
        held.append(piece)
        draft.feed(piece)
        if draft.is_prose():
            reasoning("".join(held))
            held.clear()

    take(opener)
    while True:
        mark = yield from source.until(marks, take)
        if draft.is_prose():
            return mark
        if mark in calls.openers:
            take(mark)
            continue
        text = "".join(held)
        if mark == "" and draft.is_call():
            out.text(text)
        else:
            reasoning(text)
        return mark
