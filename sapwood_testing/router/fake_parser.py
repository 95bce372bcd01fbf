"""Tool calls and reasoning in a format of the fake tokenizer's own: ``<think>…</think>`` and ``<call NAME>ARGUMENTS</call>``.

All text so far is parsed again for each piece, which takes quadratic time: enough for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sapwood.v1 import tokenizer_pb2

TOOL_PARSER, REASONING_PARSER = "fake_calls", "fake_thoughts"
_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _CALL_END = "<call ", "</call>"


@dataclass(slots=True)
class _Parsed:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


class FakeParser:
    """Parses one stream as its options say; :meth:`feed` keeps what was told before."""

    def __init__(self, options: tokenizer_pb2.DetokenizeOptions) -> None:
        self._options = options
        self._written = ""
        self._told = _Parsed()

    def feed(self, output: tokenizer_pb2.DetokenizeOutput) -> None:
        """Replaces an output's text by what it is."""
        if not self._options.tool_parser and not self._options.reasoning_parser:
            return
        self._written += output.text
        parsed = self._parse(self._written, output.ended)
        told, self._told = self._told, parsed
        output.text = parsed.text[len(told.text) :]
        output.reasoning = parsed.reasoning[len(told.reasoning) :]
        output.reasoning_tokens = len(parsed.reasoning.encode())
        for index, (name, arguments) in enumerate(parsed.calls):
            if index >= len(told.calls):
                call_id = f"call-{self._options.tool_call_id_seed}-{index}"
                output.tool_calls.add(index=index, id=call_id, name=name, arguments=arguments)
            elif len(arguments) > len(told.calls[index][1]):
                output.tool_calls.add(index=index, arguments=arguments[len(told.calls[index][1]) :])

    def _parse(self, written: str, ended: bool) -> _Parsed:
        parsed, rest = _Parsed(), written
        if self._options.reasoning_parser:
            if self._options.reasoning_open:
                rest = _OPEN + rest
            elif not ended and _OPEN.startswith(rest):
                return parsed
            if rest.startswith(_OPEN):
                parsed.reasoning, rest = _until(_CLOSE, rest.removeprefix(_OPEN), ended)
        if not self._options.tool_parser:
            parsed.text = rest
            return parsed
        while rest:
            text, rest = _until(_CALL, rest, ended)
            parsed.text += text
            name, closed, after = rest.partition(">")
            if not closed:
                break
            arguments, rest = _until(_CALL_END, after, ended)
            parsed.calls.append((name, arguments))
        return parsed


def _until(marker: str, text: str, ended: bool) -> tuple[str, str]:
    """What is certain to stand before a marker, and what follows it."""
    before, found, after = text.partition(marker)
    if found or ended:
        return before, after
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[:-size], ""
    return text, ""
