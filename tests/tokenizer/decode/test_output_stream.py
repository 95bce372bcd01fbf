"""How many tokens of an output are reasoning, however it comes."""

import pytest
from tokenizers import Tokenizer

from sapwood_tokenizer.decode.detokenizer import Detokenizer
from sapwood_tokenizer.decode.output_stream import OutputStream
from sapwood_tokenizer.output.output_parser import OutputParser, ParserOptions
from sapwood_tokenizer.vocab.token_bytes import TokenBytes


def counted(vocabulary: Tokenizer, text: str, size: int, **options) -> int:
    parser = OutputParser(ParserOptions(**options))
    stream = OutputStream(Detokenizer(TokenBytes(vocabulary), [], frozenset()), parser)
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
