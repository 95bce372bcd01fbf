"""A chain of page names continues from another's only if tokens and tenant are equal; a run of events is one record."""

from __future__ import annotations

from array import array

import pytest

from sapwood_worker.core.cache.page_key import KvEventLog, PageChain, PageName
from sapwood_worker.records.kv_events import BlockStored, split_hashes

TOKENS = array("I", range(41))


def chain(token_ids: array[int] = TOKENS, namespace: bytes = b"a", known: list[PageName] | None = None) -> PageChain:
    made = PageChain(namespace, 4)
    if known is not None:
        made.resume(known, token_ids)
    made.extend(token_ids, len(token_ids))
    return made


@pytest.mark.parametrize("known", [TOKENS, TOKENS[:16], TOKENS[:3], TOKENS + array("I", [9] * 8)])
def test_what_another_chain_has_made_is_taken_over(known: array[int]) -> None:
    assert chain(known=chain(known).pages).pages == chain().pages


def test_of_the_same_tokens_nothing_is_made_twice() -> None:
    known = chain().pages
    resumed = chain(known=known).pages
    assert [page is before for page, before in zip(resumed, known, strict=True)] == [True] * 10


@pytest.mark.parametrize("place", [0, 5, 39])
def test_what_was_made_of_other_tokens_is_not(place: int) -> None:
    other = TOKENS[:]
    other[place] += 1
    assert chain(known=chain(other).pages).pages == chain().pages
    assert chain(known=chain(namespace=b"b").pages).pages == chain().pages


def test_pages_that_follow_each_other_are_told_as_one_run() -> None:
    log, one, other = KvEventLog(), chain().pages, chain(namespace=b"b").pages
    log.stored([*one[:3], *one[4:6], *other[:1]], "CPU_TIER1")
    events = [event for event in log.take() if isinstance(event, BlockStored)]
    assert [split_hashes(event.hashes) for event in events] == [
        [page.key.hash for page in run] for run in (one[:3], one[4:6], other[:1])
    ]
    assert [event.parent for event in events] == [b"", one[3].key.hash, b""]
    assert [event.token_ids for event in events] == [
        TOKENS[:12].tobytes(),
        TOKENS[16:24].tobytes(),
        TOKENS[:4].tobytes(),
    ]
    log.stored([], "CPU_TIER1")
    assert not log.take()
