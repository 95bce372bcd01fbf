"""Which tokens are taken back from a prompt's end."""

from __future__ import annotations

import pytest

from sapwood_router.flow.healing import taken_back
from sapwood_text.vocabulary import TokenTable, Vocabulary

TOKENS = [
    b"a",
    b":",
    b"://",
    b"gr",
    b"e",
    b"green",
    b"\xc3",
    b"\x9c",
    b"\xc3\x9cb",
    b"<s>",
    b"<s>a",
    b"x",
    b"\n",
    b"\n\n",
]
A, COLON, GR, E, HALF, REST, SPECIAL, X, LINE = 0, 1, 3, 4, 6, 7, 9, 11, 12


@pytest.fixture
def vocabulary() -> Vocabulary:
    made = Vocabulary(TokenTable(lambda token: TOKENS[token]), len(TOKENS), {SPECIAL: "<s>", 10: "<s>a"})
    made.index_extensions()
    return made


@pytest.mark.parametrize(
    ("ids", "stops", "expected"),
    [
        ([A, COLON], (), (1, ":")),
        ([A, GR, E], (), (2, "gre")),
        ([A, X], (), (0, "")),
        ([COLON], (), (0, "")),  # a prompt keeps a token
        ([A, HALF, REST], (), (2, "Ü")),
        ([A, HALF], (), (0, "")),  # half a character
        ([A, SPECIAL], (), (0, "")),
        ([SPECIAL, COLON], (), (1, ":")),
        ([A, LINE], ("\n\n",), (0, "")),  # the stop would begin before the border
        ([A, LINE], ("x\n",), (1, "\n")),
        ([A, GR, E], ("r",), (0, "")),
        ([], (), (0, "")),
    ],
)
def test_tokens_are_taken_back_while_a_longer_one_begins_with_their_text(vocabulary, ids, stops, expected):
    assert taken_back(ids, vocabulary, stops) == expected
