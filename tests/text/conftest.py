import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from sapwood_testing.vocabularies import byte_level, corpus, deepseek, demo, llama3, mistral, packaged, qwen3
from sapwood_text.incremental.events import Event, ParsedOutput, merge
from sapwood_text.output_parser import OutputParser, ParserOptions

__all__ = ["byte_level", "corpus", "deepseek", "demo", "llama3", "mistral", "packaged", "qwen3"]

Parse = Callable[[ParserOptions, Sequence[str]], ParsedOutput]
Check = Callable[[ParserOptions, str], ParsedOutput]


def parse_pieces(options: ParserOptions, pieces: Sequence[str]) -> ParsedOutput:
    parser = OutputParser(options)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merge(events + parser.finish())


@pytest.fixture(scope="session")
def parse() -> Parse:
    """Parse a text given in pieces."""
    return parse_pieces


@pytest.fixture(scope="session")
def parse_every_way() -> Check:
    """Parse a text whole, at every two-way split, one character a time and at random splits: all must be equal."""

    def check(options: ParserOptions, text: str) -> ParsedOutput:
        whole = parse_pieces(options, [text])
        for cut in range(1, len(text)):
            assert parse_pieces(options, [text[:cut], text[cut:]]) == whole, f"cut before {text[cut:]!r}"
        assert parse_pieces(options, list(text)) == whole
        chance = random.Random(text)
        for _ in range(20):
            cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12))))
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            assert parse_pieces(options, pieces) == whole, pieces
        return whole

    return check


@pytest.fixture(scope="session")
def tools_json() -> str:
    """Two tools: weather(city: string, days: integer, options: any) and now()."""
    return """[
      {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": ["array", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "options": {}}}}},
      {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]"""
