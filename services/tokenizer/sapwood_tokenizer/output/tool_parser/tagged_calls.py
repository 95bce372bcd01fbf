"""Calls whose name and arguments each stand in a tag: ``<invoke name="f"><parameter name="k">v</parameter></invoke>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sapwood_tokenizer.output.incremental.emitter import Emitter
from sapwood_tokenizer.output.incremental.markers import Markers
from sapwood_tokenizer.output.incremental.source import Source, Steps
from sapwood_tokenizer.output.tool_parser.base import NAME_LIMIT, CallMarkers, ToolFamily, marked_calls, start_call
from sapwood_tokenizer.output.tool_parser.tagged_arguments import TaggedArguments
from sapwood_tokenizer.output.tool_parser.tools import Tools


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """How a family writes its tags.

    Attributes:
        markers: Around calls; an opener ends where the call's name begins.
        call_end: After the last argument.
        parameter: Before an argument's name.
        value_ends: After its value.
        word: What names of calls and arguments consist of.
        name_end: After a call's name.
        key_ends: What may follow an argument's name, with the types that the value then has; None: those of the tool's schema.
        trims_line: Whether one line break at each end of a value is dropped.
    """

    markers: CallMarkers
    call_end: str
    parameter: str
    value_ends: Markers
    word: re.Pattern[str]
    name_end: str
    key_ends: Mapping[str, frozenset[str] | None]
    trims_line: bool = False

    def family(self, name: str, *further: str) -> ToolFamily:
        """The family of this form.

        Args:
            name: Its name.
            further: Literals that tell it in a text, beside those of the markers.
        """
        return ToolFamily(name, self._script, frozenset([*further, *self.markers.all.literals]))

    def _script(self, source: Source, out: Emitter, tools: Tools) -> Steps[None]:
        def attempt() -> Steps[bool]:
            name = yield from source.word(self.word, NAME_LIMIT)
            if not name or not (yield from source.accept(self.name_end)):
                return False
            start_call(source, out, name)
            arguments = TaggedArguments(source, out, self.value_ends, trims_line=self.trims_line)
            while True:
                yield from source.whitespace()
                tag = yield from source.accept(self.parameter, self.call_end)
                if tag != self.parameter:
                    break
                key = yield from source.word(self.word, NAME_LIMIT)
                ending = yield from source.accept(*self.key_ends)
                if not key or not ending:
                    return True
                types = self.key_ends[ending]
                if not (yield from arguments.copy(key, tools.types(name, key) if types is None else types)):
                    return True
            if tag:
                arguments.close()
            return True

        yield from marked_calls(source, out, self.markers, attempt)
