"""What the prefix drafter foresees: text that stood before, near where it was left, and what the cache has of another request."""

from __future__ import annotations

import random
from array import array

import pytest

from sapwood_worker.core.scheduler.speculation.ngram_drafter import MOST_PLACES, CopyingRow, NgramIndex

NOTHING: array[int] = array("I")


def row(tokens: list[int], cached: list[int] | None = None) -> tuple[array[int], CopyingRow]:
    known = array("I", tokens)
    return known, CopyingRow(known, lambda: array("I", cached or []))


def say(known: array[int], drafter: CopyingRow, tokens: list[int]) -> tuple[int, int]:
    """The request gets these tokens one by one; how many were foreseen, and how many wrongly."""
    right = wrong = 0
    for token in tokens:
        drafter.propose(0, 4)
        known.append(token)
        counted = drafter.follow()
        right, wrong = right + counted[0], wrong + counted[1]
    return right, wrong


def brute_force(tokens: array[int]) -> int | None:
    """The latest of those of the last places of two tokens that continue alike to the front for longest, up to 32."""
    places = [end for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]][-MOST_PLACES:]

    def alike(end: int) -> int:
        return max(size for size in range(2, min(end, 32) + 1) if tokens[end - size : end] == tokens[-size:])

    return max(places, key=lambda end: (alike(end), end), default=None)


@pytest.mark.parametrize("kinds", [2, 4, 12])
def test_the_index_finds_the_place_most_like_the_end_whenever_the_tokens_came(kinds: int) -> None:
    chance = random.Random(kinds)
    tokens = array("I", [chance.randrange(kinds) << 20 for _ in range(40)])
    index = NgramIndex(tokens)
    for _ in range(150):
        assert index.find() == brute_force(tokens)
        for _ in range(chance.randint(1, 3)):
            tokens.append(chance.randrange(kinds) << 20)


def test_fewer_tokens_than_are_compared_have_no_place() -> None:
    for count in range(4):
        assert NgramIndex(array("I", range(count))).find() is None


def test_a_copy_of_the_prompt_is_foreseen_once_two_tokens_are_there() -> None:
    text = list(range(100, 160))
    known, drafter = row([1, *text, 2])
    assert say(known, drafter, text) == (len(text) - 2, 0)
    known, drafter = row([1, *text, 2, *text[:10]])
    assert drafter.propose(0, 5) == text[10:15]
    assert drafter.propose(1, 5) == text[11:16], "one token is on its way"


def test_of_two_places_the_one_that_was_like_it_for_longer_is_believed() -> None:
    known, drafter = row([1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 9, 9, 2, 3, 4])
    assert drafter.propose(0, 1) == [50]
    known.append(50)
    assert drafter.follow() == (1, 0)


def test_a_token_changed_left_out_or_added_is_got_over_two_tokens_later() -> None:
    text = list(range(100, 160))
    for edited in ([*text[:30], 7, *text[31:]], [*text[:30], *text[31:]], [*text[:30], 7, 8, *text[30:]]):
        known, drafter = row([1, *text, 2])
        right, wrong = say(known, drafter, edited)
        assert wrong == 1
        assert right >= len(edited) - 3 - 5


def test_what_repeats_itself_is_expected_to_go_on() -> None:
    _, drafter = row([9, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert drafter.propose(0, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_cache_is_believed_first_and_asked_again_when_it_has_no_more() -> None:
    answers = [[50, 51, 52], [53, 54]]
    known = array("I", [1, 2, 3])
    drafter = CopyingRow(known, lambda: array("I", answers.pop(0) if answers else []))
    assert drafter.propose(0, 9) == [50, 51, 52]
    assert say(known, drafter, [50, 51, 52, 53, 54]) == (5, 0)
    assert not answers


def test_text_that_nothing_foresees_is_neither_right_nor_wrong() -> None:
    known, drafter = row(list(range(20)))
    assert say(known, drafter, list(range(100, 140))) == (0, 0)
    assert drafter.propose(0, 4) == []
