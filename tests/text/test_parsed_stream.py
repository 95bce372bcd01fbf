"""How many tokens of an output are reasoning, however it comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sapwood_text.detokenizer import Detokenizer
from sapwood_text.incremental.events import merge
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.parsed_stream import ParsedStream, StreamOptions, open_stream
from sapwood_text.vocabulary import Vocabulary
from sapwood_tokenizer.vocab.loader import token_table


def counted(vocabulary: Tokenizer, text: str, size: int, **options) -> int:
    parser = OutputParser(ParserOptions(**options))
    stream = ParsedStream(Detokenizer(token_table(vocabulary), [], frozenset()), parser)
    ids = [vocabulary.encode(c).ids[0] for c in text]
    for at in range(0, len(ids), size):
        stream.push(ids[at : at + size])
    stream.finish()
    return stream.reasoning_tokens


@pytest.mark.parametrize("size", [1, 2, 7, 999])
@pytest.mark.parametrize(
    ("text", "options", "least", "most"),
    [
        ("<think>abcdefghij</think>answer", {"reasoning_parser": "qwen3"}, 10, 17),
        ("abcdefghij</think>answer", {"reasoning_parser": "qwen3", "reasoning_open": True}, 10, 10),
        ("abcdefghij", {"reasoning_parser": "qwen3", "reasoning_open": True}, 10, 10),
        ("<think></think>answer", {"reasoning_parser": "qwen3", "reasoning_open": False}, 0, 0),
        ("answer", {"reasoning_parser": "qwen3", "reasoning_open": False}, 0, 0),
        ("<think>abcdefghij</think>answer", {}, 0, 0),
    ],
)
def test_tokens_of_reasoning_are_counted(byte_level: Tokenizer, text, options, least, most, size) -> None:
    assert least <= counted(byte_level, text, size, **options) <= most
    assert counted(byte_level, text, size, **options) == counted(byte_level, text, 1, **options)


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    "<",
    "`",
    "word ",
    " ",
]
PIECES += ["\n\n", "é🌲", "x"]


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    opened=st.sampled_from([None, True, False]),
    tools=st.booleans(),
    sizes=st.lists(st.integers(1, 9), max_size=20),
)
def test_tokens_that_come_together_are_read_as_one_by_one(byte_level: Tokenizer, pieces, opened, tools, sizes) -> None:
    vocabulary = Vocabulary(token_table(byte_level), byte_level.get_vocab_size(), {0: "<|im_start|>", 1: "<|im_end|>"})
    ids = byte_level.encode("".join(pieces)).ids
    parsers = ParserOptions(tool_parser="hermes" if tools else "", reasoning_parser="qwen3", reasoning_open=opened)
    found = []
    for cuts in ([1] * len(ids), [*sizes, len(ids)]):
        stream, events, at = open_stream(vocabulary, StreamOptions(parsers=parsers)), [], 0
        for size in cuts:
            events += stream.push(ids[at : at + size])[0]
            at += size
        events += stream.finish()[0]
        found.append((merge(events), stream.reasoning_tokens))
    (one, counted_one), (other, counted_other) = found
    assert (one.text, one.reasoning) == (other.text, other.reasoning)
    # What a call drafted in reasoning holds back is counted when it is let go, with the tokens that came with it.
    assert counted_one == counted_other or (tools and "<tool_call>" in pieces)
    assert [(call.name, call.arguments) for call in one.tool_calls] == [
        (call.name, call.arguments) for call in other.tool_calls
    ]
