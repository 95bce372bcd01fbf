"""Calls whose name and arguments each stand in a tag: ``<invoke name="f"><parameter name="k">v</parameter></invoke>``.

One machine reads all families of this kind. Malformed calls are read like this:

* **A value's end tag** counts if the next parameter, the call's end or the output's end follows. Any other is part of the value.
* **A value whose end tag is missing** ends at the next parameter that the tool has, at the call's end or at the next call, unless
  what begins there is closed again before the value's own end tag comes: then it is an example inside the value.
* **A call's end tag** inside a value counts unless the value's end tag still comes behind it.
* **A misspelt tag** (``</paramter>``, ``</parameter1>``) is the tag that it resembles. A doubled one counts once.
* **A broken parameter** (``<parameter=`` without a name) is left out, and so is all else between two parameters.
* **A call without a name** is left out.
* Arguments that were begun are closed as JSON. No tag comes out as text, except in text about tags (``base``).

An example inside a value may hold ``_DEPTH`` tags that are open at once; each value is read at most twice, except for ``_LOOKS``
values of an output that are read to its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from sapwood_text.incremental.json_values import JsonReader
from sapwood_text.incremental.parser import Emitter
from sapwood_text.incremental.source import Markers, Source, Steps
from sapwood_text.tool_parser.base import (
    NAME_LIMIT,
    ToolFamily,
    copy_arguments,
    is_mention,
    next_marker,
)
from sapwood_text.tool_parser.call_object import parse_calls
from sapwood_text.tool_parser.tagged_value import Arguments, TaggedValue
from sapwood_text.tool_parser.tools import Tools

_DEPTH = 8
_LOOKS = 8
_CLOSE = "</"
_WORD = re.compile(r"[\w｜|:.\-]+")
_WORD_LIMIT = 40
_WORD_OR_BRACKET = re.compile(r"[<\w｜|:.\-/]+")
_TAG = re.compile(r"[^<>\n]+")
_TAG_LIMIT = 320
_NAMED = re.compile(
    r"\s*(?:\w*\s*=\s*)?[\"']?(?P<name>[^\"'<>\n=]*?)[\"']?\s*=?\s*"
    r"(?:string\s*=\s*[\"']?(?P<string>\w*)[\"']?\s*)?/?\s*"
)
_UNCLOSED = re.compile(r"\s*(?:\w*\s*=\s*)?[\"']?(?P<name>[^\s\"'<>=]+)")
_KEYED_NAME = re.compile(r"[^\s<{]+")
_KEY_TEXT = re.compile(r"[^<]+")
_TAG_END = re.compile(r"[\s/]+")
_NAME = re.compile(r"[^\s\"'<>=/{}\[\],]+")
_END, _CALL_END, _SECTION_END = "value end", "call end", "section end"
_UNENDED = "no end"


@dataclass(frozen=True, slots=True)
class Parameter:
    """The opening tag of an argument.

    Attributes:
        key: The argument's name; "" if the tag is broken.
        types: The types that its value has; None: those of the tool's schema.
        foreign: Whether the tag is written as another family writes it.
        misspelt: Whether its word is misspelt.
    """

    key: str
    types: frozenset[str] | None = None
    foreign: bool = False
    misspelt: bool = False


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """How a family writes its tags.

    Attributes:
        sections: Literals that open a section of calls, or one call around its tag.
        call: The literal that opens a call; its name follows.
        parameter: The literal that opens a parameter; its name follows.
        value_ends: The words of the closing tags of a value.
        call_end: The word of the closing tag of a call.
        section_ends: The words of the closing tags of a section.
        prefix: What may stand before each word, and be doubled or missing.
        keyed: Whether names and values each stand in a pair of tags: ``<arg_key>k</arg_key><arg_value>v</arg_value>``.
        trims_line: Whether one line break at each end of a value is dropped.
        strays: Literals that are dropped outside of a call, too.
        is_xml: Whether its parameters' tags are XML: outside of a section they may be text.
    """

    sections: tuple[str, ...]
    call: str
    parameter: str
    value_ends: tuple[str, ...]
    call_end: str
    section_ends: tuple[str, ...]
    prefix: str = ""
    keyed: bool = False
    trims_line: bool = False
    strays: tuple[str, ...] = ()
    is_xml: bool = False

    def kind(self, word: str) -> str:
        """The kind of element that a closing tag with this word ends; "" if it is no tag of the family."""
        bare = self.bare(word)
        kinds = ((_END, self.value_ends), (_CALL_END, (self.call_end,)), (_SECTION_END, self.section_ends))
        exact = [kind for kind, words in kinds if bare in words]
        similar = exact or [kind for kind, words in kinds if any(_resembles(bare, known) for known in words)]
        return similar[0] if similar else ""

    def bare(self, word: str) -> str:
        """The word of a tag without the form's prefix."""
        return re.sub(r"^[｜|]*" + self.prefix + r"[｜|]*", "", word) if self.prefix else word

    def is_parameter(self, word: str) -> bool:
        """Whether this is the word of a parameter's opening tag, perhaps misspelt."""
        known = self.bare(_first_word(self.parameter))
        return self.bare(word) == known or _resembles(self.bare(word), known)

    def family(self, name: str, *further: str) -> ToolFamily:
        """The family of this form.

        Args:
            name: Its name.
            further: The special tokens that its tags are made of, if these are not tokens themselves.
        """
        openers = tuple(dict.fromkeys([*self.sections, self.call]))
        tokens = frozenset(further or [*openers, *self.closers, *self.strays])
        return ToolFamily(
            name, lambda source, out, tools: _Machine(self, source, out, tools).run(), tokens, openers=openers
        )

    @property
    def closers(self) -> tuple[str, ...]:
        """Closing tags that are dropped wherever they come."""
        prefix = f"｜{self.prefix}｜" if self.prefix else ""
        return tuple(f"</{prefix}{word}>" for word in self.section_ends or (self.call_end,))


def _first_word(tag: str) -> str:
    found = _WORD.match(tag, 1)
    assert found, "a tag begins with a word"
    return found.group()


@lru_cache(maxsize=1024)
def _resembles(word: str, known: str) -> bool:
    """Whether ``word`` is ``known`` with a slip of the pen, or with letters behind it."""
    if abs(len(word) - len(known)) > 2 or len(known) < 5:
        return False
    return word.startswith(known) or SequenceMatcher(None, word, known, autojunk=False).ratio() >= 0.8


class _Machine:
    """Reads one output."""

    def __init__(self, form: TaggedForm, source: Source, out: Emitter, tools: Tools) -> None:
        self._form = form
        self._source = source
        self._out = out
        self._tools = tools
        self._json = JsonReader(*form.sections, form.call)
        self._openers = (*form.sections, form.call)
        self._text_marks = (
            Markers(*form.strays) if form.prefix else Markers(*self._openers, *form.closers, *form.strays)
        )
        ends = [f"</{word}>" for word in (*form.value_ends, form.call_end)]
        self._section_marks = (
            self._text_marks
            if form.prefix or form.keyed
            else Markers(*dict.fromkeys([*self._text_marks.literals, *ends]))
        )
        self._marks = Markers(_CLOSE, form.parameter, *self._openers)
        self._unclosed = 0  # how many looks for the end of an example came to the end of the output

    def run(self) -> Steps[None]:
        """Read the whole output."""
        source, out, form = self._source, self._out, self._form
        in_section = mentioned = False
        while True:
            marker, quoted = yield from next_marker(
                source, out, self._section_marks if in_section else self._text_marks
            )
            if not marker:
                return
            if form.prefix and not quoted:
                source.give_back(marker)
                marker = yield from source.accept(*self._openers)
                if not marker and not (yield from self._call_body("")):
                    yield from source.word(_WORD_OR_BRACKET, _WORD_LIMIT)
                    yield from source.word(_TAG, _TAG_LIMIT)
                    yield from source.accept(">")
                if not marker:
                    continue
            closes = marker.startswith(_CLOSE)
            if quoted or (mentioned and closes):
                out.text(marker)
                mentioned = False
                continue
            mentioned = False
            if closes:
                in_section = in_section and marker not in form.closers
                continue
            if marker in self._openers:
                source.start_recording()
                found = yield from self._opener(marker)
                left = source.stop_recording()
                if found is None:
                    mentioned = not in_section and is_mention(marker, left + (yield from source.peek(3)))
                    in_section = in_section or (not mentioned and marker != form.call)
                    out.text(marker + left if mentioned else self._text_marks.remove(left))
                    continue
                in_section = marker != self._form.call or in_section
            else:
                source.give_back(marker)
                if form.is_xml and not in_section:
                    if not (yield from self._headless_call()):
                        out.text(source.take(len(marker)))
                        continue
                elif not (yield from self._call_body("")):
                    source.take(len(marker))
            in_section = yield from self._after_call(in_section)

    def _headless_call(self) -> Steps[bool]:
        """Read a call without an opening tag, if its closing one or another call follows. Else False, and nothing is read."""
        source = self._source
        if self._unclosed >= _LOOKS:
            return False
        source.open_probe()
        if (yield from self._call_body("")) == _CALL_END or (yield from source.ahead(*self._openers)):
            source.close_probe()
            return True
        self._unclosed += yield from source.at_end()
        source.rewind()
        if not self._out.calls:
            return False
        source.open_probe()  # a tag behind a call that the end of the output has cut
        yield from source.accept(self._form.parameter)
        yield from source.word(_TAG, _TAG_LIMIT)
        if (yield from source.at_end()):
            source.close_probe()
            return True
        source.rewind()
        return False

    def _after_call(self, in_section: bool) -> Steps[bool]:
        """Read the closing tags behind a call, and the calls in its section whose opening tag is misspelt.

        Returns whether the section continues.
        """
        source = self._source
        while True:
            source.open_probe()
            yield from source.whitespace()
            kind, _ = yield from self._closing_tag()
            if kind:
                source.close_probe()
                in_section = in_section and kind != _SECTION_END
                continue
            if in_section and (yield from source.peek()) == "<" and not (yield from source.ahead(*self._openers)):
                name = yield from self._loose_head()
                if name is not None and (yield from self._call_body(name)):
                    source.close_probe()
                    continue
            source.rewind()
            return in_section

    def _opener(self, marker: str) -> Steps[str | None]:
        """Read on after an opener. Returns None if no call begins here."""
        source, form = self._source, self._form
        while True:
            yield from source.whitespace()
            if not (again := (yield from source.accept(*self._openers))):
                break
            marker = again
        if (yield from source.at_end()):
            return ""
        if (marker != form.call or form.keyed) and (yield from source.peek()) in "{[":
            if not (yield from parse_calls(source, self._out, self._json)):
                self._out.text(source.stop_recording())
            source.stop_recording()
            return ""
        if form.keyed:
            name = yield from self._keyed_head()
        elif marker == form.call:
            name = yield from self._head()
        else:
            name = yield from self._loose_head()
        if name is not None:
            source.stop_recording()
            yield from self._call_body(name)
        return name

    def _head(self) -> Steps[str | None]:
        """Read a call's name after its opening literal. "" if the call has none, None if no call begins here."""
        source = self._source
        content = yield from source.word(_TAG, _TAG_LIMIT)
        named = _NAMED.fullmatch(content)
        name = named["name"].strip() if named else ""
        if (yield from source.accept(">")):
            # A tag with letters but without a name is a broken one.
            return name or ("" if any(map(str.isalnum, content)) else None)
        if (yield from source.at_end()):
            return ""
        # The bracket is missing: the name ends at white space or at the next tag.
        begun = _UNCLOSED.match(content)
        yield from source.whitespace()
        if begun and (yield from source.ahead(self._form.parameter, _CLOSE)):
            return begun["name"]
        return "" if (yield from source.at_end()) or (yield from source.ahead(*self._openers)) else None

    def _loose_head(self) -> Steps[str | None]:
        """Read the opening tag of a call, whatever its word. "" if parameters follow without one, None if there is none."""
        source, form = self._source, self._form
        if (yield from source.ahead(form.parameter, _CLOSE)):
            return ""
        source.open_probe()
        if (yield from source.accept("<")):
            word = yield from source.word(_WORD, _WORD_LIMIT)
            if not word:
                yield from source.whitespace()
            if (yield from source.at_end()) or (not word and (yield from source.ahead(*self._openers))):
                source.close_probe()
                return ""
            if form.is_parameter(word):
                source.rewind()
                return ""
            call_word = form.bare(_first_word(form.call))
            bare = form.bare(word)
            name = yield from self._head()
            if word and (name is not None or call_word.startswith(bare) or _resembles(bare, call_word)):
                source.close_probe()
                return name or ""
        source.rewind()
        return None

    def _keyed_head(self) -> Steps[str | None]:
        """Read the name of a call whose arguments stand in pairs of tags."""
        source, form = self._source, self._form
        if (yield from source.ahead(form.parameter, "<arg_value>", _CLOSE)):
            return ""
        source.open_probe()
        name = yield from source.word(_KEYED_NAME, NAME_LIMIT)
        after = yield from source.ahead("</arg_key>")
        tool = max((tool for tool in self._tools if name.startswith(tool)), key=len, default="")
        if after and tool and self._tools.may_take(tool, name.removeprefix(tool)):
            source.rewind()  # the name and the first key are one word
            yield from source.accept(tool)
            return tool
        source.close_probe()
        yield from source.whitespace()
        if not name or after:
            return None
        if (yield from source.at_end()):
            return "" if not self._tools or any(tool.startswith(name) for tool in self._tools) else None
        if (yield from source.ahead(form.parameter, form.call, "<arg_value>")):
            return name
        source.open_probe()
        kind, _ = yield from self._closing_tag()
        source.rewind()
        if kind:
            return name
        if (yield from source.peek()) in "<{" and name in self._tools:
            return name
        source.open_probe()
        key = yield from source.word(_WORD, NAME_LIMIT)
        found = bool(key) and bool((yield from source.ahead("</arg_key>", "<arg_value>")))
        source.rewind()
        return name if found else None

    def _call_body(self, name: str) -> Steps[str]:
        """Read a call from after its name to its end. A call without a name is left out.

        Returns the kind of the closing tag that ended the call; the word of a tag of no kind; "" if nothing was read.
        """
        source, out, form = self._source, self._out, self._form
        if name:
            while (yield from self._is_doubled(name)):
                pass
            out.start_call(name)
        if name and (yield from source.peek()) == "{":
            yield from copy_arguments(source, out, self._json)
            source.stop_recording()
            return _UNENDED
        arguments = Arguments(out.arguments if name else _drop)
        seen: set[str] = set()
        flat = self._unclosed >= _LOOKS
        read = ""
        key = text = ""
        while True:
            yield from source.whitespace()
            if (yield from source.at_end()):
                if name:
                    out.note_cut()
                break
            parameter = yield from self._element()
            if parameter is not None:
                read = _UNENDED
                key = ""
                if parameter.key:
                    flat = yield from self._value(arguments, name, parameter, seen, flat)
                continue
            if (yield from source.ahead(*self._openers)):
                break
            source.open_probe()
            kind, word = yield from self._closing_tag()
            if kind == _SECTION_END:
                source.rewind()
                break
            if kind:
                source.close_probe()
                read = kind
                if kind == _CALL_END:
                    break
                if word == "arg_key" and key:
                    flat = yield from self._value(arguments, name, Parameter(key), seen, flat)
                key = ""
                continue
            source.rewind()
            if not name:
                break
            # Text between two tags is left out; text without a tag behind it stays text.
            pieces: list[str] = []
            mark = yield from source.until(self._marks, pieces.append, _drop)
            source.give_back(mark)
            if not mark or mark in self._openers:
                text = "".join(pieces)
                break
            key = "".join(pieces).strip() if form.keyed else ""
            if mark == _CLOSE and not (yield from self._is_ours()):
                source.take(len(mark))
        if name:
            arguments.close()
        if "<" not in text:
            out.text(text)
        return read

    def _is_doubled(self, name: str) -> Steps[bool]:
        """Read a call's opening tag that stands behind itself. False and nothing read if none comes."""
        source, form = self._source, self._form
        source.open_probe()
        yield from source.whitespace()
        while (marker := (yield from source.accept(*self._openers))) and marker != form.call:
            yield from source.whitespace()
        if marker == form.call and not form.keyed and (yield from self._head()) == name:
            source.close_probe()
            return True
        source.rewind()
        return False

    def _is_ours(self) -> Steps[bool]:
        source = self._source
        source.open_probe()
        kind, _ = yield from self._closing_tag()
        source.rewind()
        return bool(kind)

    def _closing_tag(self) -> Steps[tuple[str, str]]:
        """Read a closing tag of the family. Returns its kind and its word; "" and nothing read if none comes."""
        source = self._source
        source.open_probe()
        if (yield from source.accept(_CLOSE)):
            word = yield from source.word(_WORD, _WORD_LIMIT)
            kind = self._form.kind(word)
            if not kind and (yield from source.at_end()) and self._begins_tag(word):
                kind = _END
            if kind:
                yield from source.word(_TAG_END, 8)
                if (yield from source.accept(">")) or (yield from source.at_end()) or (yield from source.peek()) == "<":
                    source.close_probe()
                    return kind, word
        source.rewind()
        return "", ""

    def _begins_tag(self, word: str) -> bool:
        form = self._form
        return any(
            (form.prefix and f"｜{form.prefix}｜{known}".startswith(word)) or known.startswith(word)
            for known in (*form.value_ends, form.call_end, *form.section_ends)
        )

    def _element(self) -> Steps[Parameter | None]:
        """Read the opening tag of a parameter. A broken one has no key. None and nothing read if none comes."""
        source, form = self._source, self._form
        if form.keyed:
            return (yield from self._keyed_element())
        foreign = not (yield from source.ahead(form.parameter))
        source.open_probe()
        if (yield from source.accept("<")) and (yield from source.peek()) != "/":
            word = yield from source.word(_WORD, _WORD_LIMIT)
            if form.is_parameter(word) or ((yield from source.at_end()) and form.parameter[1:].startswith(word)):
                source.close_probe()
                content = yield from source.word(_TAG, _TAG_LIMIT)
                named = _NAMED.fullmatch(content)
                if not (yield from source.accept(">")) or named is None:
                    return Parameter("")
                key = named["name"].strip()
                if not _NAME.fullmatch(key) and not self._tools.names(key):
                    return Parameter("")
                known = {"true": frozenset(["string"]), "false": frozenset[str]()}
                types = known.get(named["string"] or "") if form.prefix else None
                misspelt = form.bare(word) != form.bare(_first_word(form.parameter))
                return Parameter(key, types, foreign, misspelt)
        source.rewind()
        return None

    def _keyed_element(self) -> Steps[Parameter | None]:
        source, form = self._source, self._form
        source.open_probe()
        yield from source.accept(form.call)
        yield from source.whitespace()
        if (yield from source.word(_WORD, NAME_LIMIT)) and (yield from source.ahead("</arg_key>")):
            source.rewind()
            if not (yield from source.accept(form.call)):  # a call's tag in place of a key's
                return None
        else:
            source.rewind()
            if not (yield from source.accept(form.parameter)):
                return Parameter("") if (yield from source.accept("<arg_value>")) else None
        while (yield from source.accept(form.parameter)):
            pass
        key = (yield from source.word(_KEY_TEXT, NAME_LIMIT)).strip()
        named = valued = False
        while (yield from source.accept("</arg_key>")):
            named = True
            yield from source.whitespace()
        while (yield from source.accept("<arg_value>")):
            valued = True
        if not valued and (yield from source.ahead(form.parameter, f"</{form.call_end}>")):
            return Parameter("")
        return Parameter(key if named or valued else "")

    def _value(self, arguments: Arguments, tool: str, parameter: Parameter, seen: set[str], flat: bool) -> Steps[bool]:
        """Read a value and its end. Returns whether the rest of the call holds no examples of calls."""
        source, form = self._source, self._form
        types = self._tools.types(tool, parameter.key) if parameter.types is None else parameter.types
        value = TaggedValue(arguments, parameter.key, types, trims_line=form.trims_line)
        if form.keyed:
            while (yield from source.accept("<arg_value>")):
                pass
        seen.add(parameter.key)
        trims = form.trims_line
        inside = 0  # closing tags of calls that are known to be part of the value
        opened = 0  # tags in the value that look like a parameter's
        while True:
            if trims:
                yield from source.accept("\n")
                trims = False
            partial: list[str] = []
            mark = yield from source.until(self._marks, value.feed, partial.append)
            if not mark:
                if len(partial) == 1 and len(partial[0]) == 1:
                    value.feed(partial[0])
                value.end(whole=False)
                if tool:
                    self._out.note_cut()
                return flat
            source.give_back(mark)
            if mark == _CLOSE:
                source.open_probe()
                kind, word = yield from self._closing_tag()
                foreign = parameter.foreign or (bool(form.prefix) and word != form.bare(word))
                if kind == _END and (yield from self._ends_value(tool, opened, foreign=foreign)):
                    source.close_probe()
                    break
                if kind == _END:
                    opened = max(0, opened - 1)
                    value.feed(source.close_probe())
                    continue
                source.rewind()
                if kind:
                    inside = inside or (yield from self._call_ends_inside())
                    if not inside:
                        break
                    inside -= 1
                value.feed(source.take(len(mark)))
                continue
            source.open_probe()
            if mark == form.parameter:
                inner = yield from self._element()
                counts = inner is not None and bool(inner.key) and self._tools.may_take(tool, inner.key)
                if counts and inner is not None and inner.key == parameter.key and value.empty:
                    source.close_probe()  # a doubled tag
                    trims = form.trims_line
                    continue
                counts = counts and inner is not None and inner.key not in seen
            else:
                counts = yield from self._call_begins()
            if not counts:
                source.rewind()
                opened += mark == form.parameter
                value.feed(source.take(len(mark)))
                continue
            if not flat:
                nested = yield from self._is_example(tool, is_call=mark != form.parameter)
                if nested:
                    value.feed(source.close_probe())
                    continue
                flat = True
            source.rewind()
            break
        value.end(whole=True)
        return flat

    def _ends_value(self, tool: str, opened: int, *, foreign: bool) -> Steps[bool]:
        """Whether what follows a value's end tag may follow it.

        Args:
            tool: The name of the tool.
            opened: How many tags in the value look like a parameter's.
            foreign: Whether the next parameter may be written as another family writes it.
        """
        source, form = self._source, self._form
        source.open_probe()
        yield from source.whitespace()
        ends = yield from source.at_end()
        if not ends:
            if (yield from source.ahead(*self._openers)):
                ends = True
            elif (yield from source.ahead(_CLOSE)):
                kind, _ = yield from self._closing_tag()
                ends = kind in (_CALL_END, _SECTION_END) or (kind == _END and not opened)
            elif (yield from source.peek()) == "<":
                inner = yield from self._element()
                ends = (
                    inner is not None
                    and (foreign or not inner.foreign or inner.misspelt)
                    and (not inner.key or not opened or self._tools.may_take(tool, inner.key))
                )
            elif form.keyed:
                key = yield from source.word(_WORD, NAME_LIMIT)
                ends = bool(key) and bool((yield from source.ahead("</arg_key>")))
        source.rewind()
        return ends

    def _call_ends_inside(self) -> Steps[int]:
        """How many closing tags of calls come before the value's own end tag; 0 if that does not come.

        The source stands at the first of them. They are part of the value.
        """
        source = self._source
        source.open_probe()
        count = 0
        while mark := (yield from source.until(self._marks, _drop)):
            source.give_back(mark)
            if mark != _CLOSE:
                if mark == self._form.parameter or (yield from self._call_begins()):
                    break
                continue
            kind, _ = yield from self._closing_tag()
            if kind == _END:
                source.rewind()
                return count
            if kind:
                count += 1
            else:
                source.take(len(mark))
        source.rewind()
        return 0

    def _call_begins(self) -> Steps[bool]:
        """Read an opener and what opens a call behind it. Returns whether that is complete."""
        source, form = self._source, self._form
        while (marker := (yield from source.accept(*self._openers))) and marker != form.call:
            yield from source.whitespace()
        if marker != form.call:
            return False
        if form.keyed:
            yield from source.whitespace()
            name = yield from source.word(_KEYED_NAME, NAME_LIMIT)
            yield from source.whitespace()
            return bool(name) and (
                bool((yield from source.ahead(form.parameter, "</tool_call>"))) or (yield from source.at_end())
            )
        return bool((yield from self._head()))

    def _is_example(self, tool: str, *, is_call: bool) -> Steps[bool]:
        """Whether the tag that was read inside a value, and all that it opens, is closed before the value's own end tag.

        If so, all up to that end tag was read.
        """
        source, form = self._source, self._form
        opened = ["call" if is_call else "value"]
        inside = 0
        while len(opened) <= _DEPTH:
            mark = yield from source.until(self._marks, _drop)
            if not mark:
                self._unclosed += 1
                return False
            source.give_back(mark)
            if mark == form.parameter:
                inner = yield from self._element()
                if inner is None:
                    source.take(len(mark))
                elif inner.key:
                    opened.append("value")
                continue
            if mark != _CLOSE:
                if (yield from self._call_begins()):
                    opened.append("call")
                continue
            source.open_probe()
            kind, _ = yield from self._closing_tag()
            in_value = not opened or opened[-1] == "value"
            nested = bool(opened) and "call" not in opened
            if kind == _END and in_value and (nested or (yield from self._ends_value(tool, 0, foreign=False))):
                if not opened:
                    source.rewind()
                    return True
                opened.pop()
            elif kind == _CALL_END and in_value:
                source.rewind()
                source.open_probe()
                inside = inside or (yield from self._call_ends_inside())
                if not inside and "call" not in opened:
                    source.close_probe()
                    return False
                while not inside and opened.pop() != "call":
                    pass
                inside = max(0, inside - 1)
                yield from self._closing_tag()
            elif kind == _CALL_END:
                opened.pop()
            if kind:
                source.close_probe()
            else:
                source.rewind()
                source.take(len(mark))
        return False


def _drop(_piece: str) -> None:
    pass
