"""Reasoning between tags, which all families but gpt-oss use; they differ in the tags and in who opens them.

The output either begins inside the reasoning, where the prompt has already opened it (an opening tag that the model repeats is
dropped), or with the opening tag; without one there is no reasoning. Only the first block counts: tags later in the
answer are text. White space around the reasoning and the tags is dropped, up to ``MAX_HELD_SPACE`` characters at the end.
Reasoning cut off by the end of the output stays reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.parser import Script
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.incremental.space_trimmer import SpaceTrimmer


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A family of models and how they mark reasoning.

    Attributes:
        name: Its name in requests.
        opening: The opening tag.
        closing: The closing tag.
        starts_open: Whether the family's prompts usually open the reasoning.
        implied_by: Markers that end the reasoning although they are part of the answer.
        signs: Strings that together tell the family's chat templates from those of the families after it in the table.
    """

    name: str
    opening: str
    closing: str
    starts_open: bool = False
    implied_by: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that may be special tokens of the vocabulary; the text must hold them."""
        return frozenset([self.opening, self.closing, *self.implied_by])

    def script(self, starts_open: bool | None) -> Script:
        """The script that parses an output; if ``starts_open`` is None, the family's usual form."""
        is_open = self.starts_open if starts_open is None else starts_open
        ends = Markers(self.closing, *self.implied_by)

        def script(source: Source, out: Emitter) -> Steps[None]:
            source.start_recording()
            yield from source.whitespace()
            tag = yield from source.accept(self.opening)
            before = source.stop_recording()
            if tag or is_open:
                reasoning = SpaceTrimmer(out.reasoning, at_start=True)
                end = yield from source.until(ends, reasoning)
                if end == self.closing:
                    yield from source.whitespace()
                else:
                    out.text(end)
            else:
                out.text(before)
            yield from source.rest(out.text)

        return script
